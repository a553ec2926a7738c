"""Lower bounds of a plan's step time and memory, for many plans at once.

Plans that differ in cuts and ranks only, with equally many replicas on their stages and equally many micro-batches, run
their computes in the same order. So the recursions below are walked once for all of them, by arrays. They take the
judge's own prices, and part of what its simulator keeps to; whatever is left out only makes a plan quicker or smaller:

    seconds    computes of a rank one after another; a compute after the messages that it takes; messages of a channel
               one after another; sums of gradients after the last backward of their stages; the optimizer after all.
               Left out: that receives must have been posted, and what posting costs.
    bytes      during every compute: state, what its stage holds, messages that are awaited, and its workspace.
               Left out: results, and messages that leave.

Every rank holds one stage, so a channel carries one edge, in the order of the micro-batches.

Legend: s, t stages, m micro-batch, c column: micro-batches that cost the same; d depth. Axes of arrays: plan, column,
replica (of the sender, of the receiver), then what is said.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_pipe.core.program import Layout, Order
from lightning_pipe.planner.candidates.moves import Ranks
from lightning_pipe.planner.estimates.bound_terms import (
    HALVES,
    NEVER,
    Array,
    Cuts,
    Edge,
    ExchangeTerm,
    Parts,
    PlanParts,
)
from lightning_pipe.schedule.lower.transfers import AHEAD
from lightning_pipe.schedule.orders.forward_only import forward_only
from lightning_pipe.schedule.orders.one_f_one_b import one_f_one_b
from lightning_pipe.schedule.rules import halves

Depths: TypeAlias = tuple[int, ...]

# kinds of bytes of a micro-batch on a replica; workspace of each half, and of the first half of its kind
_HELD, _KEPT, _ARRIVING, _WORKSPACE, _FIRST = 0, 1, {"F": 2, "I": 3}, 4, 7


class CandidateBatch:
    """Plans with equally many replicas on each stage, and equally many micro-batches.

    Args:
        parts: prices of the problem.
        plans: their cuts and ranks, at least one.
        microbatches: micro-batches per batch.
    """

    def __init__(self, parts: Parts, plans: Sequence[tuple[Cuts, Ranks]], microbatches: int) -> None:
        self.plans, self.microbatches = plans, microbatches
        self._training = parts.problem.training
        firsts = parts.columns(microbatches)
        columns = {m: c for c, m in enumerate(dict.fromkeys(firsts))}
        self._column = [columns[m] for m in firsts]
        rows = [parts.plan(*plan, microbatches) for plan in plans]
        self._stages = range(len(plans[0][1]))
        edges = dict.fromkeys(edge for row in rows for exchanges in row.exchanges for edge in exchanges)
        self._taken = [[edge for edge in edges if edge[2] == s] for s in self._stages]
        self._given = [[edge for edge in edges if edge[1] == s] for s in self._stages]
        self._moving_s, received = {}, {}
        for edge in edges:
            self._moving_s[edge], received[edge] = self._exchanged(edge, rows)
        self._seconds = [_stacked([[shares[s].seconds for shares in row.shares] for row in rows]) for s in self._stages]
        self._bytes = [self._bytes_of(s, rows, received) for s in self._stages]
        self._sums = np.array([row.sums for row in rows])
        self._step_s = np.array([max(stage.step_s for stage in row.stages) for row in rows])
        self._rooms = [np.array([row.stages[s].rooms for row in rows], dtype=float) for s in self._stages]
        self._lacking: dict[tuple[int, int], Array] = {}

    def only(self, chosen: NDArray[np.intp]) -> CandidateBatch:
        """Return the field of some of the plans."""
        field = copy.copy(self)
        field.plans = [self.plans[i] for i in chosen.tolist()]
        field._moving_s = {edge: seconds[chosen] for edge, seconds in self._moving_s.items()}
        field._seconds = [seconds[chosen] for seconds in self._seconds]
        field._bytes = [found[chosen] for found in self._bytes]
        field._rooms = [rooms[chosen] for rooms in self._rooms]
        field._sums, field._step_s = self._sums[chosen], self._step_s[chosen]
        field._lacking = {}
        return field

    def _exchanged(self, edge: Edge, rows: Sequence[PlanParts]) -> tuple[Array, Array]:
        """Return the seconds of an edge's messages, and the bytes that arrive."""
        _, source, target = edge
        senders, receivers = len(self.plans[0][1][source]), len(self.plans[0][1][target])
        nothing = ExchangeTerm(np.full((senders, receivers), NEVER), np.zeros(receivers))
        found = [[exchanges.get(edge, nothing) for exchanges in row.exchanges] for row in rows]
        moving_s = _stacked([[exchange.seconds for exchange in row] for row in found])
        return moving_s, _stacked([[exchange.received for exchange in row] for row in found])

    def _bytes_of(self, s: int, rows: Sequence[PlanParts], received: dict[Edge, Array]) -> Array:
        """Return the bytes of a stage, of all kinds."""
        shares = [[column[s] for column in row.shares] for row in rows]
        held = _stacked([[share.held for share in row] for row in shares])
        workspace = _stacked([[share.workspace for share in row] for row in shares])
        first = _stacked([[share.first for share in row] for row in shares])
        arriving = np.zeros((*held.shape[:-1], 2))
        for edge in self._taken[s]:
            arriving[..., "FB".index(edge[0])] += received[edge]
        idle = (self._seconds[s] == 0).all(axis=-1).any(axis=1)[:, None, :, None]  # its first may be a later one
        return np.concatenate([held, arriving, np.where(idle, first, workspace), first], axis=-1)

    def lacking(self, depths: Depths) -> Array:
        """Return, for every plan, the bytes by which it exceeds memory at least; 0 or less if it may fit."""
        return np.asarray(np.maximum.reduce([self._lacking_of(s, depth) for s, depth in enumerate(depths)]))

    def _lacking_of(self, s: int, depth: int) -> Array:
        if (s, depth) not in self._lacking:
            course = _course(depth, self.microbatches, self._training)
            amounts = np.zeros((len(course), self._bytes[s].shape[1], self._bytes[s].shape[-1]))
            for during, found in zip(amounts, _moments(course), strict=True):
                for m, kind in found:
                    during[self._column[m], kind] += 1
            used = np.einsum("rckf,xcf->rkx", self._bytes[s], amounts)
            lasting = np.stack([self._seconds[s][:, self._column[m], :, HALVES.index(half)] for half, m in course], -1)
            peaks = np.where(lasting > 0, used, 0.0).max(axis=-1)  # what takes no time uses no memory
            self._lacking[s, depth] = (peaks - self._rooms[s]).max(axis=-1)
        return self._lacking[s, depth]

    def least_s(self) -> Array:
        """Return, for every plan, the seconds that it takes at least in any order: a rank or a channel is always busy.

        forwards before + all computes of a stage + the longer of what is left of its sums, and the backwards of stages
        before
        forwards before + all messages of an edge in one direction
        """
        head = tail = np.zeros(len(self.plans))
        found = []
        for s in self._stages:
            seconds = self._seconds[s][:, self._column]
            loads = seconds.sum(axis=(1, 3))
            late = seconds[:, -1, :, 2]
            flowing = loads - late
            ends = np.maximum(self._summed(s, flowing), loads.max(axis=1))
            found.append(head + np.maximum(ends, flowing.max(axis=1) + tail))
            head = head + seconds[:, 0, :, 0].min(axis=1)
            tail = tail + seconds[:, -1, :, 1].min(axis=1)
            for edge in self._given[s]:
                if edge[0] == "F":
                    found.append(head + self._moving_s[edge][:, self._column].sum(axis=1).max(axis=(1, 2)))
        return np.asarray(np.maximum.reduce(found) + self._step_s)

    def seconds(self, depths: Depths) -> Array:
        """Return, for every plan, the seconds that it takes at least."""
        clocks = [np.zeros(rooms.shape) for rooms in self._rooms]
        flowed = [*clocks]  # when the last I has ended: sums go along with the W after it
        lasting = [_apart(seconds) for seconds in self._seconds]
        moving = {edge: _apart(seconds[..., None]) for edge, seconds in self._moving_s.items()}
        taken, given = ([_by_direction(edges) for edges in of_stages] for of_stages in (self._taken, self._given))
        arrived: dict[tuple[Edge, int], Array] = {}
        free: dict[Edge, Array] = {}
        for s, kind, m in _walk(depths, self.microbatches, self._training):
            forward, flow, late = lasting[s][self._column[m]]
            start = clocks[s]
            for edge in taken[s][kind]:
                start = np.maximum(start, arrived.pop((edge, m)))
            end = start + (forward if kind == "F" else flow)
            clocks[s], flowed[s] = end + late if kind == "B" else end, end
            for edge in given[s][kind]:
                begin, before = end[:, :, None], free.get(edge)
                moved = (begin if before is None else np.maximum(begin, before)) + moving[edge][self._column[m]][0]
                free[edge] = moved if before is None else np.maximum(moved, before)
                arrived[edge, m] = moved[:, 0] if moved.shape[1] == 1 else moved.max(axis=1)
        ends = [clock.max(axis=1) for clock in clocks]
        sums = [self._summed(s, clock) for s, clock in enumerate(flowed)]
        return np.asarray(np.maximum.reduce([*ends, *sums]) + self._step_s)

    def _summed(self, s: int, flowed: Array) -> Array:
        """Return when the sums of a stage end at least, if its last I has ended by `flowed` on its ranks."""
        late = self._seconds[s][:, self._column[-1], :, 2]
        made, left = self._sums[:, s, :, 0], self._sums[:, s, :, 1]
        begins = (flowed[:, :, None] + late[:, :, None] * made[:, None, :]).max(axis=1)
        return np.asarray((begins + left).max(axis=1))


