"""What the uniform planner promises: balanced stages, less traffic where links are slow, no plan over the memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cost.sketches import Sketch
from lightning_pipe.core.cluster import Cluster, Device, Host, Link
from lightning_pipe.core.graph import Graph, Node
from lightning_pipe.core.plan import Plan
from lightning_pipe.core.profile import Profile
from lightning_pipe.errors import PlanError
from lightning_pipe.planner.candidates.cut_points import crossing_bytes
from lightning_pipe.planner.comparison.alternatives import alternatives
from lightning_pipe.planner.evaluation.evaluate import Judge, Judged
from lightning_pipe.planner.problem import Constraints, Problem, counted_problem
from lightning_pipe.planner.registry import propose

FAST = Link(latency_s=0.0, bytes_per_s=1e12)


def layers(seconds: list[float], widths: list[float], *, samples: int = 16) -> tuple[Graph, Profile]:
    """Return a chain: layer k takes `seconds[k]` per sample, a third of it forward, and makes `widths[k]` bytes."""
    sketch, times = Sketch(len(seconds), samples=samples), []
    made = [sketch.batch(per_sample=1)]
    for k, width in enumerate(widths):
        made.append(sketch.forward(f"h_{k}", k, made[-1], parameters=(f"w_{k}",), size=(width, 0)))
        times.append(seconds[k] / 3)
    sketch.results.append(made[-1])
    gradient = made[-1]
    for k in reversed(range(len(seconds))):
        sketch.gradients.append((sketch.gradient(f"w_{k}", k, made[k], gradient), f"w_{k}"))
        times.append(seconds[k] / 3)
        if k:
            arguments = {"parameters": (f"w_{k}",), "size": (widths[k - 1], 0), "reach": 0}
            gradient = sketch.backward(f"g_{k - 1}", k, gradient, **arguments)
            times.append(seconds[k] / 3)
    graph = sketch.graph()
    nodes = tuple(Node(f"h_{k}", "op", f"layer.{k}", "", (), (), 0, 0, 0, 0) for k in range(len(seconds)))
    profile = Profile("sketch", "sketch", (1, 2), tuple((time, 2 * time) for time in times))
    return replace(graph, nodes=nodes), profile


def cluster(ranks: int, *, link: Link = FAST, memory: int = 1 << 40) -> Cluster:
    return Cluster((Host("a", (Device("x", memory),) * ranks, inside=link, network=link),))


def problem(seconds: list[float], widths: list[float], devices: Cluster, *, samples: int = 16) -> Problem:
    graph, profile = layers(seconds, widths, samples=samples)
    return Problem(graph, profile, devices, samples)


def candidates(asked: Problem, *, replicas: list[int], microbatches: int | None = None) -> list[Judged]:
    return propose(replace(asked, constraints=Constraints(microbatches, tuple(replicas), warmup="pa")), "uniform")


def uniform(asked: Problem, *, replicas: list[int], microbatches: int | None = None) -> Plan:
    return candidates(asked, replicas=replicas, microbatches=microbatches)[0].plan


def begins(plan) -> list[str]:
    return [stage.at for stage in plan.stages]


def test_stages_take_the_same_time():
    asked = problem([1, 1, 1, 1, 2, 2], [8] * 6, cluster(2))
    assert begins(uniform(asked, replicas=[1, 1], microbatches=4)) == ["", "h_4"]


def test_replicas_share_the_work_of_their_stage():
    asked = problem([1, 1, 1, 1, 1, 1], [8] * 6, cluster(3))
    assert begins(uniform(asked, replicas=[2, 1], microbatches=4)) == ["", "h_4"]


def test_a_slower_device_gets_less_work():
    devices = cluster(2)
    host = devices.hosts[0]
    slow = replace(host, devices=(host.devices[0], replace(host.devices[1], speed=0.5)))
    asked = problem([1] * 6, [8] * 6, Cluster((slow,)))
    assert begins(uniform(asked, replicas=[1, 1], microbatches=4)) == ["", "h_4"]


def test_a_slow_link_moves_the_cut_to_where_less_crosses():
    widths = [800, 800, 800, 8, 800, 800]
    fast = problem([1] * 6, widths, cluster(2))
    slow = problem([1] * 6, widths, cluster(2, link=Link(0.0, 300.0)))
    assert begins(uniform(fast, replicas=[1, 1], microbatches=4)) == ["", "h_3"]
    assert begins(uniform(slow, replicas=[1, 1], microbatches=4)) == ["", "h_4"]


def test_latency_makes_micro_batches_fewer():
    quick = problem([1] * 4, [8] * 4, cluster(2))
    late = problem([1] * 4, [8] * 4, cluster(2, link=Link(5.0, 1e12)))
    assert uniform(quick, replicas=[1, 1]).microbatches > uniform(late, replicas=[1, 1]).microbatches


def test_candidates_that_fit_come_before_faster_ones_that_do_not():
    wide = problem([1] * 4, [8000] * 4, cluster(2))
    limit = sorted(max(j.peak_bytes) for j in candidates(wide, replicas=[1, 1]))[0]
    tight = replace(wide, cluster=cluster(2, memory=limit))
    first, *others = candidates(tight, replicas=[1, 1])
    assert first.overflow(tight.cluster) <= 0
    overflows = [max(0, j.overflow(tight.cluster)) for j in others]
    assert overflows == sorted(overflows) and overflows[-1] > 0


def test_too_many_stages_are_refused():
    with pytest.raises(PlanError, match="too few for 3 stages"):
        uniform(problem([1, 1], [8, 8], cluster(3)), replicas=[1, 1, 1])


def test_crossing_bytes_are_those_of_messages():
    graph, _ = layers([1] * 4, [10, 20, 30, 40])
    assert crossing_bytes(graph, 2) == [0, 40, 80, 120, 0]  # value and gradient, two samples


def test_counted_costs_need_no_measurement():
    graph, _ = layers([1] * 4, [8] * 4)
    plan = uniform(counted_problem(graph, ranks=2, samples=16), replicas=[1, 1], microbatches=4)
    assert len(plan.stages) == 2


def test_alternatives_are_judged_alike():
    asked = problem([1] * 6, [8] * 6, cluster(2))
    judged = candidates(asked, replicas=[1, 1])
    found = {a.kind: a for a in alternatives(asked, judged[0], judged[1:])}
    assert found["one device"].step_s == pytest.approx(16 * (6 - 1 / 3))  # nobody needs the gradient of the input
    assert found["data parallel"].step_s == pytest.approx(8 * (6 - 1 / 3))
    assert found["plan"].step_s == Judge(asked).judge(judged[0].plan).step_s
    assert found["data parallel"].bytes_sent == 2 * 6 * 100
