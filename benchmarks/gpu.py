"""Fits on one GPU beside plain Lightning: by one process, and by two that share the GPU through gloo.

    python -m benchmarks.gpu                                  # a GPT of 12 blocks of width 1024 in bf16-mixed
    python -m benchmarks.gpu --width 256 --precision 32-true --json figures.json

Two processes take turns on one GPU, so no step here is faster than a single process's. The figures show what a
pipeline costs on CUDA, how far its predictions hold, and that losses are the same. Every contestant has processes of
its own; its row is printed as soon as they have ended.

step        from the end of a batch to the end of the next, with the GPU waited for: the median after the warm-up
peak        the most that torch has allocated in these steps, on the rank with the larger peak
reserved    the same with what torch has set aside, the memory of CUDA graphs among it
predicted   the plan's step or peak, divided by the measured one. One rank predicts its step from costs that the same
            fit has measured; a plan does not know that two ranks share a GPU
losses      their largest relative difference to plain Lightning's; DDP's sampler shuffles, so its are not compared
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import resource
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.fits import SharedGpu, fit_module
from benchmarks.models import GPT
from benchmarks.ranks import DEADLINE_S, run_ranks
from lightning_pipe import DappleStrategy

RECORDED = 3
PLAIN, DDP = "Lightning, one process", "Lightning DDP"
WHOLE, HALF = "1-1, 4 micro-batches", "1-1, 4, half of the memory"
NAN = float("nan")


@dataclass(frozen=True)
class Workload:
    """A GPT, its batches, and where it is trained.

    Attributes:
        warm_up: steps before the first that counts; more than are recorded.
        steps: steps that count.
    """

    width: int = 1024
    depth: int = 12
    batch: int = 16
    precision: str = "bf16-mixed"
    device: str = "cuda"
    vocabulary: int = 8192
    length: int = 512
    warm_up: int = 8
    steps: int = 12

    def __str__(self) -> str:
        """Return the sizes in words."""
        return f"GPT {self.depth} x {self.width}, batch {self.batch} x {self.length}, {self.precision}"

    def module(self) -> GPT:
        """Return the module with seeded parameters."""
        torch.manual_seed(0)
        return GPT(vocabulary=self.vocabulary, context=self.length, width=self.width, depth=self.depth)

    def text(self, *, ranks: int = 1) -> DataLoader[Any]:
        """Return seeded random batches, split over ranks that load a share each."""
        size = ((self.warm_up + self.steps) * self.batch, self.length + 1)
        tokens = torch.randint(self.vocabulary, size, generator=torch.Generator())
        return DataLoader(TensorDataset(tokens), batch_size=self.batch // ranks)

    def accelerator(self) -> SharedGpu | str:
        """Return the device as Lightning's trainer takes it."""
        return SharedGpu() if self.device == "cuda" else self.device


@dataclass(frozen=True)
class Contestant:
    """A way to train: its ranks, and the strategy's options (None for Lightning's own)."""

    ranks: int
    options: Mapping[str, Any] | None = None

    def run(self, workload: Workload, *, deadline_s: float = DEADLINE_S) -> Figure:
        """Return the figures of the rank with the larger peak, and the mean losses.

        Raises:
            RuntimeError: if a rank failed or took too long.
        """
        ranks: list[Figure] = run_ranks(self.ranks, partial(train, workload, self), deadline_s=deadline_s)
        losses = [statistics.fmean(each) for each in zip(*(figure.losses for figure in ranks), strict=True)]
        return replace(max(ranks, key=lambda figure: figure.peak_bytes), losses=losses)


PREDICTED = {"report": str(Path(tempfile.gettempdir()) / "lightning_pipe_gpu.html")}  # lets one rank measure costs
CONTESTANTS = {
    PLAIN: Contestant(1),
    "one rank": Contestant(1, {"microbatches": 1, **PREDICTED}),
    "one rank, 4 micro-batches": Contestant(1, {"microbatches": 4, **PREDICTED}),
    "one rank, compiled": Contestant(1, {"microbatches": 1, "compile": True, **PREDICTED}),
    "one rank, CUDA graphs": Contestant(1, {"microbatches": 1, "cuda_graphs": True, **PREDICTED}),
    "one rank, both": Contestant(1, {"microbatches": 1, "compile": True, "cuda_graphs": True, **PREDICTED}),
    "one rank, replay": Contestant(1, {"microbatches": 1, "capture": "replay", **PREDICTED}),
    DDP: Contestant(2),
    "2 replicas": Contestant(2, {"layout": "2", "microbatches": 1}),
    WHOLE: Contestant(2, {"layout": "1-1", "microbatches": 4}),
    "1-1, 4, compiled": Contestant(2, {"layout": "1-1", "microbatches": 4, "compile": True}),
    "1-1, 4, CUDA graphs": Contestant(2, {"layout": "1-1", "microbatches": 4, "cuda_graphs": True}),
    HALF: Contestant(2, {"layout": "1-1", "microbatches": 4}),
}


@dataclass(frozen=True)
class Figure:
    """What a rank has measured: seconds and bytes; predictions are NaN where there is none."""

    step_s: float
    peak_bytes: int
    reserved_bytes: int
    predicted_s: float
    predicted_bytes: float
    losses: list[float]
    first_step_s: float
    policies: str


