"""Step time of a candidate by recurrence over its stages; a rough rank order for thousands of candidates.

Every stage runs its 1F1B order; a replica's share of a micro-batch decides its time; the exchange between neighbours
takes both directions' own FIFO link; a network card that several edges share is busy with all of them; sums of
gradients follow the last backward of their stage; the optimizer waits for all. This is the program's own timeline
(`simulator`) without what replicas of one stage do at different times, values that skip stages, and posting.

    recursion of DAPPLE's design slides, for stage i and micro-batch x with depth K:
    end F[i, x] = max(end B[i, x - K], end F[i-1, x] + link, end F[i, x-1]) + F      and B likewise

Legend: s stage, m micro-batch, n samples of one; K depths.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lightning_pipe.core.cluster import NO_SWAP
from lightning_pipe.core.plan import microbatch_sizes
from lightning_pipe.core.program import Layout
from lightning_pipe.core.sharding import PIECE_BYTES
from lightning_pipe.cost.comm import AllReduce, ConcurrentFlows, all_reduce_of, card_shares, exchange_of, exchange_pairs
from lightning_pipe.planner.candidates.candidate import Candidate, falling, never_growing, weights_of
from lightning_pipe.planner.estimates.stage_costs import StageCostTable
from lightning_pipe.planner.problem import Problem
from lightning_pipe.schedule.lower.transfers import AHEAD
from lightning_pipe.schedule.orders.one_f_one_b import star_depths


@dataclass(frozen=True)
class PipelineTimes:
    """A pipeline in numbers.

    Attributes:
        forward, backward: seconds of each stage for one micro-batch.
        ahead, back: seconds of the messages between each stage and the next, by direction.
        finish: seconds of the sum of each stage's gradients.
        late: seconds at the end of each stage's backward, after its gradient has left.
        step: seconds of the optimizer, the slowest rank's.
        card: seconds for which one micro-batch keeps the busiest network card busy, over all edges, in one direction.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    ahead: tuple[float, ...]
    back: tuple[float, ...]
    finish: tuple[float, ...]
    late: tuple[float, ...]
    step: float = 0.0
    card: float = 0.0

    def loads(self) -> list[float]:
        """Return the seconds that one micro-batch occupies each stage."""
        return [f + b for f, b in zip(self.forward, self.backward, strict=True)]

    def behind(self) -> list[float]:
        """Return the seconds of each stage's sum after its last backward, along with the end of which it runs."""
        return [max(0.0, finish - late) for finish, late in zip(self.finish, self.late, strict=True)]

    def links(self) -> list[float]:
        """Return the seconds that one micro-batch occupies each link, both directions together."""
        return [f + b for f, b in zip(self.ahead, self.back, strict=True)]


@dataclass(frozen=True)
class Room:
    """Memory of one stage, of its fullest rank.

    Attributes:
        bytes: for saved tensors: what state, workspace and messages leave.
        spare: what state and workspace alone leave.
        saved: saved per micro-batch.
        arriving: the part of a micro-batch that arrives from other stages.
        remade: the most that is saved between two neighbouring positions, all of which is there while it is remade.
        swap_bytes_per_s: speed of copies to the host; 0 where there are none.
    """

    bytes: float
    spare: float
    saved: float
    arriving: float
    remade: float
    swap_bytes_per_s: float


def row_s(row: PipelineTimes, *, depths: Sequence[int], microbatches: int) -> float:
    """Return the seconds of a batch."""
    ends = backward_ends(row, depths=depths, microbatches=microbatches)
    last = max(end + behind for end, behind in zip(ends, row.behind(), strict=True))
    return max(last, microbatches * row.card) + row.step


def bound_s(row: PipelineTimes, *, microbatches: int) -> float:
    """Return what no depths make quicker: the slowest stage is busy without a break, from its first input on."""
    starts = itertools.accumulate(map(sum, zip(row.forward, row.ahead, strict=False)), initial=0.0)
    busy = (
        start + microbatches * load + behind
        for start, load, behind in zip(starts, row.loads(), row.behind(), strict=True)
    )
    return max(*busy, microbatches * row.card) + row.step