def _stacked(found: Sequence[Sequence[Array]]) -> Array:
    """Return one array for all plans and columns."""
    whole = np.stack([one for row in found for one in row])
    return whole.reshape(len(found), -1, *whole.shape[1:])


def _apart(seconds: Array) -> list[list[Array]]:
    """Return what is said of every column, each by itself; axes: plan, column, and so on, what is said."""
    apart = np.moveaxis(seconds, (1, -1), (0, 1))
    return [[np.ascontiguousarray(one) for one in column] for column in apart]


def _by_direction(edges: Sequence[Edge]) -> dict[str, list[Edge]]:
    return {direction: [edge for edge in edges if edge[0] == direction] for direction in "FB"}


Course: TypeAlias = tuple[tuple[str, int], ...]  # halves and micro-batches of one stage, in order


@lru_cache(maxsize=1024)
def _course(depth: int, microbatches: int, training: bool) -> Course:
    (line,) = _order((depth,), microbatches, training)
    return tuple((half.kind, half.microbatch) for compute in line for half in halves(compute))


def _order(depths: Depths, microbatches: int, training: bool) -> Order:
    layout = Layout(tuple((s,) for s in range(len(depths))))
    if not training:
        return forward_only(layout, microbatches)
    return one_f_one_b(layout, microbatches, {"warmup": ",".join(map(str, depths))})


