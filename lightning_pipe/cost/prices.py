"""Prices of the parts of a program on a cluster: one object for one cut and one layout.

    prices = price(graph, cuts, layout, profile=profile, cluster=cluster)
    simulate(program, prices)

    compute     (sum of the profiled seconds of its operations + seconds of a call) / the device's speed
    transfer    `cost.comm`: the flows of one exchange share network cards
    reduction   `cost.comm`: over all ranks that hold a stage of the bucket
    head        `cost.counted`, of what no profile measures; of replicas, after an all-gather (`cost.comm`)
    step        `cost.optimizer`; where holders share optimizer state, of what a rank steps, then `cost.comm`; before it
                copies of weights (`cost.versions`)
    own work    `cost.own_work`; copies by the link between a device and its host, beside all else
    joined W    as W on the samples of all its micro-batches: one call, and the profiled seconds at (or beyond) them
    bytes       `cost.memory`; every rank holds all buffers

Left out: that computes of ranks which share a host may slow each other down, and that a device may not follow its one
speed in every operation.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_pipe.core.cluster import Cluster
from lightning_pipe.core.effects import OwnWork
from lightning_pipe.core.graph import Graph
from lightning_pipe.core.profile import Profile
from lightning_pipe.core.program import AnyCompute, Bucket, ComputeKind, Layout, Message, Pass, Program, Traffic
from lightning_pipe.core.sharding import gather_bytes
from lightning_pipe.cost.activations import KEEP, StagePolicy, with_policy
from lightning_pipe.cost.comm import all_reduce_s, card_rates, exchange_pairs, flow_s, flows
from lightning_pipe.cost.counted import head_s
from lightning_pipe.cost.held_parameters import HeldParameters
from lightning_pipe.cost.memory import Amount, Live, MemoryModel, StageMemory, StateBytes
from lightning_pipe.cost.optimizer import optimizer_state_bytes, optimizer_workspace_bytes, step_s
from lightning_pipe.cost.own_work import own_work_bytes, own_work_s
from lightning_pipe.cost.stage import Cutter, StageWork
from lightning_pipe.cost.sums import Piece, made_after, pieces_of
from lightning_pipe.cost.versions import StageVersions, VersionBytes, version_bytes
from lightning_pipe.errors import PlanError

Card: TypeAlias = tuple[str, int]  # direction, host
_Stage: TypeAlias = tuple[int, int, frozenset[int]]  # positions at which it begins and ends, what it recomputes
_BEFORE = -1  # position at which the first stage begins, which alone is given the batch; the last one ends behind all


def price(graph: Graph, cuts: Sequence[int], layout: Layout, *, profile: Profile, cluster: Cluster) -> PlanPrices:
    """Return the prices of a graph that is cut at these positions; `Pricer` is quicker for several cuts.

    Raises:
        PlanError: if the profile is that of another graph.
    """
    return Pricer(graph, profile=profile, cluster=cluster).price(cuts, layout)


class Pricer:
    """Price many cuts of one graph.

    Args:
        graph: with its operations and tensors.
        profile: seconds of its operations.
        cluster: devices and links.

    Raises:
        PlanError: if the profile is that of another graph.
    """

    def __init__(self, graph: Graph, *, profile: Profile, cluster: Cluster) -> None:
        if profile.graph != graph.fingerprint or len(profile.seconds) != len(graph.operations):
            raise PlanError(
                f"The profile is of graph {profile.graph} with {len(profile.seconds)} operations, the step's graph is "
                f"{graph.fingerprint} with {len(graph.operations)}. Measure a new profile."
            )
        self.graph, self.profile, self.cluster = graph, profile, cluster
        self.cutter = Cutter(graph)
        self.memory = MemoryModel(graph, profile=profile, tables=self.cutter.tables)
        self.seconds = np.array(profile.seconds, dtype=float).reshape(len(graph.operations), len(profile.samples))
        self._works: dict[tuple[int, ...], tuple[StageWork, ...]] = {}
        self._traffic: dict[tuple[int, ...], Traffic] = {}
        self._with_less: dict[_Stage, StageWork] = {}
        self._memories: dict[_Stage, StageMemory] = {}
        self._head_s: dict[int, float] = {}

    def head_s(self, samples: int) -> float:
        """Return the seconds of the head of the step on a batch of this many samples."""
        if samples not in self._head_s:
            self._head_s[samples] = head_s(self.graph, self.profile, samples)
        return self._head_s[samples]

    def works(self, cuts: Sequence[int], policies: Sequence[StagePolicy] = ()) -> tuple[StageWork, ...]:
        """Return what every stage runs and holds.

        Args:
            cuts: positions at which stages 1, 2, ... begin.
            policies: what each stage does not keep; () if all keep everything.
        """
        key = tuple(cuts)
        if key not in self._works:
            self._works[key] = self.cutter.works(key)
        if not policies:
            return self._works[key]
        assert len(policies) == len(self._works[key]), "policies of every stage"
        return tuple(self._recomputing(key, s, policy.recomputed) for s, policy in enumerate(policies))

    def _recomputing(self, cuts: tuple[int, ...], s: int, recomputed: frozenset[int]) -> StageWork:
        work = self._works[cuts][s]
        if not recomputed:
            return work
        stage = self._stage(cuts, s, recomputed)
        if stage not in self._with_less:
            self._with_less[stage] = with_policy(self.cutter.tables, work, StagePolicy(recomputed, frozenset()))
        return self._with_less[stage]

    def _stage(self, cuts: Sequence[int], s: int, recomputed: frozenset[int]) -> _Stage:
        """Return what decides what a stage runs and holds: wherever else a graph is cut, that stays the same."""
        return cuts[s - 1] if s else _BEFORE, cuts[s] if s < len(cuts) else len(self.graph.nodes) + 1, recomputed

    def stage_memory(self, cuts: Sequence[int], stage: int, policy: StagePolicy = KEEP) -> StageMemory:
        """Return the bytes of a stage."""
        key = self._stage(cuts, stage, policy.recomputed)
        if key not in self._memories:
            works = self.works(cuts)
            others = (work.parameters for s, work in enumerate(works) if s != stage)
            shared = frozenset(name for names in others for name in names)
            work = self._recomputing(tuple(cuts), stage, policy.recomputed)
            self._memories[key] = self.memory.stage(work, shared=shared)
        return self._memories[key]

    def traffic(self, cuts: Sequence[int]) -> Traffic:
        """Return what crosses between the stages."""
        key = tuple(cuts)
        if key not in self._traffic:
            self._traffic[key] = self.cutter.traffic(key)
        return self._traffic[key]

    def price(
        self,
        cuts: Sequence[int],
        layout: Layout,
        policies: Sequence[StagePolicy] = (),
        *,
        sharded: bool = False,
        versions: Sequence[StageVersions] = (),
    ) -> PlanPrices:
        """Return the prices of one cut in one layout; the arguments are those of `PlanPrices`."""
        return PlanPrices(self, cuts, layout, policies, sharded=sharded, versions=versions)


class PlanPrices:
    """Prices of one cut in one layout (`core.prices.Prices`).

    Args:
        pricer: graph, profile and cluster.
        cuts: positions at which stages 1, 2, ... begin.
        layout: ranks of each stage.
        policies: what each stage does not keep; () if all keep everything.
        sharded: whether holders of the same parameters share their optimizer state (`core.sharding`).
        versions: versions of the weights of each stage; () for the present one alone.

    Attributes:
        works: what every stage runs and holds.
        traffic: what crosses between the stages, and which of them offload.
    """

    def __init__(
        self,
        pricer: Pricer,
        cuts: Sequence[int],
        layout: Layout,
        policies: Sequence[StagePolicy] = (),
        *,
        sharded: bool = False,
        versions: Sequence[StageVersions] = (),
    ) -> None:
        self._sharded, self._versions = sharded, tuple(versions)
        self.works = pricer.works(cuts, policies)
        self._cuts, self._policies = tuple(cuts), tuple(policies) or (KEEP,) * len(self.works)
        leaving = [r.offloaded.intersection(work.saved) for work, r in zip(self.works, self._policies, strict=True)]
        self._offloaded = tuple(pricer.memory.amount(sorted(memories)) for memories in leaving)
        traffic = pricer.traffic(cuts)
        self.traffic = replace(
            traffic,
            offloads=tuple(s for s, found in enumerate(leaving) if found),
            joinable=tuple(s for s in traffic.joinable if not self._policies[s].recomputed),
        )
        self.layout = layout
        self._parameters = HeldParameters(self.works, layout, pricer.graph.parameter_bytes, sharded=sharded)
        self._pricer, self._profile, self._cluster = pricer, pricer.profile, pricer.cluster
        self._times = {(s, kind): times for s, work in enumerate(self.works) for kind, times in self._halves(work)}
        self._edges = {
            (edge.direction, edge.source, edge.target): Amount(edge.bytes_per_sample, edge.fixed_bytes)
            for edge in self.traffic.edges
        }
        sent = pricer.cutter.sent(cuts) if len(self.traffic.edges) > len({e[:2] for e in self._edges}) else {}
        self._sent = {key: pricer.memory.amount(tensors) for key, tensors in sent.items()}
        self._compute_s: dict[tuple[int, ComputeKind, int], float] = {}
        self._workspace: dict[tuple[int, ComputeKind, int, bool], int] = {}
        self._transfer_s: dict[tuple[tuple[int, int, int], int, int, int], float] = {}
        self._flows: dict[tuple[int, int, int], dict[tuple[int, int], tuple[int, int]]] = {}
        self._pieces: dict[tuple[int, ...], tuple[Piece, ...]] = {}

    def _halves(self, work: StageWork) -> list[tuple[ComputeKind, NDArray[np.float64]]]:
        """Return the seconds of the stage's computes at the profiled numbers of samples, without those of a call."""
        halves = (work.forward, work.input_grad, work.weight_grad)
        f, i, w = (self._pricer.seconds[list(half.operations)].sum(axis=0) for half in halves)
        return [("F", f), ("I", i), ("W", w), ("B", i + w)]

    def compute_s(self, compute: AnyCompute, rank: int, samples: int) -> float:
        """Return the seconds of a compute on `samples` samples, those of all its micro-batches."""
        key = (compute.stage, compute.kind, samples)
        if key not in self._compute_s:
            times = self._times[compute.stage, compute.kind]
            self._compute_s[key] = self._profile.between(times.tolist(), samples) + self._profile.call_s
        return self._compute_s[key] / self._cluster.device(rank).speed

    def transfer_s(self, message: Message, sender: int, receiver: int) -> float:
        """Return the seconds that a message occupies its channel while the others of its exchange are under way."""
        key = (self._exchange(message), sender, receiver, self.message_bytes(message))
        if key not in self._transfer_s:
            self._transfer_s[key] = self._moving_s(*key)
        return self._transfer_s[key]

    def passes(self, message: Message, sender: int, receiver: int) -> tuple[tuple[Card, float], ...]:
        """Return the network cards that a message passes, with the seconds that its whole exchange is work for each."""
        here, there = self._cluster.host_of(sender), self._cluster.host_of(receiver)
        if here == there:
            return ()
        count = self.message_bytes(message)
        rates = card_rates(self._cluster, sender, receiver)
        out, into = self._flows_of(self._exchange(message)).get((sender, receiver), (1, 1))
        return (("out", here), count * out / rates[0]), (("in", there), count * into / rates[1])

    def _exchange(self, message: Message) -> tuple[int, int, int]:
        """Return source, target and turn: where replicas take whole micro-batches, these go to others in turn."""
        ends = (message.source, message.target)
        turns = math.lcm(*(len(self.layout.stages[s]) for s in ends)) if self.layout.whole.intersection(ends) else 1
        return (*ends, message.microbatch % turns)

    def _flows_of(self, exchange: tuple[int, int, int]) -> dict[tuple[int, int], tuple[int, int]]:
        if exchange not in self._flows:
            self._flows[exchange] = flows(self._cluster, exchange_pairs(self.layout, *exchange))
        return self._flows[exchange]

    def _moving_s(self, exchange: tuple[int, int, int], sender: int, receiver: int, count: int) -> float:
        out, into = self._flows_of(exchange).get((sender, receiver), (1, 1))
        moving_s = flow_s(self._cluster, sender, receiver, count=count, out=out, into=into)
        handing_s = self._profile.message_s - self._cluster.link(sender, receiver).latency_s
        return moving_s + max(0.0, handing_s)

    def post_s(self, message: Message) -> float:
        """Return the seconds for which the posting of a message keeps its sender from computing."""
        return self._profile.post_s + self._profile.post_s_per_byte * self.message_bytes(message)

    def reduce_s(self, bucket: int, program: Program) -> float:
        """Return the seconds of the all-reduce of a bucket over all ranks of the layout that hold one of its stages."""
        found = program.traffic.buckets[bucket]
        ranks = sorted({rank for stage in found.stages for rank in self.layout.stages[stage]})
        return all_reduce_s(self._cluster, ranks, count=found.bytes)

    def piece_shares(self, bucket: Bucket) -> list[tuple[float, float]]:
        """Return the pieces in which a bucket of one stage is summed along with W; of others, all at its end."""
        if len(bucket.stages) > 1 or not bucket.bytes:
            return [(1.0, 1.0)]
        return [(piece.made, piece.bytes / bucket.bytes) for piece in self._pieces_of(bucket)]

    def sum_busy_share(self) -> float:
        """Return the share of the seconds of sums in which they keep their ranks from computing."""
        return self._profile.sum_busy_share

    def piece_bytes(self, bucket: Bucket) -> int:
        """Return the bytes of the largest piece in which a bucket is summed."""
        return max((piece.bytes for piece in self._pieces_of(bucket)), default=0)

    def _pieces_of(self, bucket: Bucket) -> tuple[Piece, ...]:
        if bucket.stages not in self._pieces:
            sizes = self._parameters.of_bucket(bucket)
            made = self._made_after(bucket.stages[0], sizes) if len(bucket.stages) == 1 else {}
            self._pieces[bucket.stages] = pieces_of(sizes, made)
        return self._pieces[bucket.stages]

    def _made_after(self, stage: int, names: Collection[str]) -> dict[str, float]:
        maker, seconds = self._pricer.cutter.tables.maker, self._pricer.seconds[:, -1]
        return made_after(self.works[stage], names, seconds=seconds, maker=maker)

    def head_s(self, rank: int, samples: int) -> float:
        """Return the seconds of the head of the last stage, and of the all-gather of what it takes."""
        replicas = self.layout.stages[-1]
        gathering_s = all_reduce_s(self._cluster, replicas, count=self.traffic.head_bytes(samples)) / 2
        return self._pricer.head_s(samples) / self._cluster.device(rank).speed + gathering_s

    def head_bytes(self, samples: int) -> tuple[int, int]:
        """Return the bytes for the head alone, and those that it makes; what it reads where the graph has neither."""
        graph = self._pricer.graph
        if not graph.head_reads:
            return self.traffic.head_bytes(samples), self.traffic.head_bytes(samples)
        makes = self._pricer.memory.amount(graph.head_makes)
        return self.memory(len(self.works) - 1).for_head(samples), makes(samples)

    def head_workspace_bytes(self, samples: int) -> int:
        """Return the bytes of what the head makes, at most at once."""
        head = self._pricer.graph.head
        return 0 if head is None else head.workspace_bytes * samples // head.samples

    def step_s(self, rank: int) -> float:
        """Return the seconds of the optimizer step of a rank, and of telling the other holders what it stepped."""
        speed = self._cluster.device(rank).speed
        stepping_s = step_s(self._profile.optimizer, self._parameters.stepped(rank), speed=speed)
        for versions in self.version_bytes(rank):
            stepping_s += versions.step_s(self._profile.optimizer, speed=speed)
        return stepping_s + (self._gather_s(rank) if self._sharded else 0.0)

    def version_bytes(self, rank: int) -> list[VersionBytes]:
        """Return what a rank holds of the weights of each of its stages beside the parameters."""
        graph, trained = self._pricer.graph, self._parameters.trained(rank)
        stages = zip(self.works, self._versions, self.layout.stages, strict=False)
        held = [(work, versions) for work, versions, ranks in stages if rank in ranks]
        return [version_bytes(work, versions, graph=graph, trained=trained) for work, versions in held]

    def step_bytes(self, rank: int) -> int:
        """Return the bytes that the optimizer step of a rank needs beside its state, and after it the gathering."""
        stepping = optimizer_workspace_bytes(self._profile.optimizer, self._parameters.stepped(rank))
        shared = [size for sizes in self._parameters.shared(rank).values() for size in sizes]
        return max(stepping, gather_bytes(shared) if self._sharded else 0)

    def _gather_s(self, rank: int) -> float:
        """Return the seconds of an all-gather of shared parameters: half an all-reduce, its second phase."""
        shared = self._parameters.shared(rank).items()
        return sum(all_reduce_s(self._cluster, ranks, count=sum(sizes)) / 2 for ranks, sizes in shared)

    @property
    def tied(self) -> list[str]:
        """Return the parameters that several stages train."""
        shared = (bucket for bucket in self.traffic.buckets if len(bucket.stages) > 1)
        return [name for bucket in shared for name in self._parameters.of_bucket(bucket)]

    @property
    def shares_state(self) -> bool:
        """Return whether several ranks hold the same trained parameter, so that they could share optimizer state."""
        return self._parameters.shares_state

    def saved_bytes(self, stage: int, samples: int) -> int:
        """Return the bytes that a stage keeps from F to I, without results."""
        return self.memory(stage).saved(samples)

    def offloaded_bytes(self, stage: int, samples: int) -> int:
        """Return the part of the saved bytes that leaves the device between F and I."""
        return self._offloaded[stage](samples)

    @property
    def cluster(self) -> Cluster:
        """Return the devices and links."""
        return self._cluster

    def own_work_s(self, work: OwnWork, rank: int, samples: int) -> float:
        """Return the seconds of own work (`cost.own_work`)."""
        return own_work_s(self, work, rank, samples)

    def own_work_bytes(self, work: OwnWork, rank: int, samples: int) -> int:
        """Return the bytes that own work holds, or gives up (`cost.own_work`)."""
        return own_work_bytes(self, work, rank, samples)

    def kept_bytes(self, stage: int, samples: int) -> int:
        """Return the bytes that a stage keeps from I to W, without results."""
        return self.memory(stage).kept(samples)

    def result_bytes(self, stage: int, samples: int) -> int:
        """Return the bytes of the step's outputs that a stage makes."""
        return self.memory(stage).results(samples)

    def workspace_bytes(self, compute: AnyCompute, samples: int) -> int:
        """Return the most bytes that a compute needs beyond what its stages keep while it runs."""
        key = (compute.stage, compute.kind, samples, compute.is_joined)
        if key not in self._workspace:
            self._workspace[key] = self._needed(compute, samples)
        return self._workspace[key]

    def _needed(self, compute: AnyCompute, samples: int) -> int:
        memory = self.memory(compute.stage)
        if not compute.is_joined:
            return memory.workspace(compute.kind, samples)
        return self._joined(compute, samples, memory.live[2])

    def _joined(self, joined: AnyCompute, samples: int, weight_grad: Live) -> int:
        return max(0, self._pricer.memory.joined(self.works[joined.stage], weight_grad).peak(samples))

    def gradient_bytes(self, compute: AnyCompute, samples: int) -> int:
        """Return the part of the workspace that the first compute of a batch does not need."""
        memory = self.memory(compute.stage)
        if not compute.is_joined:
            return memory.gradient_bytes(compute.kind, samples)
        return self.workspace_bytes(compute, samples) - self._joined(compute, samples, memory.first[1])

    def message_bytes(self, message: Message) -> int:
        """Return the bytes of a message."""
        return self._edges[message.direction, message.source, message.target](len(message.samples))

    def sent_bytes(self, stage: int, direction: Pass, samples: int) -> int:
        """Return the bytes of everything that a compute sends, each value once however many stages get it."""
        return self._sent[stage, direction](samples)

    def state_bytes(self, rank: int) -> int:
        """Return the bytes of parameters, gradients and optimizer state of a rank's stages, and of all buffers."""
        return sum(self.state_parts(rank))

    def state_parts(self, rank: int) -> StateBytes:
        """Return the same by what they are for."""
        return StateBytes(
            parameters=sum(self._parameters.held(rank)),
            gradients=sum(self._parameters.trained(rank).values()),
            optimizer=optimizer_state_bytes(self._profile.optimizer, self._parameters.stepped(rank)),
            buffers=sum(self._pricer.graph.buffer_bytes.values()),
            versions=sum(versions.copies + versions.scratch for versions in self.version_bytes(rank)),
        )

    def memory(self, stage: int) -> StageMemory:
        """Return the bytes of a stage."""
        return self._pricer.stage_memory(self._cuts, stage, self._policies[stage])
