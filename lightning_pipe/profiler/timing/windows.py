"""Windows of a graph: ranges of positions that are made stages, and run beside their operations.

A window is made a stage by `Capture.split`. Its F and I + W are run as the runtime runs them, and its operations one by
one (`Walk`), in turn, so that both find the same machine:

    windows = Windows(capture)
    for run in windows.run(split.stages, k, course, samples, tools, longest_s=1):    of window k, with these stages
        run.forward_s, run.own_s

Windows lie spread over the graph. One that needs more memory than the limit, or takes long, has no runs.
"""

from __future__ import annotations

import logging
import math
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from lightning_pipe.capture import Capture
from lightning_pipe.capture.steps.stage_program import Half, RandomKey, StageProgram
from lightning_pipe.core.graph import Graph
from lightning_pipe.cost.stage import Cutter
from lightning_pipe.profiler.timing.arguments import bytes_of
from lightning_pipe.profiler.timing.op_sequence import Course
from lightning_pipe.profiler.timing.timed_run import Tools, Walk

log = logging.getLogger(__name__)

_WINDOWS = 3
_OPERATIONS = 200  # of a window, about, forward and backward: what a call takes once is lost among so many
_RUNS = (5, 15)  # as many as fit into
_WINDOW_S = 0.25


@dataclass(frozen=True)
class WindowRun:
    """One run of a window.

    Attributes:
        forward_s, backward_s: seconds of F, and of I and W.
        own_s: operation -> its seconds, without those that could not be run.
    """

    forward_s: float
    backward_s: float
    own_s: Mapping[int, float]


class Windows:
    """The windows of a graph.

    Args:
        capture: the step.

    Attributes:
        ranges: first position and end of each.
        bounds: cuts that make every window a stage.
    """

    def __init__(self, capture: Capture) -> None:
        self.ranges = choose_windows(capture.graph)
        ends = {bound for window in self.ranges for bound in window}
        self.bounds = tuple(sorted(ends - {0, len(capture.graph.nodes)}))
        self._works = Cutter(capture.graph).works(self.bounds)

    def stage(self, window: int) -> int:
        """Return the stage that a window is."""
        return (0, *self.bounds).index(self.ranges[window][0])

    def forward(self, window: int) -> tuple[int, ...]:
        """Return the operations that F of a window runs."""
        return tuple(self._works[self.stage(window)].forward.operations)

    def backward(self, window: int) -> tuple[int, ...]:
        """Return the operations that I and W of a window run."""
        work = self._works[self.stage(window)]
        return (*work.input_grad.operations, *work.weight_grad.operations)

    def run(
        self,
        stages: Sequence[StageProgram],
        window: int,
        course: Course,
        samples: int,
        tools: Tools,
        *,
        longest_s: float,
    ) -> list[WindowRun]:
        """Run a window again and again, and return all runs but the first.

        None of functions that have no room here, or take too long, or that do not run on made-up inputs.

        Args:
            stages: of the step, cut at `bounds`.
            window: which.
            course: all calls.
            samples: how many.
            tools: maker, clock, memory.
            longest_s: that its functions may take together.
        """
        beside = _Beside(stages[self.stage(window)], course, samples, tools)
        operations = {*self.forward(window), *self.backward(window)}
        if not beside.fits():
            return []
        try:
            return beside.runs(operations, longest_s)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # what kernels of the user raise where numbers are made up
            log.info("%d operations are timed one by one only; together, on made-up inputs: %r", len(operations), error)
            return []


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


class _Beside:
    """A stage whose functions and operations are run in turn.

    Args:
        program: its functions.
        course: all calls.
        samples: how many.
        tools: maker, clock, memory.
    """

    def __init__(self, program: StageProgram, course: Course, samples: int, tools: Tools) -> None:
        self._program, self._course, self._samples, self._tools = program, course, samples, tools
        self._given: dict[str, torch.Tensor] = {}

    def runs(self, operations: set[int], longest_s: float) -> list[WindowRun]:
        """Return what the runs of these operations take, but for the first; none that take longer."""
        items = self._course.items
        chosen = [i for i, item in enumerate(items) if item.operation in operations and item.call.results]
        walk = Walk(self._course, chosen, self._tools)
        found: list[WindowRun] = []
        least, most = _RUNS
        total = 0.0
        while len(found) <= least or (total < _WINDOW_S and len(found) <= most):
            forward_s, backward_s = self._run_functions()
            if forward_s + backward_s > longest_s and found:
                return []
            own = {items[i].operation: s for i, s in zip(chosen, walk.run(), strict=True) if not math.isnan(s)}
            found.append(WindowRun(forward_s, backward_s, own))
            total += 2 * (forward_s + backward_s)
        return found[1:]

    def fits(self) -> bool:
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
