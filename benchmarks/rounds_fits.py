"""Training steps of whole fits with and without a flush, beside the work of the busiest rank.

    python -m benchmarks.rounds_fits
    python -m benchmarks.rounds_fits --versions 2bw --habits plain hooks

`benchmarks.rounds` runs rounds without Lightning. Here `Trainer.fit` trains a module of one block per rank. A block
sleeps for F and twice as long for B, so ranks need no cores of their own. Every rank waits for what Lightning, loaders,
hooks and logs make it wait for. A step lasts from one `on_train_batch_start` to the next.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.chain import nap
from benchmarks.fits import fit_module
from benchmarks.ranks import run_ranks
from lightning_pipe import DappleStrategy
from lightning_pipe.core.plan import Plan, StagePlan
from lightning_pipe.core.serial import save_yaml

VERSIONS = ("sync", "pipedream", "2bw")
HABITS = ("plain", "reads batch_idx", "logs", "hooks", "clips")
SAMPLES, WIDTH = 2, 32  # of a micro-batch, of a block
_EDGES = 5  # steps at either end that fill or empty the pipeline, and those that are recorded


@torch.library.custom_op("lightning_pipe_benchmarks::sleep", mutates_args=())
def _sleep(x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
    nap(forward_s)
    return x.clone()


@_sleep.register_fake
def _(x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
    return torch.empty_like(x)


def _note(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, _, ctx.backward_s = inputs


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return _sleep(gradient, ctx.backward_s, 0.0), None, None


_sleep.register_autograd(_backward, setup_context=_note)


class Block(nn.Module):
    """A layer that takes a unit of time for F, and two for B."""

    def __init__(self, unit: float) -> None:
        super().__init__()
        self.layer, self.unit = nn.Linear(WIDTH, WIDTH), unit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the layer makes, later."""
        made: torch.Tensor = torch.ops.lightning_pipe_benchmarks.sleep(self.layer(x), self.unit, 2 * self.unit)
        return made


class Sleepers(pl.LightningModule):
    """A chain of blocks, with a habit that training steps have."""

    def __init__(self, ranks: int, unit: float, habit: str) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(unit) for _ in range(ranks)))
        self.habit, self.scale = habit, 1.0

    def training_step(self, batch: tuple[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return a loss."""
        loss = self.blocks(batch[0]).square().mean()
        if self.habit == "reads batch_idx":
            loss = loss * (1.0 + 0.001 * batch_idx)
        if self.habit == "logs":
            self.log("loss", loss, on_step=True, prog_bar=True)
        return loss * self.scale if self.habit == "hooks" else loss

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Leave a number that the step reads."""
        if self.habit == "hooks":
            self.scale = 1.0 + float(batch[0][0, 0]) * 1e-3
        return batch

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Train with SGD."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class _Clock(pl.Callback):
    def __init__(self) -> None:
        self.begins: list[float] = []

    def on_train_batch_start(self, *arguments: Any) -> None:
        self.begins.append(time.perf_counter())


def measure(versions: str, habit: str, ranks: int, microbatches: int, unit: float, steps: int) -> list[float]:
    """Return the seconds of training steps on this rank, without those at the ends of the epoch."""
    torch.manual_seed(0)
    data = DataLoader(TensorDataset(torch.randn(steps * microbatches * SAMPLES, WIDTH)), SAMPLES * microbatches)
    stages = tuple(StagePlan(f"blocks.{rank}" if rank else "", (rank,)) for rank in range(ranks))
    clock, clips = _Clock(), {"gradient_clip_val": 1.0} if habit == "clips" else {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.yaml"
        save_yaml(Plan(stages, microbatches), path)
        strategy = DappleStrategy(plan=str(path), versions=versions, cache="off", costs="counted", check=False)
        fit_module(Sleepers(ranks, unit, habit), data, strategy, callback=clock, **clips)
    steady = clock.begins[_EDGES:-_EDGES]
    return [end - begin for begin, end in itertools.pairwise(steady)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", nargs="+", default=VERSIONS)
    parser.add_argument("--habits", nargs="+", default=HABITS, choices=HABITS)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--unit", type=float, default=0.020, help="seconds of F; B takes twice as long")
    options = parser.parse_args()
    print(f"load of the machine: {' '.join(f'{load:.1f}' for load in os.getloadavg())}", flush=True)
    work = 3 * options.microbatches * options.unit
    table = Table("versions", "step", "units of F", "of the work", "spread", title="A training step of a fit")
    for habit in options.habits:
        for versions in options.versions:
            arguments = (versions, habit, options.ranks, options.microbatches, options.unit, options.steps)
            ranks = run_ranks(options.ranks, measure, *arguments, deadline_s=600)
            median_s = max(map(statistics.median, ranks))
            every = sorted(seconds for rank in ranks for seconds in rank)
            spread = [every[len(every) // 10] / options.unit, every[-1 - len(every) // 10] / options.unit]
            row = (f"{median_s / options.unit:.2f}", f"{median_s / work:.3f}", f"{spread[0]:.1f} to {spread[1]:.1f}")
            print(versions, habit, *row, flush=True)
            table.add_row(versions, habit, *row)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
