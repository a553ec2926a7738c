"""Fits on one GPU beside plain Lightning: by one process, and by two that share the GPU through gloo.

    python -m benchmarks.gpu                                  # a GPT of 12 blocks of width 1024 in bf16-mixed
    python -m benchmarks.gpu --width 256 --precision 32-true --json figures.json

Two processes take turns on one GPU, so no step here is faster than that of one: it shows what a pipeline costs on CUDA,
how far its predictions hold, and that losses are the same. Every contestant has processes of its own. A step lasts from
the end of a batch to the end of the next, with the GPU waited for; figures are medians over the steps after the first.
DDP's sampler shuffles, so its losses are not compared. Peak is the most that torch has allocated on the larger rank in
these steps; "reserved" adds what it has set aside, the memory of CUDA graphs among it. "predicted" is the step and the
peak that the plan foresees, made of costs that were measured in the same fit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.fits import SharedGpu, fit_module
from benchmarks.models import GPT
from benchmarks.ranks import run_ranks
from lightning_pipe import DappleStrategy

WARM_UP, RECORDED, STEPS = 8, 3, 12
VOCABULARY, LENGTH = 8192, 512
PLAIN = "Lightning, one process"


@dataclass(frozen=True)
class Contestant:
    """A way to train: its ranks, and the strategy's options (None for Lightning's own)."""

    ranks: int
    options: dict[str, Any] | None = None


CONTESTANTS = {
    PLAIN: Contestant(1),
    "one rank": Contestant(1, {"microbatches": 1}),
    "one rank, 4 micro-batches": Contestant(1, {"microbatches": 4}),
    "one rank, compiled": Contestant(1, {"microbatches": 1, "compile": True}),
    "one rank, CUDA graphs": Contestant(1, {"microbatches": 1, "cuda_graphs": True}),
    "one rank, both": Contestant(1, {"microbatches": 1, "compile": True, "cuda_graphs": True}),
    "one rank, replay": Contestant(1, {"microbatches": 1, "capture": "replay"}),
    "Lightning DDP": Contestant(2),
    "2 replicas": Contestant(2, {"layout": "2", "microbatches": 1}),
    "1-1, 4 micro-batches": Contestant(2, {"layout": "1-1", "microbatches": 4}),
    "1-1, 4, compiled": Contestant(2, {"layout": "1-1", "microbatches": 4, "compile": True}),
    "1-1, 4, CUDA graphs": Contestant(2, {"layout": "1-1", "microbatches": 4, "cuda_graphs": True}),
    "1-1, 4, half of the memory": Contestant(2, {"layout": "1-1", "microbatches": 4, "memory_limit": None}),
}


@dataclass
class Figure:
    """What a rank has measured: seconds and bytes; predictions are NaN where there is none."""

    step_s: float
    peak_bytes: int
    reserved_bytes: int
    predicted_s: float
    predicted_bytes: float
    losses: list[float]
    first_step_s: float
    policies: str = ""


class Meter(pl.Callback):
    """Keep when every batch ended, its loss, and the peak of the steps that count."""

    def __init__(self) -> None:
        self.begin = time.perf_counter()
        self.ends: list[float] = []
        self.losses: list[float] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Let the log say what runs uncompiled, or unrecorded."""
        logging.getLogger("lightning_pipe.capture.stages").setLevel(logging.WARNING)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        torch.cuda.synchronize()
        self.ends.append(time.perf_counter())
        self.losses.append(float(outputs["loss"]))
        if len(self.ends) == WARM_UP:
            torch.cuda.reset_peak_memory_stats()

    def step_s(self) -> float:
        return statistics.median(b - a for a, b in itertools.pairwise(self.ends[WARM_UP - 1 :]))


