"""Which ranks do the same at the same time? Of equal groups of replicas, two stand for all.

    stage 0   0 1 | 2 3 | 4 5 | 6 7      four groups: group k holds the k-th quarter of the replicas of every stage
    stage 1    8  |  9  |  10 | 11       and computes the k-th quarter of the samples of every micro-batch

Let g groups, whose replicas of a stage have weights w together, share a micro-batch of g q samples. The replica of
group k that has the weights b of its group before it begins at sample

    floor((k w + b) g q / (g w)) = k q + floor(b q / w)

So what a group computes depends neither on the others nor on how many there are, and it exchanges samples within itself
only. Two groups with micro-batches of 2 q samples have the same instructions, but for the numbers of their samples, and
groups with equal devices, whose messages take equally long, run them at the same time. Sums of gradients join all
groups: two are kept so that there are sums, which take what they take over all ranks.

Messages are priced in the layout of all ranks, whose flows share network cards; ranks keep their numbers. Not folded:
layouts in which a stage takes whole micro-batches in turn.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from lightning_pipe.core.cluster import Cluster
from lightning_pipe.core.program import Compute, Layout, Send
from lightning_pipe.cost.prices import PlanPrices
from lightning_pipe.schedule.rules import PRODUCER, Dataflow

_KEPT = 2  # groups
_INSTRUCTIONS = 8  # of a replica per micro-batch: F, I, W, Free, and one message in and one out each way

Twin: TypeAlias = dict[int, int]  # rank of the first group -> the rank in its place in another group


@dataclass(frozen=True)
class Fold:
    """The part of a layout that is lowered and simulated.

    Attributes:
        layout: stages with the ranks of this part.
        sizes: samples of each micro-batch for this part.
        representatives: for every rank of the whole layout, the rank of this part that does the same at the same time.
    """

    layout: Layout
    sizes: tuple[int, ...]
    representatives: tuple[int, ...]


def whole(layout: Layout, sizes: tuple[int, ...]) -> Fold:
    """Return all of a layout: every rank stands for itself."""
    return Fold(layout, sizes, tuple(range(layout.ranks)))


def instructions(layout: Layout, sizes: tuple[int, ...]) -> int:
    """Return about how many instructions the program of a layout has."""
    return sum(map(len, layout.stages)) * len(sizes) * _INSTRUCTIONS


def fold(sizes: tuple[int, ...], *, prices: PlanPrices, cluster: Cluster) -> Fold:
    """Return two of as many equal groups as replicas fall into, or the whole layout if there are no more than two.

    Args:
        sizes: samples of each micro-batch.
        prices: those of the whole layout, in which every rank runs a stage.
        cluster: devices of the ranks.
    """
    layout = prices.layout
    most = 1 if layout.whole else math.gcd(*map(len, layout.stages), *sizes)
    for count in range(most, _KEPT, -1):
        if most % count or not _weights_repeat(layout, count):
            continue
        twins = _twins(layout, count)
        part, part_sizes = _first_groups(layout, count), tuple(size * _KEPT // count for size in sizes)
        sends = _sends(Dataflow(part, sizes=part_sizes, traffic=prices.traffic), part_sizes, twins, prices)
        if twins and _equal_devices(twins, cluster) and _equal_seconds(sends, twins, prices):
            return Fold(part, part_sizes, _representatives(layout, twins))
    return whole(layout, sizes)


def _weights_repeat(layout: Layout, count: int) -> bool:
    """Say whether the weights of every stage are those of its first group, again and again."""
    return all(weights == weights[: len(weights) // count] * count for weights in layout.weights)


def _first_groups(layout: Layout, count: int) -> Layout:
    def first(of_stages: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        return tuple(of_stage[: len(of_stage) * _KEPT // count] for of_stage in of_stages)

    return Layout(first(layout.stages), layout.whole, first(layout.weights))


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


def _equal_devices(twins: list[Twin], cluster: Cluster) -> bool:
    def equal(rank: int, twin: int) -> bool:
        swaps = {cluster.hosts[cluster.host_of(r)].swap for r in (rank, twin)}
        return cluster.device(rank) == cluster.device(twin) and len(swaps) == 1

    return all(equal(*pair) for twin in twins for pair in twin.items())


def _sends(flow: Dataflow, sizes: tuple[int, ...], twins: list[Twin], prices: PlanPrices) -> Iterator[tuple[int, Send]]:
    """Yield what every rank of the first group sends of micro-batches of every size."""
    numbers = {size: m for m, size in enumerate(sizes)}.values()
    first = frozenset(twins[0]) if twins else frozenset()
    for (s, ranks), kind, m in itertools.product(enumerate(prices.layout.stages), PRODUCER.values(), numbers):
        for rank in first.intersection(ranks):
            yield from ((rank, send) for send in flow.gives(Compute(s, kind, m), rank=rank))


def _equal_seconds(sends: Iterator[tuple[int, Send]], twins: list[Twin], prices: PlanPrices) -> bool:
    """Say whether the messages of all groups take as long as those of the first."""

    def equal(rank: int, send: Send) -> bool:
        pairs = [(twin[rank], twin[send.peer]) for twin in twins]
        return len({prices.transfer_s(send.message, *pair) for pair in pairs}) == 1

    return all(equal(rank, send) for rank, send in sends)


def _representatives(layout: Layout, twins: list[Twin]) -> tuple[int, ...]:
    """Return for every rank its twin in the first group, but ranks of the groups that are kept stand for themselves."""
    stands = {twin: rank for of_group in twins[_KEPT:] for rank, twin in of_group.items()}
    return tuple(stands.get(rank, rank) for rank in range(layout.ranks))
