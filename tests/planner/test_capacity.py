"""The largest batch fits and one more sample does not; planning reaches at least what every fixed policy reaches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_pipe.core.cluster import Cluster, Device, Host, Link, limited
from lightning_pipe.planner.comparison.capacity import POLICIES, Largest, deepest_models, largest_batches
from lightning_pipe.planner.problem import Constraints, Problem
from planner.test_activations import FAST, blocks

MICROBATCHES, STAGES = 8, 4
SWAP = Link(latency_s=0.0, bytes_per_s=1e6)


def chain(memory: float, *, size: int = 8, samples: int = MICROBATCHES, swap: Link = SWAP) -> Problem:
    graph, profile = blocks(size)
    host = Host("a", (Device("x", int(memory)),) * STAGES, inside=FAST, network=FAST, swap=swap)
    return Problem(graph, profile, Cluster((host,)), samples, constraints=Constraints(microbatches=MICROBATCHES))


@pytest.fixture(scope="module")
def reached() -> dict[str, Largest]:
    return {one.policy: one for one in largest_batches(chain(250_000), planner="uniform")}


def test_each_policy_says_what_it_reaches(reached):
    assert reached.keys() == POLICIES.keys()
    for one in reached.values():
        assert one.trial is not None and one.trial.fits
        assert one.trial.problem.samples == one.size * MICROBATCHES
        assert one.trial.step_s > 0


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("policy", POLICIES)
def test_what_the_largest_batch_needs_is_not_there_for_one_sample_less_memory(policy, reached):
    """With a limit just below the peak of the largest batch, the largest batch is smaller."""
    needed = max(reached[policy].trial.peaks)
    problem = chain(250_000)
    tight = replace(problem, cluster=limited(problem.cluster, {"": needed - 1}))
    (less,) = largest_batches(tight, policies=(policy,), planner="uniform")
    slack = policy in ("planned", "offload all")  # which give up more, or wait sooner for copies, where there is less
    assert less.size < reached[policy].size or slack


def test_planning_reaches_what_every_fixed_policy_reaches(reached):
    sizes = {name: one.size for name, one in reached.items()}
    assert sizes["planned"] == max(sizes.values())
    assert sizes["gpipe"] <= sizes["keep all"] <= sizes["recompute all"]
    assert sizes["vpipe"] >= sizes["keep all"] >= sizes["pipedream"]


def test_pipedream_keeps_a_version_per_micro_batch_in_flight(reached):
    trial = reached["pipedream"].trial
    parameters = sum(trial.problem.graph.parameter_bytes.values()) / STAGES
    extra = [peak - plain for peak, plain in zip(trial.peaks, trial.judged.peak_bytes, strict=True)]
    assert extra == [pytest.approx((STAGES - 1 - s) * parameters) for s in range(STAGES)]
    assert trial.step_s < trial.judged.step_s


def test_nothing_fits_where_parameters_do_not():
    for one in largest_batches(chain(10), planner="uniform", policies=("keep all", "gpipe", "planned")):
        assert one.size == 0 and one.trial is None and one.reason


@pytest.mark.slow
def test_deeper_models_fit_where_less_is_kept():
    found = {
        one.policy: one
        for one in deepest_models(
            lambda depth: chain(40_000, size=depth), policies=("keep all", "planned"), planner="uniform", start=STAGES
        )
    }
    assert found["planned"].size > found["keep all"].size > 0
    for one in found.values():
        assert len(one.trial.problem.graph.nodes) == one.size
