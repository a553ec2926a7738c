"""Whatever the loss, micro-batches train as one device: loss, gradients, logs and Python state, by both routes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipe.capture import Request, capture_step, flatten
from lightning_pipe.capture.replayed.replay import Replay
from lightning_pipe.core.plan import microbatch_sizes
from lightning_pipe.core.program import Layout
from lightning_pipe.schedule import order_of
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.verification.verify import verify
from models import sample_losses
from ranks.world import World
from strategy.fits import dapple, make_trainer
from zoo.replaying import Replayed, traced

SAMPLES = 13
LOSSES: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]] = {}
OF_ALL_SAMPLES = (
    "info_nce sim_clr supervised_contrastive triplet_hard barlow_twins vicreg cox ranking ohem_topk flooding "
    "root_of_a_mean"
).split()
MIDDLE = ("centred_in_the_middle",)
LATER = ("looks_at_all_samples_later", "makes_inputs_of_all_samples_later", "ties_weights_and_masks")


def loss(function: Any) -> Any:
    """Add a loss of a module, inputs and classes to the table."""
    LOSSES[function.__name__] = function
    return function


@loss
def mean_over_valid_targets(m, x, y):
    return F.cross_entropy(m.body(x), torch.where(y > 0, y, -100), ignore_index=-100)


@loss
def sum_plus_penalty(m, x, y):
    return F.cross_entropy(m.body(x), y, reduction="sum") + 1e-2 * m.body[0].weight.pow(2).sum()


@loss
def mask_select_then_mean(m, x, y):
    return m.body(x)[y > 1].square().mean()


@loss
def root_of_a_mean(m, x, y):
    found = F.mse_loss(m.body(x), torch.zeros(len(x), 4, dtype=x.dtype))
    m.log("rmse", found.sqrt())
    return found.sqrt() * m.t


@loss
def contrastive(m, x, y):
    z = F.normalize(m.body(x))
    return F.cross_entropy(z @ z.T / m.t, (torch.arange(len(x)) + 1) % len(x))


@loss
def ranks_and_picks(m, x, y):
    o = m.body(x)[:, 0]
    m.log("std", o.std())
    m.log("first", o[0])
    return o.topk(3).values.mean() + o.std()


@loss
def goes_by_the_number_of_samples(m, x, y):
    found = F.cross_entropy(m.body(x), y)
    m.log("n", float(len(x)))
    return found if len(x) == SAMPLES else 2 * found


@loss
def reads_values_into_python(m, x, y):
    o = m.body(x)
    hits = int((o.argmax(1) == y).sum().item())
    m.seen.append(hits)
    m.log("acc", hits / len(x))
    return F.cross_entropy(o, y) * (1 + hits)


@loss
def flooding(m, x, y):
    return (F.cross_entropy(m.body(x), y) - 1.4).abs()


@loss
def unit_given_what_the_batch_makes(m, x, y):
    return F.cross_entropy(m.body((x - x.mean(0)) / x.std(0)), y)


@loss
def plain_mean(m, x, y):
    o = m.body(x)
    m.log("spread", o.std())
    return F.cross_entropy(o, y)


@loss
def centred_in_the_middle(m, x, y):
    h = m.body[1](m.body[0](x))
    return F.cross_entropy(m.body[2](h - h.mean(0)), y)


@loss
def looks_at_all_samples_later(m, x, y):
    return F.cross_entropy(m.body(x if m.global_step < 2 else x - x.mean(0)), y, label_smoothing=0.1).sqrt()


@loss
def makes_inputs_of_all_samples_later(m, x, y):
    return F.cross_entropy(m.body(2 * x if m.global_step < 2 else 2 * x - x.mean(0)), y)


@loss
def ties_weights_and_masks(m, x, y):
    h = m.body[0](x)
    logits, again = m.body[2](m.body[1](h)), F.linear(h, m.body[0].weight.T)
    mask = (y > 0).double()
    return (F.cross_entropy(logits, y, reduction="none") * mask).sum() / mask.sum() + again.square().mean().sqrt()


class Net(pl.LightningModule):
    """Two layers that can be separated, a temperature in the step, and a list that the step extends."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)).double()
        self.t = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
        self.name, self.seen = name, list[int]()

    def training_step(self, batch, batch_idx):
        x, y = batch
        return {"loss": LOSSES[self.name](self, x, y), "kept": y}

    def validation_step(self, batch, batch_idx):
        x = batch[0]
        o = self.body(x)
        self.log("val_std", o.std())
        self.log("val_first", o[-1, 0])
        self.seen.append(len(x))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Said(pl.Callback):
    """Keep what training batches have returned."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.outputs.append((float(outputs["loss"]), outputs["kept"].tolist()))


def fitted(names: list[str], options: dict[str, Any] | None, batches: int) -> dict[str, Any]:
    """Fit modules one after another, and return what is left of each; runs on a rank of a test world, too."""
    found = {}
    for name in names:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(SAMPLES * batches - 4 * (batches > 1), 6, generator=generator, dtype=torch.float64)
        data = DataLoader(TensorDataset(x, torch.randint(4, (len(x),), generator=generator)), SAMPLES)
        pl.seed_everything(3, verbose=False)
        module, said = Net(name), Said()
        strategy = "auto" if options is None else dapple(**options)
        trainer = make_trainer(strategy, max_epochs=1, callbacks=[said])
        trainer.fit(module, data, data)
        logged = {key: float(value) for key, value in trainer.callback_metrics.items()}
        weights = {key: parameter.detach().clone() for key, parameter in module.named_parameters()}
        found[name] = said.outputs, logged, module.seen, weights
    return found


def assert_as_one_device(
    names: list[str], options: dict[str, Any], *, batches: int, rounding: float, ranks: int = 2
) -> None:
    """Compare fits on some ranks with those on one device."""
    expected = fitted(names, None, batches)
    for found in World(ranks).run(fitted, names, {"layout": "1-1", "capture": "replay", **options}, batches):
        for name in names:
            (outputs, logged, seen, weights), (own_outputs, own_logged, own_seen, own) = expected[name], found[name]
            assert own_outputs == [(pytest.approx(value, rel=rounding), kept) for value, kept in outputs], name
            assert own_logged == pytest.approx(logged, rel=1e-6), name
            assert own_seen == seen, name
            torch.testing.assert_close(
                own, weights, rtol=rounding, atol=rounding, msg=lambda text, n=name: f"{n}: {text}"
            )


@pytest.mark.parametrize("capture", ["auto", "replay"])
def test_whatever_the_loss_a_batch_is_that_of_one_device(capture):
    table = [name for name in LOSSES if name not in (*LATER, *MIDDLE)]
    options = {"microbatches": 3, "schedule": "gpipe", "capture": capture}
    assert_as_one_device(table, options, batches=1, rounding=1e-12)


class Compared(sample_losses.Net):
    """A module of the table of losses that notes what it returns; one of them accumulates gradients of two batches."""

    def __init__(self, name: str, options: dict[str, Any] | None) -> None:
        super().__init__(name)
        self.options, self.losses, self.classes = options, list[float](), list[list[int]]()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return {"loss": loss, "classes": batch[1]}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))
        self.classes.append(outputs["classes"].tolist())

    def fitted(self) -> dict[str, Any]:
        """Fit ten batches, the last of which is smaller; return losses, what was returned and logged, and weights."""
        generator = torch.Generator().manual_seed(7)
        rows = [
            tensor.double() if tensor.is_floating_point() else tensor
            for tensor in sample_losses.make_batch(10 * SAMPLES - 4, generator=generator)
        ]
        strategy = "auto" if self.options is None else dapple(**self.options)
        accumulates = {"accumulate_grad_batches": 2} if self.name == "triplet_hard" else {}
        trainer = make_trainer(strategy, max_epochs=1, **accumulates)
        trainer.fit(self, DataLoader(TensorDataset(*rows), SAMPLES))
        weights = {name: parameter.detach().clone() for name, parameter in self.named_parameters()}
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        return {"losses": self.losses, "classes": self.classes, "logged": logged, "weights": weights}


def fit_of_all_samples(options: dict[str, Any] | None) -> dict[str, Any]:
    """Fit the losses that need all samples; runs on a rank of a test world, too."""
    found = {}
    for name in OF_ALL_SAMPLES:
        pl.seed_everything(3, verbose=False)
        found[name] = Compared(name, options).double().fitted()
    return found


@pytest.fixture(scope="module")
def on_one_device() -> dict[str, Any]:
    return fit_of_all_samples(None)


@pytest.mark.sampled
@pytest.mark.parametrize("microbatches", [1, 2, 4, 8])
@pytest.mark.parametrize("layout", ["1-1", "2-1", "1-1-1", "1-2"])
@pytest.mark.parametrize("capture", ["joint", "replay"])
def test_losses_that_need_all_samples_train_as_on_one_device(on_one_device, layout, capture, microbatches):
    if capture == "replay" and layout == "1-1-1":
        pytest.skip("a module of two sub-modules cannot be replayed on three stages")
    options = {"microbatches": microbatches, "schedule": "gpipe", "capture": capture, "layout": layout}
    ranks = sum(map(int, layout.split("-")))
    for found in World(ranks).run(fit_of_all_samples, options):
        for name, expected in on_one_device.items():
            fit = found[name]
            assert fit["losses"] == pytest.approx(expected["losses"], rel=1e-9), name
            assert fit["logged"] == pytest.approx(expected["logged"], rel=1e-6), name
            assert fit["classes"] == expected["classes"], name
            torch.testing.assert_close(fit["weights"], expected["weights"], rtol=1e-9, atol=1e-9, msg=name)


def accumulated(name: str, microbatches: int) -> dict[str, torch.Tensor]:
    """Return the weights after one batch whose micro-batches are steps of their own, weighed by their samples."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(4, (SAMPLES,), generator=generator)
    module, sizes = Net(name), microbatch_sizes(SAMPLES, microbatches)
    for part, kinds in zip(x.split(sizes), y.split(sizes), strict=True):
        (LOSSES[name](module, part, kinds) * len(part) / SAMPLES).backward()
    module.configure_optimizers().step()
    return dict(module.named_parameters())


