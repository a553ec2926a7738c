"""What matrices over all stages must say: the same as the cost model says of the stages of one cut."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from cost.captures import zoo_capture
from lightning_pipe.core.program import Compute, Layout
from lightning_pipe.cost.counted import counted
from lightning_pipe.cost.prices import Pricer
from lightning_pipe.planner.candidates.cut_points import cuttable, worthwhile
from lightning_pipe.planner.estimates.stage_costs import StageCostTable
from lightning_pipe.planner.problem import Problem, nominal_cluster

NAMES = ("mlp_classifier", "resnet_batchnorm", "nanogpt_tied", "vae", "masked_mean_loss")


def problem_of(name: str) -> Problem:
    graph = zoo_capture(name)[0].graph
    return Problem(graph, counted(graph), nominal_cluster(3), graph.samples)


@pytest.mark.parametrize("name", NAMES)
def test_stages_cost_what_the_cost_model_says(name):
    problem = problem_of(name)
    positions = worthwhile(problem, sliced=False, most=40)
    segments = StageCostTable(problem, positions)
    pricer = Pricer(problem.graph, profile=problem.profile, cluster=problem.cluster)
    chosen = random.Random(1).sample(range(1, len(positions) + 1), k=min(2, len(positions)))
    ends = [0, *sorted(chosen), segments.units]
    cuts = [int(segments.bounds[end]) for end in ends[1:-1]]
    layout = Layout(tuple((rank,) for rank in range(len(ends) - 1)))
    prices = pricer.price(cuts, layout)
    n = problem.samples
    for s, (a, b) in enumerate(itertools.pairwise(ends)):

        def seconds(kind, s=s):
            return prices.compute_s(Compute(s, kind, 0), s, n)

        assert segments.forward_s.at(a, b, n) == pytest.approx(seconds("F"), rel=1e-6)
        assert segments.backward_s.at(a, b, n) == pytest.approx(seconds("I") + seconds("W"), rel=0.05)
        assert segments.saved_bytes.at(a, b, n) == pytest.approx(prices.saved_bytes(s, n), rel=0.1, abs=2048)
        assert segments.state_bytes[a, b] == pytest.approx(prices.state_bytes(s), rel=1e-6)
        assert segments.forward_s.all(n)[a, b] == pytest.approx(segments.forward_s.at(a, b, n))
        assert segments.step_s[a, b] == pytest.approx(prices.step_s(s), rel=1e-6)


def test_what_crosses_a_cut_is_what_the_edges_carry():
    problem = problem_of("mlp_classifier")
    segments = StageCostTable(problem, cuttable(problem.graph, sliced=False))
    pricer = Pricer(problem.graph, profile=problem.profile, cluster=problem.cluster)
    for bound, position in enumerate(segments.bounds[1:-1], start=1):
        edges = pricer.cutter.traffic((int(position),)).edges
        for direction in ("F", "B"):
            carried = sum(e.bytes_per_sample * 4 + e.fixed_bytes for e in edges if e.direction == direction)
            assert segments.crossing[direction].bytes(4)[bound] == pytest.approx(carried), (position, direction)


def test_a_large_graph_is_cut_where_little_crosses():
    problem = problem_of("resnet_batchnorm")
    few = worthwhile(problem, sliced=False, most=10)
    everywhere = cuttable(problem.graph, sliced=False)
    assert len(few) <= 10
    assert set(few) <= set(everywhere)
    assert np.all(np.diff(few) > 0)
