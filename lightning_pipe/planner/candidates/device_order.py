"""Device order of a pipeline: fast links join neighbors, slow links are crossed once.

After the recursive device ordering (RDO) of Luo et al., "Efficient Pipeline Planning for Expedited Distributed DNN
Training" (INFOCOM 2022), reconstructed:

    1. devices are the vertices of a complete graph whose edges weigh the bandwidth between two of them
    2. a global minimum cut (Stoer and Wagner, JACM 1997) parts them where links are weakest
    3. each part is ordered in the same way, and the two orders are joined
    4. ours: either order may be turned round, so that the bandwidth where they meet is largest

Ours too: hosts are ordered first, each as one vertex, then the devices inside each host; so a host is never torn apart,
even where a single device hangs on less bandwidth than a host does, and 1,024 devices on 128 hosts are quick. Where all
links of a part are equal, its order is that of the ranks. Hosts that are alike, and have no better link than to each
other, stay together in that order as one vertex. Bandwidth is that of the slower direction; latency is left out.
O(h^2) array operations over h different hosts for a cut, and h cuts if every cut peels off one host: a second for 128.
More than 160 different ones are ordered by their bandwidth to all others instead, slow ones first.

    two racks, 10 between them, 40 inside; ranks numbered across      a0 b0 a1 b1  ->  a0 a1 b0 b1
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_pipe.core.cluster import Cluster

Weights: TypeAlias = NDArray[np.float64]  # [u, v], symmetric

_UNLIMITED = 1e15  # bytes per second that stand for unlimited ones, which have no sum
_MOST_CUT = 160  # different vertices that are ordered by cuts


def device_order(cluster: Cluster) -> tuple[int, ...]:
    """Return all ranks, neighbours in the order being devices with much bandwidth between them."""
    members = _members(cluster)
    hosts = order_of(_host_weights(cluster, members))
    lines = [_inside(cluster, members[h]) for h in hosts]
    return tuple(itertools.chain.from_iterable(_turned(cluster, lines)))


def quality(cluster: Cluster, order: Sequence[int]) -> float:
    """Return the sum of the bandwidths of neighbours in bytes per second: what an order is good for."""
    return sum(bandwidth(cluster, u, v) for u, v in itertools.pairwise(order))


def bandwidth(cluster: Cluster, u: int, v: int) -> float:
    """Return the bytes per second between two ranks, in the slower direction."""
    return min(cluster.link(u, v).bytes_per_s, cluster.link(v, u).bytes_per_s, _UNLIMITED)


def order_of(weights: Weights) -> tuple[int, ...]:
    """Order the vertices of a complete graph by recursive minimum cuts."""
    groups = _alike(weights)
    member = np.zeros((len(groups), len(weights)))
    for g, group in enumerate(groups):
        member[g, list(group)] = 1.0
    between = member @ weights @ member.T
    if len(groups) > _MOST_CUT:
        order = tuple(sorted(range(len(groups)), key=lambda g: float(between[g].sum()) / len(groups[g])))
    else:
        order = _ordered(between, tuple(range(len(groups))))
    return tuple(itertools.chain.from_iterable(groups[g] for g in order))


def _alike(weights: Weights) -> list[tuple[int, ...]]:
    """Group vertices with the same weights to all others that have no larger one than to each other."""
    rows = weights.astype(float, copy=True)
    np.fill_diagonal(rows, -np.inf)
    np.fill_diagonal(rows, rows.max(axis=1))
    groups: dict[bytes, list[int]] = {}
    for vertex, row in enumerate(rows):
        groups.setdefault(row.tobytes(), []).append(vertex)
    return [tuple(group) for group in groups.values()]


def _members(cluster: Cluster) -> list[tuple[int, ...]]:
    """Return the ranks of every host."""
    firsts = itertools.accumulate((len(host.devices) for host in cluster.hosts), initial=0)
    return [tuple(range(first, first + len(host.devices))) for first, host in zip(firsts, cluster.hosts, strict=False)]


def _host_weights(cluster: Cluster, members: Sequence[tuple[int, ...]]) -> Weights:
    """Return the bandwidth between the devices of any two hosts, summed over their pairs."""
    cards = np.array([min(host.network.bytes_per_s, _UNLIMITED) for host in cluster.hosts])
    counts = np.array([len(ranks) for ranks in members], dtype=float)
    unmeasured = np.multiply.outer(counts, counts)
    measured: Weights = np.zeros_like(unmeasured)
    for u, v in {(min(link.sender, link.receiver), max(link.sender, link.receiver)) for link in cluster.links}:
        here, there = cluster.host_of(u), cluster.host_of(v)
        unmeasured[[here, there], [there, here]] -= 1
        measured[[here, there], [there, here]] += bandwidth(cluster, u, v)
    weights: Weights = np.minimum.outer(cards, cards) * unmeasured + measured
    np.fill_diagonal(weights, 0.0)
    return weights


def _inside(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Order the devices of one host."""
    measured = {rank for link in cluster.links for rank in (link.sender, link.receiver)}
    if len(ranks) < 3 or measured.isdisjoint(ranks):
        return ranks
    weights = np.array([[0.0 if u == v else bandwidth(cluster, u, v) for v in ranks] for u in ranks])
    return tuple(ranks[i] for i in order_of(weights))


