"""Program: one list of instructions per rank, and the instructions there are.

A program is one list of instructions per rank. An instruction is a frozen dataclass with only the fields it has; its
`str()` is the notation of torch.distributed.pipelining (`2F0`, `1SEND_F3`) where that exists, and
`lightning_pipe.schedule.formats.text.parse` is its inverse.

Legend: s stage, m micro-batch, r rank. Samples are counted within one micro-batch: `Samples(0, 2)` are its first two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

from lightning_pipe.core.effects import Effects, OwnWork, own_work
from lightning_pipe.core.milestones import Milestone

Pass = Literal["F", "B"]
ComputeKind = Literal["F", "B", "I", "W"]


@dataclass(frozen=True, order=True)
class Samples:
    """Half-open interval of the samples of one micro-batch."""

    start: int
    stop: int

    def __len__(self) -> int:
        return max(0, self.stop - self.start)

    def __and__(self, other: Samples) -> Samples:
        start = max(self.start, other.start)
        return Samples(start, max(start, min(self.stop, other.stop)))

    def __str__(self) -> str:
        return f"[{self.start}:{self.stop}]"


class AnyCompute:
    """A compute: one pass of one stage, on one micro-batch or on several at once."""

    if TYPE_CHECKING:  # fields of some computes, properties of others

        @property
        def stage(self) -> int:
            """Return its stage."""

        @property
        def kind(self) -> ComputeKind:
            """Return the pass, or the half of one, that it runs."""

        @property
        def direction(self) -> Pass | None:
            """Return the direction of the messages that it waits for and makes; W has none."""

        @property
        def microbatches(self) -> tuple[int, ...]:
            """Return the micro-batches that it runs, in their order."""

    @property
    def is_joined(self) -> bool:
        """Return whether it runs several micro-batches at once."""
        return len(self.microbatches) > 1


@dataclass(frozen=True, order=True)
class Compute(AnyCompute):
    """Run one pass of one stage on one micro-batch: F, I (input half of the backward), W (weight half), or B (both).

    F needs the stage's loaded or received values; I needs F and the received gradients; W needs I. B = I then W with
    the input gradient sent after I; only `Order` holds B where stages can be split, lowering replaces it by I and W.
    """

    stage: int
    kind: ComputeKind
    microbatch: int

    @property
    def direction(self) -> Pass | None:
        """Return the direction of the messages that it waits for and makes; W has none."""
        match self.kind:
            case "F":
                return "F"
            case "I" | "B":
                return "B"
            case "W":
                return None

    @property
    def microbatches(self) -> tuple[int, ...]:
        """Return the micro-batches that it runs: one."""
        return (self.microbatch,)

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True, order=True)
class Joined(AnyCompute):
    """Run the weight halves of several micro-batches of one stage as one W, on all their samples in this order.

    Counts as the W of each of them. Only programs hold it, of stages that `Traffic.joinable` lists; orders do not.
    """

    stage: int
    microbatches: tuple[int, ...]

    @property
    def kind(self) -> ComputeKind:
        """Return W."""
        return "W"

    @property
    def direction(self) -> None:
        """Return nothing: W neither waits for messages nor makes any."""
        return None

    def __str__(self) -> str:
        return f"{self.stage}W{'+'.join(map(str, self.microbatches))}"


@own_work
@dataclass(frozen=True, order=True)
class Load(OwnWork):
    """Take this rank's samples of one micro-batch from the batch. Paired with the F of the same stage."""

    code: ClassVar[str] = "LOAD"
    effects: ClassVar[Effects] = Effects(
        law="inputs",
        before=("F",),
        stages=lambda program: program.traffic.loads,
        demand="loads no such samples",
        verb="loaded",
    )


@dataclass(frozen=True, order=True)
class Message:
    """The values that cross from one stage to another for some samples of one micro-batch, in one direction.

    F messages carry activations (and batch fields) from `source` to a later `target`; B messages carry gradients from
    `source` to an earlier `target`.
    """

    direction: Pass
    source: int
    target: int
    microbatch: int
    samples: Samples