def backward_ends(row: PipelineTimes, *, depths: Sequence[int], microbatches: int) -> list[float]:
    """Return when each stage has ended its last backward.

    Args:
        row: times.
        depths: warm-up forwards of each stage, never growing.
        microbatches: micro-batches of the batch.
    """
    return _Walk(row, depths, microbatches).run()


class _Walk:
    """Let round k run backward k - K and then forward k of every stage.

    Backwards go from the last stage to the first and forwards back, so that all that a compute waits for has ended
    earlier in its round or in a round before: stages whose depths never grow along the pipeline do not wait for what
    comes later.

    Attributes:
        ends: of the last compute of each stage.
    """

    def __init__(self, row: PipelineTimes, depths: Sequence[int], microbatches: int) -> None:
        stages = range(len(row.forward))
        held = [min(depth, microbatches) for depth in depths]
        self.ends = [0.0] * len(stages)
        self._microbatches, self._rounds = microbatches, microbatches + held[0]
        self._ahead, self._back = [0.0] * len(stages), [0.0] * len(stages)  # when links are free
        self._gradients = [[0.0] * microbatches for _ in stages]  # arrivals
        self._forwards = [*zip(stages, row.forward, (*row.ahead, 0.0), strict=True)]
        self._backwards = [*zip(stages, held, row.backward, row.late, (0.0, *row.back), strict=True)][::-1]

    def run(self) -> list[float]:
        """Return when each stage has ended its last backward."""
        for k in range(self._rounds):
            self._run_backwards(k)
            if k < self._microbatches:
                self._run_forwards()
        return self.ends

    def _run_backwards(self, k: int) -> None:
        ends, gradients, free = self.ends, self._gradients, self._back
        for s, held, seconds, late, message_s in self._backwards:
            m = k - held
            if m < 0:
                return  # nor do the stages before
            if m >= self._microbatches:
                continue
            end, arrived = ends[s], gradients[s][m]
            ends[s] = end = (arrived if arrived > end else end) + seconds
            if s:
                left = end - late
                free[s] = gradients[s - 1][m] = (free[s] if free[s] > left else left) + message_s

    def _run_forwards(self) -> None:
        ends, free, arrived = self.ends, self._ahead, 0.0
        for s, seconds, message_s in self._forwards:
            end = ends[s]
            ends[s] = end = (arrived if arrived > end else end) + seconds
            free[s] = arrived = (free[s] if free[s] > end else end) + message_s


_FEW_STAGES = 8
_PER_STAGE = 16  # micro-batches per stage, beyond which little is left to win; of equal ones up to twice as many
LONG = 4096  # computes of each kind in a pipeline for which fewer depths are tried


