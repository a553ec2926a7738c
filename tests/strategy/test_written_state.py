"""What a step writes to its parameters and buffers, in any way and in any batch, is there on every rank afterwards."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_pipe.errors import CaptureError
from ranks.world import Raised, World
from strategy.fits import Losses, dapple, make_trainer
from strategy.small import Small, assert_as_on_one_device, loader, run

ROUNDING = 1e-9


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(4, 8).double(), nn.Linear(8, 8).double()
        self.teacher = copy.deepcopy(self.one).requires_grad_(False)
        self.register_buffer("average", torch.zeros(8, dtype=torch.float64))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OfTeacher(Net):
    """As in MoCo."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        for taught, own in zip(self.teacher.parameters(), self.one.parameters(), strict=True):
            taught.data = taught.data * 0.9 + own.data * 0.1
        hidden = self.one(batch)
        return self.two(torch.tanh(hidden)).square().mean() + (hidden - self.teacher(batch)).square().mean()


class OfBuffer(Net):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        hidden = self.one(batch)
        self.average.data = self.average.data * 0.9 + 0.1 * hidden.detach().mean(0)
        return (self.two(torch.tanh(hidden)) - self.average).square().mean()


class OfBank(Net):
    """Reads a buffer, directly and by a view, before it assigns it; the backward needs what was read."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        out = self.two(torch.tanh(self.one(batch)))
        loss = (out * self.average).square().mean() + (out @ self.average[:, None]).square().mean()
        self.average = 0.5 * self.average + out.detach().mean(0) + 1
        loss = loss + (out * self.average).square().mean()
        self.average = self.average.roll(1)
        return loss


class NotDetached(Net):
    """What it keeps has a gradient, of which the loss knows nothing."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        hidden = self.one(batch)
        self.average += hidden.sum(0)
        return self.two(torch.tanh(hidden)).square().mean()


class OfAnotherForm(Net):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.average.data = self.average.data.float()
        return self.two(torch.tanh(self.one(batch))).square().mean()


class ReadBehind(Net):
    """The first stage writes it in some batches, and the last one reads it in all."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        hidden = self.one(batch)
        if batch_idx % 2:
            with torch.no_grad():
                self.average.copy_(hidden.mean(0))
        return (self.two(torch.tanh(hidden)) - self.average).square().mean()


class Counted(Net):
    """Nothing reads it."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx % 2:
            self.average += 1
        return self.two(torch.tanh(self.one(batch))).square().mean()


