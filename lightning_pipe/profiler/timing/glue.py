"""Overhead of a stage function beyond its operations, measured on windows of the graph that run both ways.

A window is a range of positions, made a stage by `Capture.split`. Its F and I + W are run as the runtime runs them, and
its operations one by one (`walk`), in turn:

    glue of a phase = median(seconds of the function - seconds of its operations) / number of its operations

with seconds and operations summed over the windows. On the CPU this is Python between the operations and what their
longer company does to caches and memory, less what setting marks costs; it may be slightly negative. On CUDA it is also
how long the device waits for the program.

Windows lie spread over the graph. One that needs more memory than the limit, or takes so long that glue does not count,
is left out; without any, glue counts as nothing.
"""

from __future__ import annotations

import math
import statistics
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from lightning_pipe.capture import Capture
from lightning_pipe.capture.steps.stage_program import Half, RandomKey, StageProgram
from lightning_pipe.core.graph import Graph, Phase
from lightning_pipe.cost.stage import Cutter, StageWork
from lightning_pipe.profiler.cache import Timing, Timings, digest
from lightning_pipe.profiler.timing.arguments import bytes_of
from lightning_pipe.profiler.timing.op_sequence import Course
from lightning_pipe.profiler.timing.timed_run import Tools, Walk

_WINDOWS = 3
_OPERATIONS = 200  # of a window, about, forward and backward: what a call takes once is lost among so many
_RUNS = (5, 15)  # as many as fit into
_WINDOW_S = 0.25
_LONG_S = 0.5  # of a window in whose time glue is lost


@dataclass(frozen=True)
class Glue:
    """Seconds per operation beyond its own, by phase."""

    forward_s: float
    backward_s: float

    def of(self, phase: Phase) -> float:
        """Return what is added to an operation; repeated ones run in both phases."""
        if phase == "repeated":
            return (self.forward_s + self.backward_s) / 2
        return self.forward_s if phase == "forward" else self.backward_s


def glue_names(graph: Graph, samples: int) -> tuple[str, str]:
    """Return the names under which the glue of a graph on so many samples is kept: forward, backward."""
    which = f"{graph.fingerprint} {samples}"
    return f"glue of forward {which}", f"glue of backward {which}"


def known_glue(graph: Graph, samples: int, timings: Timings) -> Glue:
    """Return the glue of a graph that was measured."""
    forward, backward = (timings[digest(name)].seconds for name in glue_names(graph, samples))
    return Glue(forward, backward)


def measure_glue(capture: Capture, courses: Mapping[int, Course], tools: Tools) -> dict[str, Timing]:
    """Return the glue of a graph at some numbers of samples, by name.

    Args:
        capture: the step.
        courses: number of samples -> its calls.
        tools: maker, clock, memory.
    """
    graph = capture.graph
    windows = choose_windows(graph)
    bounds = tuple(sorted({bound for window in windows for bound in window} - {0, len(graph.nodes)}))
    stages, works = capture.split(bounds).stages, Cutter(graph).works(bounds)
    places = [(0, *bounds).index(begin) for begin, _ in windows]
    found = {}
    for samples, course in courses.items():
        excess = [_Window(stages[s], works[s], course, samples, tools).excess() for s in places]
        for k, name in enumerate(glue_names(graph, samples)):
            found[name] = Timing(_per_operation([phases[k] for phases in excess]), 0.0)
    return found


def _per_operation(found: Sequence[tuple[float, int]]) -> float:
    operations = sum(count for _, count in found)
    return sum(seconds for seconds, _ in found) / operations if operations else 0.0


