"""Sample region of an operation sequence: how often it is run, and what the repetitions show.

A part is run once to see how long it takes. If that is short, a longer part is taken, in which every call is met more
often, since its neighbours matter: the first step of a recurrent network finds other caches than the next ones. So do
those that other ranks measure: what a micro-batch needs in all may not fit the caches, where a share of it would. The
time of a call is the mean over where it is met, and over all repetitions but the slowest tenth: means, because the
seconds of a stage are a sum, and medians of times that are now and then longer add up to less than the median of the
sum. Rounds lie apart in time, so that a disturbance that lasts for one of them does not count fully.

After the last round every call is met once more, without a clock, to see what memory it needs for itself.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from lightning_pipe.profiler.cache import Timing
from lightning_pipe.profiler.timing.op_sequence import Course
from lightning_pipe.profiler.timing.timed_run import Tools, Walk
from lightning_pipe.profiler.timing.workspace import WorkspaceGauge

_PART_S = 0.05  # of one run of a part: calls are met as often as this allows, at least once, and at most
_MOST_INSTANCES = 32
_WHOLE_S = 0.1  # of a part with all calls, also those that others measure, which is taken if it is so short
_ROUND_S = 0.25  # of repetitions in a round
_RUNS = (5, 30)  # repetitions in a round, as many as fit
_LONG_S = 1.0  # a part that takes longer is measured in one round only, by
_LONG_RUNS = 3
_SLOWEST = 0.1  # of the repetitions, which do not count


class SampleRegion:
    """What is measured of some calls of a course.

    Args:
        course: all calls.
        signatures: those that are wanted.
        tools: maker, clock, memory.
    """

    def __init__(self, course: Course, signatures: Iterable[str], tools: Tools) -> None:
        self._course, self._signatures, self._tools = course, frozenset(signatures), tools
        self._chosen: tuple[int, ...] = ()
        self._runs: list[list[float]] = []
        self._is_done = False

    def measure(self, progress: Callable[[float], None]) -> None:
        """Measure one round.

        Args:
            progress: is told the share of the round that was done.
        """
        if self._is_done:
            progress(1.0)
            return
        walk, first = self._warm() if self._chosen else self._choose()
        run_s = _total_s(first)
        self._is_done = run_s > _LONG_S
        least, most = _RUNS
        runs = _LONG_RUNS if self._is_done else min(max(math.ceil(_ROUND_S / run_s), least), most)
        self._runs.append(first)
        progress(1 / runs)
        for _ in range(runs - 1):
            self._runs.append(walk.run())
            progress(1 / runs)

    def _choose(self) -> tuple[Walk, list[float]]:
        """Choose what is run, by how long it takes."""
        self._chosen = self._course.part(self._signatures, instances=1)
        walk, first = self._warm()
        part_s, met = _total_s(first), self._signatures
        whole = frozenset(self._course.signatures)
        whole_s = part_s * len(whole) / len(met)
        if met < whole and whole_s <= _WHOLE_S:
            part_s, met = whole_s, whole
        instances = min(int(_PART_S / part_s), _MOST_INSTANCES)
        if instances <= 1 and met is self._signatures:
            return walk, first
        self._chosen = self._course.part(met, instances=max(1, instances))
        return self._warm()

    def _warm(self) -> tuple[Walk, list[float]]:
        """Return a walk that has been run twice, and what the second run took."""
        walk = Walk(self._course, self._chosen, self._tools)
        walk.run()
        return walk, walk.run()

    def watch(self, gauge: WorkspaceGauge) -> None:
        """Run every call once more, watched."""
        chosen = self._course.part(self._signatures, instances=1)
        Walk(self._course, chosen, self._tools, around=gauge.around).run()

    def timings(self, scratch: Mapping[str, float]) -> Iterator[tuple[str, Timing]]:
        """Yield the signature and what was measured of every call that was wanted.

        Args:
            scratch: what the gauge has found.
        """
        runs = np.sort(np.array(self._runs), axis=0)
        typical = runs[: math.ceil(len(runs) * (1 - _SLOWEST))].mean(axis=0)
        lower, middle, upper = np.percentile(runs, (25, 50, 75), axis=0)
        places: dict[str, list[int]] = defaultdict(list)
        for place, i in enumerate(self._chosen):
            places[self._course.items[i].call.signature].append(place)
        for name in self._signatures:
            own = places[name]
            spread = (upper[own] - lower[own]) / np.maximum(middle[own], _TICK_S)
            yield name, Timing(float(typical[own].mean()), float(np.median(spread)), scratch.get(name, 0.0))


def _total_s(seconds: list[float]) -> float:
    """Return the seconds of all calls that could be run."""
    return max(float(np.nansum(seconds)), _TICK_S)


_TICK_S = 1e-9  # no call is quicker
