"""Search for hybrid pipelines of least latency: DAPPLE's recursion over (layers, devices, occupation).

After Fan et al., DAPPLE (PPoPP 2021), eq. 4 and 5:

    TPL(j, m, g)   the first j layers are planned on m devices g; the others form one last stage on all other devices;
                   its value is L of this complete plan
    step           the last stage is split at j': layers j..j' on m' devices, placed by each policy of D(g, m')

So the value of a state is not the cost of a sub-problem but that of its completion, and the recursion is a memoised
search, not an exact dynamic program. The paper's: state, step, value, placement, pivot that goes on from that of the
state. Ours:

    - a state knows its number of stages too, so that the best plans of each number are found (the formula is too kind
      to many stages, see `planner.systems.dapple.dapple_planner`);
    - hosts of one kind are interchangeable, so g is a multiset (`placement.canonical`);
    - memory: what exceeds it least comes first. The last stage is taken to hold one micro-batch, the others two; none
      where what is saved may be recomputed or offloaded;
    - replicas that would get fewer samples than wanted are left out;
    - where many states of g are found (many hosts), those with the best values are kept.

All j and j' are worked out at once, as arrays. Growth: O(stages · states of g · degrees · bounds²) for one number of
micro-batches; with `most_states` the second factor is bounded.

Legend: j, k bounds (`planner.estimates.stage_costs`), a stage is [j, k); g devices used per host; M micro-batches.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_pipe.cost.comm import all_reduce_of, exchange_of
from lightning_pipe.planner.candidates.candidate import weights_of
from lightning_pipe.planner.estimates.stage_costs import StageCostTable
from lightning_pipe.planner.problem import Problem
from lightning_pipe.planner.systems.dapple.dapple_latency import ElementTimes, Prefix, Values, empty_prefix
from lightning_pipe.planner.systems.dapple.placement import (
    Counts,
    Site,
    canonical,
    placements,
    ranks_of,
    reorder,
    site_of,
)

Ranks: TypeAlias = tuple[int, ...]
_WHOLE_MODEL_TIMES = 1e3  # a plan that exceeds memory by all of it is that many times as bad as one device alone
_PROBE_BYTES = 1e6  # messages and sums are affine in their bytes: two sizes tell both numbers


class Network:
    """Seconds of sums and exchanges as (latency, seconds per byte), worked out once for all numbers of micro-batches.

    Args:
        problem: devices and links.
    """

    def __init__(self, problem: Problem) -> None:
        self.cluster, self.site = problem.cluster, site_of(problem.cluster)
        self._message_s = problem.profile.message_s
        self._looks: dict[Ranks, object] = {}
        self._reductions: dict[object, tuple[float, float]] = {}
        self._exchanges: dict[tuple[Ranks, Ranks], tuple[float, float]] = {}

    def look(self, ranks: Ranks) -> object:
        """Return what is equal for devices that stages cannot tell apart."""
        if ranks not in self._looks:
            hosts = Counter((self.cluster.host_of(rank), self.cluster.device(rank)) for rank in ranks)
            looks = Counter((self.site.kinds[h], device, count) for (h, device), count in hosts.items())
            self._looks[ranks] = frozenset(looks.items())
        return self._looks[ranks]

    def reduction(self, ranks: Ranks) -> tuple[float, float]:
        """Return latency and seconds per byte of a sum of gradients."""
        look = self.look(ranks)
        if look not in self._reductions:
            reduction = all_reduce_of(self.cluster, ranks)
            start = reduction.seconds(0.0)
            self._reductions[look] = start, (reduction.seconds(_PROBE_BYTES) - start) / _PROBE_BYTES
        return self._reductions[look]

    def exchange(self, senders: Ranks, receivers: Ranks) -> tuple[float, float]:
        """Return latency and seconds per byte of what a stage sends to the next for a micro-batch."""
        if not self.cluster.links and (receivers, senders) in self._exchanges:
            return self._exchanges[receivers, senders]  # links that follow from hosts are alike in both directions
        if (senders, receivers) not in self._exchanges:
            exchange = exchange_of(self.cluster, _pairs(senders, receivers))
            start = max(self._message_s, exchange.seconds(0.0))
            per_byte = max(0.0, exchange.seconds(_PROBE_BYTES) - start) / _PROBE_BYTES
            self._exchanges[senders, receivers] = start, per_byte
        return self._exchanges[senders, receivers]


def _pairs(senders: Ranks, receivers: Ranks) -> list[tuple[int, int]]:
    """Return who sends to whom where replicas share a micro-batch evenly on both sides."""
    p, q = len(senders), len(receivers)
    return [(sender, receivers[j]) for i, sender in enumerate(senders) for j in range(i * q // p, -(-(i + 1) * q // p))]


class DappleCosts:
    """Times of stages and links for one number of micro-batches.

    Args:
        segments: costs of stages.
        bounds: which of the bounds are looked at, rising, the first and the last among them.
        network: of the same problem.
        microbatches: micro-batches per batch.
    """

    def __init__(self, segments: StageCostTable, bounds: Sequence[int], network: Network, *, microbatches: int) -> None:
        self.segments, self.network, self.microbatches = segments, network, microbatches
        self.bounds = np.array(bounds)
        self.samples = segments.problem.samples / microbatches
        self._training = segments.problem.training
        self._pick = np.ix_(self.bounds, self.bounds)
        self._trained = segments.trained_bytes[self._pick]
        self._state = segments.state_bytes[self._pick]
        crossing = segments.crossing
        self._ahead = crossing["F"].bytes(self.samples)[self.bounds]
        self._back = crossing["B"].bytes(self.samples)[self.bounds]
        self._slices: dict[float, tuple[Values, Values, Values]] = {}
        self._by_ranks: dict[tuple[Ranks, int], ElementTimes] = {}
        self._by_look: dict[tuple[object, int], ElementTimes] = {}

    @property
    def penalty_s(self) -> float:
        """Return the seconds for which exceeding memory by all of it counts."""
        forward, backward, _ = self._slice(self.samples)
        return _WHOLE_MODEL_TIMES * self.microbatches * float(forward[0, -1] + backward[0, -1])

    def stage(self, ranks: Ranks, *, held: int) -> ElementTimes:
        """Return the times of all stages [j, k) on these ranks, which hold so many micro-batches."""
        if (ranks, held) not in self._by_ranks:
            look = (self.network.look(ranks), held)
            if look not in self._by_look:
                self._by_look[look] = self._stage(ranks, held=held)
            self._by_ranks[ranks, held] = self._by_look[look]
        return self._by_ranks[ranks, held]

    def _stage(self, ranks: Ranks, *, held: int) -> ElementTimes:
        cluster = self.network.cluster
        weights = weights_of(cluster, ranks) or (1,) * len(ranks)
        forward, backward, excess = (np.zeros_like(self._trained) for _ in range(3))
        summed = self._trained if len(ranks) > 1 else np.zeros_like(self._trained)
        for weight, device in {(w, cluster.device(rank)) for w, rank in zip(weights, ranks, strict=True)}:
            f, b, saved = self._slice(self.samples * weight / sum(weights))
            forward = np.maximum(forward, f / device.speed)
            backward = np.maximum(backward, b / device.speed)
            excess = np.maximum(excess, (self._state + summed + held * saved) / device.memory_bytes - 1.0)
        start, per_byte = self.network.reduction(ranks)
        reduce = np.where(self._trained > 0, start + self._trained * per_byte, 0.0)
        if not self._training:
            backward, reduce = np.zeros_like(backward), np.zeros_like(reduce)
        return ElementTimes(forward, backward, reduce, excess)

    def _slice(self, samples: float) -> tuple[Values, Values, Values]:
        if samples not in self._slices:
            segments = self.segments
            matrices = (segments.forward_s.all(samples), segments.backward_s.all(samples))
            forward, backward = (matrix[self._pick] for matrix in matrices)
            self._slices[samples] = forward, backward, segments.saved_bytes.all(samples)[self._pick]
        return self._slices[samples]

    def link(self, senders: Ranks, receivers: Ranks) -> ElementTimes:
        """Return the times of the link between two stages, for every bound at which they may meet."""
        nothing = np.zeros_like(self._ahead)
        latency, per_byte = self.network.exchange(senders, receivers)
        ahead = latency + per_byte * self._ahead
        if not self._training:
            return ElementTimes(ahead, nothing, nothing, nothing)
        latency, per_byte = self.network.exchange(receivers, senders)
        return ElementTimes(ahead, latency + per_byte * self._back, nothing, nothing)


@dataclass(frozen=True)
class Found:
    """A complete plan of the search.

    Attributes:
        cuts: graph positions at which stages 1, 2, ... begin.
        ranks: ranks of each stage.
    """

    cuts: tuple[int, ...]
    ranks: tuple[Ranks, ...]


@dataclass(frozen=True)
class _Move:
    """A stage that was added to a state.

    Attributes:
        state: the state before.
        taken: devices per host that it took, in the hosts' order of that state.
        order: what the hosts were before, in their new order.
    """

    state: _State
    taken: Counts
    order: Counts


@dataclass(frozen=True)
class _State:
    """All plans of some stages on the same devices; arrays over j, the bound at which they end.

    Attributes:
        used: devices used per host, in canonical order.
        prefix: summary of their elements.
        value: L of the completion; infinite where there is none.
        moves: ways of getting here.
        move: which of them was taken.
        source: bound at which the state before ended.
    """

    used: Counts
    prefix: Prefix
    value: Values
    moves: tuple[_Move, ...]
    move: NDArray[np.int64]
    source: NDArray[np.int64]


@dataclass(frozen=True)
class SearchLimits:
    """How far to search.

    Attributes:
        degrees: numbers of replicas of a stage.
        most_stages: stages of a plan at most.
        most_states: occupations that are kept for each number of stages.
        most_replicas: replicas of a stage at most, so that all get the samples they want.
    """

    degrees: tuple[int, ...]
    most_stages: int
    most_states: int
    most_replicas: int


def search(costs: DappleCosts, limits: SearchLimits, *, kept: int) -> list[Found]:
    """Return the best plans with 2, 3, ... stages, at most `kept` of each number, those with few stages first."""
    return _Search(costs, limits).run(kept)


class _Search:
    def __init__(self, costs: DappleCosts, limits: SearchLimits) -> None:
        self._costs, self._limits = costs, limits
        self._site: Site = costs.network.site
        self._ranks = costs.network.cluster.ranks
        self._size = len(costs.bounds)
        self._penalty_s = costs.penalty_s
        self._held = (0, 0) if costs.segments.problem.constraints.memory_policies else (min(2, costs.microbatches), 1)

    def run(self, kept: int) -> list[Found]:
        found: list[Found] = []
        states = [self._start()]
        for _ in range(min(self._limits.most_stages, self._size - 1, self._ranks) - 1):
            states = self._next(states)
            best = sorted(
                (float(state.value[j]), i, int(j))
                for i, state in enumerate(states)
                if self._free(state) <= self._limits.most_replicas
                for j in np.argsort(state.value, kind="stable")[:kept]
            )
            found.extend(self._found(states[i], j) for value, i, j in best[:kept] if value < math.inf)
            states = sorted(states, key=lambda state: float(state.value.min()))[: self._limits.most_states]
        return found

    def _start(self) -> _State:
        nothing = np.zeros(self._size, dtype=np.int64)
        value = np.where(np.arange(self._size) == 0, 0.0, np.inf)
        return _State((0,) * len(self._site.capacity), empty_prefix(self._size), value, (), nothing, nothing)

    def _free(self, state: _State) -> int:
        return self._ranks - sum(state.used)

    def _next(self, states: Sequence[_State]) -> list[_State]:
        """Split the last stage of every state in all ways, and keep the best for every occupation."""
        reached: dict[Counts, _State] = {}
        for state in states:
            for degree in self._limits.degrees:
                if degree >= self._free(state) or degree > self._limits.most_replicas:
                    break
                for taken in placements(self._site, state.used, degree):
                    new = self._split(state, taken)
                    reached[new.used] = _better(reached[new.used], new) if new.used in reached else new
        return list(reached.values())

    def _split(self, state: _State, taken: Counts) -> _State:
        """Let the next stage take these devices; arrays over [j, k] until the best j of every k is chosen."""
        count, end = self._costs.microbatches, self._size - 1
        ranks = ranks_of(self._site, state.used, taken)
        used = tuple(map(sum, zip(state.used, taken, strict=True)))
        rest = self._rest(used)
        rows = np.flatnonzero(state.value < np.inf)
        stage = self._costs.stage(ranks, held=self._held[0]).take(lambda values: values[rows])
        last = self._costs.stage(rest, held=self._held[1]).take(lambda values: values[:, end])
        before = self._linked(state, ranks).take(lambda values: values[rows, None])
        new = before.append(stage, microbatches=count)
        whole = new.append(self._costs.link(ranks, rest), microbatches=count).append(last, microbatches=count)
        bounds = np.arange(self._size)
        possible = (rows[:, None] < bounds) & (bounds < end)
        value = np.where(possible, whole.latency_s(count) + self._penalty_s * whole.excess, np.inf)
        best = value.argmin(axis=0)
        order = canonical(self._site, used)
        return _State(
            reorder(used, order),
            new.take(lambda values: values[best, bounds]),
            value[best, bounds],
            (_Move(state, taken, order),),
            np.zeros(self._size, dtype=np.int64),
            rows[best],
        )

    def _rest(self, used: Counts) -> Ranks:
        free = tuple(size - before for size, before in zip(self._site.capacity, used, strict=True))
        return ranks_of(self._site, used, free)

    def _linked(self, state: _State, ranks: Ranks) -> Prefix:
        """Return the prefixes of a state with the links from their last stages to these ranks."""
        if not state.moves:
            return state.prefix
        links = np.zeros((2, self._size))
        for index in np.unique(state.move[state.value < np.inf]):
            move = state.moves[index]
            begun, taken = reorder(move.state.used, move.order), reorder(move.taken, move.order)
            link = self._costs.link(ranks_of(self._site, begun, taken), ranks)
            links = np.where(state.move == index, (link.forward, link.backward), links)
        nothing = np.zeros(self._size)
        return state.prefix.append(
            ElementTimes(links[0], links[1], nothing, nothing), microbatches=self._costs.microbatches
        )

    def _found(self, state: _State, j: int) -> Found:
        """Return the plan of a state, in the hosts' own order."""
        cuts, moves = [], []
        while state.moves:
            move = state.moves[state.move[j]]
            cuts.append(int(self._costs.segments.bounds[self._costs.bounds[j]]))
            moves.append(move)
            state, j = move.state, int(state.source[j])
        hosts = tuple(range(len(self._site.capacity)))
        used, ranks = (0,) * len(hosts), []
        for move in reversed(moves):
            taken = dict(zip(hosts, move.taken, strict=True))
            here = tuple(taken[host] for host in range(len(hosts)))
            ranks.append(ranks_of(self._site, used, here))
            used = tuple(map(sum, zip(used, here, strict=True)))
            hosts = reorder(hosts, move.order)
        return Found(tuple(reversed(cuts)), (*ranks, self._rest(used)))


def _better(old: _State, new: _State) -> _State:
    """Return, for every bound, the better of two ways to the same occupation."""
    gains = new.value < old.value
    if not gains.any():
        return old
    return _State(
        old.used,
        new.prefix.where(gains, old.prefix),
        np.where(gains, new.value, old.value),
        (*old.moves, *new.moves),
        np.where(gains, len(old.moves), old.move),
        np.where(gains, new.source, old.source),
    )
