"""Operator profile of a captured step: seconds and workspace of every operation on this device.

    profile = profile_capture(capture, device=device, sizes=(1, 4, 8), cache=Path(".lightning_pipe"))

Every distinct call is timed where it stands in the step (`course`, `walk`, `part`), at each of some numbers of samples,
and what a stage function takes besides is measured on windows of the graph (`glue`). Calls that are timed already, on
this kind of device by this version of torch, are read from the cache. Nothing is run on the user's parameters: tensors
are made up, so parameters may be on the meta device, and models larger than the device can be measured.

Where ranks share the work, each measures its share of the calls at the same time as the others, so that what they have
in common (caches, memory bandwidth) is as busy as in training:

    operators = Operators(capture, device=device, sizes=sizes, compiled=False)
    mine = operators.measure(known, share=(rank, ranks))        known: the same on all ranks
    profile = operators.assemble({**known, **everybody's})

Of stages that will run compiled, what that changes is measured too, on windows that are compiled (`compiled`):
`mine |= operators.measure_compiled(known, share=...)`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from lightning_pipe.capture import Capture
from lightning_pipe.capture.stages.operation_calls import operator_calls
from lightning_pipe.capture.steps.keyed_random import undisturbed
from lightning_pipe.collection import without_collection
from lightning_pipe.core.graph import Graph
from lightning_pipe.core.profile import Profile
from lightning_pipe.cost.counted import counted
from lightning_pipe.profiler.cache import Timing, Timings, digest, load_timings, store_timings
from lightning_pipe.profiler.devices import device_kind
from lightning_pipe.profiler.timing.arguments import Maker
from lightning_pipe.profiler.timing.clock import clock_of
from lightning_pipe.profiler.timing.compiled import Fusion, fusion_names, is_fused, known_fusion, measure_fusion
from lightning_pipe.profiler.timing.glue import glue_names, known_glue, measure_glue
from lightning_pipe.profiler.timing.op_sequence import Course
from lightning_pipe.profiler.timing.progress import Bar
from lightning_pipe.profiler.timing.sample_region import SampleRegion
from lightning_pipe.profiler.timing.timed_run import Tools
from lightning_pipe.profiler.timing.windows import choose_windows
from lightning_pipe.profiler.timing.workspace import gauge_of

_ROUNDS = 2
_LIMIT_BYTES = 2 * 2**30  # for tensors, unless one call needs more
_LEAST_SHARE = 0.5  # of an operation's own time is left where glue is negative


def profile_capture(
    capture: Capture,
    *,
    device: torch.device,
    sizes: Sequence[int],
    cache: Path | None = None,
    progress: bool = False,
    compiled: bool = False,
) -> Profile:
    """Return the seconds of all operations, from the cache where they are known, else measured.

    Args:
        capture: the step; its parameters may be on the meta device.
        device: where to measure.
        sizes: numbers of samples at which to measure; those for which the graph does not hold are left out.
        cache: directory of known times; None for none.
        progress: whether to show a bar if it takes long.
        compiled: whether stages will run compiled.
    """
    operators = Operators(capture, device=device, sizes=sizes, compiled=compiled)
    known = load_timings(cache, device) if cache is not None else {}
    found = operators.measure(known, progress=progress) | operators.measure_compiled(known)
    if cache is not None and found:
        store_timings(cache, device, found)
    return operators.assemble({**known, **found})


class Operators:
    """Measure the operations of one captured step.

    Args:
        capture: the step.
        device: where to measure.
        sizes: numbers of samples at which to measure; those for which the graph does not hold are left out, and if none
            is left, the captured one is taken.
        compiled: whether stages will run compiled.

    Attributes:
        sizes: numbers of samples at which is measured.
        compiled: as given.
    """

    def __init__(self, capture: Capture, *, device: torch.device, sizes: Sequence[int], compiled: bool = False) -> None:
        self._capture, self._device, self.compiled = capture, device, compiled
        fitting = [n for n in sorted(set(sizes)) if not capture.misfit(n)]
        self.sizes: tuple[int, ...] = tuple(fitting) or (capture.graph.samples,)
        with without_collection():  # which takes longer than the work where a graph has made many objects
            self._courses = {n: self._course(n) for n in self.sizes}

    def _course(self, samples: int) -> Course:
        calls = list(operator_calls(self._capture.joint, samples, self._device))
        return Course(self._capture.graph, calls)

    def found(self, known: Timings) -> tuple[int, int]:
        """Return how many of the distinct calls have known times, and how many there are."""
        names = {digest(name) for course in self._courses.values() for name in course.signatures}
        return len(names & known.keys()), len(names)

    def measure(self, known: Timings, *, share: tuple[int, int] = (0, 1), progress: bool = False) -> dict[str, Timing]:
        """Measure what is not known, and return it.

        Args:
            known: what need not be measured; the same on all ranks that share the work.
            share: this rank's number among the ranks that share the work, and their number.
            progress: whether to show a bar if it takes long.
        """
        wanted = self._wanted(known, share)
        graph = self._capture.graph
        glue = [n for n in self.sizes if share[0] == 0 and any(digest(g) not in known for g in glue_names(graph, n))]
        if not glue and not any(wanted.values()):
            return {}
        with Bar("Profiling", shown=progress) as bar, _measuring(self._device):
            tools = self._tools()
            parts = [SampleRegion(self._courses[n], names, tools) for n, names in wanted.items() if names]
            for part in parts * _ROUNDS:
                part.measure(lambda done: bar.advance(done / (_ROUNDS * len(parts))))
            with gauge_of(self._device) as gauge:
                for part in parts:
                    part.watch(gauge)
            found = {name: timing for part in parts for name, timing in part.timings(gauge.scratch)}
            if glue:
                found |= measure_glue(self._capture, {n: self._courses[n] for n in glue}, tools)
        return {digest(name): timing for name, timing in found.items()}

    def measure_compiled(self, known: Timings, *, share: tuple[int, int] = (0, 1)) -> dict[str, Timing]:
        """Compile windows of the step, measure what is not known of them, and return it; nothing if none is compiled.

        Args:
            known: what need not be measured; the same on all ranks that share the work.
            share: this rank's number among the ranks that share the work, and their number.
        """
        if not self.compiled:
            return {}
        (rank, ranks), graph, samples = share, self._capture.graph, self._compiled_for
        mine = [
            k
            for k in range(rank, len(choose_windows(graph)), ranks)
            if any(digest(name) not in known for name in fusion_names(graph, samples, k))
        ]
        if not mine:
            return {}
        with _measuring(self._device):
            found = measure_fusion(
                self._capture, mine, self._courses[samples], samples, device=self._device, tools=self._tools()
            )
        return {digest(name): timing for name, timing in found.items()}

    @property
    def _compiled_for(self) -> int:
        """Return the number of samples for which windows are compiled."""
        return self.sizes[len(self.sizes) // 2]

    def _tools(self) -> Tools:
        return Tools(Maker(self._device), clock_of(self._device), _LIMIT_BYTES)

    def _wanted(self, known: Timings, share: tuple[int, int]) -> dict[int, list[str]]:
        """Return the signatures to be measured here at each number of samples: neighbours stay together."""
        rank, ranks = share
        seen: set[str] = set()
        wanted = {}
        for n, course in self._courses.items():
            names = [name for name in course.signatures if name not in seen and digest(name) not in known]
            seen.update(names)
            wanted[n] = names[len(names) * rank // ranks : len(names) * (rank + 1) // ranks]
        return wanted

    def assemble(self, timings: Timings) -> Profile:
        """Return the profile that known and measured times make.

        Args:
            timings: of all calls.
        """
        fusion = known_fusion(self._capture.graph, self._compiled_for, timings) if self.compiled else None
        columns = [self._column(n, timings, fusion) for n in self.sizes]
        scratch = [self._scratch(n, timings) for n in self.sizes]
        found = [timings[digest(name)] for course in self._courses.values() for name in course.signatures]
        return Profile(
            graph=self._capture.graph.fingerprint,
            device=device_kind(self._device),
            samples=self.sizes,
            seconds=tuple(zip(*columns, strict=True)),
            spread=statistics.median(t.spread for t in found if not math.isnan(t.seconds)),
            scratch_bytes=tuple(zip(*scratch, strict=True)),
        )

    def _scratch(self, samples: int, timings: Timings) -> list[int]:
        """Return what every operation holds for itself at one number of samples, 0 where that is not known."""
        found = (timings[digest(name)].scratch_bytes for name in self._courses[samples].own)
        return [0 if math.isnan(scratch) else round(scratch) for scratch in found]

    def _column(self, samples: int, timings: Timings, fusion: Fusion | None) -> list[float]:
        """Return the seconds of all operations at one number of samples, glue included; compiled, if that is known."""
        course = self._courses[samples]
        by_name = {name: timings[digest(name)].seconds for name in course.signatures}
        graph = self._capture.graph
        seconds = [0.0] * len(graph.operations)
        untimed: set[int] = set()
        for name, operation in course.charges():
            if math.isnan(by_name[name]):
                untimed.add(operation)
            else:
                seconds[operation] += by_name[name]
        if untimed:
            seconds = _with_estimates(seconds, untimed, graph, samples)
        if fusion is not None:
            both = zip(graph.operations, seconds, strict=True)
            return [own * fusion.of(operation) if is_fused(operation) else own for operation, own in both]
        glue = known_glue(graph, samples, timings)
        return [
            max(own + glue.of(operation.phase), _LEAST_SHARE * own) if own else 0.0
            for operation, own in zip(graph.operations, seconds, strict=True)
        ]


def _with_estimates(seconds: list[float], untimed: set[int], graph: Graph, samples: int) -> list[float]:
    """Return the seconds of all operations: those that cannot be timed take what is counted, at the pace of others."""
    profile = counted(graph)
    counts = [profile.operation_s(operation, samples) for operation in range(len(seconds))]
    counted_s = sum(count for operation, count in enumerate(counts) if operation not in untimed)
    timed_s = sum(own for operation, own in enumerate(seconds) if operation not in untimed)
    pace = timed_s / counted_s if timed_s and counted_s else 1.0
    return [
        max(own, pace * count) if operation in untimed else own
        for operation, (own, count) in enumerate(zip(seconds, counts, strict=True))
    ]


@contextmanager
def _measuring(device: torch.device) -> Iterator[None]:
    """Run as stages do, without garbage collection in between, and leave torch's random state as it is."""
    with without_collection(), torch.no_grad(), undisturbed(device):
        yield
