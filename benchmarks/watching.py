"""What rows for loggers cost: a step that is recorded and logged, beside its neighbours in the same fit.

    python -m benchmarks.watching            # about a minute on an idle machine

A GPT on two ranks (two stages, 4 micro-batches), whose every `EVERY`-th step is watched and logged to a CSV file. Steps
with and without alternate, so that a busy machine slows both. Prints the medians, and the share of a step that a row
costs with the default of `watch_every`.
"""

from __future__ import annotations

import tempfile
import time
from itertools import pairwise
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from benchmarks.fits import fit_module
from benchmarks.ranks import run_ranks
from lightning_pipe import DappleStrategy
from lightning_pipe.config import DappleConfig
from lightning_pipe.examples.gpt import GPT
from lightning_pipe.units import format_seconds, format_share

EVERY, STEPS, FIRST = 10, 400, 20  # steps from row to row, in all, and those that are not counted
AFFECTED = {
    "the step before is recorded": EVERY - 2,
    "the step is recorded": EVERY - 1,
    "times are sent, a row logged": 0,
}


class Begins(pl.Callback):
    """Note when steps begin, on the wall's clock and on that of this process, which runs while it computes."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.own: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.wall.append(time.perf_counter())
        self.own.append(time.process_time())


def seconds(folder: str) -> tuple[list[float], list[float]]:
    """Fit on this rank; return the seconds of every step by both clocks."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    module, begins = GPT(4, 128, 4, context=64, vocabulary=2048), Begins()
    data = DataLoader(torch.randint(2048, (8 * STEPS, 65)), 8)  # type: ignore[arg-type]
    strategy = DappleStrategy(
        layout="1-1", microbatches=4, costs="counted", watch_every=EVERY, check=False, witness=False
    )
    logger = CSVLogger(folder, version="", flush_logs_every_n_steps=10 * STEPS)
    fit_module(module, data, strategy, callback=begins, logger=logger, log_every_n_steps=10 * STEPS)
    wall, own = ([after - before for before, after in pairwise(times)] for times in (begins.wall, begins.own))
    return wall, own


def show(clock: str, steps: list[float]) -> None:
    """Print medians of steps by their place between two rows."""
    plain = median(s for step, s in enumerate(steps[FIRST:], FIRST) if step % EVERY not in AFFECTED.values())
    extra = 0.0
    print(f"{clock}\n  {'neither':<28} {format_seconds(plain)}")
    for name, phase in AFFECTED.items():
        of_phase = median(steps[FIRST + phase :: EVERY])
        extra += of_phase - plain
        print(f"  {name:<28} {format_seconds(of_phase)}")
    every = DappleConfig.watch_every
    print(f"  A row costs {format_seconds(extra)}: {format_share(extra / every / plain, 2)} with one in {every} steps.")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks(2, seconds, folder)
    show("Seconds of a step", ranks[0][0])
    for rank, (_, own) in enumerate(ranks):
        show(f"Seconds that rank {rank} computes in it", own)


if __name__ == "__main__":
    main()
