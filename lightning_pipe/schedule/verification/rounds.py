"""Proof across rounds: what leaves a round enters the next, and computes read the versions that a policy promises.

Every round has been proved by itself (`verify`), for the forwards that its seam names. Here several are looked at
together, with micro-batches numbered through. It is an executable specification, independent of seams:

    "seam"      a round takes over what the round before left; the first takes over nothing, and the last leaves nothing
    "once"      every pass of every micro-batch runs once on every rank with samples of it
    "inputs"    what a compute waits for was received, or computed on its rank, in this round or an earlier one, and
                nothing is received that no compute takes
    "versions"  F, I and W of a micro-batch read one version of the weights, those of a batch do on every stage, or
                each pass of a batch does on a stage, if the policy promises it; so does a joined W; a rank never holds
                more versions than the policy says

A version is counted by the steps of the optimizer that its rank has made.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple, NoReturn

from lightning_pipe.core.effects import OwnWork
from lightning_pipe.core.program import (
    AnyCompute,
    Compute,
    ComputeKind,
    Recv,
    Step,
    VerifiedProgram,
)
from lightning_pipe.core.versions import Pin, PinEntry, PinOlder, Predict, PredictBack
from lightning_pipe.errors import ProgramError
from lightning_pipe.schedule.rules import Dataflow, halves
from lightning_pipe.schedule.weights import WeightPolicy


class Version(NamedTuple):
    """Weights that a compute reads: those after so many steps, or what they are predicted to be some steps later.

    A negative horizon stands for weights that are corrected towards older ones.
    """

    steps: int
    horizon: int = 0

    def __str__(self) -> str:
        return f"{self.steps}{self.horizon:+d}" if self.horizon else f"{self.steps}"


@dataclass(frozen=True)
class WeightRead:
    """Which weights a compute reads.

    Attributes:
        rank: that runs it.
        round: in which it runs.
        compute: with its micro-batch numbered through all rounds.
        version: that it reads.
    """

    rank: int
    round: int
    compute: Compute
    version: Version


def verify_rounds(rounds: Sequence[VerifiedProgram], policy: WeightPolicy) -> tuple[WeightRead, ...]:
    """Prove rounds that follow each other, from an empty pipeline to an empty pipeline.

    Args:
        rounds: their programs; a program may occur again.
        policy: what its promises are.

    Returns:
        What every compute reads, in the order of each rank.

    Raises:
        ProgramError: naming round, rank, instruction and the law that is broken.
    """
    _check_seams(rounds)
    reads: list[WeightRead] = []
    for rank in range(len(rounds[0].ranks)):
        reads += _RankWalk(rounds, rank, policy).run()
    _check_promise(rounds, reads, policy)
    return tuple(reads)


def _check_seams(rounds: Sequence[VerifiedProgram]) -> None:
    nothing = (0,) * len(rounds[0].layout.stages)
    left = nothing
    for number, program in enumerate(rounds):
        if program.seam is None or program.layout != rounds[0].layout:
            raise ProgramError(f'round {number}: law "seam": expected a round of layout {rounds[0].layout.stages}')
        if program.seam.enters != left:
            raise ProgramError(f'round {number}: law "seam": {program.seam.enters} enter, the round before left {left}')
        left = program.seam.leaves
    if left != nothing:
        raise ProgramError(f'round {len(rounds) - 1}: law "seam": it leaves {left}, and no round follows')


@dataclass
class _RankWalk:
    """The list of one rank through all rounds, with micro-batches numbered through."""

    rounds: Sequence[VerifiedProgram]
    rank: int
    policy: WeightPolicy
    steps: int = 0
    received: set[Recv] = field(default_factory=set)
    done: set[Compute] = field(default_factory=set)
    pinned: dict[tuple[int, int], Version] = field(default_factory=dict)  # stage, micro-batch
    predicted: dict[tuple[int, int, ComputeKind], Version] = field(default_factory=dict)
    batches: dict[tuple[int, int, ComputeKind], Version] = field(default_factory=dict)  # predicted once for a batch
    batch_of: Sequence[int] = ()
    number: int = 0
    keeps_older: bool = False
    entered: dict[int, int] = field(default_factory=dict)  # steps made when a micro-batch entered at stage 0

    def run(self) -> Iterator[WeightRead]:
        sizes, firsts = _numbered(self.rounds)
        self.batch_of = [number for number, program in enumerate(self.rounds) for _ in range(program.batch)]
        layout, traffic = self.rounds[0].layout, self.rounds[0].traffic
        flow = Dataflow(layout, sizes=sizes, traffic=traffic)
        self.keeps_older = any(isinstance(x, PinOlder) for program in self.rounds for x in program.ranks[self.rank])
        for program, first in zip(self.rounds, firsts, strict=True):
            self._note_entries(program, first)
            for instruction in program.ranks[self.rank]:
                match instruction:
                    case Recv(message, peer):
                        self.received.add(Recv(replace(message, microbatch=message.microbatch + first), peer))
                    case OwnWork(stage, microbatch):
                        self._choose(instruction, stage, microbatch + first)
                        if self.predicted:
                            self._check_live(program, first)
                    case AnyCompute():
                        parts = [replace(half, microbatch=half.microbatch + first) for half in halves(instruction)]
                        reads = [self._compute(part, flow) for part in parts]
                        if instruction.is_joined and len(versions := {read.version for read in reads}) > 1:
                            self._refuse("versions", f"{instruction} reads {' and '.join(map(str, sorted(versions)))}")
                        yield from reads
                    case Step():
                        self.steps += 1
            self._check_live(program, first)
            self.number += 1
        wanted = {
            Compute(stage, kind, m)
            for stage in range(len(layout.stages))
            for m in range(len(sizes))
            if flow.samples(stage, rank=self.rank, microbatch=m)
            for kind in ("F", "I", "W")
        }
        if missing := wanted - self.done:
            self._refuse("once", f"{min(missing)} runs in no round")
        if self.received:
            self._refuse("inputs", f"nobody takes {min(self.received)}")

    def _compute(self, compute: Compute, flow: Dataflow) -> WeightRead:
        stage, kind, microbatch = compute.stage, compute.kind, compute.microbatch
        if compute in self.done:
            self._refuse("once", f"{compute} runs again")
        needs = flow.needs(compute, rank=self.rank)
        for receive in needs.receives:
            if receive not in self.received:
                self._refuse("inputs", f"{compute} needs {receive} before it")
            self.received.remove(receive)
        for earlier in needs.computes:
            if earlier not in self.done:
                self._refuse("inputs", f"{compute} needs {earlier} before it")
        self.done.add(compute)
        moment = Version(self.steps)
        version = self.predicted.pop((stage, microbatch, kind), self.pinned.get((stage, microbatch), moment))
        if kind == "W":
            self.pinned.pop((stage, microbatch), None)
        return WeightRead(self.rank, self.number, compute, version)

    def _note_entries(self, program: VerifiedProgram, first: int) -> None:
        """Note what stage 0 has stepped when forwards of a round enter there; all ranks step together."""
        if program.seam is not None:
            entering = range(first + program.seam.enters[0], first + program.batch + program.seam.leaves[0])
            self.entered.update(dict.fromkeys(entering, self.steps))

    def _choose(self, work: OwnWork, stage: int, microbatch: int) -> None:
        match work:
            case Pin():
                self.pinned[stage, microbatch] = Version(self.steps)
            case PinOlder():
                self.pinned[stage, microbatch] = Version(max(0, self.steps - 1))
            case PinEntry():
                self.pinned[stage, microbatch] = Version(self.entered[microbatch])
            case Predict():
                self.predicted[stage, microbatch, "F"] = self._predicted(stage, microbatch, "F")
            case PredictBack():
                for kind in ("I", "W"):
                    self.predicted[stage, microbatch, kind] = self._predicted(stage, microbatch, "I")

    def _predicted(self, stage: int, microbatch: int, kind: ComputeKind) -> Version:
        program, policy = self.rounds[self.number], self.policy
        horizons = policy.horizons_of(stage, len(program.layout.stages), program.batch)
        version = Version(self.steps, horizons[kind != "F"])
        if not policy.predicts_once:
            return version
        batch = self.batch_of[microbatch]
        for key in [key for key in self.batches if key[0] == stage and key[1] != batch and key[2] == kind]:
            del self.batches[key]
        return self.batches.setdefault((stage, batch, kind), version)

    def _check_live(self, program: VerifiedProgram, first: int) -> None:
        """Check how many versions there are, once weights are chosen and once the optimizer has stepped."""
        live = {Version(self.steps), *self.pinned.values(), *self.predicted.values(), *self.batches.values()}
        if self.keeps_older:
            live.add(Version(self.steps - 1))
        for stage, ranks in enumerate(program.layout.stages):
            if self.rank in ranks:
                if self.policy.keeps_entries and program.seam is not None:
                    awaited = range(program.batch + program.seam.leaves[stage], program.batch + program.seam.leaves[0])
                    live |= {Version(self.entered[first + m]) for m in awaited}
                most = self.policy.lives(program.layout, program.batch)[stage]
                if len(live) > most:
                    self._refuse("versions", f"it holds {len(live)} versions, the policy says {most}")

    def _refuse(self, law: str, why: str) -> NoReturn:
        raise ProgramError(f'round {self.number}, rank {self.rank}: law "{law}": {why}')


def _numbered(rounds: Sequence[VerifiedProgram]) -> tuple[tuple[int, ...], list[int]]:
    """Return the sizes of all micro-batches, and the number of the first of each round."""
    firsts = [0, *accumulate(program.batch for program in rounds)]
    sizes = tuple(size for program in rounds for size in program.sizes[: program.batch])
    for number, (program, first) in enumerate(zip(rounds, firsts, strict=False)):
        if sizes[first : first + len(program.sizes)] != program.sizes:
            raise ProgramError(f'round {number}: law "seam": its micro-batches have other sizes than in the next')
    return sizes, firsts[:-1]


def _check_promise(rounds: Sequence[VerifiedProgram], reads: Sequence[WeightRead], policy: WeightPolicy) -> None:
    """Check that what should read one version reads one."""
    if not policy.promise:
        return
    _, firsts = _numbered(rounds)
    batch_of = {first + m: t for t, first in enumerate(firsts) for m in range(rounds[t].batch)}
    versions: dict[tuple[int, ...], dict[Version, WeightRead]] = defaultdict(dict)
    key: tuple[int, ...]
    for read in reads:
        m = read.compute.microbatch
        match policy.promise:
            case "micro-batch":
                key = (read.rank, read.compute.stage, m)
            case "micro-batch on all stages":
                key = (m,)
            case "pass":
                key = (read.rank, read.compute.stage, batch_of[m], int(read.compute.kind == "F"))
            case _:
                key = (batch_of[m],)
        versions[key].setdefault(read.version, read)
    for different in versions.values():
        if len(different) > 1:
            first, second, *_ = different.values()
            raise ProgramError(
                f'round {second.round}, rank {second.rank}: law "versions": {second.compute} reads version '
                f"{second.version}, but {first.compute} of rank {first.rank} reads {first.version}; the policy "
                f"promises one version for a {policy.promise}"
            )