def choose_windows(graph: Graph) -> list[tuple[int, int]]:
    """Return up to three ranges of positions with about 200 operations each; all of a graph that has few."""
    count = len(graph.nodes)
    own = [0] * count
    for operation in graph.operations:
        if operation.phase != "repeated":
            own[max(0, operation.at)] += 1
    before = [0, *accumulate(own)]
    windows = min(_WINDOWS, before[-1] // _OPERATIONS)
    if windows <= 1:
        return [(0, count)]
    cuts = [k for k in range(count + 1) if k not in graph.uncuttable]

    def cut_at(operations: int) -> int:
        """Return the first cut with so many operations before it."""
        return cuts[min(bisect_left(cuts, bisect_left(before, operations)), len(cuts) - 1)]

    each = before[-1] // windows
    starts = [each * w + (each - _OPERATIONS) // 2 for w in range(windows)]
    found = [(cut_at(start), cut_at(start + _OPERATIONS)) for start in starts]
    return [(begin, end) for begin, end in found if begin < end]


class _Window:
    """A stage whose functions and operations are run in turn.

    Args:
        program: its functions.
        work: its operations.
        course: all calls.
        samples: how many.
        tools: maker, clock, memory.
    """

    def __init__(self, program: StageProgram, work: StageWork, course: Course, samples: int, tools: Tools) -> None:
        self._program, self._course, self._samples, self._tools = program, course, samples, tools
        self._forward = work.forward.operations
        self._backward = (*work.input_grad.operations, *work.weight_grad.operations)
        self._given: dict[str, torch.Tensor] = {}

    def excess(self) -> tuple[tuple[float, int], tuple[float, int]]:
        """Return, for forward and backward, (seconds of the functions beyond those of the operations, operations).

        Nothing of functions that have no room here, or that divide by zero with so few samples, as deviations do.
        """
        try:
            return self._measured() if self._fits() else ((0.0, 0), (0.0, 0))
        except ZeroDivisionError:
            return (0.0, 0), (0.0, 0)

    def _measured(self) -> tuple[tuple[float, int], tuple[float, int]]:
        operations = {*self._forward, *self._backward}
        items = self._course.items
        chosen = [i for i, item in enumerate(items) if item.operation in operations and item.call.results]
        walk = Walk(self._course, chosen, self._tools)
        forward: list[float] = []
        backward: list[float] = []
        least, most = _RUNS
        total = 0.0
        while len(forward) <= least or (total < _WINDOW_S and len(forward) <= most):
            whole_forward, whole_backward = self._run_functions()
            if whole_forward + whole_backward > _LONG_S:
                return (0.0, 0), (0.0, 0)
            own = {items[i].operation: s for i, s in zip(chosen, walk.run(), strict=True) if not math.isnan(s)}
            forward.append(whole_forward - sum(own.get(o, 0.0) for o in self._forward))
            backward.append(whole_backward - sum(own.get(o, 0.0) for o in self._backward))
            total += 2 * (whole_forward + whole_backward)
        return (
            (statistics.median(forward[1:]), len(self._forward)),
            (statistics.median(backward[1:]), len(self._backward)),
        )

    def _fits(self) -> bool:
        """Return whether all inputs are known and fit the memory."""
        made: set[str] = set()
        total = 0
        for half in self._halves():
            forms = [self._course.forms.get(name) for name in half.inputs if name not in made]
            if any(form is None for form in forms):
                return False
            total += sum(bytes_of(form) for form in forms if form is not None)
            made.update(half.outputs)
        return total <= self._tools.limit_bytes

    def _halves(self) -> list[Half]:
        halves = (self._program.forward, self._program.input_grad, self._program.weight_grad)
        return [half for half in halves if half is not None]

    def _run_functions(self) -> tuple[float, float]:
        """Run F, I and W, and return the seconds of F and those of I and W."""
        values: dict[str, Any] = {}
        seconds = [self._run(half, values) for half in self._halves()]
        return seconds[0], sum(seconds[1:])

    def _run(self, half: Half, values: dict[str, Any]) -> float:
        inputs = [self._input(name, values) for name in half.inputs]
        clock = self._tools.clock
        clock.finish()
        start = time.perf_counter()
        outputs = half.run(self._samples, _KEY, *inputs)
        clock.finish()
        seconds = time.perf_counter() - start
        values.update(zip(half.outputs, outputs, strict=True))
        return seconds

    def _input(self, name: str, values: dict[str, Any]) -> Any:
        if name in values:
            return values[name]
        if name not in self._given:
            self._given[name] = self._tools.maker.tensor(self._course.forms[name])
        return self._given[name]


_KEY = RandomKey(seed=0, step=0, microbatch=0)
