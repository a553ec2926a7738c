"""Symmetry reduction: of equal groups of replicas, few are simulated in place of all.

    stage 0   0 1 | 2 3 | 4 5 | 6 7      four groups: group k holds the k-th quarter of the replicas of every stage
    stage 1    8  |  9  |  10 | 11       and computes the k-th quarter of the samples of every micro-batch

Let g groups, whose replicas of a stage have weights w together, share a micro-batch of g q samples. The replica of
group k that has the weights b of its group before it begins at sample

    floor((k w + b) g q / (g w)) = k q + floor(b q / w)

So what a group computes depends neither on the others nor on how many there are, and it exchanges samples within itself
only: any k of the groups, with micro-batches of k q samples, run as they do beside the others. Groups meet only at the
network cards of their hosts, where gradients are summed, and before the step, which all wait for. So one group of every
kind is kept (groups are of a kind if their devices are equal, their messages take equally long, and as much passes the
cards on their way), and at least two, so that there are sums, which take what they take over all ranks.

Messages, and their work for network cards, are priced in the layout of all ranks, whose flows share the cards; ranks
keep their numbers. Not folded: layouts in which a stage takes whole micro-batches in turn.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lightning_pipe.core.cluster import Cluster, Device, Link
from lightning_pipe.core.program import Compute, Layout, Pass, Send, Traffic
from lightning_pipe.cost.prices import Card, PlanPrices
from lightning_pipe.schedule.rules import PRODUCER, Dataflow

_LEAST = 2  # groups that are kept
_INSTRUCTIONS = 8  # of a replica per micro-batch: F, I, W, Free, and one message in and one out each way

Twin: TypeAlias = dict[int, int]  # rank of the first group -> the rank in its place in another group
_Loads: TypeAlias = dict[Card, frozenset[tuple[Pass, int, int, float]]]  # edges, with the work of an exchange
_Kind: TypeAlias = tuple[tuple[Device, ...], tuple[Link, ...], tuple[float, ...], tuple[object, ...]]


@dataclass(frozen=True)
class SymmetryReduction:
    """The part of a layout that is lowered and simulated.

    Attributes:
        layout: stages with the ranks of this part.
        sizes: samples of each micro-batch for this part.
        representatives: for every rank of the whole layout, the rank of this part that does the same at the same time.
    """

    layout: Layout
    sizes: tuple[int, ...]
    representatives: tuple[int, ...]


def whole(layout: Layout, sizes: tuple[int, ...]) -> SymmetryReduction:
    """Return all of a layout: every rank stands for itself."""
    return SymmetryReduction(layout, sizes, tuple(range(layout.ranks)))


def instructions(layout: Layout, sizes: tuple[int, ...]) -> int:
    """Return about how many instructions the program of a layout has."""
    return sum(map(len, layout.stages)) * len(sizes) * _INSTRUCTIONS


def fold(sizes: tuple[int, ...], *, prices: PlanPrices, cluster: Cluster) -> SymmetryReduction:
    """Return the smallest part of a layout that represents all of it; everything if there are no groups alike.

    Args:
        sizes: samples of each micro-batch.
        prices: those of the whole layout, in which every rank runs a stage.
        cluster: devices of the ranks.
    """
    layout = prices.layout
    most = 1 if layout.whole else math.gcd(*map(len, layout.stages), *sizes)
    counts = (count for count in range(_LEAST + 1, most + 1) if most % count == 0 and _weights_repeat(layout, count))
    groupings = [twins for count in counts if (twins := _twins(layout, count))]
    parts = [whole(layout, sizes), *(_part(twins, sizes, prices, cluster) for twins in groupings)]
    return min(parts, key=lambda part: len(set(part.representatives)))


def _weights_repeat(layout: Layout, count: int) -> bool:
    """Return whether the weights of every stage are those of its first group, again and again."""
    return all(weights == weights[: len(weights) // count] * count for weights in layout.weights)


def _twins(layout: Layout, count: int) -> list[Twin]:
    """Return the twins in all groups, that of the first with itself included; none if groups overlap or differ."""
    twins: list[Twin] = [{} for _ in range(count)]
    for ranks in layout.stages:
        each = len(ranks) // count
        for (k, twin), place in itertools.product(enumerate(twins), range(each)):
            rank = ranks[k * each + place]
            if twin.setdefault(ranks[place], rank) != rank:
                return []
    everyone = [rank for twin in twins for rank in twin.values()]
    return twins if len(set(everyone)) == len(everyone) else []


def _part(twins: list[Twin], sizes: tuple[int, ...], prices: PlanPrices, cluster: Cluster) -> SymmetryReduction:
    """Return one group of every kind, and at least two."""
    layout, count = prices.layout, len(twins)
    sends = _sends(_of_groups(layout, [0], count), tuple(size // count for size in sizes), prices.traffic)
    loads = _loads(twins, sends, prices)
    kinds = [_kind(twin, sends, prices, cluster, loads) for twin in twins]
    first = {kind: k for k, kind in reversed(list(enumerate(kinds)))}
    kept = sorted({*first.values(), *range(_LEAST)})
    stands = {k: k if k in kept else first[kind] for k, kind in enumerate(kinds)}
    by_rank = {rank: twins[stands[k]][place] for k, twin in enumerate(twins) for place, rank in twin.items()}
    return SymmetryReduction(
        _of_groups(layout, kept, count),
        tuple(size // count * len(kept) for size in sizes),
        tuple(by_rank[rank] for rank in range(layout.ranks)),
    )


def _of_groups(layout: Layout, kept: Sequence[int], count: int) -> Layout:
    """Return a layout with some of its groups only."""

    def parts(of_stages: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        eaches = (len(of_stage) // count for of_stage in of_stages)
        return tuple(
            tuple(x for k in kept for x in of_stage[k * each : (k + 1) * each])
            for of_stage, each in zip(of_stages, eaches, strict=True)
        )

    return Layout(parts(layout.stages), layout.whole, parts(layout.weights))


def _sends(group: Layout, sizes: tuple[int, ...], traffic: Traffic) -> list[tuple[int, Send]]:
    """Return what the ranks of a group send, of one micro-batch of every size."""
    flow = Dataflow(group, sizes=sizes, traffic=traffic)
    numbers = {size: m for m, size in enumerate(sizes)}.values()
    return [
        (rank, send)
        for (s, ranks), kind, m in itertools.product(enumerate(group.stages), PRODUCER.values(), numbers)
        for rank in ranks
        for send in flow.gives(Compute(s, kind, m), rank=rank)
    ]


def _loads(twins: list[Twin], sends: list[tuple[int, Send]], prices: PlanPrices) -> _Loads:
    """Return what passes every network card, of all groups."""
    found: dict[Card, set[tuple[Pass, int, int, float]]] = defaultdict(set)
    for twin, (rank, send) in itertools.product(twins, sends):
        message = send.message
        for card, work_s in prices.passes(message, twin[rank], twin[send.peer]):
            found[card].add((message.direction, message.source, message.target, work_s))
    return {card: frozenset(edges) for card, edges in found.items()}


def _kind(twin: Twin, sends: list[tuple[int, Send]], prices: PlanPrices, cluster: Cluster, loads: _Loads) -> _Kind:
    """Return all that the times and the memory of a group depend on."""
    hosts = (cluster.hosts[cluster.host_of(rank)] for rank in twin.values())
    return (
        tuple(cluster.device(rank) for rank in twin.values()),
        tuple(host.swap for host in hosts),
        tuple(prices.transfer_s(send.message, twin[rank], twin[send.peer]) for rank, send in sends),
        tuple(
            loads[card] for rank, send in sends for card, _ in prices.passes(send.message, twin[rank], twin[send.peer])
        ),
    )
