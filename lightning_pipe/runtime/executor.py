"""Executor: walks the instructions of one rank and hands each to its owner.

    executor = Executor(split, layout, state=State(parameters, buffers, device), transport=..., loss="loss", step=...)
    groups.connect(transport, programs)            on all ranks together, before the first program
    outcome = executor.run(program, job)           process group: one process per rank
    outcomes = run_together(executors, program, jobs)      local transport: all ranks in this thread

Only what `verify` returned is run. Instructions are posted in the program's order; a compute waits for its
letters, `Step` waits for sends and reductions. Neighbouring stages on one rank hand values over through the mailbox
without a message.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from typing_extensions import assert_never

from lightning_pipe.capture.steps.stage_program import RandomKey, Split
from lightning_pipe.core.effects import OwnWork, effects_of
from lightning_pipe.core.milestones import Head, Milestone, Rollback
from lightning_pipe.core.program import (
    AnyCompute,
    Compute,
    Instruction,
    Layout,
    Recv,
    Reduce,
    Send,
    Step,
    VerifiedProgram,
)
from lightning_pipe.errors import BatchError, InstructionError, ProgramError
from lightning_pipe.runtime.abort_program import left_over
from lightning_pipe.runtime.activations.host import host_of
from lightning_pipe.runtime.activations.offloads import Offloads
from lightning_pipe.runtime.activations.protocol import HostStore
from lightning_pipe.runtime.exchanges.batch_heads import BatchHeads
from lightning_pipe.runtime.exchanges.exchange import Exchange
from lightning_pipe.runtime.exchanges.gradients import Gradients
from lightning_pipe.runtime.exchanges.slicing import Content
from lightning_pipe.runtime.guard.watch import Unwatched, Watch
from lightning_pipe.runtime.handlers import RankParts, handler_of
from lightning_pipe.runtime.job import BatchInput, ProgramResult, ResultSlice
from lightning_pipe.runtime.memory import is_out_of_memory, out_of_memory
from lightning_pipe.runtime.milestones import MilestoneHandlers, milestone_handler
from lightning_pipe.runtime.record import Recorder, clock_of
from lightning_pipe.runtime.stage import Ahead, Slice, Slices, Stage, State, changed_by_several, slices_of
from lightning_pipe.runtime.transport.protocol import Transport
from lightning_pipe.runtime.versions import InFlight, Versions
from lightning_pipe.runtime.waiting import Wait, Walk, drive, drive_together


@dataclass(frozen=True)
class _Course:
    """What one run of a program has with it: the batch, who looks after it, and the results so far."""

    job: BatchInput
    recorder: Recorder
    watch: Watch
    results: dict[str, list[ResultSlice]]
    parts: RankParts
    milestones: MilestoneHandlers
    leaves_sums: bool


class Executor:
    """Run programs on one rank.

    Args:
        split: the stages, whose parts on this rank it runs.
        layout: ranks of each stage; that of every program it will run.
        state: parameters and buffers of this rank.
        transport: to the other ranks.
        loss: value name of the loss; None where there is none.
        step: called by `Step`, when all gradients are those of the whole batch.
        host: where tensors are offloaded to; None takes one of its own.
    """

    def __init__(
        self,
        split: Split,
        layout: Layout,
        *,
        state: State,
        transport: Transport,
        loss: str | None = None,
        step: Callable[[], None] = lambda: None,
        host: HostStore | None = None,
    ) -> None:
        self.rank = transport.rank
        self.layout = layout
        own = [split.stages[number] for number, ranks in enumerate(layout.stages) if self.rank in ranks]
        apart = changed_by_several(own)
        self.stages = {
            program.stage: Stage(program, split.values, state=state, loss=loss, apart=apart[program.stage])
            for program in own
        }
        self._state = state
        self._step = step
        self._slices: dict[int, Slices] = defaultdict(dict)
        self._flight = InFlight()
        self.versions = Versions(self.stages)
        self._checked: VerifiedProgram | None = None
        self._transport = transport
        self._begun: dict[int, VerifiedProgram] = {}  # by identity: a hash would look at every instruction
        self._parts: dict[tuple[int, tuple[int, ...]], Slice] = {}  # of the batch at hand
        self._milestones: list[Milestone] = []  # of that program
        self._offloads_some = False  # that program
        self._notes_slices = False  # whether it is noted where slices of the batch lie
        self._exchange = Exchange(split, self.stages, transport=transport, device=state.device)
        self._gradients = Gradients(split, layout, transport=transport, state=state)
        self._heads = BatchHeads(split, self.stages, layout=layout, transport=transport, device=state.device)
        for stage in self.stages.values():
            stage.made = self._gradients.made
        self._offloads = Offloads(self.stages, host or host_of(state.device))

    def run(
        self,
        program: VerifiedProgram,
        job: BatchInput,
        *,
        record: bool = False,
        record_memory: bool = False,
        watch: Watch | None = None,
        milestones: MilestoneHandlers | None = None,
        before_waiting: Callable[[], None] | None = None,
        leave_sums: bool = False,
        most_messages: int | None = None,
    ) -> ProgramResult:
        """Run this rank's part of a program while the other ranks run theirs.

        Args:
            program: what `verify` returned, the same on all ranks.
            job: the batch.
            record: whether to return a timeline.
            record_memory: whether to return a timeline and what the stages kept over time; counting takes time of the
                host, so such a run is slower.
            watch: sets deadlines and tells of failures on other ranks; without one a wait may last for ever.
            milestones: what to do at those of the program.
            before_waiting: called before this rank waits for anything, each time.
            leave_sums: whether `Step` may leave sums under way, for which `land` waits.
            most_messages: how many messages of this rank may be under way beside a compute
                (`simulator.in_flight`); None for any number.

        Raises:
            PipelineError: if an instruction of this rank fails, or, through `watch`, one of another rank.
        """
        watch = watch or Unwatched()
        with watch.program(job.step):
            walk = self.walk(
                program,
                job,
                record=record,
                record_memory=record_memory,
                watch=watch,
                milestones=milestones,
                leave_sums=leave_sums,
                most_messages=most_messages,
            )
            if before_waiting is None:
                return drive(walk, wait=watch.wait)

            def wait(pending: Wait) -> None:
                before_waiting()
                watch.wait(pending)

            return drive(walk, wait=wait)

    def walk(
        self,
        program: VerifiedProgram,
        job: BatchInput,
        *,
        record: bool = False,
        record_memory: bool = False,
        watch: Watch | None = None,
        milestones: MilestoneHandlers | None = None,
        leave_sums: bool = False,
        most_messages: int | None = None,
    ) -> Walk[ProgramResult]:
        """Return the coroutine behind `run`; `watch` is told every instruction as it begins."""
        milestones = milestones or {}
        self._check(program, milestones)
        clock = clock_of(self._state.device) if record or record_memory else None
        recorder = Recorder(self.rank, clock, held_bytes=self._saved_bytes if record_memory else None)
        self._offloads_some = bool(program.traffic.offloads)
        self._notes_slices = record_memory or self._offloads_some
        passed = self._begin(program, job, recorder, most_messages)
        parts = RankParts(
            self.stages,
            self._offloads,
            self._slices,
            lambda stage, microbatch: self._load(stage, microbatch, job),
            self.versions,
        )
        results = self._flight.results(passed)
        course = _Course(job, recorder, watch or Unwatched(), results, parts, milestones, leave_sums)
        if not (yield from self._follow(program.ranks[self.rank], course)):
            yield from self._exchange.give_up(left_over(program)[self.rank])
            yield from self._follow((Rollback(),), course)
            del self._begun[id(program)]  # its backward has not run
            return ProgramResult({}, recorder.timeline(), given_up=True)
        yield from self._exchange.finish()
        self._offloads.finish()
        if not (program.training and program.synchronise):  # else before the step
            yield from self._finish_state(replicas=program.training or job.is_skipped)
        self._flight.end(program)
        collected = {name: tuple(pieces) for name, pieces in course.results.items()}
        return ProgramResult(collected, recorder.timeline(), recorder.memory())

    def _follow(self, line: Sequence[Instruction], course: _Course) -> Walk[bool]:
        """Run instructions one after another; return whether all were run, or the program was left at a milestone."""
        recorder = course.recorder
        for instruction in line:
            course.watch.at(instruction, pending=self._exchange.is_under_way or self._gradients.is_under_way)
            started = recorder.mark()
            match instruction:
                case Recv():
                    self._exchange.receive(instruction)
                case Compute():
                    yield from self._exchange.collect(instruction)
                    if self._offloads_some:
                        yield from self._offloads.collect(instruction)
                    started = recorder.mark()
                    self._compute(instruction, course.job, course.results)
                    recorder.add(instruction, started)
                    recorder.note_memory()
                    self._exchange.hand_over(instruction)
                    self._gradients.computed()
                case AnyCompute():
                    self._join(instruction, course.job)
                    recorder.add(instruction, started)
                    recorder.note_memory()
                case Send():
                    self._exchange.send(instruction)
                    recorder.add(instruction, started)
                    recorder.note_memory()
                case Reduce():
                    self._gradients.start(instruction)
                case Step():
                    yield from self._finish_batch(course)
                case Head():
                    yield from self._run_head(instruction, course)
                    recorder.add(instruction, started)
                    recorder.note_memory()
                case Milestone():
                    goes_on = yield from milestone_handler(course.milestones, instruction)(course.results)
                    recorder.add(instruction, started)
                    if not goes_on:
                        return False
                case OwnWork():
                    if (waits := handler_of(instruction)(course.parts, instruction)) is not None:
                        yield from waits
                    effects = effects_of(instruction)
                    if effects.resource in (None, "compute"):  # copies are recorded when they have run
                        recorder.add(instruction, started)
                    if effects.bytes or effects.ends or effects.resource is not None:
                        recorder.note_memory()
                case _:
                    assert_never(instruction)
        return True

    def _begin(
        self, program: VerifiedProgram, job: BatchInput, recorder: Recorder, most_messages: int | None
    ) -> int | None:
        """Forget what an earlier program has left, but for forwards in flight; return how many micro-batches passed."""
        passed = self._flight.begin(program)
        self._slices.clear()
        self._parts.clear()
        self._transport.begin(is_first=id(program) not in self._begun)
        self._begun[id(program)] = program
        ahead = None if program.seam is None else Ahead(job.step, program.batch, passed)
        self._exchange.begin(program, recorder, most_messages=most_messages, ahead=ahead)
        self.versions.begin(program, job)
        self._gradients.begin(recorder)
        self._offloads.begin(recorder)
        return passed

    def _saved_bytes(self) -> int:
        """Return what the stages of this rank keep for I and W; memory that several share counts once."""
        storages: dict[int, int] = {}
        for stage in self.stages.values():
            storages |= stage.saved_storages(self._slices)
        return sum(storages.values())

    def _check(self, program: VerifiedProgram, milestones: MilestoneHandlers) -> None:
        if not isinstance(program, VerifiedProgram):
            raise ProgramError(
                f"Rank {self.rank} was given a {type(program).__name__}; only what schedule.verify returned is run."
            )
        if program.layout != self.layout:
            raise ProgramError(f"The program is for {program.layout}, this executor for {self.layout}.")
        if self._transport.launches not in ("on host", program.launches):
            raise ProgramError(
                f'Rank {self.rank} was given a program that is proved for launches "{program.launches}"; its transport '
                f'launches receives "{self._transport.launches}". Give that to `verify`.'
            )
        if program is not self._checked:
            line = program.ranks[self.rank]
            for work in line:
                if isinstance(work, OwnWork):
                    handler_of(work)  # which it must have, before anything runs
            has_head = any(stage.program.head is not None for stage in self.stages.values())
            if (Head() in line) != has_head:
                where = "has no HEAD, but its stages have one" if has_head else "has HEAD, but its stages have none"
                raise ProgramError(f"The program of rank {self.rank} {where}; it was lowered for another split.")
            self._milestones = [x for x in line if isinstance(x, Milestone) and not isinstance(x, Head)]
            if any(x.effects.leaves for x in self._milestones):
                self._milestones.append(Rollback())
            self._checked = program
        for passed in self._milestones:
            milestone_handler(milestones, passed)

    def _load(self, number: int, microbatch: int, job: BatchInput) -> None:
        stage = self.stages[number]
        samples = self._exchange.local(number, microbatch)
        job, place = job.of(microbatch)
        first = job.offsets[place] + samples.start
        count = len(samples)
        leaves = {index: _leaf(job, index, first=first, count=count) for index in {*stage.program.leaves.values()}}
        stage.load(microbatch, leaves)
        if self._notes_slices:
            self._slices[microbatch] |= slices_of(leaves.values())

    def _compute(self, compute: Compute, job: BatchInput, results: dict[str, list[ResultSlice]]) -> None:
        stage = self.stages[compute.stage]
        if compute.kind == "F" and (buffers := job.of(compute.microbatch)[0].buffers):
            stage.hold_buffers(compute.microbatch, buffers)
        try:
            stage.compute(compute.kind, compute.microbatch, self._slice(compute, job))
        except Exception as error:
            raise _named(error, self.rank, compute) from error
        if compute.kind == "F":
            samples = self._exchange.local(compute.stage, compute.microbatch)
            for name, content in stage.results(compute.microbatch).items():
                self._flight.put(results, name, ResultSlice(compute.microbatch, samples, content))

    def _run_head(self, head: Head, course: _Course) -> Walk[None]:
        """Run the head of the last stage; what it says of the batch are results of this rank."""
        job = course.job
        samples = self._exchange.batch_samples
        whole = Slice(samples, RandomKey(job.seed, job.step, -1, 0, samples), job.weight, job.weight)
        try:
            results = yield from self._heads.run(self._exchange.sizes, whole)
        except Exception as error:
            raise _named(error, self.rank, head) from error
        for name, piece in results.items():
            self._flight.put(course.results, name, piece)

    def _join(self, joined: AnyCompute, job: BatchInput) -> None:
        try:
            self.stages[joined.stage].join(joined.microbatches, self._slice(joined, job))
        except Exception as error:
            raise _named(error, self.rank, joined) from error

    def _slice(self, compute: AnyCompute, job: BatchInput) -> Slice:
        """Return the samples of a compute; a joined W draws no random numbers, so its key does not matter."""
        where = compute.stage, compute.microbatches
        if where not in self._parts:
            self._parts[where] = self._part(*where, job)
        return self._parts[where]

    def _part(self, stage: int, microbatches: tuple[int, ...], job: BatchInput) -> Slice:
        parts = [self._exchange.local(stage, microbatch) for microbatch in microbatches]
        samples = sum(map(len, parts))
        job, place = job.of(microbatches[0])
        total = job.samples or self._exchange.batch_samples
        key = RandomKey(job.seed, job.step, place, parts[0].start, total)
        return Slice(samples, key, samples / total * job.weight, job.weight)

    def land(self, step: Callable[[], None], *, among: Iterable[torch.Tensor], wait: Callable[[Wait], None]) -> None:
        """Wait for the sums that a run has left; `step` is called whenever some parameters have their gradients.

        Args:
            step: steps the parameters that have gradients.
            among: all that may have some.
            wait: waits for a handle, with a deadline.
        """
        drive(self._gradients.land(step, among=among), wait=wait)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Return the forwards of each stage that the last round ran beyond its batch; () if none are in flight."""
        return self._flight.leaves

    def give_up_flight(self, *, wait: Callable[[Wait], None]) -> None:
        """Forget forwards of batches that have not had their turn: the next round begins with none.

        Args:
            wait: waits for a handle, with a deadline.
        """
        drive(self._exchange.give_up_flight(), wait=wait)
        self._flight.forget()
        self.versions.forget()

    def _finish_batch(self, course: _Course) -> Walk[None]:
        yield from self._exchange.finish_sends()
        yield from self._gradients.finish(leave=course.leaves_sums)
        yield from self._finish_state(replicas=True)
        yield Wait(self._transport.reached(), Step())  # else it could be queued behind a sum that fails
        course.watch.raise_failure()
        started = course.recorder.mark()
        self.versions.before_step()
        try:
            self._step()
        except Exception as error:
            raise _named(error, self.rank, Step()) from error
        course.recorder.add(Step(), started)

    def _finish_state(self, *, replicas: bool) -> Walk[None]:
        """Write the state that changes once per batch; make what a batch has changed equal on all replicas if asked."""
        for stage in self.stages.values():
            stage.finish()
        if replicas:
            yield from self._gradients.synchronise_buffers(self._exchange.sizes)


