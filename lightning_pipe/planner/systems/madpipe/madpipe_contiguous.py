"""Contiguous allocations by MadPipe: cuts of least period within memory, exact.

After MadPipe (`madpipe_chain`) without its special processor. For a period T, 1F1B* (`one_f_one_b`)
packs loads and links from the end of the pipeline into groups of at most T; a stage of the g-th group holds g
micro-batches, which is the least that sustains T. So all that stages further to the front need to know of those behind
is V, the seconds packed so far, where what does not fit begins a new group:

    V + x = V + x if that stays in the group of V, else T ceil(V/T) + x
    best[s, a] = min over b of (best[s+1, b] + link[s, b]) + U[s, a, b], if bytes(a, b, g of the sum) fit

"+" is monotone in V and bytes grow with g, so the least V is all that must be kept of a state: one value per bound and
processor. Where a stage may drop a share of what it saves, the share and its seconds follow from g and grow with it,
and a stage is either in the group of V or in the next: two cases, still exact. The least feasible T is found by
bisection. For one T, O(bounds^2) if stages are short (rows are as wide as the longest stage within T), otherwise
O(processors bounds^2).

Legend: s processor, a, b bounds, g group; V is kept as (group, seconds filled of it).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from lightning_pipe.planner.estimates.stage_costs import Matrix
from lightning_pipe.planner.systems.madpipe.madpipe_chain import Chain, Processor
from lightning_pipe.schedule.orders.one_f_one_b import ROUNDING

Found = TypeVar("Found")
_START = 1e-3  # of the longest period: the first that is tried after the least
_GROWTH = 1.5  # of a period until one is feasible


@dataclass(frozen=True)
class PeriodicPipeline:
    """Contiguous stages that sustain a period within memory.

    Attributes:
        cuts: bounds at which stages 1, 2, ... begin.
        groups: for each stage the group of 1F1B*: the micro-batches that it has to hold.
        held: for each stage those that it does hold: no more than there are, or as many as is decided already.
        dropped: for each stage the share that it drops of what it may drop.
        period: seconds per micro-batch.
    """

    cuts: tuple[int, ...]
    groups: tuple[int, ...]
    held: tuple[int, ...]
    dropped: tuple[float, ...]
    period: float

    def excess(self, chain: Chain) -> float:
        """Return the bytes by which the fullest processor exceeds its memory; 0 or less if all fit."""
        stages = itertools.pairwise((0, *self.cuts, chain.bounds - 1))
        return max(
            processor.bytes(a, b, held=held, dropped=share) - processor.memory_bytes
            for processor, (a, b), held, share in zip(chain.processors, stages, self.held, self.dropped, strict=True)
        )


def best_pipeline(chain: Chain, *, precision: float = 1e-6) -> PeriodicPipeline | None:
    """Return the pipeline with the least period; None if memory allows none.

    Args:
        chain: processors; all get a stage.
        precision: relative error of the period.
    """
    search = _Search(chain)
    whole = [float(p.load_s[0, -1]) for p in chain.processors]
    least = 1 / sum(1 / seconds for seconds in whole) if min(whole) > 0 else 0.0
    return least_period(search.pipeline, least=least, most=longest_period(chain), precision=precision)


def least_exceeding(chain: Chain) -> PeriodicPipeline:
    """Return a pipeline that exceeds memory as little as any, however long its period."""
    most = max(float(p.fixed_bytes.max() + p.saved_bytes.max()) for p in chain.processors) * chain.held(0, 1)
    period = longest_period(chain)
    found = least_period(
        lambda more: _Search(chain.with_memory(more, more=True)).pipeline(period), least=0.0, most=most, precision=0.01
    )
    assert found is not None, "a stage fits where memory is added that all stages together need"
    return found


def stretched(chain: Chain, cuts: Sequence[int], *, precision: float = 1e-6) -> PeriodicPipeline | None:
    """Return the least period that given stages can sustain within memory; None if they do not fit at all.

    Args:
        chain: processors.
        cuts: bounds at which stages 1, 2, ... begin.
        precision: relative error of the period.
    """
    bounds = itertools.pairwise((0, *cuts, chain.bounds - 1))
    least = max(float(p.load_s[a, b]) for p, (a, b) in zip(chain.processors, bounds, strict=True))
    return least_period(
        lambda T: sustained(chain, cuts, T), least=least, most=longest_period(chain), precision=precision
    )


def longest_period(chain: Chain) -> float:
    """Return a period within which every pipeline does everything to one micro-batch alone."""
    links = sum(float(link.max()) for link in chain.links)
    return links + sum(float(p.load_s[0, -1] + p.forward_s[0, -1]) for p in chain.processors)


def least_period(
    attempt: Callable[[float], Found | None], *, least: float, most: float, precision: float
) -> Found | None:
    """Return what is found for the least period for which something is; None if nothing is for the most.

    Args:
        attempt: finds something for a period, and for all longer ones.
        least: period below which nothing can be found.
        most: longest period that is worth a try.
        precision: relative error of the period.
    """
    found = attempt(least)
    if found is not None:
        return found
    low, high = least, min(most, max(least * _GROWTH, most * _START))
    while (found := attempt(high)) is None:
        if high >= most:
            return None
        low, high = high, min(most, high * _GROWTH)
    while high - low > precision * high:
        middle = (low + high) / 2
        better = attempt(middle)
        if better is None:
            low = middle
        else:
            high, found = middle, better
    return found


def sustained(chain: Chain, cuts: Sequence[int], period: float) -> PeriodicPipeline | None:
    """Return how given stages sustain a period within memory; None if they cannot."""
    bounds = [*itertools.pairwise((0, *cuts, chain.bounds - 1))]
    group, filled = 1, 0.0
    groups, shares = [], []
    for s, (a, b) in reversed([*enumerate(bounds)]):
        processor = chain.processors[s]
        for number, used in ((group, filled), (group + 1, 0.0)):
            share = _share(processor, a, b, chain.held(s, number))
            load = float(processor.load_s[a, b]) + share * float(processor.forward_s[a, b]) if share <= 1.0 else np.inf
            if used + load <= period * (1 + ROUNDING):
                break
        else:
            return None
        if number > chain.most_groups(s):
            return None
        group, filled = number, used + load
        groups.append(group)
        shares.append(share)
        if s:
            link = float(chain.links[s - 1][a])
            group, filled = (group, filled + link) if filled + link <= period * (1 + ROUNDING) else (group + 1, link)
            if link > period * (1 + ROUNDING):
                return None
    groups.reverse()
    held = tuple(chain.held(s, number) for s, number in enumerate(groups))
    return PeriodicPipeline(tuple(cuts), tuple(groups), held, tuple(reversed(shares)), period)


def _share(processor: Processor, a: int, b: int, held: int) -> float:
    """Return the share of what a stage may drop that it must drop to fit; infinite if that does not help."""
    excess = processor.bytes(a, b, held=held) - processor.memory_bytes
    if excess <= 0:
        return 0.0
    freed = processor.freed_bytes(a, b, held=held)
    return excess / freed if freed else np.inf


@dataclass(frozen=True)
class _Band:
    """Costs of a processor with stages by length: column w is the stage of w + 1 units.

    Loads are infinite beyond the end, and where not even one micro-batch fits.
    """

    load_s: Matrix
    forward_s: Matrix
    fixed_bytes: Matrix
    saved_bytes: Matrix
    droppable_bytes: Matrix
    spread_bytes: Matrix

    @cached_property
    def can_drop(self) -> bool:
        """Return whether anything may be dropped."""
        return bool(self.droppable_bytes.any())

    def to(self, width: int) -> _Band:
        """Return the stages of at most so many units."""
        return _Band(
            self.load_s[:, :width],
            self.forward_s[:, :width],
            self.fixed_bytes[:, :width],
            self.saved_bytes[:, :width],
            self.droppable_bytes[:, :width],
            self.spread_bytes[:, :width],
        )


def _band(processor: Processor, ends: NDArray[np.int64]) -> _Band:
    """Return the costs of stages from every bound to these ends (one row of `ends` for each bound)."""
    units = len(ends)
    rows = np.arange(units)[:, None]
    inside = np.minimum(ends, units)
    fixed, saved = processor.fixed_bytes[rows, inside], processor.saved_bytes[rows, inside]
    droppable, spread = processor.droppable_bytes[rows, inside], processor.spread_bytes[rows, inside]
    may_fit = (ends <= units) & (fixed + saved - spread <= processor.memory_bytes)
    load = np.where(may_fit, processor.load_s[rows, inside], np.inf)
    return _Band(load, processor.forward_s[rows, inside], fixed, saved, droppable, spread)


class _Search:
    """The dynamic program over one chain, for any period."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        units = chain.bounds - 1
        self._ends = np.arange(units)[:, None] + 1 + np.arange(units)[None, :]
        different = {id(processor): processor for processor in chain.processors}
        self._bands = {key: _band(processor, self._ends) for key, processor in different.items()}

    def pipeline(self, period: float) -> PeriodicPipeline | None:
        """Return a pipeline that sustains a period, with the least V; None if there is none."""
        units, count = self._chain.bounds - 1, len(self._chain.processors)
        group, filled = np.ones(units + 1), np.full(units + 1, np.inf)
        filled[units] = 0.0
        chosen = []
        for s in reversed(range(count)):
            group, filled, ends = self._stage(s, period, group, filled)
            chosen.append(ends)
            if not np.isfinite(filled).any():
                return None
            if s:
                group, filled = _packed(group, filled, self._chain.links[s - 1], period)
        if not np.isfinite(filled[0]):
            return None
        cuts, a = [], 0
        for ends in reversed(chosen):
            a = int(ends[a])
            cuts.append(a)
        return sustained(self._chain, cuts[:-1], period)

    def _stage(
        self, s: int, period: float, group: NDArray[np.float64], filled: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
        """Return the least V with stage s from every bound on, and where that stage ends.

        Args:
            s: the stage.
            period: the period.
            group, filled: the least V of all behind, by the bound at which the stage ends.
        """
        units, limit = self._chain.bounds - 1, period * (1 + ROUNDING)
        whole = self._bands[id(self._chain.processors[s])]
        width = 1 + int(np.flatnonzero((whole.load_s <= limit).any(axis=0)).max(initial=0))
        band, ends = whole.to(width), np.minimum(self._ends[:, :width], units)
        number, used = group[ends], filled[ends]
        here = used + self._load_s(s, band, number)
        further = np.where(np.isfinite(used), self._load_s(s, band, number + 1), np.inf)
        stays = here <= limit
        number, packed = np.where(stays, number, number + 1), np.where(stays, here, further)
        packed[packed > limit] = np.inf
        packed[number > self._chain.most_groups(s)] = np.inf
        best = np.argmin((number - 1) * period + packed, axis=1)
        rows = np.arange(units)
        found = np.ones(units + 1), np.full(units + 1, np.inf)
        found[0][:-1], found[1][:-1] = number[rows, best], packed[rows, best]
        return (*found, ends[rows, best])

    def _load_s(self, s: int, band: _Band, group: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the seconds of all stages with what they must recompute in this group; infinite if they do not fit."""
        chain = self._chain
        held = np.minimum(chain.depths[s] if chain.depths else group, chain.microbatches)
        excess = band.fixed_bytes + held * band.saved_bytes - chain.processors[s].memory_bytes
        if not band.can_drop:
            return np.where(excess <= 0, band.load_s, np.inf)
        freed = np.maximum((held - 1) * band.droppable_bytes, held * band.spread_bytes)
        enough = excess <= freed
        share = np.divide(np.maximum(excess, 0.0), freed, out=np.zeros_like(freed), where=enough & (excess > 0))
        return np.where(enough, band.load_s + share * band.forward_s, np.inf)


def _packed(
    group: NDArray[np.float64], filled: NDArray[np.float64], loads: NDArray[np.float64], period: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return V with a link in front, by bound."""
    limit = period * (1 + ROUNDING)
    stays = filled + loads <= limit
    alone = np.where(np.isfinite(filled) & (loads <= limit), loads, np.inf)
    return np.where(stays, group, group + 1), np.where(stays, filled + loads, alone)
