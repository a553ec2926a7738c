"""Communication time of messages and gradient sums on a cluster.

Message of b bytes over a link:

    t = latency + b / bandwidth

Exchange between stages with different numbers of replicas: all flows of one edge and micro-batch start together. Those
that leave (or enter) one host share its network card, so each gets `card / flows`, but never more than its own link
gives. The exchange takes as long as its slowest pair (after the slides on DAPPLE's planner, 2021); the ACR values of
the DAPPLE paper let every pair have the whole network, which here holds only for one flow per host. Flows inside a host
are taken to be independent. What flows of different edges and micro-batches do to each other at a card depends on when
they start: the simulator says (`simulator.simulate`), and estimates know how busy a card is at least.

All-reduce of b bytes over n ranks, the cheaper of two, unless it was measured:

    ring           2(n-1) steps of b/n bytes over the slowest link of the ring:
                   2(n-1)/n b/bandwidth + 2(n-1) latency             (Patarasuk and Yuan, JPDC 2009)
    hierarchical   k ranks on each of h hosts: reduce-scatter inside the hosts, k rings between hosts that share the
                   cards, all-gather inside the hosts:
                   2(k-1)/k b/inside + 2(h-1)/h b/card + latencies   (after NCCL's two-level algorithms)

Left out: trees for small sums, the time of the additions, and that computes slow communication down.
"""

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_pipe.core.cluster import Cluster, Link
from lightning_pipe.core.program import Layout


def flow_s(cluster: Cluster, sender: int, receiver: int, *, count: float, out: int = 1, into: int = 1) -> float:
    """Return the seconds of one message.

    Args:
        cluster: the devices and links.
        sender: rank that sends.
        receiver: rank that receives.
        count: bytes.
        out: messages that leave the sender's host for other hosts at the same time, this one included.
        into: messages that enter the receiver's host at the same time, this one included.
    """
    return _shared(cluster, sender, receiver, out=out, into=into).seconds(count)


def _shared(cluster: Cluster, sender: int, receiver: int, *, out: int, into: int) -> Link:
    """Return what a link gives one message beside the others that share network cards with it."""
    link = cluster.link(sender, receiver)
    here, there = cluster.host_of(sender), cluster.host_of(receiver)
    if here == there:
        return link
    shares = (rate / count for rate, count in zip(card_rates(cluster, sender, receiver), (out, into), strict=True))
    return Link(link.latency_s, min(link.bytes_per_s, *shares))


def card_rates(cluster: Cluster, sender: int, receiver: int) -> tuple[float, float]:
    """Return the bytes per second of the cards between two hosts; no less than what was measured between two ranks."""
    link = cluster.link(sender, receiver).bytes_per_s
    hosts = (cluster.hosts[cluster.host_of(rank)] for rank in (sender, receiver))
    out, into = (max(host.network.bytes_per_s, link) for host in hosts)
    return out, into


def card_shares(cluster: Cluster, pairs: Sequence[tuple[int, int]]) -> dict[tuple[str, int], float]:
    """Return, by direction and host, the seconds per byte of an exchange for which it keeps the network card busy."""
    found: dict[tuple[str, int], float] = defaultdict(float)
    for sender, receiver in pairs:
        here, there = cluster.host_of(sender), cluster.host_of(receiver)
        if here != there:
            out, into = card_rates(cluster, sender, receiver)
            found["out", here] += 1 / out / len(pairs)
            found["in", there] += 1 / into / len(pairs)
    return found


def exchange_pairs(layout: Layout, source: int, target: int, microbatch: int) -> tuple[tuple[int, int], ...]:
    """Return the (sender, receiver) pairs between two stages for a micro-batch; a rank sends nothing to itself."""
    senders, receivers = layout.stages[source], layout.stages[target]
    # divides evenly on both sides, as large micro-batches nearly do
    size = sum(layout.shares(source)) * sum(layout.shares(target))
    takers = [(receiver, layout.samples(target, j, microbatch, size)) for j, receiver in enumerate(receivers)]
    takers = [(receiver, theirs) for receiver, theirs in takers if theirs]
    stops = [theirs.stop for _, theirs in takers]
    pairs = []
    for i, sender in enumerate(senders):
        ours = layout.samples(source, i, microbatch, size)
        first, last = bisect.bisect_right(stops, ours.start), bisect.bisect_left(stops, ours.stop) + 1
        pairs += [(sender, receiver) for receiver, theirs in takers[first:last] if ours & theirs and sender != receiver]
    return tuple(pairs)


def flows(cluster: Cluster, pairs: Sequence[tuple[int, int]]) -> dict[tuple[int, int], tuple[int, int]]:
    """Return, for every pair of an exchange, the messages that leave its first host and enter its second with it."""
    out: dict[int, int] = defaultdict(int)
    into: dict[int, int] = defaultdict(int)
    hosts = {pair: (cluster.host_of(pair[0]), cluster.host_of(pair[1])) for pair in pairs}
    for here, there in hosts.values():
        if here != there:
            out[here] += 1
            into[there] += 1
    return {pair: (out[here], into[there]) if here != there else (1, 1) for pair, (here, there) in hosts.items()}