@lru_cache(maxsize=1024)
def _moments(course: Course) -> list[list[tuple[int, int]]]:
    """Return what is there during every compute: micro-batches, and kinds of bytes."""
    places = {compute: x for x, compute in enumerate(course)}
    spans = []  # begin, end (not included), micro-batch, kind
    for (half, m), x in places.items():
        if half == "F":
            spans.append((x, places.get(("I", m), x) + 1, m, _HELD))
        if half == "W":
            spans.append((x, x + 1, m, _KEPT))
        if half in _ARRIVING:
            spans.append((max(0, x - AHEAD), x, m, _ARRIVING[half]))
        spans.append((x, x + 1, m, (_WORKSPACE if m else _FIRST) + HALVES.index(half)))
    return [[(m, kind) for begin, end, m, kind in spans if begin <= x < end] for x in range(len(course))]


@lru_cache(maxsize=4096)
def _walk(depths: Depths, microbatches: int, training: bool) -> tuple[tuple[int, str, int], ...]:
    """Return the computes of all stages so that each comes after those that it needs."""
    lines = [
        [(compute.stage, compute.kind, compute.microbatch) for compute in line]
        for line in _order(depths, microbatches, training)
    ]
    done: dict[tuple[int, str, int], None] = {}
    places = [0] * len(lines)
    while len(done) < sum(map(len, lines)):
        for s, line in enumerate(lines):
            for step in line[places[s] :]:
                _, kind, m = step
                t = s + (-1 if kind == "F" else 1)  # values that skip stages are there by then
                if 0 <= t < len(lines) and (t, kind, m) not in done:
                    break
                done[step] = None
                places[s] += 1
    return tuple(done)