def _ordered(weights: Weights, vertices: tuple[int, ...]) -> tuple[int, ...]:
    """Order some vertices: cut, order both sides, join them where most bandwidth is."""
    if len(vertices) < 3 or _all_equal(weights, vertices):
        return vertices
    inside = set(minimum_cut(weights[np.ix_(vertices, vertices)])[0])
    sides = [tuple(v for i, v in enumerate(vertices) if (i in inside) is wanted) for wanted in (True, False)]
    first, second = (_ordered(weights, side) for side in sorted(sides))
    return max(
        (left + right for left in (first, first[::-1]) for right in (second, second[::-1])),
        key=lambda joined: weights[joined[len(first) - 1], joined[len(first)]],
    )


def _all_equal(weights: Weights, vertices: Sequence[int]) -> bool:
    part = weights[np.ix_(vertices, vertices)][np.triu_indices(len(vertices), k=1)]
    return bool(np.all(part == part[0]))


def minimum_cut(weights: Weights) -> tuple[tuple[int, ...], float]:
    """Return one side of a global minimum cut and the weight across, after Stoer and Wagner.

    Every phase adds vertices in the order of their weight to those already added; the last one's weight to all others
    is a cut, after which the last two become one vertex. The own code is for speed: networkx takes seconds for a
    hundred vertices, and an order needs as many cuts.
    """
    merged = weights.astype(float, copy=True)
    np.fill_diagonal(merged, 0.0)
    groups: list[tuple[int, ...]] = [(v,) for v in range(len(merged))]
    alive = np.ones(len(merged), dtype=bool)
    best: tuple[tuple[int, ...], float] = ((), np.inf)
    for _ in range(len(merged) - 1):
        before, last, across = _phase(merged, alive)
        if across < best[1]:
            best = (groups[last], across)
        merged[before] += merged[last]
        merged[:, before] += merged[:, last]
        merged[before, before] = 0.0
        groups[before] += groups[last]
        alive[last] = False
    return best


def _phase(merged: Weights, alive: NDArray[np.bool_]) -> tuple[int, int, float]:
    """Return the vertex added last but one, the last one, and the weight of the last one to all others."""
    start = int(np.argmax(alive))
    attached = np.where(alive, merged[start], -np.inf)
    attached[start] = -np.inf
    before, last, across = start, start, 0.0
    for _ in range(int(alive.sum()) - 1):
        before, last = last, int(attached.argmax())
        across = float(attached[last])
        attached += merged[last]
        attached[last] = -np.inf
    return before, last, across


def _turned(cluster: Cluster, lines: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Turn lines round where that makes the bandwidth between neighbouring lines largest in sum; as they are if not."""
    choices = [(0.0, [lines[0]]), (0.0, [lines[0][::-1]])]  # best so far that ends with the last line so, or turned
    for line in lines[1:]:
        choices = [
            max(
                ((gained + bandwidth(cluster, chosen[-1][-1], way[0]), [*chosen, way]) for gained, chosen in choices),
                key=lambda choice: choice[0],
            )
            for way in (line, line[::-1])
        ]
    return max(choices, key=lambda choice: choice[0])[1]
