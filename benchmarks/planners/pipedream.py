"""PipeDream planner against the configurations that the paper prints, on the profiles of its repository.

    python -m benchmarks.planners pipedream

The paper's table 1 (SOSP 2019): 4 hosts of 4 V100 with 10 Gbit/s (cluster A), 2 hosts of 8 with 25 Gbit/s (cluster B).
`flat` sees 16 (or 4) devices behind one bandwidth, that of the network; `hierarchical` sees hosts, with a guess of 10
GB/s inside, which the paper does not state. `x DP` is how many times shorter the slowest stage or link is than that of
data parallel training, both by the planner's own terms: no measurement, and not the paper's speed-up of an epoch, which
is printed beside it where table 1 has one for the same model and number of workers.

The printed configurations are those of the flat view. ResNet-50 differs: its outputs are so large that PipeDream's max
of compute and sums finds pipelines where the paper prints data parallel training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lightning_pipe.core.cluster import Cluster, Device, Host, Link
from lightning_pipe.planner.estimates.stage_costs import StageCostTable
from lightning_pipe.planner.problem import Problem
from lightning_pipe.planner.systems.pipedream import SteadyPlan, steady_plans
from lightning_pipe.profiles.published import load_published

PROFILES = Path(__file__).parents[3] / "shared" / "profiles" / "pipedream_msr_fiddle"
GIGABIT = 1e9 / 8  # bytes
INSIDE = 10e9  # bytes per second between devices of one host: a guess
DEVICE = Device("V100", 1 << 50)  # memory is not tested, as by default in the published source


@dataclass(frozen=True)
class Case:
    """A line of table 1: a profile, its samples, the cluster, and what is printed."""

    profile: str
    samples: int
    hosts: int
    devices: int
    gigabits: int
    printed: str
    speedup: str

    def problem(self, hosts: int, devices: int) -> Problem:
        """Return the problem on so many hosts."""
        graph, profile = load_published(PROFILES / self.profile / "graph.txt", batch=self.samples)
        network = Link(0.0, self.gigabits * GIGABIT)
        row = (DEVICE,) * devices
        cluster = Cluster(tuple(Host(f"host {h}", row, Link(0.0, INSIDE), network) for h in range(hosts)))
        return Problem(graph, profile, cluster, self.samples)


CASES = (
    Case("vgg16", 128, 4, 4, 10, "15-1", "5.28"),
    Case("vgg16", 128, 2, 8, 25, "15-1", "2.98"),
    Case("resnet50", 128, 4, 4, 10, "16", "1"),
    Case("resnet50", 128, 2, 8, 25, "16", "1"),
    Case("alexnet", 256, 4, 4, 10, "15-1", "4.92"),
    Case("alexnet", 256, 2, 8, 25, "15-1", "2.04"),
    Case("gnmt_large", 64, 1, 4, 10, "straight", "1.46"),
    Case("gnmt_large", 64, 4, 4, 10, "straight", "2.34"),
    Case("gnmt_large", 64, 2, 8, 25, "straight", "3.14"),
    Case("gnmt", 64, 1, 4, 10, "straight", "1.5"),
    Case("gnmt", 64, 4, 4, 10, "straight", "2.95"),
    Case("gnmt", 64, 2, 8, 25, "16", "1"),
)


def lines(cases: Sequence[Case] = CASES) -> Iterator[tuple[str, ...]]:
    """Yield the cells of the table."""
    for case in cases:
        flat = case.problem(case.hosts * case.devices, 1)
        found = {"flat": _best(flat, "flat")}
        deep = case.problem(case.hosts, case.devices)
        if case.hosts > 1:
            found["hierarchical"] = _best(deep, "hierarchical")
        cells = [case.profile, f"{case.hosts} x {case.devices}", f"{case.gigabits}", case.printed, case.speedup]
        for view, asked in (("flat", flat), ("hierarchical", deep)):
            plan = found.get(view)
            if plan is None:
                cells += ["", ""]
            else:
                cells += [configuration(plan), f"{data_parallel_s(asked) / plan.seconds:.2f}"]
        yield tuple(cells)


def configuration(plan: SteadyPlan) -> str:
    """Return the replicas of the stages as the paper writes them."""
    replicas = [len(group) for group in plan.ranks]
    return "straight" if len(replicas) > 1 and set(replicas) == {1} else "-".join(map(str, replicas))


def _best(problem: Problem, view: str) -> SteadyPlan:
    return next(plan for plan in steady_plans(problem) if plan.view == view)


def data_parallel_s(problem: Problem) -> float:
    """Return the seconds of a mini-batch on all devices: T^2 of the whole model, whose T^1 is that of one host."""
    segments, hosts = StageCostTable(problem, []), problem.cluster.hosts
    alone = float(sum(times.all(problem.samples)[0, 1] for times in (segments.forward_s, segments.backward_s)))
    weights, devices = float(segments.trained_bytes[0, 1]), len(hosts[0].devices)
    inside = max(alone, 2 * (devices - 1) * weights / INSIDE) / devices
    return max(inside, 2 * (len(hosts) - 1) * weights / hosts[0].network.bytes_per_s) / len(hosts)


def main(arguments: Sequence[str] = ()) -> None:
    """Print the table."""
    if arguments:
        raise SystemExit(f"pipedream: found {' '.join(arguments)}; expected no arguments.")
    if not PROFILES.exists():
        raise SystemExit(f"found no profiles at {PROFILES}; put the files of msr-fiddle/pipedream there")
    table = Table("profile", "hosts", "Gbit/s", "printed", "x DP", "flat", "x DP", "hierarchical", "x DP")
    for cells in lines():
        table.add_row(*cells)
    Console(width=160).print(table)
