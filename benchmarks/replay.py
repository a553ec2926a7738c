"""Cost of replay, where every stage plays the Python of the step: against the plain module.

    python -m benchmarks.replay                         # the GPT of examples/, 4 micro-batches, 2 and 4 stages
    python -m benchmarks.replay --width 128 --rounds 60

All stages of a pipeline live on one rank, in this process: nothing is waited for, and messages are handed over. What is
compared is the work of all stages (F and B of every micro-batch) with forward and backward of the whole module on the
same micro-batches, which logs nothing. Beside it stand the stages of the joint route (its work, I and W together), cut
into as many parts.

Seconds are those of the processor, as others may use the machine too. The contestants run in turn, and every ratio is
that of their medians.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import platform
import runpy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks.prediction import noise
from lightning_pipe.capture import Request, Route, capture_step, flatten
from lightning_pipe.capture.recording.unit_trace import trace_units
from lightning_pipe.capture.replayed.replay import Replay
from lightning_pipe.core.graph import Graph
from lightning_pipe.core.plan import microbatch_sizes
from lightning_pipe.core.program import Layout
from lightning_pipe.runtime.executor import Executor, run_together
from lightning_pipe.runtime.job import BatchInput
from lightning_pipe.runtime.stage import State
from lightning_pipe.runtime.transport.local import Hub
from lightning_pipe.schedule import order_of
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.verification.verify import verify
from lightning_pipe.units import format_seconds

CPU = torch.device("cpu")
EXAMPLE = Path(__file__).parents[1] / "examples" / "01_gpt_on_real_text.py"
BATCH, MICROBATCHES, STAGES = 32, 4, (2, 4)
WARM_UP = 3  # rounds that are not counted
ASKED = 1.25

Contestant = Callable[[], float]  # one batch; returns the seconds that count


def make_gpt(**sizes: int) -> pl.LightningModule:
    """Return the module of the example."""
    torch.manual_seed(0)
    gpt = runpy.run_path(str(EXAMPLE))["GPT"](**sizes)
    assert isinstance(gpt, pl.LightningModule)
    return gpt.train()


def plain(module: pl.LightningModule, batch: torch.Tensor, sizes: Sequence[int]) -> Contestant:
    """Return a run of the whole module on every micro-batch."""
    module = copy.deepcopy(module)
    vars(module)["log"] = lambda *_, **__: None
    parts = batch.split(list(sizes))

    def run() -> float:
        module.zero_grad()
        started = time.process_time()
        for part in parts:
            loss = module.training_step([part], 0)
            assert isinstance(loss, torch.Tensor)
            (loss * (len(part) / len(batch))).backward()
        return time.process_time() - started

    return run


class Stages:
    """All stages of a cut, on one rank."""

    def __init__(self, capture: Route, request: Request, cuts: tuple[int, ...]) -> None:
        self._capture, self._request = capture, request
        self._split = capture.split(cuts)
        module = request.module
        self._layout = Layout(((0,),) * (len(cuts) + 1))
        state = State(dict(module.named_parameters(remove_duplicate=False)), dict(module.named_buffers()), CPU)
        self._executor = Executor(
            self._split, self._layout, state=state, transport=Hub().endpoint(0), loss=capture.record.loss
        )
        self._seconds = 0.0
        for stage in self._executor.stages.values():
            vars(stage)["compute"] = self._timed(stage.compute)

    def contestant(self, batch: torch.Tensor, sizes: tuple[int, ...]) -> Contestant:
        """Return a run of all stages on every micro-batch."""
        order = order_of("gpipe", layout=self._layout, microbatches=len(sizes))
        program = verify(lower(order, layout=self._layout, sizes=sizes, traffic=self._split.traffic))
        offsets = tuple(sum(sizes[:m]) for m in range(len(sizes)))
        job = BatchInput((batch,), (True,), offsets)

        def run() -> float:
            self._request.module.zero_grad()
            self._seconds = 0.0
            self._capture.begin(self._request.arguments, self._request.structure.template)
            run_together([self._executor], program, [job])
            return self._seconds

        return run

    def _timed(self, compute: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any) -> None:
            started = time.process_time()
            compute(*args)
            self._seconds += time.process_time() - started

        return run


def cuts_of(graph: Graph, depth: int, stages: int) -> tuple[int, ...]:
    """Return the positions at which blocks begin that give every stage as many of them."""
    starts = [f"blocks.{depth * s // stages}" for s in range(1, stages)]
    modules = [f"{node.module}." for node in graph.nodes]
    return tuple(next(k for k, path in enumerate(modules) if path.startswith(f"{start}.")) for start in starts)


def compare(sizes: Mapping[str, int], stages: int, rounds: int) -> tuple[dict[str, float], int]:
    """Return the median seconds of a batch by contestant, and the number of units."""
    module = make_gpt(**sizes)
    batch = torch.randint(256, (BATCH, module.hparams["context"] + 1), dtype=torch.uint8)
    microbatches = microbatch_sizes(BATCH, MICROBATCHES)
    request = Request(module, "training_step", flatten([batch])[1], samples=microbatches[0])
    trace = trace_units(request, [batch], parts=stages)
    contestants = {"eager": plain(module, batch, microbatches)}
    for name, capture in (("replay", Replay(request, trace)), ("joint", capture_step(request))):
        cuts = cuts_of(capture.graph, sizes["depth"], stages)
        contestants[name] = Stages(capture, request, cuts).contestant(batch, microbatches)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    gc.disable()
    for _ in range(WARM_UP + rounds):
        for name, run in contestants.items():
            seconds[name].append(run())
        gc.collect()
    gc.enable()
    return {name: statistics.median(found[WARM_UP:]) for name, found in seconds.items()}, len(trace.units)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    torch.set_num_threads(1)
    quiet = noise()
    sizes = {"width": args.width, "depth": args.depth}
    print(f"{platform.machine()}, {os.cpu_count()} cores, one thread; Python {platform.python_version()}, ", end="")
    print(f"torch {torch.__version__}; GPT of {sizes}, {BATCH} samples in {MICROBATCHES} micro-batches")
    print(f"{'stages':>6} {'units':>5} {'eager':>10} {'replay':>10} {'joint':>10}   replay/eager   joint/eager")
    for stages in STAGES:
        found, units = compare(sizes, stages, args.rounds)
        times = " ".join(f"{format_seconds(found[name]):>10}" for name in ("eager", "replay", "joint"))
        replayed, joint = found["replay"] / found["eager"], found["joint"] / found["eager"]
        print(f"{stages:6} {units:5} {times}   {replayed:12.2f} {joint:13.2f}   (asked of replay: {ASKED})")
    print(f"noise of this machine (spread of a matrix product's times): {quiet:.1%} before, {noise():.1%} after")


if __name__ == "__main__":
    main()