def text(samples: int, *, share: int) -> DataLoader[Any]:
    """Return batches of so many samples, of which each of some ranks loads its share."""
    tokens = torch.randint(VOCABULARY, ((WARM_UP + STEPS) * samples, LENGTH + 1), generator=torch.Generator())
    return DataLoader(TensorDataset(tokens), batch_size=samples // share)


def train(options: argparse.Namespace, contestant: Contestant) -> Figure:
    """Fit on this rank."""
    torch.manual_seed(0)
    module = GPT(vocabulary=VOCABULARY, context=LENGTH, width=options.width, depth=options.depth)
    strategy: Any = "auto" if contestant.ranks == 1 else DDPStrategy(process_group_backend="gloo")
    if contestant.options is not None:
        own = {"timeline_steps": RECORDED, "cache": "off", "replan": False, **contestant.options}
        strategy = DappleStrategy(**own)
    meter = Meter()
    fit_module(
        module,
        text(options.batch, share=contestant.ranks if contestant.options is None else 1),
        strategy,
        callback=meter,
        accelerator=SharedGpu(),
        precision=options.precision,
    )
    predicted_s = predicted_bytes = float("nan")
    policies = ""
    if contestant.options is not None:
        rank = torch.distributed.get_rank()
        predicted_bytes = float(strategy.foreseen[rank].peak_bytes)
        policies = ", ".join(f"{len(s.recompute)} recomputed, {len(s.offload)} offloaded" for s in strategy.plan.stages)
        if strategy.comparison is not None:
            predicted_s = strategy.comparison.step.predicted
    return Figure(
        meter.step_s(),
        torch.cuda.max_memory_allocated(),
        torch.cuda.max_memory_reserved(),
        predicted_s,
        predicted_bytes,
        meter.losses,
        meter.ends[0] - meter.begin,
        policies,
    )


def larger(ranks: Sequence[Figure]) -> Figure:
    """Return the figures of the rank with the larger peak, the prediction that rank 0 has told, and mean losses."""
    most = max(ranks, key=lambda figure: figure.peak_bytes)
    losses = [statistics.fmean(each) for each in zip(*(figure.losses for figure in ranks), strict=True)]
    return replace(most, predicted_s=ranks[0].predicted_s, losses=losses)


def table_of(found: dict[str, Figure], title: str) -> Table:
    columns = ("step", "of plain", "predicted", "peak", "of plain", "predicted", "reserved", "loss differs")
    table = Table("", *columns, title=title)
    plain = found.get(PLAIN)
    for name, one in found.items():
        ratio = [one.step_s / plain.step_s, one.peak_bytes / plain.peak_bytes] if plain else [float("nan")] * 2
        is_same_data = plain is not None and CONTESTANTS[name] != CONTESTANTS["Lightning DDP"]
        pairs = zip(one.losses, plain.losses, strict=True) if is_same_data else [(float("nan"), 1.0)]
        table.add_row(
            *(name, f"{one.step_s * 1e3:.1f} ms", f"{ratio[0]:.2f}", f"{one.predicted_s / one.step_s:.2f}"),
            *(f"{one.peak_bytes / 2**20:.0f} MiB", f"{ratio[1]:.2f}", f"{one.predicted_bytes / one.peak_bytes:.2f}"),
            *(f"{one.reserved_bytes / 2**20:.0f} MiB", f"{max(abs(a / b - 1) for a, b in pairs):.1e}"),
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--only", nargs="*", default=[*CONTESTANTS])
    parser.add_argument("--json", type=Path)
    options, console, found = parser.parse_args(), Console(width=150), dict[str, Figure]()
    for name in options.only:
        contestant = CONTESTANTS[name]
        if contestant.options is not None and "memory_limit" in contestant.options:
            whole = found["1-1, 4 micro-batches"].peak_bytes
            own = {**contestant.options, "memory_limit": f"{whole // 2}B"}
            contestant = Contestant(contestant.ranks, own)
        try:
            ranks = run_ranks(contestant.ranks, partial(train, options, contestant))
        except RuntimeError as error:
            console.print(f"{name}: {str(error)[-1500:]}", markup=False)
            continue
        found[name] = larger(ranks)
        console.print(f"{name}: {found[name].step_s * 1e3:.1f} ms, first step after {found[name].first_step_s:.0f} s")
        if options.json is not None:
            options.json.write_text(json.dumps({name: asdict(one) for name, one in found.items()}))
    title = f"GPT {options.depth} x {options.width}, batch {options.batch} x {LENGTH}, {options.precision}"
    console.print(table_of(found, title))


if __name__ == "__main__":
    main()