class Meter(pl.Callback):
    """Keep when every batch ended, its loss, and the peak of the steps that count."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self.begin = time.perf_counter()
        self.ends: list[float] = []
        self.losses: list[float] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Let the log say what runs uncompiled, or unrecorded."""
        logging.getLogger("lightning_pipe.capture.stages").setLevel(logging.WARNING)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        on_cuda = self._workload.device == "cuda"
        if on_cuda:
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())
        self.losses.append(float(outputs["loss"]))
        if on_cuda and len(self.ends) == self._workload.warm_up:
            torch.cuda.reset_peak_memory_stats()

    def step_s(self) -> float:
        return statistics.median(b - a for a, b in itertools.pairwise(self.ends[self._workload.warm_up - 1 :]))


def train(workload: Workload, contestant: Contestant) -> Figure:
    """Fit on this rank."""
    strategy: Any = "auto" if contestant.ranks == 1 else DDPStrategy(process_group_backend="gloo")
    if contestant.options is not None:
        common = {"timeline_steps": RECORDED, "cache": "off", "replan": False}
        strategy = DappleStrategy(**{**common, **contestant.options})
    module, meter = workload.module(), Meter(workload)
    fit_module(
        module,
        workload.text(ranks=contestant.ranks if contestant.options is None else 1),
        strategy,
        callback=meter,
        accelerator=workload.accelerator(),
        precision=workload.precision,
    )
    predicted_s, predicted_bytes, policies = NAN, NAN, ""
    if contestant.options is not None:
        predicted_bytes = float(strategy.foreseen[torch.distributed.get_rank()].peak_bytes)
        policies = ", ".join(
            f"stage {number} recomputes {len(stage.recompute)}, offloads {len(stage.offload)}"
            for number, stage in enumerate(strategy.plan.stages)
            if stage.recompute or stage.offload
        )
        if contestant.ranks == 1 and strategy.comparison is not None:
            predicted_s = strategy.comparison.step.predicted
    return Figure(
        meter.step_s(),
        *peak_and_reserved_bytes(workload.device),
        predicted_s,
        predicted_bytes,
        meter.losses,
        meter.ends[0] - meter.begin,
        policies,
    )


def peak_and_reserved_bytes(device: str) -> tuple[int, int]:
    """Return this process's peaks: of tensors on the GPU, and of torch's memory there; on a CPU of all its memory."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    resident_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return resident_bytes, resident_bytes


def limited(name: str, contestant: Contestant, figures: Mapping[str, Figure]) -> Contestant:
    """Return the contestant, held to half of the peak of the pipeline without a limit where its name asks for that."""
    if name != HALF:
        return contestant
    if WHOLE not in figures:
        raise RuntimeError(f"{HALF!r} needs the peak of {WHOLE!r}, which has not run")
    limit = f"{figures[WHOLE].peak_bytes // 2}B"
    return replace(contestant, options={**(contestant.options or {}), "memory_limit": limit})


def row(name: str, figures: Mapping[str, Figure]) -> str:
    """Return a contestant's line of the table, with its ratios to plain Lightning where that has run."""
    figure, plain = figures[name], figures.get(PLAIN)
    step, peak = (figure.step_s / plain.step_s, figure.peak_bytes / plain.peak_bytes) if plain else (NAN, NAN)
    differences = [abs(a / b - 1) for a, b in zip(figure.losses, plain.losses, strict=True)] if plain else []
    differs = NAN if name == DDP else max(differences, default=NAN)
    columns = [
        f"{name:26}",
        f"step {figure.step_s * 1e3:6.1f} ms, {_ratio(step)} of plain, "
        f"predicted {_ratio(figure.predicted_s / figure.step_s)}",
        f"peak {figure.peak_bytes >> 20:6} MiB, {_ratio(peak)} of plain, "
        f"predicted {_ratio(figure.predicted_bytes / figure.peak_bytes)}",
        f"reserved {figure.reserved_bytes >> 20:6} MiB",
        f"losses differ {'      -' if math.isnan(differs) else f'{differs:.1e}'}",
        f"first step after {figure.first_step_s:3.0f} s",
        figure.policies,
    ]
    return " | ".join(filter(None, columns))


def _ratio(value: float) -> str:
    return "   -" if math.isnan(value) else f"{value:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Workload):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    parser.add_argument("--only", nargs="*", default=[*CONTESTANTS], choices=[*CONTESTANTS])
    parser.add_argument("--json", type=Path)
    options, figures = parser.parse_args(), dict[str, Figure]()
    workload = Workload(**{field.name: getattr(options, field.name) for field in fields(Workload)})
    print(workload, flush=True)
    for name in options.only:
        try:
            contestant = limited(name, CONTESTANTS[name], figures)
            figures[name] = contestant.run(workload)
        except RuntimeError as error:
            print(f"{name}: {str(error)[-1500:]}", flush=True)
            continue
        print(row(name, figures), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps({name: asdict(figure) for name, figure in figures.items()}))


if __name__ == "__main__":
    main()
