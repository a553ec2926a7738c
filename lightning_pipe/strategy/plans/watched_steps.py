"""Watched steps: one optimizer step in many is recorded on every rank while training goes on, for rank 0's loggers.

    the step before     is recorded too: a step counts from its end where a rank has begun ahead of it
    the watched step    its instructions, with the optimizer's own time
    the next batch      every rank sends its times to rank 0 and goes on; rank 0 looks, batch by batch, whether all have
                        come, and logs a row

Nothing waits for another rank, except at the end of the fit.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch.optim import Optimizer

from lightning_pipe.core.program import Instruction, VerifiedProgram
from lightning_pipe.core.timeline import Event, Timeline
from lightning_pipe.report import aligned, clock_offsets
from lightning_pipe.runtime.waiting import Wait
from lightning_pipe.strategy.plans.logged_rows import PipeLog
from lightning_pipe.strategy.plans.recording import Recording
from lightning_pipe.strategy.ranks.control_plane import ControlPlane
from lightning_pipe.strategy.steps.step_calls import StepResult

_BESIDE = 2  # numbers that travel beside the times: the end of the step before, and the peak of memory


@dataclass(frozen=True)
class _Coming:
    """The times of a watched step, on their way to rank 0."""

    step: int
    ran: StepResult
    rates: Mapping[str, float]
    times: list[tuple[torch.Tensor, Wait]]


class StepWatch:
    """The watched steps of one rank; every method is called on all ranks together.

    Args:
        every: of so many optimizer steps, the last one is watched.
        control: to the other ranks.
        device: of this rank.
        optimizers: of the trainer.
        ranks_per_host: ranks with one clock.
        log: what rank 0 logs with; None elsewhere.
    """

    def __init__(
        self,
        every: int,
        *,
        control: ControlPlane,
        device: torch.device,
        optimizers: Sequence[Optimizer],
        ranks_per_host: int,
        log: PipeLog | None,
    ) -> None:
        self._every, self._control, self._device, self._optimizers = every, control, device, optimizers
        self._hosts = [rank // ranks_per_host for rank in range(control.ranks)]
        self._log = log
        self._recording: Recording | None = None
        self._step = 0  # that is watched, while there is a recording
        self._ended = -math.inf  # the last batch that was recorded
        self._coming: deque[_Coming] = deque()  # on rank 0

    def recording(self, step: int, *, is_new: bool) -> Recording | None:
        """Return what the next batch is recorded in, if it is.

        Args:
            step: optimizer steps so far.
            is_new: whether the batch is the first one for its optimizer step.
        """
        self._look()
        if is_new:
            self._send(step)
        if self._recording is None:
            if not is_new or (step + 2) % self._every > 1:
                return None
            self._step = step + -(step + 1) % self._every
            self._recording = Recording(2, wants_memory=False, device=self._device, optimizers=self._optimizers)
        return self._recording

    def end(self, step: int, *, healthy: bool) -> None:
        """Log the last watched step, where all ranks come to the end of the fit."""
        if healthy:
            self._send(step)
            for _, wait in chain.from_iterable(coming.times for coming in self._coming):
                self._control.wait(wait)
            self._look()
        if self._recording is not None:
            self._recording.close()

    def _send(self, step: int) -> None:
        """Begin to bring the times of a watched step to rank 0, once the optimizer has stepped."""
        if self._recording is None or step <= self._step:
            return
        *before, ran = self._recording.close()
        self._recording = None
        since = max((_end(earlier.timeline) for earlier in before), default=self._ended)
        self._ended = _end(ran.timeline)
        if ran.is_skipped:
            return
        peak = torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else math.nan
        mine = torch.tensor([*_times(ran, self._control.rank), since, peak], dtype=torch.float64)
        sizes = [2 * len(line) + _BESIDE for line in ran.program.ranks]
        times = self._control.begin_gather(mine, sizes=sizes, what="the times of a step")
        if self._log is not None:
            rates = self._log.take_rates(ran.graph, ran.samples)
            self._coming.append(_Coming(self._step, ran, rates, times))
            self._look()

    def _look(self) -> None:
        """Log the watched steps whose times have come, on rank 0."""
        while self._coming and all(self._has_come(wait) for _, wait in self._coming[0].times):
            self._log_step(self._coming.popleft())

    def _has_come(self, wait: Wait) -> bool:
        try:
            return wait.handle.wait(0.0)
        except RuntimeError:  # a rank is gone
            self._control.wait(wait)  # which raises what is known of that
            return True

    def _log_step(self, coming: _Coming) -> None:
        assert self._log is not None, "only rank 0 waits for times"
        numbers = [there.tolist() for there, _ in coming.times]
        timeline = _together(coming.ran.program, numbers, self._hosts)
        memory = [int(peak) for *_, peak in numbers if not math.isnan(peak)]
        self._log.log_steps([timeline], memory=memory, rates=coming.rates, step=coming.step)


def _end(timeline: Timeline) -> float:
    return max((event.end for event in timeline.events), default=-math.inf)


def _times(ran: StepResult, rank: int) -> list[float]:
    """Return start and end of every instruction of a rank, in the program's order; those of the last part of a sum."""
    last: dict[Instruction, Event] = {event.instruction: event for event in ran.timeline.events}  # by rising start
    nothing = (math.nan, math.nan)
    events = (last.get(instruction) for instruction in ran.program.ranks[rank])
    return [*chain.from_iterable(nothing if event is None else (event.start, event.end) for event in events)]


def _together(program: VerifiedProgram, numbers: Sequence[list[float]], hosts: Sequence[int]) -> Timeline:
    """Return the timeline of all ranks on one clock."""
    events = [
        Event(rank, instruction, start, end)
        for rank, line in enumerate(program.ranks)
        for instruction, start, end in zip(line, numbers[rank][0:-_BESIDE:2], numbers[rank][1:-_BESIDE:2], strict=True)
        if not math.isnan(start)
    ]
    timeline, ends = Timeline(tuple(events)), [since for *_, since, _ in numbers]
    if len({*hosts}) > 1:
        offsets = clock_offsets([timeline], hosts=hosts)
        timeline = aligned(timeline, offsets)
        ends = [end - offset for end, offset in zip(ends, offsets, strict=True)]
    return Timeline(timeline.events, since=max(ends))