@pytest.mark.parametrize("capture", ["joint", "replay"])
def test_by_microbatch_trains_as_accumulation_does(capture):
    options = {"microbatches": 3, "layout": "1-1", "capture": capture, "whole_batch": "by_microbatch"}
    for found in World(2).run(fitted, ["contrastive", "flooding", "centred_in_the_middle"], options, 1):
        for name, (_, _, _, weights) in found.items():
            torch.testing.assert_close(weights, accumulated(name, 3), rtol=1e-9, atol=1e-9, msg=name)


def test_what_meets_in_the_middle_is_told_and_exact_where_that_is_wanted():
    name, options = "centred_in_the_middle", {"microbatches": 3, "layout": "1", "capture": "joint"}
    batch = (torch.zeros(SAMPLES, 6, dtype=torch.float64), torch.zeros(SAMPLES, dtype=torch.long))
    with pytest.warns(
        UserWarning, match=r"test_whole_batches.py:\d+ .* in the middle of the model.* time, batch_dim=1 cuts it"
    ):
        capture_step(Request(Net(name), "training_step", flatten(batch)[1], samples=5))
    found = fitted([name], options, 1)[name][-1]
    torch.testing.assert_close(found, accumulated(name, 3), rtol=1e-9, atol=1e-9)
    exact = fitted([name], {**options, "whole_batch": "exact", "schedule": "gpipe"}, 1)[name][-1]
    torch.testing.assert_close(exact, fitted([name], None, 1)[name][-1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("options", [{"layout": "1-1"}, {"layout": "2"}], ids=str)
def test_what_begins_later_and_what_is_tied_is_that_of_one_device(options):
    """Glue that begins to look at all samples gave units of micro-batches something else, without a word."""
    assert_as_one_device([*LATER], {"microbatches": 2, "schedule": "gpipe", **options}, batches=5, rounding=1e-9)


def trace_of(name: str, width: int = 4) -> Replayed:
    module = Net(name)
    module.body[2] = nn.Linear(16, width).double()
    x = torch.randn(6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return traced(module, (x, torch.arange(6) % 4), (2, 2, 2), parts=2)


def test_a_proven_mean_keeps_its_program_and_its_head_only_speaks():
    found = trace_of("plain_mean")
    split, layout = Replay(found.request, found.trace).split((1,)), Layout(((0,), (1,)))
    order = order_of("1f1b", layout=layout, microbatches=3)
    lowered = [
        lower(order, layout=layout, sizes=found.sizes, traffic=traffic)
        for traffic in (split.traffic, replace(split.traffic, head=None))
    ]
    verify(lowered[0])
    lines, plain = ([[*map(str, line)] for line in program.ranks] for program in lowered)
    assert "HEAD" in lines[1]
    assert not found.trace.is_random_in_python, "its trials draw, and leave nothing behind"
    assert [[x for x in line if "HEAD" not in x and "FREE" not in x] for line in lines] == [
        [x for x in line if "FREE" not in x] for line in plain
    ]


def test_results_of_many_numbers_are_not_put_together_for_a_head_that_only_speaks():
    found = trace_of("plain_mean", width=4097)
    assert (found.trace.law is not None, found.trace.head) == (True, "")
    assert "return more than 4,096 numbers of every sample" in Replay(found.request, found.trace).told()
    assert trace_of("contrastive", width=4097).trace.head == "holds"
