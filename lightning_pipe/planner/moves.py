"""Which outlines are near this one? Moves that a local search tries, small ones first.

    count       more or fewer micro-batches
    shift       a cut to a position nearby
    pass        a device from one stage to another
    swap        two devices of different stages, where devices or links differ
    merge       two neighbouring stages into one on all their devices
    split       a stage with several devices into two

Moves that change who does what leave the cuts to `planner.balance`. A layout is the ranks of each stage.

Legend: s, t stages.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from lightning_pipe.core.cluster import Cluster

Ranks: TypeAlias = tuple[tuple[int, ...], ...]

_MOST_STAGES = 16  # of these many stages, a device is passed between any two; of more, between neighbours
_MOST_SWAPPED = 12  # devices up to which any two are swapped


def layouts_near(ranks: Ranks, cluster: Cluster) -> Iterator[Ranks]:
    """Yield layouts that differ by one move, each once."""
    moves = (*_passed(ranks), *_merged(ranks), *_split(ranks), *_swapped(ranks, cluster))
    yield from dict.fromkeys(moves)


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
    for s, t in itertools.combinations(range(len(ranks)), 2):
        for one, two in itertools.product(ranks[s], ranks[t]):
            if not _alike(cluster, one, two):
                yield _with(ranks, {s: (*_without(ranks[s], one), two), t: (*_without(ranks[t], two), one)})


def _alike(cluster: Cluster, one: int, two: int) -> bool:
    """Say whether exchanging two devices changes nothing: they are equal and on one host with links of its own."""
    same_host = cluster.host_of(one) == cluster.host_of(two)
    measured = any({pair.sender, pair.receiver} & {one, two} for pair in cluster.links)
    return same_host and not measured and cluster.device(one) == cluster.device(two)


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
