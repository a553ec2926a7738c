"""Where weights do not change (a rate of zero), forwards ahead of their batch have no digit of what others write."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn

from lightning_pipe.schedule.weights import POLICIES
from lightning_pipe.strategy.steps.rounds import Rounds
from ranks.world import World
from strategy.fits import dapple, make_trainer

BATCHES, SIZE = 7, 4
WAYS = ("in place", "rebound", "data", "numpy", "set_", "no_grad", "inference_mode")
HOOKS = (
    "on_train_batch_start on_before_zero_grad on_after_backward on_before_optimizer_step on_train_batch_end "
    "on_validation_end"
).split()
TARGETS = ("factor", "count", "running_mean", "batch")
WARN = "lightning_pipe.strategy.steps.rounds.rank_zero_warn"


@dataclass(frozen=True)
class Write:
    """What writes to what a step reads.

    Attributes:
        hook: that writes; "" for none.
        way: how.
        target: a buffer that the step reads, one that it writes once per batch or per micro-batch, or the batch.
        every: batches between two writes.
        policy: of weight versions.
        microbatches: of a batch.
        refills: whether the loader fills one array with every batch.
        validates: whether there is a validation after every third batch.
        reads: whether a hook reads all buffers after every batch.
    """

    hook: str
    way: str
    target: str
    every: int = 1
    policy: str = "pipedream"
    microbatches: int = 2
    refills: bool = False
    validates: bool = False
    reads: bool = False


def any_write(number: int) -> Write:
    """Return a write that a generator chooses."""
    chosen = random.Random(number)
    hook = chosen.choice(HOOKS)
    batch = hook == "on_train_batch_start" and chosen.random() < 0.3
    target, way = ("batch" if batch else chosen.choice(TARGETS[:3])), chosen.choice(WAYS)
    policy, microbatches, flags = chosen.choice([*POLICIES]), chosen.choice((1, 2, 4)), [chosen.random() < 0.5] * 3
    validates = flags[1] or hook == "on_validation_end"
    return Write(hook, way, target, chosen.choice((1, 4)), policy, microbatches, flags[0], validates, flags[2])


class Refilled:
    """A loader that fills one array with every batch."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x.numpy(), y.numpy()

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[Any]:
        x, y = np.zeros((SIZE, 4)), np.zeros((SIZE, 2))
        for k in range(0, BATCHES * SIZE, SIZE):
            x[...], y[...] = self.x[k : k + SIZE], self.y[k : k + SIZE]
            yield torch.from_numpy(x), torch.from_numpy(y)


class Written(pl.LightningModule):
    """Two stages with buffers, to which a hook writes."""

    def __init__(self, write: Write) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.write, self.outcome = write, list[tuple[str, list[float]]]()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.register_buffer("factor", torch.ones(1))
        self.register_buffer("count", torch.zeros(1))
        self.double()

    def put(self, batch: Any, batches: int) -> None:
        """Write to the target."""
        target, number = self.write.target, 1 + 0.1 * batches
        owner, name = (self.norm, target) if target == "running_mean" else (self, target)
        if batch is not None and not self.trainer.is_global_zero:  # which has loaded it
            return
        tensor = batch[0] if batch is not None else getattr(owner, name)
        match self.write.way:
            case "in place":
                tensor.mul_(number)
            case "rebound" if batch is None:
                setattr(owner, name, tensor * number)
            case "data":
                tensor.data.mul_(number)
            case "numpy":
                tensor.numpy()[...] *= number
            case "set_":
                tensor.set_(tensor * number)
            case "no_grad" | "rebound":
                with torch.no_grad():
                    tensor.copy_(tensor * number)
            case "inference_mode":
                with torch.inference_mode():
                    tensor.mul_(number)

    def loss(self, batch: Any) -> torch.Tensor:
        hidden = self.norm(self.first(batch[0] * self.factor))
        return F.mse_loss(self.last(torch.tanh(hidden + self.count)), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.count += 0.1
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0, momentum=0.5)


def noting(hook: str) -> Any:
    """Return a hook that notes what it sees, and writes if it is the one that does."""

    def run(self: Written, *arguments: Any) -> None:
        batches = self.trainer.fit_loop.total_batch_idx + 1
        if hook == "on_train_batch_end":
            self.outcome.append(("loss", [float(arguments[0]["loss"])]))
            if self.write.reads:
                self.outcome += [(name, buffer.tolist()) for name, buffer in self.named_buffers()]
        if hook == "on_validation_end":
            self.outcome.append(("val", [float(self.trainer.callback_metrics["val"])]))
        if hook == self.write.hook and batches % self.write.every == 0:
            self.put(arguments[0] if self.write.target == "batch" else None, batches)

    return run


for hook in HOOKS:
    setattr(Written, hook, noting(hook))


@dataclass
class Outcome:
    """What hooks have seen, how a fit has ended, which batches had forwards in flight, and what was said."""

    seen: list[tuple[str, list[float]]]
    error: str
    ahead: list[bool]
    warnings: list[str]
    delays: tuple[int, ...]


