"""Recording of the first steps on every rank, put together on rank 0.

    step 0      nothing but a timeline: caches fill, the optimizer makes its state
    step 1      memory is measured, which makes the step slow (in the next one, should the profiler fail)
    step 2...   timelines that are compared with the simulated one

With weight versions the steps that count are rounds in the middle of many: others fill the pipeline, or empty it.

The optimizer steps after the program, by Lightning: its time is taken by hooks and put in the place of the program's
`Step`, so that a recorded step ends where the next one may begin.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_pipe.capture.device_streams import finish_stream
from lightning_pipe.core.program import Step, VerifiedProgram
from lightning_pipe.core.timeline import Event, Timeline
from lightning_pipe.report import RankPeak, aligned, clock_offsets
from lightning_pipe.runtime.memory import state_bytes
from lightning_pipe.strategy.parameters.inner_optimizers import inner_optimizers
from lightning_pipe.strategy.ranks.control_plane import ControlPlane
from lightning_pipe.strategy.steps.step_calls import StepResult

WARM_UP = 2  # steps that are recorded but not compared
_MEMORY_STEP = 1
_MOST_FILLING = 32  # steps that fill or empty the pipeline, beside those that count


@dataclass(frozen=True)
class Recorded:
    """What all ranks recorded.

    Attributes:
        graph: fingerprint of the graph of the last step that counts.
        program: its program.
        timelines: of all ranks, by step, on one clock.
        comparable: those of `timelines` that ran `program` after the warm-up (all that ran it, if there are no others).
        memory: by rank, empty if not measured.
        held: by rank, bytes that stages held over time in the step whose memory was measured.
    """

    graph: str
    program: VerifiedProgram
    timelines: tuple[Timeline, ...]
    comparable: tuple[Timeline, ...]
    memory: tuple[RankPeak, ...]
    held: dict[int, tuple[tuple[float, int], ...]]


@dataclass
class _Clock:
    """When optimizers stepped, on the clock of timelines."""

    device: torch.device
    marks: list[float] = field(default_factory=list)

    def mark(self, *_: Any) -> None:
        finish_stream(self.device)
        self.marks.append(time.time())


@dataclass(frozen=True)
class _OfRank:
    """What one rank tells the first."""

    host: str
    timelines: tuple[Timeline, ...]
    memory: RankPeak | None
    held: tuple[tuple[float, int], ...]


class Recording:
    """The first steps of one rank.

    Args:
        steps: optimizer steps that are recorded.
        wants_memory: whether the memory of one of them is measured.
        device: of this rank.
        optimizers: of the trainer.
    """

    def __init__(
        self, steps: int, *, wants_memory: bool, device: torch.device, optimizers: Sequence[Optimizer]
    ) -> None:
        self._optimizers = [inner for optimizer in optimizers for inner in inner_optimizers(optimizer)]
        self._clock = _Clock(device)
        self._ran: list[StepResult] = []
        self._memory: RankPeak | None = None
        self._held: tuple[tuple[float, int], ...] = ()
        self._left, self._wants_memory = steps, wants_memory
        self._filling = _MOST_FILLING
        self._hooks = [optimizer.register_step_post_hook(self._clock.mark) for optimizer in optimizers]

    @property
    def active(self) -> bool:
        """Return whether the next step is recorded."""
        return self._left > 0

    @property
    def measures_memory(self) -> bool:
        """Return whether the memory of the next step is measured."""
        return self._wants_memory and self._memory is None and len(self._ran) >= _MEMORY_STEP

    def add(self, ran: StepResult) -> None:
        """Keep what a step was like, before the optimizer steps."""
        self._close_step()
        self._ran.append(replace(ran, values={}))
        if not (is_steady := _is_steady(ran)):
            self._filling -= 1
        if ran.peak_bytes is not None and (is_steady or self._filling < 0):
            saved = max((held for _, held in ran.held), default=0)
            there = ran.state_bytes + state_bytes((), optimizers=self._optimizers)
            self._memory = RankPeak(saved, there + ran.peak_bytes)
            self._held = ran.held if saved else ()  # what a replayed step saves is autograd's, and cannot be told apart
        self._left -= ran.program.synchronise and (is_steady or self._filling < 0)
        self._clock.mark()  # the program is the optimizer's closure, so a hook before the step would be too early

    def _close_step(self) -> None:
        """Put the optimizer's own time in the place of the last program's step."""
        marks, self._clock.marks = self._clock.marks, []
        if self._ran and len(marks) > 1:
            last = self._ran[-1]
            events = (_lasting(event, marks[0], marks[-1]) for event in last.timeline.events)
            self._ran[-1] = replace(last, timeline=Timeline(tuple(events)))

    def close(self) -> list[StepResult]:
        """Stop recording, and return what was recorded on this rank."""
        self._close_step()
        self._left = 0
        for hook in self._hooks:
            hook.remove()
        ran, self._ran, self._hooks = self._ran, [], []
        return ran

    def finish(self, control: ControlPlane, *, host: str) -> Recorded | None:
        """Stop recording and bring everything to rank 0; on all ranks together. None elsewhere, or without steps.

        Args:
            control: to the other ranks.
            host: name of this host.
        """
        ran = self.close()
        if not ran:
            return None
        mine = _OfRank(host, tuple(step.timeline for step in ran), self._memory, self._held)
        told = [control.to_first(mine, source=rank, what="the recorded steps") for rank in range(control.ranks)]
        everyone = [one for one in told if one is not None]
        return _together(ran, everyone) if control.rank == 0 else None


def _is_steady(step: StepResult) -> bool:
    """Return whether a step leaves as much in flight as it has found, as every one does that is flushed."""
    return step.program.seam is None or step.program.seam.is_even


def _lasting(event: Event, start: float, end: float) -> Event:
    return replace(event, start=start, end=end) if isinstance(event.instruction, Step) else event


def _in_a_row(steps: Iterable[Timeline]) -> tuple[Timeline, ...]:
    """Tell every step when the one before has ended."""
    found: list[Timeline] = []
    ended = -math.inf
    for step in steps:
        found.append(replace(step, since=ended))
        ended = max((event.end for event in step.events), default=ended)
    return tuple(found)


def _together(ran: Sequence[StepResult], everyone: Sequence[_OfRank]) -> Recorded:
    hosts = [[one.host for one in everyone].index(one.host) for one in everyone]
    steps = [
        Timeline(tuple(chain.from_iterable(timeline.events for timeline in of_ranks)))
        for of_ranks in zip(*(one.timelines for one in everyone), strict=True)
    ]
    offsets = clock_offsets(steps, hosts=hosts)
    timelines = _in_a_row(aligned(timeline, offsets) for timeline in steps)
    steady = [k for k, step in enumerate(ran) if _is_steady(step)]
    last = ran[max(steady or range(len(ran)), key=lambda k: (ran[k].program.is_ahead, k))]
    alike = [k for k in steady if ran[k].program == last.program and ran[k].graph == last.graph]
    compared = [k for k in alike if k in steady[WARM_UP:]] or alike or [len(ran) - 1]
    return Recorded(
        graph=last.graph,
        program=last.program,
        timelines=timelines,
        comparable=tuple(timelines[k] for k in compared),
        memory=tuple(one.memory for one in everyone if one.memory is not None),
        held={rank: one.held for rank, one in enumerate(everyone) if one.held},
    )
