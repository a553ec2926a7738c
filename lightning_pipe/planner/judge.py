"""How good is a plan? The simulator says: the same program that would run, priced with the problem's costs.

    judged = judge(plan, problem)
    judged.step_s, judged.bubble, judged.peak_bytes, judged.overflow()

Nothing is judged that has not been verified. Costs of a cut are worked out once and shared by all plans that cut alike
and relieve their stages alike (`Judge`).
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_pipe.core.cluster import NO_SWAP, Cluster
from lightning_pipe.core.plan import Plan, microbatch_sizes
from lightning_pipe.core.prices import Prices
from lightning_pipe.core.program import Layout, Order, VerifiedProgram
from lightning_pipe.core.timeline import Timeline
from lightning_pipe.cost.activations import Reliefs
from lightning_pipe.cost.prices import PlanPrices, Pricer
from lightning_pipe.errors import PlanError
from lightning_pipe.planner.problem import Problem
from lightning_pipe.planner.resolve import resolve, resolve_reliefs
from lightning_pipe.schedule.forward_only import forward_only
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.registry import order_of
from lightning_pipe.schedule.verify import verify
from lightning_pipe.simulator import MemoryCurve, memory_curves, simulate


@dataclass(frozen=True)
class Judged:
    """A plan with what the simulator says of it.

    Attributes:
        plan: the plan.
        cuts: positions at which its stages 1, 2, ... begin.
        program: the program of one batch.
        prices: its prices.
        timeline: predicted times.
        curves: predicted memory of every rank.
    """

    plan: Plan
    cuts: tuple[int, ...]
    program: VerifiedProgram
    prices: Prices
    timeline: Timeline
    curves: tuple[MemoryCurve, ...]

    @property
    def step_s(self) -> float:
        """Return the predicted seconds of a batch, optimizer step included."""
        return self.timeline.makespan

    @property
    def bubble(self) -> float:
        """Return the mean bubble of the ranks."""
        ranks = self.timeline.ranks
        return sum(self.timeline.bubble(rank) for rank in ranks) / len(ranks)

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """Return the predicted peak of every rank."""
        return tuple(curve.peak_total_bytes for curve in self.curves)

    def overflow(self, cluster: Cluster) -> int:
        """Return by how many bytes the fullest rank exceeds its memory; 0 or less if the plan fits."""
        return max(peak - cluster.device(rank).memory_bytes for rank, peak in enumerate(self.peak_bytes))


class Judge:
    """Judge plans of one problem.

    Args:
        problem: costs and devices.

    Attributes:
        pricer: prices its cuts.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.pricer = Pricer(problem.graph, profile=problem.profile, cluster=problem.cluster)
        self._prices: dict[tuple[tuple[int, ...], Layout, tuple[Reliefs, ...]], PlanPrices] = {}

    def judge(self, plan: Plan, sizes: tuple[int, ...] | None = None) -> Judged:
        """Lower, verify, price and simulate a plan.

        Args:
            plan: the plan.
            sizes: samples of the micro-batches; by default the batch in equal parts.

        Raises:
            PlanError: if the plan does not fit graph or ranks, or offloads where nothing can be copied to a host.
        """
        problem = self._problem
        cuts = resolve(plan, problem.graph, ranks=problem.cluster.ranks)
        prices = self._priced(plan, cuts)
        sizes = sizes or microbatch_sizes(problem.samples, plan.microbatches)
        order = _order(plan, len(sizes), training=problem.training)
        program = verify(
            lower(
                order,
                layout=plan.layout,
                sizes=sizes,
                traffic=prices.traffic,
                training=problem.training,
                synchronise=problem.training,
            )
        )
        timeline = simulate(program, prices)
        curves = memory_curves(timeline, program=program, prices=prices)
        return Judged(plan, cuts, program, prices, timeline, curves)

    def _priced(self, plan: Plan, cuts: tuple[int, ...]) -> PlanPrices:
        reliefs = resolve_reliefs(plan, self._problem.graph, self.pricer.works(cuts))
        key = (cuts, plan.layout, reliefs)
        if key not in self._prices:
            prices = self.pricer.price(cuts, plan.layout, reliefs)
            _check_swaps(prices, self._problem.cluster)
            self._prices[key] = prices
        return self._prices[key]


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


def _order(plan: Plan, count: int, *, training: bool) -> Order:
    if not training:
        return forward_only(plan.layout, count)
    return order_of(plan.schedule, layout=plan.layout, microbatches=count, options=plan.options)


def judge(plan: Plan, problem: Problem) -> Judged:
    """Judge one plan; see `Judge`."""
    return Judge(problem).judge(plan)