def fit(kind: type[Net], options: dict[str, Any] | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    module, seen = kind(), Losses()
    data = torch.randn(20, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    strategy = "auto" if options is None else dapple(**options)
    make_trainer(strategy, max_epochs=2, callbacks=[seen]).fit(module, DataLoader(data, batch_size=4))
    return seen.losses, {name: value.detach().clone() for name, value in module.state_dict().items()}


@pytest.mark.sampled
@pytest.mark.parametrize("capture", ["replay", "joint"])
@pytest.mark.parametrize("kind", [OfTeacher, OfBuffer, OfBank])
def test_assigned_data_is_that_of_one_device(kind: type[Net], capture: str) -> None:
    expected = fit(kind, None)
    for found in World(2).run(fit, kind, {"layout": "1-1", "microbatches": 1, "capture": capture}):
        torch.testing.assert_close(found, expected, rtol=ROUNDING, atol=ROUNDING)


def test_a_backward_reads_what_the_step_has_read_and_not_what_it_assigns() -> None:
    """The check before training refused such a graph; without it, gradients were those of the assigned content."""
    found = fit(OfBank, {"layout": "1", "microbatches": 1, "capture": "joint", "check": False})
    torch.testing.assert_close(found, fit(OfBank, None), rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize(
    ("kind", "capture"), [(OfTeacher, "joint"), (NotDetached, "joint"), (OfTeacher, "replay"), (OfBuffer, "replay")]
)
def test_it_is_assigned_once_per_batch(kind: type[Net], capture: str) -> None:
    """A replayed step that keeps what depends on the samples takes whole batches; it assigned once per micro-batch."""
    expected = fit(kind, None)
    found = fit(kind, {"layout": "1", "microbatches": 4, "capture": capture})
    torch.testing.assert_close(found, expected, rtol=ROUNDING, atol=ROUNDING)


class KeptByHook(Net):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        hidden = self.one(batch)
        hidden.register_hook(self.keep)
        return self.two(torch.tanh(hidden)).square().mean()

    def keep(self, gradient: torch.Tensor) -> None:
        self.average += gradient.norm()


def test_a_buffer_that_a_hook_on_a_gradient_changes_is_named() -> None:
    with pytest.raises(CaptureError, match="its backward writes to a tensor that is kept"):
        fit(KeptByHook, {"capture": "joint"})


def test_data_of_another_form_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"another shape or type by `.data` at .*test_written_state\.py"):
        fit(OfAnotherForm, {"capture": "joint"})


@pytest.mark.parametrize("kind", [ReadBehind, Counted])
def test_every_rank_has_what_a_later_graph_has_written(kind: type[Net]) -> None:
    """Ranks of other stages went on with the value that they had, and ended with it."""
    expected = fit(kind, None)
    for found in World(2).run(fit, kind, {"layout": "1-1", "microbatches": 1}):
        torch.testing.assert_close(found, expected, rtol=ROUNDING, atol=ROUNDING)


class ReadAhead(Net):
    """The first stage reads what the last one writes, in some batches only."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        outputs = self.two(torch.tanh(self.one(batch - self.average[:4])))
        if batch_idx % 2:
            self.average = self.average + outputs.detach().mean(0)
        return (outputs - 1).square().mean()


class CountedInUnit(Net):
    """A sub-module of the first stage counts some batches only."""

    def __init__(self) -> None:
        super().__init__()
        self.one.count = 0

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.one.count += batch_idx % 2
        return self.two(torch.tanh(self.one(batch * self.one.count))).square().mean()


@pytest.mark.parametrize("options", [{"layout": "1-1", "microbatches": m} for m in (1, 2)] + [{"layout": "2"}])
@pytest.mark.parametrize("kind", [ReadAhead, CountedInUnit, Counted])
def test_what_a_replayed_step_writes_in_later_batches_only_is_that_of_one_device(
    kind: type[Net], options: dict[str, Any]
) -> None:
    """It was once per micro-batch or replica, and other stages went on with the old value without a word."""
    expected = fit(kind, None)
    for found in World(2).run(fit, kind, {"capture": "replay", **options}):
        torch.testing.assert_close(found, expected, rtol=ROUNDING, atol=ROUNDING)


class Deep(ReadAhead):
    def __init__(self) -> None:
        super().__init__()
        self.two = nn.Sequential(*(nn.Linear(8, 8).double() for _ in range(4)))


def test_a_later_graph_is_cut_where_its_state_allows() -> None:
    """The cut of the first batch lay between where a buffer is read and where it is written, and ended the training."""
    expected = fit(Deep, None)
    for found in World(2).run(fit, Deep, {"layout": "1-1", "microbatches": 1}):
        torch.testing.assert_close(found, expected, rtol=ROUNDING, atol=ROUNDING)


class ByValues(Net):
    """Heads, and scales outside of all sub-modules, of which every batch uses those that its values name."""

    def __init__(self, first: int = 0) -> None:
        super().__init__()
        self.first, self.heads = first, nn.ModuleList(nn.Linear(8, 1).double() for _ in range(3))
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(8, dtype=torch.float64)) for _ in range(3))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        hidden, losses = torch.tanh(self.two(torch.tanh(self.one(batch)))), []
        kinds = [int(10 * number.abs()) % 3 for number in batch[:, 0]]
        for kind in range(3):
            mask = torch.tensor([one == kind for one in kinds])
            if batch_idx < self.first or mask[:3].any():
                losses.append((self.heads[kind](hidden) - 1)[mask].square().sum())
        return sum(losses) + (hidden * self.scales[kinds[0]]).square().mean()


class ByValuesLater(ByValues):
    """The first batch uses all of them."""

    def __init__(self) -> None:
        super().__init__(first=1)


@pytest.mark.parametrize("kind", [ByValues, ByValuesLater])
def test_what_values_skip_trains_as_on_one_device(kind: type[Net]) -> None:
    """Gradients of parameters outside of sub-modules that the first samples do not use were zero, without a word."""
    expected = fit(kind, None)
    for found in World(2).run(fit, kind, {"layout": "1-1", "microbatches": 1, "capture": "replay"}):
        torch.testing.assert_close(found, expected, rtol=ROUNDING, atol=ROUNDING)


class Initialised(Net):
    """A scale that is set by the values of the first batch, as in flows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.is_set = nn.Parameter(torch.ones(8, dtype=torch.float64)), False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        hidden = self.one(batch)
        if not self.is_set:
            self.scale.data.copy_(1 / (hidden.detach().std(0) + 0.1))
            self.is_set = True
        return self.two(torch.tanh(hidden * self.scale)).square().mean()


def fit_initialised(options: dict[str, Any] | None, before: bool) -> dict[str, torch.Tensor]:
    """Fit, with values that were set before or are set by the first batch; a worker function."""
    module, data = Initialised(), torch.randn(16, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    if before:
        module.training_step(data[:8], 0)
    trainer = make_trainer("auto" if options is None else dapple(**options), max_epochs=2)
    trainer.fit(module, DataLoader(data, 8))
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def test_a_parameter_that_the_first_batch_sets_is_refused_where_parts_would_set_it_and_else_right() -> None:
    """Every replica, and every micro-batch, set its own without a word."""
    expected = fit_initialised(None, False)
    for found in World(2).run(fit_initialised, {"layout": "1-1", "microbatches": 1}, False):
        torch.testing.assert_close(found, expected, rtol=ROUNDING, atol=ROUNDING)
    for options in ({"layout": "2"}, {"layout": "1-1", "microbatches": 2}):
        for result in World(2).results(fit_initialised, options, False):
            assert isinstance(result, Raised) and result.kind == "CaptureError"
            assert "training_step sets scale in its first call" in result.text
    for found in World(2).run(fit_initialised, {"layout": "1-1", "microbatches": 2}, True):
        torch.testing.assert_close(found, fit_initialised(None, True), rtol=ROUNDING, atol=ROUNDING)


class Written(Small):
    """State that every batch writes: a counter, a parameter of a teacher, a mean; validation counts too."""

    data = staticmethod(lambda: loader(13, 4))  # the last batch has a single sample, which is the second replica's
    validation = staticmethod(lambda: loader(6, 4, 2))

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.first).requires_grad_(False)
        for name in ("count", "mean", "validated"):
            self.register_buffer(name, torch.zeros((), dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        with torch.no_grad():
            self.count += 1
            self.mean.mul_(0.9).add_(batch[0].mean(), alpha=0.1)
            for taught, own in zip(self.teacher.parameters(), self.first.parameters(), strict=True):
                taught.mul_(0.9).add_(own, alpha=0.1)
        return self.loss(batch) / (1 + self.count) + (self.first(batch[0]) - self.teacher(batch[0])).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated += 1
        self.log("validated", self.validated)

    def on_train_epoch_end(self) -> None:
        self.noted += [one.clone() for one in (self.count, self.mean, self.validated)]


def written(accumulated: str, options: dict[str, Any] | None) -> tuple[Any, ...]:
    """Fit it; a worker function."""
    return run(Written, options, accumulate_grad_batches=int(accumulated))


@pytest.mark.parametrize("layout", ["1-1", "2", "2-1"])
@pytest.mark.parametrize("accumulated", ["1", "2"])
def test_every_batch_writes_it_also_one_that_is_accumulated_or_has_no_sample_for_some(
    accumulated: str, layout: str
) -> None:
    """Batches without a step wrote nothing, and replicas without a sample told the others what had been there."""
    assert_as_on_one_device(written, accumulated, {"layout": layout, "microbatches": 1, "capture": "joint"})


class Frequencies(Small):
    """Weigh classes by how often they were met, this batch included."""

    data = staticmethod(lambda: loader(22, 8))

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("met", torch.tensor([5.0, 1.0, 2.0], dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        targets = batch[1].masked_fill(batch[0][:, 0] > 1, -100)
        self.met += F.one_hot(batch[1], 3).sum(0)
        weights = self.met.sum() / self.met
        return F.cross_entropy(self(batch[0]), targets, weight=weights / weights.mean())


class FrequenciesBefore(Frequencies):
    """Weigh them by how often they were met before."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1], weight=1 / self.met)
        self.met += F.one_hot(batch[1], 3).sum(0)
        return loss


class Normed(Small):
    """Keep statistics of instances."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(2, track_running_stats=True).double()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        made = self.norm(torch.tanh(self.first(batch[0])).unflatten(1, (2, 4)))
        return F.cross_entropy(self.last(made.flatten(1)), batch[1])


def weighed(_: str, options: dict[str, Any] | None) -> tuple[Any, ...]:
    """Fit; a worker function."""
    return run(Frequencies, options and {**options, "schedule": "gpipe"})


@pytest.mark.parametrize("options", [{"layout": "1-1", "microbatches": 3}, {"layout": "2", "microbatches": 2}], ids=str)
def test_weights_of_classes_that_the_step_makes_of_the_batch_weigh_all_of_it(options: dict[str, Any]) -> None:
    """The mean over targets of a micro-batch was weighed by its samples."""
    assert_as_on_one_device(weighed, "", options)


@pytest.mark.parametrize("kind", [FrequenciesBefore, Normed])
def test_state_that_a_step_reads_and_changes_is_that_of_one_device(kind: type[Small]) -> None:
    states = []
    for strategy in ("auto", dapple(layout="1", microbatches=2, schedule="gpipe")):
        pl.seed_everything(3, verbose=False)
        module, trainer = kind(), make_trainer(strategy, max_epochs=1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(module, loader())
        assert not [1 for one in caught if "per batch" in str(one.message)]
        states.append(module.state_dict())
    torch.testing.assert_close(*states, rtol=ROUNDING, atol=ROUNDING)


class Skipping(Small):
    """Some batches are skipped, and change state all the same."""

    data = staticmethod(lambda: loader(22, 4))

    def __init__(self) -> None:
        super().__init__()
        for name, size in (("count", ()), ("mean", (4,)), ("activation", (8,))):
            self.register_buffer(name, torch.zeros(size, dtype=torch.float64))
        self.scale = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = torch.tanh(self.first(batch[0]))
        with torch.no_grad():
            self.count += 1
            self.mean.mul_(0.9).add_(batch[0].mean(0), alpha=0.1)
            self.activation.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
        loss = F.cross_entropy(self.last(hidden), batch[1])
        if self.is_skipped(batch, batch_idx, loss):
            return None
        return loss * self.scale

    def is_skipped(self, batch: Any, batch_idx: int, loss: torch.Tensor) -> Any:
        return batch_idx in (1, 3)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.scale = 1 / (1 + float(self.count))
        self.noted += [one.clone() for one in (self.count, self.mean, self.activation)]


class SkippingByValue(Skipping):
    def is_skipped(self, batch: Any, batch_idx: int, loss: torch.Tensor) -> Any:
        return bool(batch[0].sum() > 3)  # in the third and fourth batch


def skipped(name: str, options: dict[str, Any] | None) -> tuple[Any, ...]:
    """Fit; a worker function."""
    return run({"index": Skipping, "value": SkippingByValue}[name], options)


@pytest.mark.parametrize(
    "options",
    [
        {"layout": "1-1", "microbatches": 2},
        {"layout": "2", "microbatches": 2},
        {"layout": "2-1", "microbatches": 2},
        {"layout": "1-1", "microbatches": 2, "capture": "replay"},
        {"layout": "2", "capture": "replay"},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["index", "value"])
def test_a_batch_that_is_skipped_changes_state_on_every_rank(name: str, options: dict[str, Any]) -> None:
    """It was put back, or became that of each replica."""
    assert_as_on_one_device(skipped, name, options)