def train(write: Write, *callbacks: pl.Callback) -> Outcome:
    """Fit one module; a worker function."""
    module, ahead, told, begin = Written(write), list[bool](), list[str](), Rounds.begin

    def begin_noted(self: Rounds, *args: Any, **options: Any) -> Any:
        round_ = begin(self, *args, **options)
        if options["training"]:
            ahead.append(round_.seam is not None and any(round_.seam.enters))
        return round_

    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(BATCHES * SIZE, n, generator=generator, dtype=torch.float64) for n in (4, 2))
    pairs = [(x[k : k + SIZE].clone(), y[k : k + SIZE].clone()) for k in range(0, len(x), SIZE)]
    loader = Refilled(x, y) if write.refills else torch.utils.data.DataLoader(pairs, batch_size=None)
    options = {"layout": "1-1", "planner": "uniform", "microbatches": write.microbatches, "cache": "off"}
    strategy = dapple(versions=write.policy, **options)
    validations = {"val_check_interval": 3} if write.validates else {"limit_val_batches": 0}
    trainer = make_trainer(strategy, callbacks=[*callbacks], max_epochs=1, num_sanity_val_steps=0, **validations)
    error = ""
    with mock.patch.object(Rounds, "begin", begin_noted), mock.patch(WARN, told.append):
        try:
            trainer.fit(module, loader, torch.utils.data.DataLoader(pairs[:2], batch_size=None))
        except Exception as raised:
            error = type(raised).__name__
    return Outcome(module.outcome, error, ahead, told, () if error else strategy.delays)


def train_all(writes: list[Write]) -> list[tuple[Outcome, Outcome]]:
    """Fit modules by their policies, and without; a worker function."""
    return [(train(write), train(replace(write, policy="sync"))) for write in writes]


FEW = [
    Write("on_train_batch_end", "data", "factor"),
    Write("on_train_batch_end", "rebound", "count", 4, "2bw", 1),
    Write("on_train_batch_start", "numpy", "batch", 4, "stale", refills=True),
    Write("on_validation_end", "in place", "running_mean", 2, "pb", 1, validates=True),
]
MANY = [
    [Write(hook, way, "factor", 4, refills=True) for hook, way in itertools.product(HOOKS[-2:], WAYS)],
    *([any_write(number) for number in range(k, k + 20)] for k in range(0, 60, 20)),
]


@pytest.mark.parametrize("writes", [FEW, *(pytest.param(many, marks=pytest.mark.slow) for many in MANY)])
def test_what_others_write_changes_no_digit(writes: list[Write]) -> None:
    """Whatever hook writes in whatever way to buffers or batches, and whatever is validated in between."""
    for outcomes in World(2).run(train_all, writes, deadline_s=400):
        for write, (ahead, flushed) in zip(writes, outcomes, strict=True):
            assert (ahead.error, ahead.seen) == (flushed.error, flushed.seen), write
            assert ahead.error or any(ahead.ahead), write
            assert not ahead.error or writes is not FEW, write  # others may write where hooks have no weights


class Norms(pl.Callback):
    """Read all weights after every batch."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        module.outcome.append(("norm", [float(sum(p.detach().norm() for p in module.parameters()))]))


class Halves(Norms):
    """Write weights after every batch."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)
        for parameter in module.parameters():
            parameter.data.mul_(0.9)


class Saves(pl.Callback):
    """Take a checkpoint after every batch."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        trainer.strategy.lightning_module_state_dict()


def train_with_callbacks() -> list[tuple[Outcome, Outcome]]:
    """Fit with callbacks that use the weights after every batch; a worker function."""
    makers = [Norms, lambda: EMAWeightAveraging(decay=0.9), Saves, Halves]
    plain, validated = Write("", "", ""), Write("", "", "", policy="2bw", validates=True)
    pairs = zip([plain, validated, plain, plain], makers, strict=True)
    return [(train(write, make()), train(replace(write, policy="sync"), make())) for write, make in pairs]


def test_who_reads_weights_keeps_forwards_in_flight_and_who_cannot_is_named() -> None:
    """A resumed fit begins with an empty pipeline, and written weights are read: both flush it after three batches."""
    for norms, averages, saves, halves in World(2).run(train_with_callbacks):
        for outcome, flushed in (norms, averages, saves, halves):
            assert not outcome.error and outcome.seen == flushed.seen
        for outcome, _ in (norms, averages):
            assert outcome.ahead == [False] + [True] * (BATCHES - 1)
            assert outcome.delays[0] == 1 and not outcome.warnings
        for (outcome, _), words in ((saves, "a checkpoint is taken"), (halves, "a hook writes the weights of")):
            assert not any(outcome.ahead[-3:]) and outcome.delays == (0, 0)
            assert len(outcome.warnings) == 1 and words in outcome.warnings[0]
