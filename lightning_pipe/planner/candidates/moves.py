"""Moves of the local search: candidates near a given one, small changes first.

    count       more or fewer micro-batches
    shift       a cut to a position nearby
    pass        a device from one stage to another
    swap        two devices of different stages, where devices or links differ
    merge       two neighbouring stages into one on all their devices
    split       a stage with several devices into two

Moves that change who does what leave the cuts to `planner.estimates.balance`. A layout is the ranks of each stage.

Legend: s, t stages.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from lightning_pipe.core.cluster import Cluster

Ranks: TypeAlias = tuple[tuple[int, ...], ...]

_MOST_STAGES = 16  # of these many stages, a device is passed between any two; of more, between neighbours
_MOST_SWAPPED = 12  # devices up to which any two are swapped


def layouts_near(ranks: Ranks, cluster: Cluster) -> Iterator[Ranks]:
    """Yield layouts that differ by one move, each once."""
    moves = (*_passed(ranks), *_merged(ranks), *_split(ranks), *_swapped(ranks, cluster))
    yield from different(moves, cluster)


def _passed(ranks: Ranks) -> Iterator[Ranks]:
    for s, group in enumerate(ranks):
        if len(group) < 2:
            continue
        others = range(len(ranks)) if len(ranks) <= _MOST_STAGES else (s - 1, s + 1)
        for t in others:
            if 0 <= t < len(ranks) and t != s:
                rank = group[-1] if t > s else group[0]
                yield _with(ranks, {s: _without(group, rank), t: (*ranks[t], rank)})


def _merged(ranks: Ranks) -> Iterator[Ranks]:
    for s in range(len(ranks) - 1):
        yield (*ranks[:s], tuple(sorted((*ranks[s], *ranks[s + 1]))), *ranks[s + 2 :])


def _split(ranks: Ranks) -> Iterator[Ranks]:
    for s, group in enumerate(ranks):
        for size in sorted({1, len(group) // 2, len(group) - 1} - {0, len(group)}):
            yield (*ranks[:s], group[:size], group[size:], *ranks[s + 1 :])


def _swapped(ranks: Ranks, cluster: Cluster) -> Iterator[Ranks]:
    for s in range(len(ranks) - 1):  # neighbours change places with all their devices
        yield _with(ranks, {s: ranks[s + 1], s + 1: ranks[s]})
    count = sum(map(len, ranks))
    if count > _MOST_SWAPPED:
        return
    likeness = interchangeable(cluster)
    for s, t in itertools.combinations(range(len(ranks)), 2):
        for one, two in itertools.product(ranks[s], ranks[t]):
            if likeness[one] != likeness[two]:
                yield _with(ranks, {s: (*_without(ranks[s], one), two), t: (*_without(ranks[t], two), one)})


def different(layouts: Iterable[Ranks], cluster: Cluster) -> Iterator[Ranks]:
    """Yield layouts, and of those that differ only in which of some interchangeable devices they have, the first."""
    likeness = interchangeable(cluster)
    found: set[tuple[tuple[int, ...], ...]] = set()
    for ranks in layouts:
        key = tuple(tuple(sorted(likeness[rank] for rank in group)) for group in ranks)
        if key not in found:
            found.add(key)
            yield ranks


def interchangeable(cluster: Cluster) -> tuple[int, ...]:
    """Return a number for every rank, the same for those whose exchange changes nothing.

    They are equal devices of one host, whose links are the host's, and in the same measured sums.
    """
    linked = {rank for pair in cluster.links for rank in (pair.sender, pair.receiver)}
    summed: list[list[int]] = [[] for _ in range(cluster.ranks)]
    for number, reduction in enumerate(cluster.reductions):
        for rank in reduction.ranks:
            summed[rank].append(number)
    numbers: dict[object, int] = {}
    return tuple(
        numbers.setdefault(
            rank if rank in linked else (cluster.host_of(rank), cluster.device(rank), tuple(summed[rank])), len(numbers)
        )
        for rank in range(cluster.ranks)
    )


def _without(group: Sequence[int], rank: int) -> tuple[int, ...]:
    return tuple(other for other in group if other != rank)


def _with(ranks: Ranks, changed: dict[int, tuple[int, ...]]) -> Ranks:
    return tuple(tuple(sorted(changed[s])) if s in changed else group for s, group in enumerate(ranks))


def groupings(ranks: Sequence[int]) -> Iterator[Ranks]:
    """Yield every way to give ranks to stages, in every order: 1, 3, 13, 75, 541 for 1 to 5 ranks."""
    for assignment in _surjections(len(ranks)):
        stages = max(assignment) + 1
        yield tuple(tuple(r for r, stage in zip(ranks, assignment, strict=True) if stage == s) for s in range(stages))


def _surjections(count: int) -> Iterator[tuple[int, ...]]:
    """Yield all assignments of `count` items to stages 0..k for which no stage is empty."""

    def extend(prefix: tuple[int, ...], stages: int) -> Iterator[tuple[int, ...]]:
        missing = stages - len(set(prefix))
        if missing > count - len(prefix):
            return
        if len(prefix) == count:
            yield prefix
            return
        for stage in range(stages):
            yield from extend((*prefix, stage), stages)

    for stages in range(1, count + 1):
        yield from extend((), stages)
