"""Evaluation of a plan: the program that would run, simulated with the problem's costs.

    judged = judge(plan, problem)
    judged.step_s, judged.bubble, judged.peak_bytes, judged.overflow()

Nothing is judged that has not been verified. Costs of a cut are worked out once and shared by all plans that cut alike
and have the same activation policies (`Judge`). Of long programs with many equal replicas only some are lowered and
simulated (`planner.evaluation.symmetry`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

from lightning_pipe.collection import without_collection
from lightning_pipe.core.cluster import NO_SWAP, Cluster
from lightning_pipe.core.plan import Plan, microbatch_sizes
from lightning_pipe.core.program import Compute, ComputeKind, CopyingOrder, Layout, VerifiedProgram
from lightning_pipe.core.timeline import Timeline
from lightning_pipe.cost.activations import StagePolicy
from lightning_pipe.cost.prices import PlanPrices, Pricer
from lightning_pipe.errors import PlanError
from lightning_pipe.planner.evaluation.chain_times import times_of
from lightning_pipe.planner.evaluation.copies import is_open, with_copies
from lightning_pipe.planner.evaluation.heads import check_constraints, check_order
from lightning_pipe.planner.evaluation.resolve import resolve, resolve_policies
from lightning_pipe.planner.evaluation.rounds import middle_round, refuse_rounds, stage_versions
from lightning_pipe.planner.evaluation.symmetry import SymmetryReduction, fold, instructions, whole
from lightning_pipe.planner.problem import Problem
from lightning_pipe.schedule.construct.devices import peak_bytes
from lightning_pipe.schedule.formats.text import parse_order
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.orders.forward_only import forward_only
from lightning_pipe.schedule.registry import (
    needs_times,
    order_of,
    planned_join,
    planned_order,
    stages_placed,
    with_order,
)
from lightning_pipe.schedule.verification.verify import verify
from lightning_pipe.schedule.weights import WeightPolicy
from lightning_pipe.simulator import MemoryCurve, memory_curves, period, simulate
from lightning_pipe.simulator.ahead import ends, steady_step

_ORDERS = 2  # that are tried of one plan
_HALVES: tuple[ComputeKind, ...] = ("F", "I", "W")
_WHOLE = 20_000  # instructions up to which a program is judged with all its ranks, some 0.4 seconds

_IDLE = 1e9  # times as long: a plan in which a rank has nothing to do comes behind all others that fit


@dataclass(frozen=True)
class Judged:
    """A plan with what the simulator says of it.

    Attributes:
        plan: the plan.
        cuts: positions at which its stages 1, 2, ... begin.
        program: the program of one batch, of the ranks that represent others or themselves; with weight versions a
            round in the middle of many.
        prices: its prices.
        timeline: predicted times of these ranks.
        curves: predicted memory of every rank of the plan.
        representatives: for every rank of the plan, the rank of the program that does the same at the same time.
        ahead_s: seconds from step to step where ranks do not wait for each other; None where they do.
        policy: of weight versions; None for a pipeline that is flushed.
    """

    plan: Plan
    cuts: tuple[int, ...]
    program: VerifiedProgram
    prices: PlanPrices
    timeline: Timeline
    curves: tuple[MemoryCurve, ...]
    representatives: tuple[int, ...]
    ahead_s: float | None = None
    policy: WeightPolicy | None = None

    @cached_property
    def step_s(self) -> float:
        """Return the predicted seconds of a batch, optimizer step included."""
        return self.timeline.makespan if self.ahead_s is None else self.ahead_s

    @cached_property
    def bubble(self) -> float:
        """Return the mean bubble of the ranks."""
        bubbles = {rank: self.timeline.bubble(rank) for rank in self.timeline.ranks}
        found = [bubbles[rank] for rank in self.representatives if rank in bubbles]
        return sum(found) / len(found)

    @cached_property
    def peak_bytes(self) -> tuple[int, ...]:
        """Return the predicted peak of every rank."""
        peaks = {rank: self.curves[rank].peak_total_bytes for rank in set(self.representatives)}
        return tuple(peaks[rank] for rank in self.representatives)

    @property
    def version_bytes(self) -> tuple[int, ...]:
        """Return what every rank holds of versions of the weights beside the present one."""
        return tuple(self.prices.state_parts(rank).versions for rank in self.representatives)

    def overflow(self, cluster: Cluster) -> int:
        """Return by how many bytes the fullest rank exceeds its memory; 0 or less if the plan fits."""
        return max(peak - cluster.device(rank).memory_bytes for rank, peak in enumerate(self.peak_bytes))

    def rank(self, cluster: Cluster) -> tuple[int, float]:
        """Return what plans are ranked by, smaller is better: bytes over memory, then seconds; idle ranks are last."""
        return max(0, self.overflow(cluster)), self.step_s * (_IDLE if self.plan.idle_ranks else 1.0)


class Judge:
    """Judge plans of one problem.

    Args:
        problem: costs and devices.
        pricer: of its graph, profile and cluster, if there is one already.

    Attributes:
        pricer: prices its cuts.
    """

    def __init__(self, problem: Problem, pricer: Pricer | None = None) -> None:
        self._problem = problem
        self.pricer = pricer or Pricer(problem.graph, profile=problem.profile, cluster=problem.cluster)
        self._prices: dict[tuple[tuple[int, ...], Layout, tuple[StagePolicy, ...], bool, int], PlanPrices] = {}

    def judge(self, plan: Plan, sizes: tuple[int, ...] | None = None, *, folds: bool = True) -> Judged:
        """Lower, verify, price and simulate a plan.

        Args:
            plan: the plan.
            sizes: samples of the micro-batches; by default the batch in equal parts.
            folds: whether few ranks may represent all in a long program.

        Returns:
            The judgement; its plan has the order of its computes if the schedule decides that by times.

        Raises:
            PlanError: if the plan does not fit graph or ranks, offloads where nothing can be copied to a host, or
                cannot run in rounds, as the policy of weight versions asks for.
        """
        cuts = resolve(plan, self._problem.graph, ranks=self._problem.cluster.ranks)
        prices = self._priced(plan, cuts)
        if self._problem.constraints.shard_optimizer == "on" and not plan.shard_optimizer and prices.shares_state:
            plan = replace(plan, shard_optimizer=True)
            prices = self._priced(plan, cuts)
        sizes = sizes or microbatch_sizes(self._problem.samples, plan.microbatches)
        if self._problem.policy is not None:
            check_constraints(self._problem)
            refuse_rounds(plan, versions=self._problem.constraints.versions, ties=prices.tied)
            return self._in_rounds(plan, cuts, sizes, self._problem.policy)
        if self._problem.training and needs_times(plan):
            return self._ordered(plan, cuts, sizes)
        return self._simulated(plan, cuts, sizes, folds=folds)

    def busiest_s(self, plan: Plan) -> float:
        """Return the seconds for which the busiest rank computes and steps: no step or round of a plan is shorter.

        Raises:
            PlanError: as of `judge`.
        """
        prices = self._priced(plan, resolve(plan, self._problem.graph, ranks=self._problem.cluster.ranks))
        sizes = microbatch_sizes(self._problem.samples, plan.microbatches)
        seconds = [prices.step_s(rank) for rank in range(plan.layout.ranks)]
        for stage, ranks in enumerate(plan.layout.stages):
            for replica, rank in enumerate(ranks):
                shares = Counter(len(plan.layout.samples(stage, replica, m, size)) for m, size in enumerate(sizes))
                for samples, count in shares.items():
                    halves = [prices.compute_s(Compute(stage, kind, 0), rank, samples) for kind in _HALVES]
                    seconds[rank] += count * sum(halves) if samples else 0.0
        return max(seconds)

    def retimed(self, judged: Judged) -> Timeline:
        """Return when the program of a plan runs that was judged by other costs."""
        prices = self._priced(judged.plan, judged.cuts)
        if judged.policy is not None:
            return predicted_round(judged.program, prices, self._problem)
        return simulate(judged.program, prices, cards=self._cards(prices))

    def _cards(self, prices: PlanPrices) -> PlanPrices | None:
        return prices if len(self._problem.cluster.hosts) > 1 else None

    def _ordered(self, plan: Plan, cuts: tuple[int, ...], sizes: tuple[int, ...]) -> Judged:
        """Judge a plan whose order is decided by times, again with less room if the first order exceeds memory.

        The room that schedules are told of leaves out messages, results and sums.
        """
        cluster = self._problem.cluster
        times = times_of(self._priced(plan, cuts), sizes, cluster=cluster)
        tried: dict[tuple[str, ...], Judged] = {}
        for _ in range(_ORDERS):
            ordered = with_order(plan, times)
            if ordered.order in tried:
                break
            judged = tried[ordered.order] = self._simulated(ordered, cuts, sizes, folds=False)
            if judged.overflow(cluster) <= 0:
                break
            held = [peak_bytes(line, times) for line in parse_order(ordered.order)]
            over = [max(0, peak - cluster.device(r).memory_bytes) for r, peak in enumerate(judged.peak_bytes)]
            rooms = zip(times.room_bytes, held, over, strict=True)
            times = replace(times, room_bytes=tuple(min(r, h) - o if o else r for r, h, o in rooms))
        return min(tried.values(), key=lambda judged: judged.rank(cluster))

    def _in_rounds(self, plan: Plan, cuts: tuple[int, ...], sizes: tuple[int, ...], policy: WeightPolicy) -> Judged:
        """Judge a plan by a round in the middle of many."""
        prices = self._priced(plan, cuts)
        with without_collection():
            program = middle_round(policy, plan.layout, sizes=sizes, traffic=prices.traffic)
            timeline = predicted_round(program, prices, self._problem)
            curves = memory_curves(timeline, program=program, prices=prices)
        every, seconds = tuple(range(len(curves))), max(ends(timeline)) - timeline.since
        return Judged(plan, cuts, program, prices, timeline, curves, every, seconds, policy)

    def _simulated(self, plan: Plan, cuts: tuple[int, ...], sizes: tuple[int, ...], *, folds: bool) -> Judged:
        prices = self._priced(plan, cuts)
        if folds and not plan.order and instructions(prices.layout, sizes) > _WHOLE:
            part = fold(sizes, prices=prices, cluster=self._problem.cluster)
        else:
            part = whole(prices.layout, sizes)
        cards = self._cards(prices)
        with without_collection():  # programs have no cycles
            program = self._program(plan, part, prices)
            timeline = simulate(program, prices, cards=cards)
            if self._problem.training and is_open(plan, prices.traffic.offloads):
                plan = with_copies(plan, timeline, prices.traffic.offloads)
                program = self._program(plan, part, prices)
                timeline = simulate(program, prices, cards=cards)
            ahead_s = period(program, prices) if self._problem.runs_ahead else None
            curves = memory_curves(timeline, program=program, prices=prices)
        used = frozenset(part.representatives)
        events = tuple(event for event in timeline.events if event.rank in used)  # others only step
        found = tuple(curves[rank] for rank in part.representatives)
        return Judged(plan, cuts, program, prices, Timeline(events), found, part.representatives, ahead_s)

    def shares_state(self, judged: Judged) -> bool:
        """Return whether ranks of a plan hold the same trained parameters, whose optimizer state they could share."""
        return self._priced(judged.plan, judged.cuts).shares_state

    def _program(self, plan: Plan, part: SymmetryReduction, prices: PlanPrices) -> VerifiedProgram:
        training = self._problem.training
        _check_copies(plan, prices)
        order = _order(plan, part, training=training)
        check_order(order, self._problem, schedule=plan.schedule)
        return verify(
            lower(
                order,
                layout=part.layout,
                sizes=part.sizes,
                traffic=prices.traffic,
                training=training,
                synchronise=training,
                join=planned_join(plan),
                beside=plan.beside_copies,
                confirms=training and self._problem.runs_ahead,
            )
        )

    def _priced(self, plan: Plan, cuts: tuple[int, ...]) -> PlanPrices:
        policies = resolve_policies(plan, self._problem.graph, self.pricer.works(cuts))
        policy, count = self._problem.policy, plan.microbatches
        key = (cuts, plan.layout, policies, plan.shard_optimizer, count if policy is not None else 0)
        if key not in self._prices:
            if policy is not None:
                refuse_rounds(plan, versions=self._problem.constraints.versions)
            versions = () if policy is None else stage_versions(policy, plan.layout, count)
            prices = self.pricer.price(cuts, plan.layout, policies, sharded=plan.shard_optimizer, versions=versions)
            _check_swaps(prices, self._problem.cluster)
            self._prices[key] = prices
        return self._prices[key]


def predicted_round(program: VerifiedProgram, prices: PlanPrices, problem: Problem) -> Timeline:
    """Return the predicted timeline of a round in the middle of many; its `since` is the end of the round before.

    Args:
        program: the round: `Judged.program` of a plan with weight versions, or one that has run.
        prices: those of the plan (`Judged.prices`).
        problem: what it was made for.
    """
    cards = prices if len(problem.cluster.hosts) > 1 else None
    return steady_step(program, prices, cards=cards, together=problem.steps_together)


def _check_swaps(prices: PlanPrices, cluster: Cluster) -> None:
    for stage in prices.traffic.offloads:
        for rank in prices.layout.stages[stage]:
            host = cluster.hosts[cluster.host_of(rank)]
            if host.swap == NO_SWAP:
                raise PlanError(
                    f"Stage {stage} of the plan offloads, but host {host.name} of its rank {rank} has no link between "
                    "the memory of a device and its own. Add `swap:` to the host in the cluster file, or remove "
                    "`offload:` from the stage."
                )


def _check_copies(plan: Plan, prices: PlanPrices) -> None:
    keeping = stages_placed(plan).difference(prices.traffic.offloads)
    if keeping:
        raise PlanError(
            f"The order of the plan has copies to the host of stage {min(keeping)}, which offloads nothing. Name what "
            "it offloads in `offload:`, or remove VACATE and FETCH of this stage from the order."
        )


def _order(plan: Plan, part: SymmetryReduction, *, training: bool) -> CopyingOrder:
    if not training:
        return forward_only(part.layout, len(part.sizes))
    if plan.order:
        return planned_order(plan, microbatches=len(part.sizes))
    return order_of(plan.schedule, layout=part.layout, microbatches=len(part.sizes), options=plan.options)


def judge(plan: Plan, problem: Problem) -> Judged:
    """Judge one plan with all its ranks, as for running or drawing it; see `Judge`."""
    return Judge(problem).judge(plan, folds=False)


def unfolded(judged: Judged, problem: Problem) -> Judged:
    """Return a judgement of the same plan that has program and timeline of all ranks."""
    is_whole = len(set(judged.representatives)) == len(judged.representatives)
    return judged if is_whole else judge(judged.plan, problem)
