"""Gain of post-validation, where no rank waits between steps: fits of stages that sleep, with and without.

    python -m benchmarks.post_validation
    chrt --rr 20 python -m benchmarks.post_validation        # wakes sleepers on time where others use the cores too

Every block of the module multiplies by a small matrix and sleeps: F, I and W one unit each, so that four ranks need no
more than two cores. Lightning's trainer fits it with clipping by norm, in which nothing is clipped, and in which single
batches are. Per step: from one end of a batch to the next, the median; beside it the units that the simulator says.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.chain import nap
from benchmarks.fits import fit_module
from benchmarks.ranks import run_ranks
from lightning_pipe import DappleStrategy
from lightning_pipe.cli.schedules import SchedulesOptions, shown
from lightning_pipe.units import format_seconds

RANKS, MICROBATCHES, WIDTH, BATCHES = 4, 8, 4, 24
SKIPPED = 4  # first steps, which are not counted
CLIP_VAL = 1e3
_unit_s = 0.01


@torch.library.custom_op("sleeping::product", mutates_args=())
def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    nap(_unit_s)
    return x @ weight


@torch.library.custom_op("sleeping::product_input", mutates_args=())
def product_input(gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    nap(_unit_s)
    return gradient @ weight.t()


@torch.library.custom_op("sleeping::product_weight", mutates_args=())
def product_weight(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    nap(_unit_s)
    return x.t() @ gradient


@product.register_fake
def _(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight


@product_input.register_fake
def _(gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return gradient @ weight.t()


@product_weight.register_fake
def _(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x.t() @ gradient


def _keep(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
    x, weight = ctx.saved_tensors
    return product_input(gradient, weight), product_weight(gradient, x)


product.register_autograd(_backward, setup_context=_keep)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH) + 0.01 * torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(product(x, self.weight))


class Sleeping(pl.LightningModule):
    """One block per stage."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.ones(WIDTH))  # so that the first block has an input gradient too
        self.blocks = nn.Sequential(*(Block() for _ in range(blocks)))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.blocks(x * self.scale), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Ends(pl.Callback):
    """When each batch ended on this rank, and what its loss was."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.times.append(time.monotonic())
        self.losses.append(float(outputs["loss"]))


@dataclass(frozen=True)
class Fitted:
    """What one rank saw: when batches ended, their losses, and how many steps were taken back."""

    times: list[float]
    losses: list[float]
    taken_back: int


def batches(wild: frozenset[int]) -> list[list[torch.Tensor]]:
    """Return batches of which some have targets so far off that their gradients are clipped."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for k in range(BATCHES):
        x = torch.randn(MICROBATCHES, WIDTH, generator=generator)
        found.append([x, x.flip(1) * (1e5 if k in wild else 1.0)])
    return found


def fit(schedule: str, chunks: int, post_validation: bool, wild: frozenset[int], unit_s: float) -> Fitted:
    """Fit on this rank, while the others do the same."""
    global _unit_s
    _unit_s = unit_s
    ends = Ends()
    strategy = DappleStrategy(
        layout="-".join("1" * RANKS),
        schedule=schedule,
        stages_per_device=chunks,
        microbatches=MICROBATCHES,
        costs="counted",
        planner="uniform",
        check=False,
        post_validation=post_validation,
    )
    module = Sleeping(RANKS * chunks)
    fit_module(module, DataLoader(batches(wild), batch_size=None), strategy, callback=ends, gradient_clip_val=CLIP_VAL)
    return Fitted(ends.times, ends.losses, strategy.steps_taken_back)


def seconds(found: list[Fitted]) -> float:
    """Return the median seconds of a step, as the last rank saw it."""
    times = found[-1].times[SKIPPED:-1]
    return statistics.median(b - a for a, b in itertools.pairwise(times))


CASES = (("1f1b", 1), ("zb_h1", 1), ("zb_h2", 1), ("zb_v", 2))
WILD = frozenset({8, 13, 18})


def main() -> int:
    """Print the table; return 1 if the two ways differ in what they train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--unit", type=float, default=0.01, help="seconds of F, I and W each")
    unit_s = parser.parse_args().unit
    table = Table(box=box.SIMPLE, title=f"{RANKS} ranks, {MICROBATCHES} micro-batches", title_justify="left")
    for name in ("schedule", "units waiting", "ahead", "step waiting", "ahead", "ratio", "simulated"):
        table.add_column(name, justify="left" if name == "schedule" else "right")
    for name in ("3 clipped: waiting", "ahead", "ratio", "taken back"):
        table.add_column(name, justify="right")
    same = True
    for schedule, chunks in CASES:
        alone = shown(schedule, SchedulesOptions(devices=RANKS, microbatches=MICROBATCHES, stages_per_device=chunks))
        flush, ahead = alone.timeline.makespan, alone.ahead_s
        unit = unit_s * (0.5 if chunks == 2 else 1.0)  # a device's work stays the same
        runs = {
            (later, wild): run_ranks(RANKS, fit, schedule, chunks, later, wild, unit)
            for wild in (frozenset(), WILD)
            for later in (False, True)
        }
        same &= all(runs[True, wild][0].losses == runs[False, wild][0].losses for wild in (frozenset(), WILD))
        calm = [seconds(runs[later, frozenset()]) for later in (False, True)]
        whole = [found[-1].times[-1] - found[-1].times[SKIPPED] for found in (runs[False, WILD], runs[True, WILD])]
        table.add_row(
            schedule,
            f"{flush:g}",
            f"{ahead:g}",
            *map(format_seconds, calm),
            f"{calm[1] / calm[0]:.3f}",
            f"{ahead / flush:.3f}",
            *map(format_seconds, whole),
            f"{whole[1] / whole[0]:.3f}",
            str(runs[True, WILD][0].taken_back),
        )
    Console(width=140).print(table)
    print("losses are the same, bit for bit" if same else "LOSSES DIFFER")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
