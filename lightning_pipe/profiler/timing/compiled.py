"""Compiled stage functions: what is left of the time of operations, measured on windows that run compiled (`windows`).

What a library computes (products, convolutions, attention) takes as long as by itself; all else a compiler fuses:

    share of a phase in a window = median((seconds of the compiled function - seconds of what a library computes)
                                          / seconds of all its other operations)

An operation of the second kind takes the share of the nearest window of its own time, and no glue. Windows are compiled
for one number of samples, and are shared by the ranks that measure.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import torch

from lightning_pipe.capture import Capture
from lightning_pipe.capture.stages.compiled_stages import CompiledStages, HalfKind
from lightning_pipe.core.graph import Graph, Operation
from lightning_pipe.profiler.cache import Timing, Timings, digest
from lightning_pipe.profiler.timing.op_sequence import Course
from lightning_pipe.profiler.timing.timed_run import Tools
from lightning_pipe.profiler.timing.windows import WindowRun, Windows, choose_windows

_LIBRARY = ("attention", "lstm", "gru", "rnn", "fft", "sort", "topk", "linalg")  # besides what has FLOPs counted
_LONGEST_S = 4.0  # of a window: what takes longer is planned as it is uncompiled
_MOST = 2.0  # a share: what takes longer compiled is left uncompiled by whoever notices


@dataclass(frozen=True)
class Fusion:
    """Shares of the time of operations that are left when they are compiled.

    Attributes:
        windows: first position and end of each window.
        forward, backward: share in each.
    """

    windows: Sequence[tuple[int, int]]
    forward: Sequence[float]
    backward: Sequence[float]

    def of(self, operation: Operation) -> float:
        """Return the share for an operation; repeated ones run in both phases."""
        middles = [(begin + end) / 2 for begin, end in self.windows]
        near = min(range(len(middles)), key=lambda k: abs(middles[k] - operation.at))
        if operation.phase == "repeated":
            return (self.forward[near] + self.backward[near]) / 2
        return self.forward[near] if operation.phase == "forward" else self.backward[near]


def is_fused(operation: Operation) -> bool:
    """Return whether a compiler makes an operation part of a kernel of its own."""
    return not operation.flops and not any(word in operation.op for word in _LIBRARY)


def fusion_names(graph: Graph, samples: int, window: int) -> tuple[str, str]:
    """Return the names under which the shares of a window are kept: forward, backward."""
    which = f"in window {window} of {graph.fingerprint} {samples}"
    return f"compiled forward {which}", f"compiled backward {which}"


def known_fusion(graph: Graph, samples: int, timings: Timings) -> Fusion | None:
    """Return the shares of a graph, as far as they were measured; None if none was."""
    found: list[tuple[tuple[int, int], float, float]] = []
    for k, window in enumerate(choose_windows(graph)):
        forward, backward = (timings.get(digest(name)) for name in fusion_names(graph, samples, k))
        if forward is not None and backward is not None:
            found.append((window, forward.seconds, backward.seconds))
    return Fusion(*zip(*found, strict=True)) if found else None


def measure_fusion(
    capture: Capture, windows: Sequence[int], course: Course, samples: int, *, device: torch.device, tools: Tools
) -> dict[str, Timing]:
    """Return the shares of some windows, by name; none of those that cannot be compiled, or run.

    Args:
        capture: the step.
        windows: which, by number.
        course: all calls.
        samples: for how many windows are compiled.
        device: where they run.
        tools: maker, clock, memory.
    """
    every = Windows(capture)
    stages = CompiledStages(capture.split(every.bounds), device, trials=False)
    found = {}
    for window in windows:
        done = [stages.compile(every.stage(window), kind, samples) for kind in get_args(HalfKind)]
        runs = every.run(stages.split.stages, window, course, samples, tools, longest_s=_LONGEST_S) if any(done) else []
        for name, backward in zip(fusion_names(capture.graph, samples, window), (False, True), strict=True):
            if runs:
                ran = every.backward(window) if backward else every.forward(window)
                found[name] = Timing(_share(capture.graph, runs, ran, backward=backward), 0.0)
    return found


def _share(graph: Graph, runs: Sequence[WindowRun], ran: Sequence[int], *, backward: bool) -> float:
    """Return the share of the time of those operations that a compiler fuses which their function takes."""
    shares = []
    for run in runs:
        own = [(graph.operations[o], run.own_s.get(o, 0.0)) for o in ran]
        fused_s = sum(seconds for operation, seconds in own if is_fused(operation))
        left_s = (run.backward_s if backward else run.forward_s) - (sum(seconds for _, seconds in own) - fused_s)
        shares.append(left_s / fused_s if fused_s else 1.0)
    return min(max(statistics.median(shares), 0.0), _MOST)