@dataclass(frozen=True, order=True)
class Send:
    """Post the sending of a message to rank `peer`; does not block. Paired with the `Recv` of the same message."""

    message: Message
    peer: int

    def __str__(self) -> str:
        m = self.message
        return f"{m.source}SEND_{m.direction}{m.microbatch}>{m.target}@{self.peer}{m.samples}"


@dataclass(frozen=True, order=True)
class Recv:
    """Post the receiving of a message from rank `peer`; the compute that needs it waits. Paired with a `Send`."""

    message: Message
    peer: int

    def __str__(self) -> str:
        m = self.message
        return f"{m.target}RECV_{m.direction}{m.microbatch}<{m.source}@{self.peer}{m.samples}"


@dataclass(frozen=True, order=True)
class Reduce:
    """Start summing the gradients of bucket `bucket` over its ranks (replicas, and holders of tied parameters).

    `along` with the W that comes next, the last one of the bucket's only stage, piece by piece as it makes them: the
    sum runs beside the rest of that backward, as in DistributedDataParallel (Li et al. 2020, section 3.2.3). Else all
    of them at once.
    """

    bucket: int
    along: bool = False

    def __str__(self) -> str:
        return f"REDUCE{self.bucket}{'+' if self.along else ''}"


@dataclass(frozen=True, order=True)
class Step:
    """Wait for this rank's reductions, then let the optimizer step. The last instruction of a training program.

    Where nothing needs all gradients at once, the optimizer may step the parameters of each piece of a sum as soon as
    that has ended (`runtime.executor.Executor.land`). Simulated times do not count on it: they are upper bounds then.
    """

    def __str__(self) -> str:
        return "STEP"


@own_work
@dataclass(frozen=True, order=True)
class Free(OwnWork):
    """Drop everything that the stage still holds of one micro-batch (a send in flight keeps its own buffer)."""

    code: ClassVar[str] = "FREE"
    effects: ClassVar[Effects] = Effects(
        law="free",
        ends=True,
        stages=lambda program: range(len(program.layout.stages)),
        demand="never held it",
        verb="freed",
    )


def _offloading(program: Program) -> tuple[int, ...]:
    return program.traffic.offloads if program.training else ()


@own_work
@dataclass(frozen=True, order=True)
class Evict(OwnWork):
    """Start copying what the stage offloads of one micro-batch to the host's memory; does not block.

    Comes after F, and is paired with the `Vacate` and the `Fetch` of the same stage and micro-batch. A micro-batch that
    has none of the three is kept.
    """

    code: ClassVar[str] = "EVICT"
    effects: ClassVar[Effects] = Effects(
        law="offload",
        after=("F",),
        resource="out",
        stages=_offloading,
        is_optional=True,
        demand="offloads no such samples",
        verb="evicted",
        label="copy to the host",
        colour="#0072B2",
    )


@own_work
@dataclass(frozen=True, order=True)
class Vacate(OwnWork):
    """Wait until what `Evict` copies is on the host, and give its memory up.

    So what a rank holds is decided by its place in the program, however slow copies are.
    """

    code: ClassVar[str] = "VACATE"
    effects: ClassVar[Effects] = Effects(
        law="offload",
        after=("EVICT",),
        before=("I",),
        resource="compute",
        bytes=-1,
        stages=_offloading,
        is_optional=True,
        demand="offloads no such samples",
        verb="vacated",
    )


@own_work
@dataclass(frozen=True, order=True)
class Fetch(OwnWork):
    """Start copying back what `Evict` took away; does not block, but I of the same micro-batch waits for its end."""

    code: ClassVar[str] = "FETCH"
    effects: ClassVar[Effects] = Effects(
        law="offload",
        after=("EVICT",),
        before=("I",),
        resource="back",
        bytes=1,
        stages=_offloading,
        is_optional=True,
        demand="offloads no such samples",
        verb="fetched",
        label="copy back",
        colour="#F0E442",
    )


