"""Verification of a program: an executable specification of every law that lowering must keep.

Laws (the name in the error text is the one in quotes):

    "once"        every pass of every stage and micro-batch runs once on every rank with samples of it, and no other:
                  F, then either I and W or B; F alone in a forward-only program; a joined W is that of each of its
                  micro-batches
    "join"        W is joined for two or more micro-batches of a stage that can join them
    "inputs"      a compute runs after its load, after the receives it waits for are posted, and after the computes of
                  the same rank that it needs (F before I before W; local hand-over)
    "messages"    exactly the messages that traffic and layout demand are posted, each once, sends after their compute
    "channel"     sends and receives between two ranks are in the same order
    own work      (`core.effects`, each under a law of its own) once for every micro-batch of the stages that need
                  it, or at most once where none does; after what it follows, before the computes that wait for it
        "offload"     after F, then before I (or B); of stages that offload, in no forward-only program; a micro-batch
                      may do without all of it
        "free"        after the last compute and the last send of its stage and micro-batch
        "versions"    what chooses the weights of a compute stands before it, as the round's seam asks
    "gradients"   every rank that holds a shared bucket reduces it once, after its last W or along with it, in ascending
                  bucket order; along with a W that no compute of the rank comes before, of the bucket's only stage
    milestones    (`core.milestones`, each under a law of its own) once on every rank or on none, or on all ranks of
                  the stages that need them; after what they follow, before what they precede
        "confirm"     before the first backward and the first sum
        "publish"     after the last forward, and after CONFIRM and HEAD where they are
        "head"        on every rank of a last stage that has a head: after its forwards, before its backwards where the
                      head holds them; before all sums, or behind them (`rules.stands_last`)
        "rollback"    in no program: it is what follows one that was left
    rounds        where a program has a seam: all of this for the computes of its round, of which forwards of later
                  batches are some; messages that a later round takes are received too. What joins one round to the
                  next is `schedule.verification.rounds`
    "step"        the optimizer steps once, last, on every rank of a program that synchronises, and in no other
    "deadlock"    no circle of ranks that wait for each other (`schedule.verification.deadlock`)
    "launch"      the same where a device carries messages, and every launch may wait for all launched receives

What the rank-local laws say of a rank depends on that rank's list only, so they are checked one rank at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import NoReturn, TypeVar, cast

from typing_extensions import assert_never

from lightning_pipe.core.effects import OWN_WORK, OwnWork, effects_of
from lightning_pipe.core.milestones import MILESTONES, Milestone, milestone_effects
from lightning_pipe.core.program import (
    AnyCompute,
    Compute,
    ComputeKind,
    Instruction,
    Launches,
    Program,
    Recv,
    Reduce,
    Send,
    Step,
    VerifiedProgram,
)
from lightning_pipe.errors import ProgramError
from lightning_pipe.schedule.rules import ComputeNeeds, Dataflow, halves, holders, stands_last, version_work
from lightning_pipe.schedule.verification.deadlock import check_progress
from lightning_pipe.schedule.verification.well_formed import check_frame

T = TypeVar("T")


def verify(program: Program, *, launches: Launches = "on host") -> VerifiedProgram:
    """Prove a program.

    Args:
        program: to be proved.
        launches: how the transport that will run it launches receives (`VerifiedProgram`).

    Returns:
        The same program as the type that simulator and executor accept.

    Raises:
        ProgramError: naming rank, position, instruction and the law that is broken.
    """
    check_frame(program)
    flow, shared = Dataflow.of(program), _shared_buckets(program)
    for rank in range(len(program.ranks)):
        _RankCheck(program, flow, shared.get(rank, frozenset()), rank).run()
    _check_channels(program)
    _check_milestones(program)
    check_progress(program)
    if launches != "on host":
        check_progress(program, launches=launches)
    return VerifiedProgram(**{field.name: getattr(program, field.name) for field in fields(Program)}, launches=launches)


def _shared_buckets(program: Program) -> dict[int, frozenset[int]]:
    """Return by rank the buckets that it shares with others."""
    shared: dict[int, set[int]] = defaultdict(set)
    for number, bucket in enumerate(program.traffic.buckets):
        sharers = holders(bucket, layout=program.layout)
        for rank in sharers if len(sharers) > 1 else ():
            shared[rank].add(number)
    return {rank: frozenset(numbers) for rank, numbers in shared.items()}


@dataclass
class _Demand:
    """What the laws demand of one rank; fulfilled demands are removed."""

    computes: set[Compute] = field(default_factory=set)  # with B as I and W
    needs: dict[Compute, ComputeNeeds] = field(default_factory=dict)  # of these
    receives: set[Recv] = field(default_factory=set)
    own_work: set[OwnWork] = field(default_factory=set)
    gates: dict[Compute, list[OwnWork]] = field(default_factory=dict)  # demanded own work that computes wait for
    reductions: set[int] = field(default_factory=set)
    milestones: dict[str, tuple[int, ...]] = field(default_factory=dict)  # by code: stages of the rank that need it
    open_work: dict[tuple[int, int], int] = field(default_factory=dict)  # computes and sends left before Free


class _RankCheck:
    """Walk the list of one rank and check the rank-local laws."""

    def __init__(self, program: Program, flow: Dataflow, shared: frozenset[int], rank: int) -> None:
        self._program = program
        self._flow = flow
        self._rank = rank
        self._line = program.ranks[rank]
        self._position = 0
        self._demand = self._demanded(shared)
        self._sendable: set[Send] = set()
        self._done: set[OwnWork] = set()
        self._passed: set[str | tuple[int, str]] = set()  # kinds of computes, alone and by stage; codes of milestones
        self._last_bucket = -1
        self._open_gradients = defaultdict(int, self._count_weight_gradients())
        self._along: Reduce | None = None  # the sum that goes along with the next compute

    def _demanded(self, shared: frozenset[int]) -> _Demand:
        program, demand = self._program, _Demand()
        kinds: tuple[ComputeKind, ...] = ("F", "I", "W") if program.training else ("F",)
        held = [s for s, ranks in enumerate(program.layout.stages) if self._rank in ranks]
        works = [(s, m) for s in held for m in range(len(program.sizes))]
        needing = {kind: frozenset(_stages_needing(kind, program)) for kind in OWN_WORK.values()}
        there = {(effects_of(x).law, x.stage, x.microbatch) for x in self._line if isinstance(x, OwnWork)}
        for s, m in works:
            if not self._flow.samples(s, rank=self._rank, microbatch=m):
                continue
            computes = [Compute(s, kind, m) for kind in kinds if program.runs(s, kind, m)]
            if not computes:
                continue  # its message may arrive, and a later round takes it
            demand.computes.update(computes)
            demand.open_work[s, m] = len(computes)
            for kind in (kind for kind, stages in needing.items() if s in stages):
                if kind.effects.is_optional and (kind.effects.law, s, m) not in there:
                    continue
                if not program.runs(s, "F" if "F" in kind.effects.before else "W", m):
                    continue
                demand.own_work.add(work := kind(s, m))
                for waiting in kind.effects.before:
                    demand.gates.setdefault(Compute(s, cast(ComputeKind, waiting), m), []).append(work)
            for compute in computes:
                if choice := version_work(program, compute):
                    demand.own_work.update(choice)
                    demand.gates.setdefault(compute, []).extend(choice)
                needs = demand.needs[compute] = self._flow.needs(compute, rank=self._rank)
                demand.receives.update(needs.receives)
        demand.receives.update(self._flow.awaited_later(rank=self._rank))
        for code, milestone in MILESTONES.items():
            needed = () if (stages := milestone.effects.stages) is None else stages(program)
            if own := tuple(s for s in needed if s in held):
                demand.milestones[code] = own
                for place in demand.open_work:
                    demand.open_work[place] += place[0] in own
        if program.training and program.synchronise:
            demand.reductions = set(shared)
        return demand

    def _count_weight_gradients(self) -> dict[int, int]:
        counts: dict[int, int] = defaultdict(int)
        for compute in self._demand.computes:
            counts[compute.stage] += compute.kind == "W"
        return counts

    def run(self) -> None:
        for position, instruction in enumerate(self._line):
            self._position = position
            match instruction:
                case Compute():
                    self._compute(instruction)
                case AnyCompute():
                    self._joined(instruction)
                case Send():
                    self._send(instruction)
                case Recv():
                    self._receive(instruction)
                case Reduce():
                    self._reduce(instruction)
                case Step():
                    self._step()
                case OwnWork():
                    self._own_work(instruction)
                case Milestone():
                    self._milestone(instruction)
                case _:
                    assert_never(instruction)
        self._nothing_left()

    def _compute(self, compute: Compute) -> None:
        left = self._demand.computes
        parts = tuple(halves(compute))
        if not left.issuperset(parts):
            self._refuse("once", self._why_not(compute))
        needs = self._demand.needs[parts[0]]
        for work in (work for half in parts for work in self._demand.gates.get(half, ())):
            if work in self._demand.own_work:
                self._refuse(work.effects.law, f"it needs {work} before it")
        for receive in needs.receives:
            if receive in self._demand.receives:
                self._refuse("inputs", f"it waits for {receive}, which is not posted before it")
        for earlier in needs.computes:
            if earlier in left:
                self._refuse("inputs", f"it needs {earlier} before it on this rank")
        left.difference_update(parts)
        self._passed |= {compute.kind, (compute.stage, compute.kind)}
        sends = self._flow.gives(compute, rank=self._rank)
        self._sendable.update(sends)
        self._demand.open_work[compute.stage, compute.microbatch] += len(sends) - len(parts)
        self._open_gradients[compute.stage] -= compute.kind in ("W", "B")
        if self._along is not None:
            if compute.kind != "W" or (compute.stage,) != self._program.traffic.buckets[self._along.bucket].stages:
                self._refuse("gradients", f"{self._along} before it goes along with the last W of its stage")
            self._along = None

    def _joined(self, joined: AnyCompute) -> None:
        if joined.stage not in self._program.traffic.joinable:
            self._refuse(
                "join", f"W of stage {joined.stage} cannot be joined; joinable: {self._program.traffic.joinable}"
            )
        if len(joined.microbatches) < 2:
            self._refuse("join", f"it has {len(joined.microbatches)} micro-batches; a single W is written alone")
        for compute in halves(joined):
            self._compute(compute)

    def _why_not(self, compute: Compute) -> str:
        if compute.kind != "F" and not self._program.training:
            return "a forward-only program has F computes only"
        if self._rank not in self._program.layout.stages[compute.stage]:
            return f"stage {compute.stage} belongs to ranks {self._program.layout.stages[compute.stage]}"
        if not self._flow.samples(compute.stage, rank=self._rank, microbatch=compute.microbatch):
            return f"this rank has no samples of micro-batch {compute.microbatch} in stage {compute.stage}"
        if not self._program.runs(compute.stage, compute.kind, compute.microbatch):
            return "it belongs to another round"
        return "it (or a part of it) has run before"

    def _send(self, send: Send) -> None:
        if not _taken(self._sendable, send):
            self._refuse("messages", "it is sent twice, before its compute, or nobody needs it")
        self._demand.open_work[send.message.source, send.message.microbatch] -= 1

    def _receive(self, receive: Recv) -> None:
        if not _taken(self._demand.receives, receive):
            self._refuse("messages", "it is received twice, or no compute of this rank needs it")

    def _reduce(self, reduce: Reduce) -> None:
        if reduce.bucket not in self._demand.reductions:
            self._refuse("gradients", "it is reduced twice, or this rank shares no such bucket, or nothing is reduced")
        if reduce.bucket < self._last_bucket:
            self._refuse("gradients", f"it comes after bucket {self._last_bucket}; ranks post buckets in rising order")
        stages = self._program.traffic.buckets[reduce.bucket].stages
        if self._along is not None:
            self._refuse("gradients", f"{self._along} before it goes along with the W that comes next")
        if reduce.along and (len(stages) > 1 or self._open_gradients[stages[0]] != 1):
            self._refuse("gradients", "it goes along with the last W of a bucket's only stage, which comes next")
        for stage in stages:
            if self._open_gradients[stage] and not reduce.along:
                self._refuse("gradients", f"{self._open_gradients[stage]} W of stage {stage} come after it")
        self._along = reduce if reduce.along else None
        self._demand.reductions.remove(reduce.bucket)
        self._last_bucket = reduce.bucket

    def _step(self) -> None:
        if not (self._program.training and self._program.synchronise):
            self._refuse("step", "this program does not synchronise, so the optimizer must not step")
        if self._position != len(self._line) - 1:
            self._refuse("step", "it is not the last instruction")

    def _own_work(self, work: OwnWork) -> None:
        effects, place = effects_of(work), (work.stage, work.microbatch)
        demanded = effects.stages is None or work in self._demand.own_work
        if not demanded or work in self._done or place not in self._demand.open_work:
            self._refuse(effects.law, f"it is {effects.verb} twice, or this rank {effects.demand}")
        for earlier in effects.after:
            if earlier in OWN_WORK:
                before: OwnWork | Compute = OWN_WORK[earlier](*place)
                is_there = before in self._done
            else:
                before = Compute(work.stage, cast(ComputeKind, earlier), work.microbatch)
                is_there = before not in self._demand.computes
            if not is_there:
                self._refuse(effects.law, f"it needs {before} before it")
        for later in effects.before:
            if (compute := Compute(work.stage, cast(ComputeKind, later), work.microbatch)) not in self._demand.computes:
                self._refuse(effects.law, f"it comes after {compute}, which waits for it")
        if effects.ends and self._demand.open_work[place]:
            self._refuse(effects.law, f"not before it: {', '.join(self._open_work(*place))}")
        self._demand.own_work.discard(work)
        self._done.add(work)

    def _milestone(self, milestone: Milestone) -> None:
        effects = milestone_effects(milestone)
        if effects.in_abort:
            self._refuse(effects.law, "it follows a program that was left, and stands in none")
        if milestone.code in self._passed:
            self._refuse(effects.law, "it stands twice")
        batch, stages = self._program.batch, self._demand.milestones.pop(milestone.code, None)
        if effects.stages is not None and stages is None:
            self._refuse(effects.law, "no stage of this rank needs it")
        waiting = {x for x in self._demand.computes if stages is None or x.stage in stages}
        if early := sorted(x for x in waiting if x.kind in effects.follows and x.microbatch < batch):
            self._refuse(effects.law, f"{early[0]} comes after it")
        if missing := [str(x) for x in self._line if str(x) in effects.follows and str(x) not in self._passed]:
            self._refuse(effects.law, f"{missing[0]} comes after it")
        if effects.precedes and effects.holds(self._program):
            places = effects.precedes if stages is None else [(s, kind) for s in stages for kind in effects.precedes]
            if late := [place for place in places if place in self._passed]:
                what = late[0] if stages is None else f"{late[0][1]} of stage {late[0][0]}"
                self._refuse(effects.law, f"{what} of this rank comes before it")
        if stands_last(milestone, self._program):
            if self._demand.reductions:
                self._refuse(effects.law, f"{Reduce(min(self._demand.reductions))} comes after it")
        elif effects.precedes and self._last_bucket >= 0:
            self._refuse(effects.law, f"{Reduce(self._last_bucket)} comes before it")
        self._passed.add(milestone.code)
        for place in self._demand.open_work:
            self._demand.open_work[place] -= place[0] in (stages or ())

    def _open_work(self, *work: int) -> list[str]:
        """Name the computes and the sends of a stage and micro-batch that are missing so far."""
        computes = sorted(x for x in self._demand.computes if (x.stage, x.microbatch) == work)
        sends = sorted(x for x in self._sendable if (x.message.source, x.message.microbatch) == work)
        milestones = [code for code, stages in self._demand.milestones.items() if work[0] in stages]
        return [*map(str, computes), *map(str, sends), *milestones]

    def _nothing_left(self) -> None:
        demand = self._demand
        self._refuse_left("once", sorted(demand.computes))
        for code in demand.milestones:
            self._refuse_left(MILESTONES[code].effects.law, [MILESTONES[code]()])
        for code, kind in OWN_WORK.items():  # Free covers sends: it comes after all of them
            self._refuse_left(kind.effects.law, sorted(work for work in demand.own_work if work.code == code))
        self._refuse_left("gradients", [Reduce(bucket) for bucket in sorted(demand.reductions)])
        steps = self._program.training and self._program.synchronise
        if steps and not (self._line and isinstance(self._line[-1], Step)):
            self._refuse_left("step", [Step()])

    def _refuse_left(self, law: str, missing: Sequence[Instruction]) -> None:
        if missing:
            names = ", ".join(map(str, missing[:4])) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
            raise ProgramError(f'rank {self._rank}, at its end: law "{law}": missing {names}')

    def _refuse(self, law: str, why: str) -> NoReturn:
        instruction = self._line[self._position]
        raise ProgramError(f'rank {self._rank}, position {self._position}, {instruction}: law "{law}": {why}')


def _stages_needing(kind: type[OwnWork], program: Program) -> Iterable[int]:
    """Return the stages of which every micro-batch needs own work of a kind."""
    return () if kind.effects.stages is None else kind.effects.stages(program)


def _taken(demands: set[T], one: T) -> bool:
    """Remove one of the demands; return whether it was there."""
    before = len(demands)
    demands.discard(one)
    return len(demands) < before


def _check_channels(program: Program) -> None:
    """Check that sends and receives of every pair of ranks are the same messages in the same order."""
    posted: dict[tuple[int, int], tuple[list[tuple[int, Send]], list[tuple[int, Recv]]]] = defaultdict(lambda: ([], []))
    for rank, line in enumerate(program.ranks):
        for position, instruction in enumerate(line):
            if isinstance(instruction, Send):
                posted[rank, instruction.peer][0].append((position, instruction))
            elif isinstance(instruction, Recv):
                posted[instruction.peer, rank][1].append((position, instruction))
    for (sender, receiver), (sends, receives) in posted.items():
        for number, (sent, received) in enumerate(zip_longest(sends, receives)):
            if sent is None or received is None or sent[1].message != received[1].message:
                raise ProgramError(
                    f'channel from rank {sender} to rank {receiver}: law "channel": message {number} is sent by '
                    f"{_posted(sender, sent)} but received by {_posted(receiver, received)}"
                )


def _check_milestones(program: Program) -> None:
    """Check that every rank comes to the same milestones: whoever awaits others there must be awaited by them."""
    found = [{x for x in line if isinstance(x, Milestone) and x.effects.stages is None} for line in program.ranks]
    for rank, here in enumerate(found):
        for missing in sorted(set().union(*found) - here, key=str):
            raise ProgramError(f'rank {rank}, at its end: law "{missing.effects.law}": missing {missing}')


def _posted(rank: int, entry: tuple[int, Instruction] | None) -> str:
    return f"rank {rank}, position {entry[0]}, {entry[1]}" if entry else f"nothing on rank {rank}"