class Estimator:
    """Estimate outlines of one problem over some cut positions.

    Args:
        segments: costs of all stages.
    """

    def __init__(self, segments: StageCostTable) -> None:
        self.segments = segments
        self.problem: Problem = segments.problem
        self._bound = {int(position): bound for bound, position in enumerate(segments.bounds)}
        self._times = (segments.forward_s, segments.backward_s, segments.late_s)
        self._stages: dict[tuple[int, int, tuple[int, ...], float], tuple[float, ...]] = {}
        self._rooms: dict[tuple[int, int, tuple[int, ...], int], Room] = {}
        self._shares: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._coupled = segments.coupled
        self._exchanges: dict[tuple[tuple[int, ...], tuple[int, ...]], ConcurrentFlows] = {}
        self._cards: dict[tuple[tuple[int, ...], tuple[int, ...]], dict[tuple[str, int], float]] = {}
        self._reductions: dict[tuple[int, ...], AllReduce] = {}

    def knows(self, cuts: Sequence[int]) -> bool:
        """Return whether all of these cuts are at its positions: of others it cannot be asked."""
        return self._bound.keys() >= {*cuts}

    def step_s(self, outline: Candidate) -> float:
        """Return the seconds of a batch."""
        row = self.row(outline.cuts, outline.ranks, outline.microbatches)
        return row_s(row, depths=outline.depths, microbatches=outline.microbatches)

    def row(self, cuts: Sequence[int], ranks: Sequence[tuple[int, ...]], microbatches: int) -> PipelineTimes:
        """Return the times of a pipeline on micro-batches of `samples / microbatches`."""
        samples = self.problem.samples / microbatches
        costs = [self._stage(a, b, group, samples) for (a, b), group in zip(self.stages(cuts), ranks, strict=True)]
        ahead, back = [], []
        for cut, here, there in zip(cuts, ranks[:-1], ranks[1:], strict=True):
            bound, found = self._bound[cut], self.segments.crossing
            ahead.append(self.exchange_s(here, there, found["F"].at(bound, samples)))
            back.append(self.exchange_s(there, here, found["B"].at(bound, samples)))
        forward, backward, late, finish, step = (tuple(column) for column in zip(*costs, strict=True))
        card = self._card_s(cuts, ranks, samples) if len(self.problem.cluster.hosts) > 1 else 0.0
        return PipelineTimes(forward, backward, tuple(ahead), tuple(back), finish, late, step=max(step), card=card)

    def _card_s(self, cuts: Sequence[int], ranks: Sequence[tuple[int, ...]], samples: float) -> float:
        """Return the seconds for which a micro-batch keeps the busiest network card busy."""
        busy: dict[tuple[str, int], float] = defaultdict(float)
        for cut, here, there in zip(cuts, ranks[:-1], ranks[1:], strict=True):
            for direction, crossing in self.segments.crossing.items():
                if direction == "F" or self.problem.training:
                    count = crossing.at(self._bound[cut], samples)
                    ends = (here, there) if direction == "F" else (there, here)
                    for card, per_byte in self._card_shares(*ends).items():
                        busy[card] += count * per_byte
        return max(busy.values(), default=0.0)

    def _card_shares(self, senders: tuple[int, ...], receivers: tuple[int, ...]) -> dict[tuple[str, int], float]:
        """Return the seconds per byte of an exchange for which it keeps every card busy."""
        if (senders, receivers) not in self._cards:
            self._cards[senders, receivers] = card_shares(
                self.problem.cluster, exchange_pairs(Layout((senders, receivers)), 0, 1, 0)
            )
        return self._cards[senders, receivers]

    def _stage(self, a: int, b: int, group: tuple[int, ...], samples: float) -> tuple[float, ...]:
        """Return the seconds of F, of the backward, of its part after the gradient has left, of sums, of the step."""
        key = (a, b, group, samples)
        if key not in self._stages:
            cluster, segments = self.problem.cluster, self.segments
            shares = {(n, cluster.device(rank).speed) for n, rank in self.slices(a, b, group, samples)}
            seconds = [max(times.at(a, b, n) / speed for n, speed in shares) for times in self._times]
            reduced = self._reduce_s(group, float(segments.trained_bytes[a, b]))
            step = max(float(segments.step_s[a, b]) / speed for _, speed in shares)
            self._stages[key] = (*seconds, reduced, step) if self.problem.training else (seconds[0], 0.0, 0.0, 0.0, 0.0)
        return self._stages[key]

    def stages(self, cuts: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield the bounds of every stage."""
        return itertools.pairwise((0, *(self._bound[cut] for cut in cuts), self.segments.units))

    def slices(self, a: int, b: int, ranks: Sequence[int], samples: float) -> list[tuple[float, int]]:
        """Return the samples of a micro-batch that each rank of a stage gets; whole ones in turn count as parts.

        Samples are whole, so where replicas do not divide a micro-batch, all wait for those with one more.
        """
        if len(ranks) == 1 or self._coupled[a:b].any():
            return [(samples / len(ranks), rank) for rank in ranks]
        sizes = microbatch_sizes(self.problem.samples, round(self.problem.samples / samples))
        parts = {size: sizes.count(size) / len(sizes) for size in (sizes[0], sizes[-1])}
        weights = self._weights(tuple(ranks))
        if not weights:
            most = sum(math.ceil(size / len(ranks)) * part for size, part in parts.items())
            return [(most, rank) for rank in ranks]
        layout = Layout((tuple(ranks),), weights=(weights,))
        slices = [
            sum(len(layout.samples(0, i, 0, size)) * part for size, part in parts.items()) for i in range(len(ranks))
        ]
        return list(zip(slices, ranks, strict=True))

    def _weights(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        if ranks not in self._shares:
            self._shares[ranks] = weights_of(self.problem.cluster, ranks)
        return self._shares[ranks]

    def depth_choices(self, row: PipelineTimes, *, most: Sequence[int], microbatches: int) -> Iterator[tuple[int, ...]]:
        """Yield warm-up depths worth trying, none above `most`, never growing.

        They rise by one, two (PA, PB) and, for slow links, three and four (SPP's execution order) per stage from the
        end; then those of 1F1B*, and all forwards first.
        """
        stages = len(row.forward)
        if self.problem.constraints.schedule == "gpipe":
            yield (microbatches,) * stages
            return
        loads, links = row.loads(), row.links()
        period = max(*loads, *links, 1e-12)
        found = [
            [stages - s for s in range(stages)],
            [2 * (stages - s) - 1 for s in range(stages)],
            star_depths(loads, links=links, period=period),
            [microbatches] * stages,
        ]
        if stages * microbatches <= LONG:
            found += [[step * (stages - 1 - s) + 1 for s in range(stages)] for step in (3, 4)]
        if self.problem.constraints.warmup is not None:
            found = [_wished(self.problem.constraints.warmup, found)]
        capped = ([min(depth, microbatches, m) for depth, m in zip(depths, most, strict=True)] for depths in found)
        lowers = (never_growing, falling) if self.problem.constraints.warmup is None else (never_growing,)
        yield from dict.fromkeys(lower(depths) for depths in capped for lower in lowers)

    def outline(
        self, cuts: Sequence[int], ranks: Sequence[tuple[int, ...]], microbatches: int
    ) -> tuple[Candidate, float, float]:
        """Choose the depths of a pipeline by time, within memory as far as that is possible.

        Returns:
            The outline, its estimated seconds, and the bytes by which the fullest stage is estimated to exceed its
            memory (0 or less if it fits).
        """
        row = self.row(cuts, ranks, microbatches)
        rooms = self.rooms(cuts, ranks, microbatches)
        free = [microbatches] * len(rooms)
        most = [int(min(microbatches, max(1.0, room.bytes / (room.saved or 1.0)))) for room in rooms]
        limits = [free, most] if self.problem.constraints.memory_policies else [most]
        depths = dict.fromkeys(d for m in limits for d in self.depth_choices(row, most=m, microbatches=microbatches))
        choices = []
        for found in depths:
            less, excess = self._with_policies(row, rooms, found)
            seconds = row_s(less, depths=found, microbatches=microbatches)
            choices.append((max(0.0, excess), seconds, sum(found), found, excess))
        _, seconds, _, best, excess = min(choices)
        return Candidate(tuple(cuts), tuple(ranks), microbatches, best), seconds, excess

    def rooms(self, cuts: Sequence[int], ranks: Sequence[tuple[int, ...]], microbatches: int) -> list[Room]:
        """Return what each stage has for saved tensors, and saves."""
        return [self._room(a, b, group, microbatches) for (a, b), group in zip(self.stages(cuts), ranks, strict=True)]

    def _room(self, a: int, b: int, group: tuple[int, ...], microbatches: int) -> Room:
        key = (a, b, group, microbatches)
        if key not in self._rooms:
            cluster, segments = self.problem.cluster, self.segments
            n = max(share for share, _ in self.slices(a, b, group, self.problem.samples / microbatches))
            ends = [max(crossing.at(a, n), crossing.at(b, n)) for crossing in segments.crossing.values()]
            trained = float(segments.trained_bytes[a, b])
            summed = len(group) > 1 or microbatches > 1  # of gradients, a piece is there twice
            twice = min(trained, PIECE_BYTES) if summed else 0.0
            workspace = segments.workspace_bytes(a, b, n)
            swaps = (cluster.hosts[cluster.host_of(rank)].swap for rank in group)
            spare = min(cluster.device(rank).memory_bytes for rank in group) - float(segments.state_bytes[a, b])
            saved = segments.saved_bytes.at(a, b, n)
            self._rooms[key] = Room(
                bytes=spare - max(workspace + max(ends), twice - saved),  # these come when one is no longer saved
                spare=spare - workspace,
                saved=saved,
                arriving=segments.crossing["F"].at(a, n),
                remade=segments.largest_saved(a, b, n),
                swap_bytes_per_s=min(0.0 if swap == NO_SWAP else swap.bytes_per_s for swap in swaps),
            )
        return self._rooms[key]

    def _with_policies(
        self, row: PipelineTimes, rooms: Sequence[Room], depths: Sequence[int]
    ) -> tuple[PipelineTimes, float]:
        """Return the times with as much recompute as memory asks for, and the bytes that are missing all the same.

        As if saved bytes were a fluid: what a swap can carry while one micro-batch is worked on is swapped for nothing;
        of the rest, a share is dropped for the same share of the forward's seconds. What arrived for the stage stays.
        """
        policies = self.problem.constraints.memory_policies
        backward, excess = list(row.backward), -math.inf
        period = max(row.loads())
        for s, (room, depth) in enumerate(zip(rooms, depths, strict=True)):
            missing = depth * room.saved - room.bytes
            if missing > 0 and "offload" in policies and depth > AHEAD:
                missing -= (depth - AHEAD) * min(room.saved, room.swap_bytes_per_s * period)
            if missing > 0 and "recompute" in policies:
                missing += room.remade
                droppable = depth * max(0.0, room.saved - room.arriving)
                share = min(1.0, missing / droppable) if droppable else 0.0
                backward[s] += share * row.forward[s]
                missing -= share * droppable
            excess = max(excess, missing)
        return replace(row, backward=tuple(backward)), excess

    def exchange_s(self, senders: tuple[int, ...], receivers: tuple[int, ...], count: float) -> float:
        """Return the seconds of a micro-batch's values between two stages; what is on one rank takes none."""
        key = (senders, receivers)
        if key not in self._exchanges:
            pairs = exchange_pairs(Layout((senders, receivers)), 0, 1, 0)
            self._exchanges[key] = exchange_of(self.problem.cluster, pairs)
        found = self._exchanges[key]
        return max(self.problem.profile.message_s, found.seconds(count)) if found.flows else 0.0

    def _reduce_s(self, ranks: tuple[int, ...], count: float) -> float:
        if ranks not in self._reductions:
            self._reductions[ranks] = all_reduce_of(self.problem.cluster, sorted(ranks))
        return self._reductions[ranks].seconds(count)


def _wished(warmup: str, policies: Sequence[Sequence[int]]) -> list[int]:
    """Return the depths that the user wants."""
    by_name = dict(zip(("pa", "pb", "1f1b*"), policies, strict=False))
    if warmup in by_name:
        return list(by_name[warmup])
    depths = [int(part) for part in warmup.split(",")]
    return depths * len(policies[0]) if len(depths) == 1 else depths


def microbatch_counts(problem: Problem, *, stages: int, replicas: int) -> list[int]:
    """Return the numbers of micro-batches worth trying, rising.

    Args:
        problem: samples of a batch, and constraints.
        stages: stages of the pipeline.
        replicas: replicas of its most replicated stage, which all want samples.

    Raises:
        PlanError: if more micro-batches are wished for than a batch has samples.
    """
    constraints = problem.constraints
    if constraints.microbatches is not None:
        problem.check_samples(constraints.microbatches)
        return [constraints.microbatches]
    most = max(1, problem.samples // (constraints.least_samples * replicas))
    wanted = {1, 3, 6, *(stages * factor for factor in (1, 2, 3, 4, 8)), *(2**k for k in range(10))}
    least = stages // 2 if stages > _FEW_STAGES else 1  # with fewer, half of a long pipeline is idle
    even = {most // parts for parts in (1, 2, 3)}  # of as few samples as may be, and of two and three times as many
    counts = {min(count, most) for count in wanted if least <= count <= _PER_STAGE * stages}
    return sorted(counts | {count for count in even if least <= count <= 2 * _PER_STAGE * stages})
