"""Kinds of steps that once gave other numbers than one device, or ended in an error of ours; each tells its story."""

from __future__ import annotations

import contextlib
import functools
import warnings
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_pipe.capture import Request, capture_step, flatten
from lightning_pipe.errors import CaptureError
from ranks.world import World
from strategy.fits import Losses, checked, make_trainer

SAMPLES, BATCH, EPOCHS, CLASSES = 21, 8, 3, 4  # batches of 8, 8 and 5
ROUNDING = 1e-9
KINDS: dict[str, type[Net]] = {}


class Net(pl.LightningModule):
    """8-16-16-4."""

    CALLBACKS: ClassVar[tuple[Any, ...]] = ()

    def __init_subclass__(cls) -> None:
        KINDS[cls.__name__] = cls

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, CLASSES)
        self.extra()

    def extra(self) -> None:
        """Add what this kind has besides."""

    def forward(self, x):
        return self.head(torch.tanh(self.two(torch.tanh(self.one(x)))))

    def error(self, batch, x=None, **options):
        return F.cross_entropy(self(batch["x"] if x is None else x), batch["y"], **options)

    def training_step(self, batch, batch_idx):
        return self.error(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class LayerOfLaterEpochs(Net):
    """A parameter that no stage has used at first: only the ranks of its stage trained it, others had old values."""

    def training_step(self, batch, batch_idx):
        h = torch.tanh(self.one(batch["x"]))
        if self.current_epoch:
            h = torch.tanh(self.two(h))
        return F.cross_entropy(self.head(h), batch["y"])


class GradientPenalty(Net):
    """Derivatives taken in the step: what watched them was taken for operations of the step, which then differed."""

    def training_step(self, batch, batch_idx):
        x = batch["x"].requires_grad_(True)
        out = self(x)
        (slope,) = torch.autograd.grad(out.logsumexp(1).sum(), x, create_graph=True)
        return F.cross_entropy(out, batch["y"]) + (slope.norm(dim=1) - 1).square().mean()


class AverageOfInputs(Net):
    """An average over samples moved once per micro-batch, and not once per batch."""

    def extra(self) -> None:
        self.register_buffer("average", torch.zeros(8))

    def training_step(self, batch, batch_idx):
        x = batch["x"] - self.average
        with torch.no_grad():
            self.average.lerp_(batch["x"].mean(0), 0.1)
        return self.error(batch, x)


class Bank(Net):
    """A memory bank, of which replicas kept the mean of theirs."""

    def extra(self) -> None:
        self.register_buffer("bank", torch.zeros(6, 8))

    def training_step(self, batch, batch_idx):
        x = batch["x"] - 0.1 * self.bank.mean(0)
        with torch.no_grad():
            self.bank.copy_(torch.cat([batch["x"], self.bank])[:6])
        return self.error(batch, x)


class Largest(Net):
    """A maximum that runs had reached already, so that it was taken for one that no sample changes."""

    def extra(self) -> None:
        self.register_buffer("largest", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        self.largest = torch.maximum(self.largest, batch["x"].abs().max())
        return self.error(batch)


class Scale(nn.Module):
    """A layer that divides by the largest number that was seen."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("largest", torch.tensor(2.9))

    def forward(self, x):
        self.largest = torch.maximum(self.largest, x.abs().max())
        return self.linear(x / self.largest)


class LargestInside(Net):
    """A maximum in a sub-module that is resumed with one that its first samples do not reach."""

    def extra(self) -> None:
        self.scale = Scale()

    def training_step(self, batch, batch_idx):
        return self.error(batch, self.scale(batch["x"]))


class Teacher(Net):
    """A parameter that the step writes to, on the one replica that has the whole batch."""

    def extra(self) -> None:
        self.teacher = nn.Linear(8, 16).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            for old, new in zip(self.teacher.parameters(), self.one.parameters(), strict=True):
                old.lerp_(new, 0.1)
        return self.error(batch) + F.mse_loss(self.one(batch["x"]), self.teacher(batch["x"]))


class RareRows(Net):
    """Sparse gradients, which a sum over replicas made dense."""

    def extra(self) -> None:
        self.table = nn.Embedding(30, 8, sparse=True)

    def training_step(self, batch, batch_idx):
        return self.error(batch, self.table(batch["rows"]).mean(1))

    def configure_optimizers(self):
        return torch.optim.SparseAdam(self.table.parameters(), lr=0.05)


class Thawed(Net):
    """A backbone that a callback of Lightning trains from the second epoch on."""

    CALLBACKS = (functools.partial(pl.callbacks.BackboneFinetuning, 1, should_align=False),)

    def extra(self) -> None:
        self.backbone, self.one = self.one, nn.Identity()

    def forward(self, x):
        return super().forward(self.backbone(x))

    def configure_optimizers(self):
        return torch.optim.SGD([*self.two.parameters(), *self.head.parameters()], lr=0.1)


class LossesOfALoop(Net):
    """Losses and counts that a loop over time adds up."""

    def extra(self) -> None:
        self.cell = nn.LSTMCell(8, 16)

    def training_step(self, batch, batch_idx):
        h = c = batch["x"].new_zeros(len(batch["x"]), 16)
        total, count = 0.0, 0.0
        for time in range(4):
            h, c = self.cell(batch["x"].roll(time, 1), (h, c))
            counts = (time < batch["length"]).to(h.dtype)
            total = total + (F.cross_entropy(self.head(h), batch["y"], reduction="none") * counts).sum()
            count = count + counts.sum()
        return total / count


class WithoutASingleVariance(Net):
    """A variance over samples, of which one sample has none."""

    def training_step(self, batch, batch_idx):
        return self.error(batch) + F.relu(1 - self(batch["x"]).var(0)).mean()


def batches() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "x": torch.randn(8, generator=generator, dtype=torch.float64),
            "y": int(torch.randint(0, CLASSES, (), generator=generator)),
            "rows": torch.randint(0, 30, (3,), generator=generator),
            "length": int(torch.randint(1, 5, (), generator=generator)),
        }
        for _ in range(SAMPLES)
    ]


def trained(kind: str, options: dict[str, Any] | None = None) -> tuple[list[float], dict[str, torch.Tensor], str]:
    """Return losses and state of a fit on one device, or as a pipeline on the ranks of this world, and warnings."""
    torch.manual_seed(0)
    module, losses = KINDS[kind]().double(), Losses()
    strategy = "auto" if options is None else checked(witness=True, cache="off", **options)
    callbacks = [losses, *(make() for make in module.CALLBACKS)]
    trainer = make_trainer(strategy, max_epochs=EPOCHS, callbacks=callbacks)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(batches(), batch_size=BATCH))
    state = {name: value.detach().clone() for name, value in module.state_dict().items()}
    return losses.losses, state, "\n".join(str(one.message) for one in caught)


PIPELINES = [
    ("LayerOfLaterEpochs", "1-1", 2, "joint"),
    ("GradientPenalty", "1-1", 2, "joint"),
    ("AverageOfInputs", "1-1", 4, "joint"),
    ("AverageOfInputs", "2-1", 2, "joint"),
    ("Bank", "2-1", 2, "joint"),
    ("Largest", "2-1", 2, "replay"),
    ("Teacher", "2-1", 2, "replay"),
    ("RareRows", "2", 2, "joint"),
    ("RareRows", "2", 2, "replay"),
    ("Thawed", "1-1", 2, "replay"),
    ("LossesOfALoop", "1-1", 4, "joint"),
]


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize(("kind", "layout", "microbatches", "capture"), PIPELINES)
def test_every_rank_has_the_losses_and_the_state_of_one_device(kind, layout, microbatches, capture):
    losses, state, _ = trained(kind)
    options = {"layout": layout, "microbatches": microbatches, "capture": capture}
    for found, own, _ in World(sum(map(int, layout.split("-")))).run(trained, kind, options):
        assert found == pytest.approx(losses, rel=ROUNDING)
        for name, value in state.items():
            torch.testing.assert_close(own[name], value, rtol=ROUNDING, atol=ROUNDING, msg=f"{name}: {own[name]}")


def test_a_buffer_inside_a_sub_module_that_is_made_of_samples_is_known_before_they_change_it():
    """It was taken for one that no sample changes, so micro-batches of later batches forgot what others had seen."""
    x = torch.stack([sample["x"] for sample in batches()])
    assert x[:BATCH].abs().max() < 2.9 < x.abs().max(), "the first batch does not reach it, and another one does"
    *_, told = trained("LargestInside", {"layout": "1", "microbatches": 2, "capture": "replay"})
    assert "changes scale.largest for the samples" in told
    losses, state, _ = trained("LargestInside")
    found, own, _ = trained("LargestInside", {"layout": "1", "microbatches": 1, "capture": "replay"})
    assert found == pytest.approx(losses, rel=ROUNDING)
    assert own["scale.largest"] == state["scale.largest"]


@pytest.mark.parametrize("capture", ["joint", "replay"])
def test_samples_that_need_each_other_are_in_micro_batches_of_one(capture):
    """The first batch ended in "report this as a bug", the last, of 5 samples in 4 micro-batches, in weights of NaN."""
    losses, _, told = trained("WithoutASingleVariance", {"layout": "1", "microbatches": BATCH, "capture": capture})
    assert losses == pytest.approx(trained("WithoutASingleVariance")[0], rel=ROUNDING)
    assert "Samples of a batch meet" not in told


def request(step: Any) -> Request:
    class Step(Net):
        def training_step(self, batch, batch_idx):
            return step(self, batch)

    batch = torch.utils.data.default_collate(batches()[:BATCH])
    return Request(Step().double(), "training_step", flatten(batch)[1], samples=BATCH)


def needs_all_samples(step: Any) -> bool:
    """Return whether gradients of a step that is cut need all samples of the batch."""
    capture = capture_step(request(step))
    return capture.graph.head is not None or not capture.is_exact


MIXING = {
    "topk": lambda loss: loss.topk(len(loss) // 2).values.mean(),
    "sort": lambda loss: loss.sort().values[:2].mean(),
    "roll": lambda loss: (loss * loss.roll(1).detach()).mean(),
    "softmax": lambda loss: (loss * loss.softmax(0)).sum(),
}


@pytest.mark.parametrize("mixing", MIXING)
def test_an_operation_that_runs_along_the_samples_is_known_also_by_its_default_dimension(mixing):
    """The hardest half of the samples was taken for a mean: as many were in each micro-batch of the first batch."""
    step = lambda self, batch: MIXING[mixing](self.error(batch, reduction="none"))  # noqa: E731
    assert needs_all_samples(step) and not needs_all_samples(lambda self, batch: self.error(batch))


OF_SEVERAL_RESULTS = {
    "layer norm": (lambda h: F.layer_norm(h, (16,)), False),
    "layer norm over samples": (lambda h: F.layer_norm(h.T, (len(h),)), True),
    "attention": (lambda h: F.scaled_dot_product_attention(*[h.view(-1, 1, 4, 4)] * 3), False),
    "attention over samples": (lambda h: F.scaled_dot_product_attention(*[h[None, None]] * 3), True),
}


@pytest.mark.parametrize("name", OF_SEVERAL_RESULTS)
def test_whether_samples_meet_in_an_operation_of_several_results_depends_on_where_they_lie(name):
    operation, expected = OF_SEVERAL_RESULTS[name]
    assert needs_all_samples(lambda self, batch: operation(self.one(batch["x"])).square().mean()) == expected


@pytest.mark.parametrize("is_advised", [False, True])
def test_parameters_that_a_step_switches_off_are_named_and_the_advice_holds(is_advised):
    def step(self, batch):
        x = batch["x"]
        if is_advised:
            values = {name: p.detach() for name, p in self.one.named_parameters()}
            return self.error(batch) + torch.func.functional_call(self.one, values, x).square().mean()
        self.one.requires_grad_(False)
        fixed = self.one(x).square().mean()
        self.one.requires_grad_(True)
        return self.error(batch) + fixed

    with contextlib.nullcontext() if is_advised else pytest.raises(CaptureError, match="switches requires_grad of a"):
        capture_step(request(step))


def test_a_grid_of_every_sample_fixes_no_number_of_samples():
    """The derivative that torch has of it did."""

    def step(self, batch):
        h = self.one(batch["x"])
        turned = torch.stack([h[:, :3], h[:, 3:6]], 1)
        images = h.view(-1, 1, 4, 4)
        moved = F.grid_sample(images, F.affine_grid(turned, images.shape, align_corners=False), align_corners=False)
        return moved.square().sum() / len(h)

    capture = capture_step(request(step))
    assert capture.is_exact and capture.graph.head is None and not capture.misfit(7)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.11 has no operation that checks, in a graph")
def test_an_operation_that_does_more_than_compute_is_no_part_of_a_graph():
    def step(self, batch):
        h = self.one(batch["x"])
        return self.error(batch) + torch.linalg.lu_factor(h.T @ h + torch.eye(16, dtype=h.dtype))[0].square().mean()

    with pytest.raises(CaptureError, match=r"_linalg_check_errors.*test_other_kinds\.py:\d+"):
        capture_step(request(step))


FUNCTIONAL = {
    "grad": lambda self, x: torch.func.grad(lambda x: self(x).logsumexp(1).sum())(x).square().mean(),
    "vmap": lambda self, x: torch.func.vmap(lambda x: self(x[None])[0])(x).square().mean(),
    "jacrev": lambda self, x: torch.func.vmap(torch.func.jacrev(lambda x: self(x[None])[0]))(x).square().mean(),
}


class Functional(Net):
    """Transformations of `torch.func` around calls of sub-modules, which only a graph can hold."""

    kind = ""

    def training_step(self, batch, batch_idx):
        return self.error(batch) + FUNCTIONAL[self.kind](self, batch["x"])


@pytest.mark.parametrize("kind", FUNCTIONAL)
def test_functional_derivatives_in_the_step_are_those_of_one_device_or_refused(kind, monkeypatch):
    monkeypatch.setattr(Functional, "kind", kind)
    losses, *_ = trained("Functional")
    found, *_ = trained("Functional", {"layout": "1", "microbatches": 2, "capture": "joint"})
    assert found == pytest.approx(losses, rel=ROUNDING)
    with pytest.raises(CaptureError, match=r"cannot be replayed|calls no sub-module"):
        trained("Functional", {"layout": "1", "microbatches": 2, "capture": "replay"})
