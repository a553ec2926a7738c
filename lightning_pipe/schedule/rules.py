"""Rules of data flow: what must be there before a compute runs, and who gets what it makes.

The answer is a pure function of the compute's identity, the rank, and the frame of the program (layout, sizes and
traffic); it is stated here only. Lowering places instructions by it and `verify` demands them by it.

    compute | needs on the same rank                    | needs received              | gives
    F(s, m) | Load(s, m) if s reads the batch           | every F edge's values       | its values on every F edge
    I(s, m) | F(s, m)                                   | every B edge's gradients    | its gradients on every B edge
    W(s, m) | I(s, m)                                   |                             |
    B(s, m) | as I; counts as I followed by W           | as I                        | as I
    joined  | as W(s, m) of each of its micro-batches   |                             |

In a round (`Seam`) this holds for the computes of the round: what computes of earlier rounds made is there. A message
is sent and received in the round that makes it, whichever round takes it.

A replica needs exactly the samples that it computes, so an edge between stages with unequal replicas is one message per
overlapping pair (producer replica, consumer replica). Where both are the same rank there is no message: the producing
compute must come earlier on that rank, and what it hands over belongs to the consumer from then on.

Legend: s stage, m micro-batch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from lightning_pipe.core.effects import OWN_WORK, OwnWork
from lightning_pipe.core.milestones import Milestone, milestone_effects, ranks_at
from lightning_pipe.core.program import (
    AnyCompute,
    Bucket,
    Compute,
    ComputeKind,
    CopyingOrder,
    Layout,
    Load,
    Message,
    Pass,
    Program,
    Recv,
    Samples,
    Seam,
    Send,
    Traffic,
)
from lightning_pipe.core.versions import Pin, PinOlder

HALVES: tuple[ComputeKind, ...] = ("I", "W")  # of B
PRODUCER: dict[Pass, ComputeKind] = {"F": "F", "B": "I"}

Peers: TypeAlias = dict[int, tuple[tuple[int, Samples], ...]]  # by rank: the other rank and the samples that cross


@dataclass(frozen=True)
class ComputeNeeds:
    """What one compute needs.

    Attributes:
        loads: loads of the same stage and micro-batch (one or none).
        computes: computes that come earlier on the same rank.
        receives: receives posted earlier on the same rank; the compute waits until they have arrived.
    """

    loads: tuple[Load, ...]
    computes: tuple[Compute, ...]
    receives: tuple[Recv, ...]


class Dataflow:
    """Dependencies of the computes under one layout, sizes and traffic."""

    def __init__(self, layout: Layout, *, sizes: tuple[int, ...], traffic: Traffic, seam: Seam | None = None) -> None:
        self._layout, self._seam = layout, seam
        self._sizes = sizes
        self._loads = frozenset(traffic.loads)
        self._replica = {(s, r): i for s, ranks in enumerate(layout.stages) for i, r in enumerate(ranks)}
        self._sources: dict[tuple[Pass, int], list[int]] = defaultdict(list)
        self._targets: dict[tuple[Pass, int], list[int]] = defaultdict(list)
        self._turns = {(edge.source, edge.target): _turns(layout, edge.source, edge.target) for edge in traffic.edges}
        for edge in traffic.edges:
            self._sources[edge.direction, edge.target].append(edge.source)
            self._targets[edge.direction, edge.source].append(edge.target)
        self._exchanges: dict[tuple[int, int, int, int], tuple[Peers, Peers]] = {}

    @classmethod
    def of(cls, program: Program) -> Dataflow:
        """Return the dependencies that hold in a program."""
        return cls(program.layout, sizes=program.sizes, traffic=program.traffic, seam=program.seam)

    def samples(self, stage: int, *, rank: int, microbatch: int) -> Samples:
        """Return the samples of a micro-batch that a rank computes in a stage; none if it does not hold the stage."""
        replica = self._replica.get((stage, rank))
        if replica is None:
            return Samples(0, 0)
        return self._layout.samples(stage, replica, microbatch, self._sizes[microbatch])

    def count(self, compute: AnyCompute, *, rank: int) -> int:
        """Return the number of samples that a compute has on a rank, over all of its micro-batches."""
        return sum(len(self.samples(compute.stage, rank=rank, microbatch=m)) for m in compute.microbatches)

    def needs(self, compute: Compute, *, rank: int) -> ComputeNeeds:
        """Return what a compute needs on a rank."""
        stage, microbatch = compute.stage, compute.microbatch
        match compute.kind:
            case "F":
                return self._with_inputs("F", compute, rank, loads=self.loads(compute))
            case "I" | "B":
                forward = Compute(stage, "F", microbatch)
                return self._with_inputs("B", compute, rank, computes=(forward,) if self._runs(forward) else ())
            case "W":
                return ComputeNeeds((), (Compute(stage, "I", microbatch),), ())

    def loads(self, compute: Compute) -> tuple[Load, ...]:
        """Return the load that a compute needs, if it needs one."""
        is_loaded = compute.kind == "F" and compute.stage in self._loads
        return (Load(compute.stage, compute.microbatch),) if is_loaded else ()

    def _with_inputs(
        self,
        direction: Pass,
        compute: Compute,
        rank: int,
        *,
        loads: tuple[Load, ...] = (),
        computes: tuple[Compute, ...] = (),
    ) -> ComputeNeeds:
        stage, microbatch, receives = compute.stage, compute.microbatch, []
        for source in self._sources.get((direction, stage), ()):
            if not self._runs(Compute(source, PRODUCER[direction], microbatch)):
                continue  # it arrived in an earlier round
            _, incoming = self._exchange(source, stage, microbatch)
            for sender, samples in incoming.get(rank, ()):
                if sender == rank:
                    computes = (*computes, Compute(source, PRODUCER[direction], microbatch))
                else:
                    receives.append(Recv(Message(direction, source, stage, microbatch, samples), sender))
        return ComputeNeeds(loads, computes, tuple(receives))

    def _runs(self, compute: Compute) -> bool:
        """Return whether a compute belongs to this round."""
        return self._seam is None or self._seam.runs(compute.stage, compute.kind, compute.microbatch)

    def awaited_later(self, *, rank: int) -> tuple[Recv, ...]:
        """Return the receives of this round whose messages a later round takes."""
        if self._seam is None:
            return ()
        return tuple(
            receive
            for stage, ranks in enumerate(self._layout.stages)
            for m in range(self._seam.batch + self._seam.leaves[stage], len(self._sizes) if rank in ranks else 0)
            for receive in self.needs(Compute(stage, "F", m), rank=rank).receives
        )

    def gives(self, compute: Compute, *, rank: int) -> tuple[Send, ...]:
        """Return the sends that carry what a compute makes to the ranks that need it."""
        direction = compute.direction
        if direction is None:
            return ()
        stage, microbatch = compute.stage, compute.microbatch
        return tuple(
            Send(Message(direction, stage, target, microbatch, samples), receiver)
            for target in self._targets.get((direction, stage), ())
            for receiver, samples in self._exchange(stage, target, microbatch)[0].get(rank, ())
            if receiver != rank
        )

    def _exchange(self, source: int, target: int, microbatch: int) -> tuple[Peers, Peers]:
        """Return who sends which samples to whom between two stages: by sender, and by receiver."""
        size = self._sizes[microbatch]
        turn = microbatch % self._turns[source, target]
        key = (source, target, turn, size)
        if key not in self._exchanges:
            senders, receivers = self._layout.stages[source], self._layout.stages[target]
            made = [self._layout.samples(source, i, turn, size) for i in range(len(senders))]
            taken = [self._layout.samples(target, j, turn, size) for j in range(len(receivers))]
            pairs = [
                (sender, receiver, ours & theirs)
                for sender, ours in zip(senders, made, strict=True)
                for receiver, theirs in zip(receivers, taken, strict=True)
                if ours.start < theirs.stop and theirs.start < ours.stop  # for most pairs they are far apart
            ]
            self._exchanges[key] = (
                _grouped((sender, receiver, samples) for sender, receiver, samples in pairs if samples),
                _grouped((receiver, sender, samples) for sender, receiver, samples in pairs if samples),
            )
        return self._exchanges[key]


def _turns(layout: Layout, source: int, target: int) -> int:
    """Return after how many micro-batches an exchange is the same again: whole ones go round the replicas."""
    if layout.whole.isdisjoint((source, target)):
        return 1
    return math.lcm(len(layout.stages[source]), len(layout.stages[target]))


def _grouped(triples: Iterable[tuple[int, int, Samples]]) -> Peers:
    groups: dict[int, list[tuple[int, Samples]]] = defaultdict(list)
    for rank, peer, samples in triples:
        groups[rank].append((peer, samples))
    return {rank: tuple(peers) for rank, peers in groups.items()}


def halves(compute: AnyCompute) -> Iterator[Compute]:
    """Yield the computes that one counts as: B is I, then W; a joined one that of each micro-batch."""
    kinds = HALVES if compute.kind == "B" else (compute.kind,)
    yield from (Compute(compute.stage, kind, microbatch) for microbatch in compute.microbatches for kind in kinds)


def is_forwards_first(order: CopyingOrder) -> bool:
    """Return whether every rank runs all of its forwards before its first backward.

    So the last stage does, and no rank waits for gradients that wait for a forward of its own.
    """
    lines = ([x.kind for x in line if isinstance(x, Compute)] for line in order)
    return all("F" not in kinds[kinds.count("F") :] for kinds in lines)


def forwards_first(order: CopyingOrder) -> CopyingOrder:
    """Return an order with the forwards of every rank before all else, which stays in its order."""
    return tuple(tuple(sorted(line, key=lambda x: not (isinstance(x, Compute) and x.kind == "F"))) for line in order)


def stands_last(milestone: Milestone, program: Program) -> bool:
    """Return whether a milestone stands behind all sums of its ranks, and not before them.

    So does one at which ranks await each other, which holds nothing up, and where one of them has other stages too:
    their backwards may be what another one needs for its forwards. All come to it behind the same sums in either case,
    since a device carries sums, and what they give each other, in one order.
    """
    effects, ranks = milestone_effects(milestone), ranks_at(milestone, program)
    if effects.stages is None or effects.holds(program) or len(ranks) < 2:
        return False
    held = [stage for stage, replicas in enumerate(program.layout.stages) if ranks.intersection(replicas)]
    return len(held) > len(effects.stages(program))


def version_work(program: Program, compute: Compute) -> tuple[OwnWork, ...]:
    """Return the own work that chooses which weights a compute of a round reads, where its seam asks for any.

    Of PIN and PINOLDER one stands before a forward: PINOLDER where the batch of its micro-batch began in the round
    before, so that all forwards of a batch read one version (PipeDream-2BW).
    """
    seam = program.seam
    if seam is None:
        return ()
    codes = [code for code in seam.work if compute.kind in OWN_WORK[code].effects.before]
    if PinOlder.code in codes:
        codes.remove(PinOlder.code if seam.is_first or compute.microbatch >= seam.batch else Pin.code)
    return tuple(OWN_WORK[code](compute.stage, compute.microbatch) for code in codes)


def holders(bucket: Bucket, *, layout: Layout) -> frozenset[int]:
    """Return the ranks that hold parameters of a bucket."""
    return frozenset(rank for stage in bucket.stages for rank in layout.stages[stage])