@dataclass(frozen=True)
class ConcurrentFlows:
    """Flows that start together.

    Attributes:
        flows: how many, all of as many bytes.
        links: the different links that they go over, with what is left of shared network cards.
    """

    flows: int
    links: tuple[Link, ...]

    def seconds(self, count: float) -> float:
        """Return the seconds until `count` bytes, in equal parts, have gone over all of them."""
        return max((link.seconds(count / self.flows) for link in self.links), default=0.0)


def exchange_of(cluster: Cluster, pairs: Sequence[tuple[int, int]]) -> ConcurrentFlows:
    """Return the exchange over all pairs."""
    shared = flows(cluster, pairs)
    ways = ((pair, shared[pair]) for pair in _unlike(cluster, pairs))
    links = dict.fromkeys(_shared(cluster, *pair, out=out, into=into) for pair, (out, into) in ways)
    return ConcurrentFlows(len(pairs), tuple(links))


def _unlike(cluster: Cluster, pairs: Iterable[tuple[int, int]]) -> Iterable[tuple[int, int]]:
    """Return pairs among which are all links that there are: unless measured, they depend on the hosts only."""
    if cluster.links:
        return pairs
    return {(cluster.host_of(pair[0]), cluster.host_of(pair[1])): pair for pair in pairs}.values()


@dataclass(frozen=True)
class Ring:
    """A ring of ranks, round which parts of what they sum go.

    Attributes:
        ranks: how many.
        share: the part of all bytes that this ring sums.
        links: the different links between neighbours.
    """

    ranks: int
    share: float
    links: tuple[Link, ...]

    def seconds(self, count: float) -> float:
        """Return the seconds of n-1 steps round a ring of n, each passing 1/n of the bytes: half of an all-reduce."""
        part = count * self.share / self.ranks
        return (self.ranks - 1) * max((link.seconds(part) for link in self.links), default=0.0)


@dataclass(frozen=True)
class Rings:
    """An all-reduce by rings: scattered phase by phase, gathered phase by phase; rings of a phase go on at once."""

    phases: tuple[tuple[Ring, ...], ...]

    def seconds(self, count: float) -> float:
        """Return the seconds of an all-reduce of `count` bytes."""
        return 2 * sum(max(ring.seconds(count) for ring in phase) for phase in self.phases)


@dataclass(frozen=True)
class AllReduce:
    """The ways to sum among some ranks, of which the quickest is taken: by rings, or as it was measured."""

    ways: tuple[Rings | ConcurrentFlows, ...]

    def seconds(self, count: float) -> float:
        """Return the seconds of an all-reduce of `count` bytes."""
        return min((way.seconds(count) for way in self.ways), default=0.0)


def all_reduce_of(cluster: Cluster, ranks: Sequence[int]) -> AllReduce:
    """Return the all-reduce among some ranks, measured or by formula."""
    if len(ranks) < 2:
        return AllReduce(())
    measured = cluster.reduction(ranks)
    if measured is not None:
        return AllReduce(tuple(ConcurrentFlows(1, (way,)) for way in measured.ways))
    return AllReduce((ring_of(cluster, ranks), *hierarchies_of(cluster, ranks)))


def all_reduce_s(cluster: Cluster, ranks: Sequence[int], *, count: float) -> float:
    """Return the seconds of an all-reduce of `count` bytes, measured or by the cheaper formula."""
    return all_reduce_of(cluster, ranks).seconds(count)


def ring_of(cluster: Cluster, ranks: Sequence[int]) -> Rings:
    """Return a ring all-reduce in rank order, which enters and leaves every host once."""
    return Rings(((_ring(cluster, sorted(ranks)),),))


def hierarchies_of(cluster: Cluster, ranks: Sequence[int]) -> tuple[Rings, ...]:
    """Return the two-level all-reduce; none unless several hosts have equally many of the ranks."""
    grouped: dict[int, list[int]] = defaultdict(list)
    for rank in sorted(ranks):
        grouped[cluster.host_of(rank)].append(rank)
    groups = list(grouped.values())
    each = len(groups[0])
    if len(groups) < 2 or any(len(group) != each for group in groups):
        return ()
    inside = dict.fromkeys(_ring(cluster, group) for group in groups)
    between = dict.fromkeys(_ring(cluster, ring, sharing=each) for ring in zip(*groups, strict=True))
    return (Rings((tuple(inside), tuple(between))),)


def _ring(cluster: Cluster, ranks: Sequence[int], *, sharing: int = 1) -> Ring:
    """Return a ring.

    Args:
        sharing: rings like this one that share the bytes, and the same network cards at the same time.
    """
    pairs = _unlike(cluster, itertools.pairwise([*ranks, ranks[0]])) if len(ranks) > 1 else ()
    links = dict.fromkeys(_shared(cluster, *pair, out=sharing, into=sharing) for pair in pairs)
    return Ring(len(ranks), 1 / sharing, tuple(links))
