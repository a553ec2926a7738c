"""Small modules and everything that is needed to run them as pipelines, with the plain module's gradients to compare.

Cuts are given as paths of modules at which stages begin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_pipe.capture import Capture, Request, capture_step
from lightning_pipe.capture.steps.batch import flatten
from lightning_pipe.capture.steps.stage_program import Split
from lightning_pipe.core.program import Layout, VerifiedProgram
from lightning_pipe.runtime.executor import Executor
from lightning_pipe.runtime.job import BatchInput
from lightning_pipe.runtime.stage import State
from lightning_pipe.runtime.transport.protocol import Transport
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.registry import order_of
from lightning_pipe.schedule.verification.verify import verify

CPU = torch.device("cpu")
WIDTH = 4


class Chain(pl.LightningModule):
    """Three blocks one after another, with a mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        prediction = self(x)
        self.log("largest", prediction.max(), reduce_fx="max")
        return nn.functional.mse_loss(prediction, y)


class Tied(Chain):
    """The last block has the weight of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.third.weight = self.first.weight


class Skip(Chain):
    """What the first block makes is used by the third as well."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        early = torch.tanh(self.first(x))
        return self.third(torch.tanh(self.second(early)) * early)


class Summed(Chain):
    """The loss is a sum over samples."""

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self(x), y, reduction="sum")


class Normed(Chain):
    """Batch statistics, with running averages, in the first block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.norm(self.first(x))))))


MODULES = {cls.__name__: cls for cls in (Chain, Tied, Skip, Summed, Normed)}


@dataclass(frozen=True)
class Case:
    """A module as a pipeline: what to cut where, on which ranks, in which micro-batches."""

    module: str
    stages: tuple[tuple[int, ...], ...]
    cuts: tuple[str, ...] = ("second", "third")
    sizes: tuple[int, ...] = (2, 2, 2)
    schedule: str = "1f1b"
    whole: frozenset[int] = frozenset()
    weights: tuple[tuple[int, ...], ...] = ()

    @property
    def layout(self) -> Layout:
        return Layout(self.stages, self.whole, self.weights)


def module_of(case: Case) -> pl.LightningModule:
    """Return the case's module, the same on every call, in float64."""
    torch.manual_seed(0)
    return MODULES[case.module]().double()


def batch_of(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the case's batch, the same on every call."""
    generator = torch.Generator().manual_seed(1)
    samples = sum(case.sizes)
    x, y = (torch.randn(samples, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y


def capture_of(case: Case, module: pl.LightningModule) -> Capture:
    """Capture the module's training step."""
    return capture_step(Request(module, "training_step", flatten(batch_of(case))[1]))


def split_of(case: Case, capture: Capture) -> Split:
    """Cut at the first nodes of the case's modules."""
    return capture.split(tuple(capture.graph.position(at) for at in case.cuts))


def program_of(case: Case, split: Split, *, synchronise: bool = True, milestones: bool = False) -> VerifiedProgram:
    """Return the verified program of the case's schedule."""
    order = order_of(case.schedule, layout=case.layout, microbatches=len(case.sizes))
    return verify(
        lower(
            order,
            layout=case.layout,
            sizes=case.sizes,
            traffic=split.traffic,
            synchronise=synchronise,
            confirms=milestones,
            publishes=milestones,
        )
    )


def job_of(case: Case, **changes: float) -> BatchInput:
    """Return the job of the case's batch."""
    offsets = tuple(sum(case.sizes[:m]) for m in range(len(case.sizes)))
    return BatchInput(batch_of(case), (True, True), offsets, **changes)  # type: ignore[arg-type]


def executor_of(
    case: Case,
    module: pl.LightningModule,
    capture: Capture,
    split: Split,
    transport: Transport,
    step: Callable[[], None] = lambda: None,
) -> Executor:
    """Return the executor of one rank, whose optimizer is `step`."""
    state = State(dict(module.named_parameters()), dict(module.named_buffers()), CPU)
    return Executor(split, case.layout, state=state, transport=transport, loss=capture.record.loss, step=step)


def plain_gradients(case: Case, slices: Sequence[tuple[int, int]] = ()) -> dict[str, torch.Tensor | None]:
    """Return the plain module's gradients, accumulated over slices (default: the micro-batches) of the batch."""
    module = module_of(case)
    x, y = batch_of(case)
    offsets = [sum(case.sizes[:m]) for m in range(len(case.sizes))]
    for start, stop in slices or [(o, o + n) for o, n in zip(offsets, case.sizes, strict=True)]:
        loss = module.training_step((x[start:stop], y[start:stop]), 0)
        weight = 1.0 if case.module == "Summed" else (stop - start) / len(x)
        loss.backward(torch.tensor(weight, dtype=loss.dtype))
    return {name: parameter.grad for name, parameter in module.named_parameters()}
