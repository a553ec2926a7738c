"""Predictions against measurements: step time and memory of pipelines on two ranks.

    python -m benchmarks.prediction                     # GPT, CNN and encoder-decoder; 3 schedules x 3 micro-batches
    python -m benchmarks.prediction --models cnn --steps 9
    python -m benchmarks.prediction --compile --models written      # with compiled stages, of a Llama written out
    python -m benchmarks.prediction --models simclr     # a head (all forwards first) beside 1F1B by micro-batch

Every case is an ordinary fit on two processes: the strategy profiles the module, probes the link, predicts, trains,
records. Step time is that of the program (from its first load to the end of the last optimizer step), the median over
the recorded steps; beside it stands the time between two batches as the trainer sees it. Figures are medians over
several fits of each case, which lie minutes apart, since machines change their speed. Saved tensors are those that
stages keep for their backward; memory in all is every tensor of the process (allocations seen by torch's profiler in
one step, above the parameters and optimizer state that were there).
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks.fits import fit
from benchmarks.models import ALL, MODELS
from benchmarks.ranks import run_ranks
from lightning_pipe import DappleStrategy

RANKS = 2
SCHEDULES = {"gpipe": {"schedule": "gpipe"}, "1f1b pa": {"warmup": "pa"}, "1f1b pb": {"warmup": "pb"}}
HEADS = {"head": {"schedule": "gpipe"}, "1f1b pa": {"warmup": "pa", "whole_batch": "by_microbatch"}}
MICROBATCHES = (2, 4, 8)
BATCH = 32
WARM_UP = 2  # steps that are not compared: the first, and the one whose memory is measured


@dataclass(frozen=True)
class Row:
    """One case: seconds and bytes, predicted and measured."""

    model: str
    schedule: str
    microbatches: int
    predicted_s: float
    measured_s: float
    between_batches_s: float
    memory: tuple[tuple[float, float, float, float], ...]  # per rank: saved predicted, measured; total likewise

    @property
    def step_error(self) -> float:
        return self.predicted_s / self.measured_s - 1


class Clock(pl.Callback):
    """Keep when every batch ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append(time.perf_counter())


def cases(model: str, runs: int, steps: int, compile_: bool) -> list[Row]:
    """Fit all cases of a model several times, in turn; on all ranks, rank 0 returns the rows."""
    grid = [(schedule, m) for schedule in _ways(model) for m in MICROBATCHES]
    found = [[case(model, schedule, m, steps, compile_) for schedule, m in grid] for _ in range(runs)]
    return [median_row([row for row in rows if row is not None]) for rows in zip(*found, strict=True) if all(rows)]


def _ways(model: str) -> dict[str, dict[str, str]]:
    return HEADS if model == "simclr" else SCHEDULES


def median_row(rows: list[Row]) -> Row:
    """Return the medians of all figures of one case."""
    figures = {
        name: statistics.median(getattr(row, name) for row in rows)
        for name in ("predicted_s", "measured_s", "between_batches_s")
    }
    memory = tuple(
        tuple(statistics.median(row.memory[rank][k] for row in rows) for k in range(4)) for rank in range(RANKS)
    )
    return replace(rows[0], **figures, memory=memory)


def case(model: str, schedule: str, microbatches: int, steps: int, compile_: bool) -> Row | None:
    """Fit one case; None on other ranks than the first."""
    options = {**_ways(model)[schedule], "layout": "1-1", "microbatches": microbatches, "compile": compile_}
    strategy = DappleStrategy(**options, timeline_steps=WARM_UP + steps, cache="off", measure_memory=True, replan=False)
    clock = Clock()
    fit(model, strategy, batch_size=BATCH, steps=WARM_UP + steps, callback=clock)
    found = strategy.comparison
    if found is None:
        return None
    ends = clock.ends[WARM_UP:]
    return Row(
        model=model,
        schedule=schedule,
        microbatches=microbatches,
        predicted_s=found.step.predicted,
        measured_s=found.step.measured,
        between_batches_s=statistics.median(b - a for a, b in itertools.pairwise(ends)),
        memory=tuple((m.saved.predicted, m.saved.measured, m.total.predicted, m.total.measured) for m in found.memory),
    )


def noise() -> float:
    """Return how unsteady this machine is: spread (quartiles over median) of one matrix product's times."""
    a = torch.randn(384, 384)
    seconds = []
    for _ in range(200):
        started = time.perf_counter()
        a @ a
        seconds.append(time.perf_counter() - started)
    low, middle, high = statistics.quantiles(seconds, n=4)
    return (high - low) / middle


def lines(rows: Iterable[Row]) -> Iterator[str]:
    yield (
        f"{'model':8} {'schedule':8} {'m':>2} {'predicted':>10} {'measured':>10} {'error':>7} {'batch':>10} "
        f"{'saved, per rank: predicted/measured':>38} {'all tensors':>24}"
    )
    for row in rows:
        saved = "  ".join(f"{p / 2**20:.1f}/{m / 2**20:.1f} MiB" for p, m, _, _ in row.memory)
        total = "  ".join(f"{p / 2**20:.0f}/{m / 2**20:.0f} MiB" for _, _, p, m in row.memory)
        yield (
            f"{row.model:8} {row.schedule:8} {row.microbatches:2} {1e3 * row.predicted_s:7.1f} ms "
            f"{1e3 * row.measured_s:7.1f} ms {row.step_error:+7.1%} {1e3 * row.between_batches_s:7.1f} ms {saved:>38} "
            f"{total:>24}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(ALL))
    parser.add_argument("--runs", type=int, default=5, help="fits per case, each with a profile of its own")
    parser.add_argument("--steps", type=int, default=3, help="recorded steps per fit")
    parser.add_argument("--compile", action="store_true", help="compile the stages")
    args = parser.parse_args()
    torch.set_num_threads(1)
    quiet = noise()
    rows = [
        row
        for model in args.models
        for row in run_ranks(RANKS, cases, model, args.runs, args.steps, args.compile, deadline_s=1800)[0]
    ]
    print("\n".join(lines(rows)))
    errors = [abs(row.step_error) for row in rows]
    saved = [abs(p / m - 1) for row in rows for p, m, _, _ in row.memory]
    total = [abs(p / m - 1) for row in rows for _, _, p, m in row.memory]
    print(f"\nnoise of this machine (spread of a matrix product's times): {quiet:.1%} before, {noise():.1%} after")
    print(f"step time:     median error {statistics.median(errors):.1%}, worst {max(errors):.1%} (asked: 10 %, 25 %)")
    print(f"saved tensors: median error {statistics.median(saved):.1%}, worst {max(saved):.1%} (asked: 3 %)")
    print(f"all tensors:   median error {statistics.median(total):.1%}, worst {max(total):.1%} (asked: 10 %)")


if __name__ == "__main__":
    main()
