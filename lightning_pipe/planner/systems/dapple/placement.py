"""Placement of the next stage: DAPPLE's three policies over the free devices of every host.

    D(g, n), after Fan et al., DAPPLE (PPoPP 2021), section 4.2: devices returned when n are asked for in state g

    fresh first     from hosts that nobody uses yet, one after another, then from others: keeps a stage inside a host
    append first    from hosts that are used already, one after another, then from fresh ones: leaves no fragments
    scatter first   evenly from all used hosts, or from all hosts if all are fresh: spreads replicas of a large stage

    2 hosts of 4, 1 device used:    * . . . | . . . .
    3 more, fresh first             * . . . | x x x .
            append first            * x x x | . . . .
            scatter first           * x x x | . . . .      the only used host; with both used, evenly: * x x . | * x . .

Ours: where used hosts have too few free devices for scatter first, the rest is spread over fresh ones; hosts may have
different numbers and kinds of devices, and then every policy is tried with the hosts of each kind first; hosts that are
alike are told apart by what is used of them only (`canonical`), so that states are multisets and remain few. Devices of
a host are taken in their order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lightning_pipe.core.cluster import Cluster

Counts: TypeAlias = tuple[int, ...]  # devices per host
_MOST_KINDS = 4  # of hosts that are tried first in turn; with more, hosts are taken in their order


@dataclass(frozen=True)
class Site:
    """Where stages are placed.

    Attributes:
        capacity: devices of every host.
        kinds: kind of every host; hosts of one kind are alike in all respects.
    """

    capacity: Counts
    kinds: Counts


def site_of(cluster: Cluster) -> Site:
    """Return hosts and their kinds; where links between hosts were measured unequally, no two hosts are alike."""
    capacity = tuple(len(host.devices) for host in cluster.hosts)
    looks = [(host.devices, host.inside, host.network) for host in cluster.hosts]
    if not _is_symmetric(cluster, looks):
        return Site(capacity, tuple(range(len(looks))))
    different = list(dict.fromkeys(looks))
    return Site(capacity, tuple(different.index(look) for look in looks))


def _is_symmetric(cluster: Cluster, looks: Sequence[object]) -> bool:
    """Return whether measured links depend on the looks of their hosts only."""
    found: dict[object, set[object]] = {}
    if not cluster.links:
        return True
    for sender in range(cluster.ranks):
        for receiver in range(cluster.ranks):
            here, there = cluster.host_of(sender), cluster.host_of(receiver)
            if sender != receiver:
                ends = (looks[here], looks[there], here == there)
                found.setdefault(ends, set()).add(cluster.link(sender, receiver))
    return all(len(links) == 1 for links in found.values())


def placements(site: Site, used: Counts, count: int) -> list[Counts]:
    """Return what the policies take from every host, each different result once; none if too few devices are free."""
    free = tuple(size - taken for size, taken in zip(site.capacity, used, strict=True))
    if not 0 < count <= sum(free):
        return []
    found: dict[Counts, None] = {}
    for hosts in _preferences(site):
        fresh = [h for h in hosts if free[h] and not used[h]]
        begun = [h for h in hosts if free[h] and used[h]]
        found[_in_turn(free, [*fresh, *begun], count)] = None
        found[_in_turn(free, [*begun, *fresh], count)] = None
        found[_evenly(free, [begun, fresh], count)] = None
    return list(found)


def _preferences(site: Site) -> Iterator[list[int]]:
    """Yield the hosts in order, those of each kind first in turn."""
    hosts, kinds = range(len(site.capacity)), list(dict.fromkeys(site.kinds))
    for kind in kinds if len(kinds) <= _MOST_KINDS else kinds[:1]:
        yield sorted(hosts, key=lambda h: site.kinds[h] != kind)


def _in_turn(free: Counts, hosts: Sequence[int], count: int) -> Counts:
    """Take all free devices of one host after another."""
    taken = [0] * len(free)
    for h in hosts:
        taken[h] = min(free[h], count)
        count -= taken[h]
    return tuple(taken)


def _evenly(free: Counts, groups: Sequence[Sequence[int]], count: int) -> Counts:
    """Take one device of each host of a group in turn, and go on to the next group when it has no more."""
    turns = [host for group in groups for turn in range(max(free)) for host in group if turn < free[host]]
    taken = Counter(turns[:count])
    return tuple(taken[host] for host in range(len(free)))


def canonical(site: Site, used: Counts) -> tuple[int, ...]:
    """Return an order of the hosts in which those of one kind come by what is used of them, most first.

    The h-th host of the new order is the one that had this index before; it is of the same kind as the h-th before.
    """
    order = list(range(len(used)))
    for kind in dict.fromkeys(site.kinds):
        places = [h for h in order if site.kinds[h] == kind]
        chosen = sorted(places, key=lambda h: (-used[h], h))
        for place, host in zip(places, chosen, strict=True):
            order[place] = host
    return tuple(order)


def reorder(counts: Counts, order: Sequence[int]) -> Counts:
    """Return counts per host in another order of the hosts."""
    return tuple(counts[h] for h in order)


def ranks_of(site: Site, used: Counts, taken: Counts) -> tuple[int, ...]:
    """Return the ranks of the next `taken` devices of every host, rising; ranks are numbered host by host."""
    ranks: list[int] = []
    first = 0
    for size, begin, count in zip(site.capacity, used, taken, strict=True):
        ranks.extend(range(first + begin, first + begin + count))
        first += size
    return tuple(ranks)