def run_together(
    executors: Sequence[Executor],
    program: VerifiedProgram,
    jobs: Sequence[BatchInput],
    *,
    record: bool = False,
    record_memory: bool = False,
) -> list[ProgramResult]:
    """Run a program on all ranks in this thread, over a local transport; one executor and one job per rank."""
    walks = [
        executor.walk(program, job, record=record, record_memory=record_memory)
        for executor, job in zip(executors, jobs, strict=True)
    ]
    return drive_together(walks)


def _leaf(job: BatchInput, index: int, *, first: int, count: int) -> Content:
    """Return `count` samples of a leaf from sample `first` on, or the whole leaf if it is not cut."""
    leaf = job.leaves[index]
    if leaf is None:
        raise BatchError(f"Leaf {index} of the batch is read by a stage of this rank, but was not loaded here.")
    if not job.cut[index]:
        return leaf
    dim = job.batch_dim
    if not isinstance(leaf, torch.Tensor) or leaf.ndim <= dim or leaf.shape[dim] < first + count:
        found = list(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf
        raise BatchError(
            f"Leaf {index} of the batch is {found}; samples {first} to {first + count} along dimension {dim} were "
            "expected. All leaves that are cut must have as many samples as the batch."
        )
    return leaf.narrow(dim, first, count)


def _named(error: Exception, rank: int, instruction: Instruction) -> Exception:
    """Return an error that says where another has happened."""
    where = f"Rank {rank} failed at {instruction}"
    if is_out_of_memory(error):
        return out_of_memory(where, error)
    return InstructionError(f"{where}: {type(error).__name__}: {error}")