Instruction: TypeAlias = AnyCompute | Send | Recv | Reduce | Step | OwnWork | Milestone
Order: TypeAlias = tuple[tuple[Compute, ...], ...]  # computes per rank
HostCopy: TypeAlias = Vacate | Fetch  # the parts of an offload that have places in an order
CopyingOrder: TypeAlias = tuple[tuple[Compute | HostCopy, ...], ...]  # where copies to the host have places too


@dataclass(frozen=True)
class Layout:
    """Which ranks run each stage, and how the replicas of a stage share a micro-batch.

    Attributes:
        stages: ranks of each stage, in replica order; a rank may hold several stages.
        whole: stages whose replicas take whole micro-batches in turn (micro-batch m goes to replica m mod r) because
            their samples are coupled; all other replicated stages take slices of every micro-batch (after DAPPLE).
        weights: proportions in which the replicas of each stage share a micro-batch; () if all take equal parts.
    """

    stages: tuple[tuple[int, ...], ...]
    whole: frozenset[int] = frozenset()
    weights: tuple[tuple[int, ...], ...] = ()

    @property
    def ranks(self) -> int:
        """Count the ranks: one more than the largest rank used."""
        return 1 + max(rank for stage in self.stages for rank in stage)

    def shares(self, stage: int) -> tuple[int, ...]:
        """Return the proportions in which the replicas of a stage share a micro-batch."""
        return self.weights[stage] if self.weights else (1,) * len(self.stages[stage])

    def samples(self, stage: int, replica: int, microbatch: int, size: int) -> Samples:
        """Return the samples of a micro-batch of `size` samples that one replica of a stage computes (maybe none)."""
        if stage in self.whole:
            return Samples(0, size) if microbatch % len(self.stages[stage]) == replica else Samples(0, 0)
        key = (stage, replica, size)
        if key not in self._slices:
            shares = self.shares(stage)
            before, total = sum(shares[:replica]), sum(shares)
            self._slices[key] = Samples(before * size // total, (before + shares[replica]) * size // total)
        return self._slices[key]

    @cached_property
    def _slices(self) -> dict[tuple[int, int, int], Samples]:
        return {}


@dataclass(frozen=True)
class Edge:
    """Values that cross from stage `source` to stage `target` for every micro-batch, in one direction."""

    direction: Pass
    source: int
    target: int
    bytes_per_sample: float
    fixed_bytes: int = 0


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients are summed together: those held by exactly these stages."""

    stages: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class HeadTraffic:
    """What the head of the last stage takes of all micro-batches, which replicas of the stage give each other.

    Attributes:
        bytes_per_sample: of what has samples.
        fixed_bytes: of what every micro-batch has one value of.
        holds_backwards: whether backwards read what it makes; else it makes results only.
    """

    bytes_per_sample: float
    fixed_bytes: int = 0
    holds_backwards: bool = True


@dataclass(frozen=True)
class Traffic:
    """What a cut makes cross, and what its stages can do.

    Attributes:
        edges: what crosses between stages.
        buckets: gradients that are summed together.
        loads: stages that read the batch.
        offloads: stages that offload.
        joinable: stages whose weight halves of several micro-batches can run as one (`Joined`).
        head: of the last stage; None if it has none.
    """

    edges: tuple[Edge, ...]
    buckets: tuple[Bucket, ...]
    loads: tuple[int, ...] = (0,)
    offloads: tuple[int, ...] = ()
    joinable: tuple[int, ...] = ()
    head: HeadTraffic | None = None

    def bytes_of(self, message: Message) -> int:
        """Return the bytes that a message carries."""
        way = (message.direction, message.source, message.target)
        edges = [edge for edge in self.edges if (edge.direction, edge.source, edge.target) == way]
        return sum(round(edge.bytes_per_sample * len(message.samples)) + edge.fixed_bytes for edge in edges)

    def head_bytes(self, samples: int) -> int:
        """Return the bytes that the head takes of so many samples; 0 if there is none."""
        return 0 if self.head is None else round(self.head.bytes_per_sample * samples) + self.head.fixed_bytes


@dataclass(frozen=True)
class Seam:
    """Where a round of an asynchronous pipeline meets the rounds before and after it: forwards in flight, by stage.

    A round runs all backwards of one batch, and forwards of the batches behind it. Micro-batches are numbered from the
    first that the round differentiates; the next round calls `m` what this one calls `m + batch`.

    Attributes:
        batch: micro-batches of the round's batch.
        enters: forwards of each stage that ran in earlier rounds: those of micro-batches 0, 1, ...
        leaves: forwards of each stage that run beyond the batch.
        work: codes of the own work that chooses which weights computes read (`core.versions`); () if all read the
            weights of the moment.
    """

    batch: int
    enters: tuple[int, ...]
    leaves: tuple[int, ...]
    work: tuple[str, ...] = ()

    @property
    def is_first(self) -> bool:
        """Return whether nothing is in flight when the round begins."""
        return not any(self.enters)

    @property
    def is_even(self) -> bool:
        """Return whether as many forwards leave as enter: rounds that fill or empty the pipeline are not even."""
        return self.enters == self.leaves

    def runs(self, stage: int, kind: ComputeKind, microbatch: int) -> bool:
        """Return whether a compute belongs to this round."""
        if kind == "F":
            return self.enters[stage] <= microbatch < self.batch + self.leaves[stage]
        return microbatch < self.batch


@dataclass(frozen=True)
class Program:
    """Instructions of every rank for one optimizer step (or one forward-only batch).

    Attributes:
        ranks: instructions by rank.
        sizes: samples of each micro-batch.
        layout: ranks of each stage.
        traffic: what crosses between stages; message and bucket numbers refer to it.
        training: whether backward computes belong to it (a forward-only program has none).
        synchronise: whether gradients are reduced and the optimizer steps (False while gradients are accumulated
            over several batches).
        seam: how it joins the rounds before and after it; None for a pipeline that is flushed after every batch.
    """

    ranks: tuple[tuple[Instruction, ...], ...]
    sizes: tuple[int, ...]
    layout: Layout
    traffic: Traffic
    training: bool = True
    synchronise: bool = True
    seam: Seam | None = None

    @property
    def batch(self) -> int:
        """Return the number of micro-batches whose backwards the program runs (or forwards, without training)."""
        return len(self.sizes) if self.seam is None else self.seam.batch

    @property
    def is_ahead(self) -> bool:
        """Return whether forwards of later batches run in it."""
        return self.seam is not None and any(self.seam.leaves)

    def runs(self, stage: int, kind: ComputeKind, microbatch: int) -> bool:
        """Return whether a compute belongs to the program, if its rank has samples of the micro-batch."""
        return self.seam is None or self.seam.runs(stage, kind, microbatch)


Launches: TypeAlias = Literal["on host", "late", "early"]


@dataclass(frozen=True)
class VerifiedProgram(Program):
    """A program that `schedule.verification.verify.verify` has proved; simulator and executor accept nothing else.

    Attributes:
        launches: how the transport launches receives, for which the absence of deadlocks is proved:

            "on host"   the host carries messages; a posted receive costs a buffer, and nothing waits for it but the
                        compute that needs it (gloo, same host, local)
            "late"      a launched receive runs on the device until its message comes (NCCL), so it is launched right
                        before the compute that needs it, behind earlier receives of its channel
            "early"     the same device, but receives are launched where they stand
    """

    launches: Launches = "on host"


Options: TypeAlias = Mapping[str, int | str]
