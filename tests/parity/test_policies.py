"""What a plan gives up, the run gives up, and nothing else changes."""

from __future__ import annotations

import functools

import pytest

from lightning_pipe.core.program import Evict
from lightning_pipe.planner.evaluation.evaluate import judge
from lightning_pipe.planner.registry import propose
from lightning_pipe.schedule import SCHEDULES
from lightning_pipe.schedule.construct.layout_shapes import both_ways
from lightning_pipe.schedule.lower import offload
from parity.policies import Ran, check_same, check_saved, mixed, plan_of, run, swapping_problem, tight
from slow import slow_but

NAMES = ("gpt_tied", "unet_skips", "resnet_batchnorm", "seq2seq")
ROUNDING = 1e-5  # of sums over joined micro-batches
MIXTURES = ((1.0, 0.0), (0.0, 1.0), (0.5, 0.5), (0.3, 0.3), (1.0, 1.0))


@pytest.fixture(autouse=True)
def _fetched_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let micro-batches leave that are away for a single compute; three are fetched ahead of time otherwise."""
    monkeypatch.setattr(offload, "AHEAD", 0)


@functools.cache
def keeping(name: str, layout: str, schedule: str, join: int) -> Ran:
    problem = swapping_problem(name, layout=layout, schedule=schedule, microbatches=3, dropout=0.2)
    return run(judge(plan_of(problem, join), problem), name, problem, dropout=0.2)


def check(
    name: str, layout: str, schedule: str, mixture: tuple[float, float], *, join: int = 1, tolerance: float = 0.0
) -> None:
    """Compare a mixture with keeping all, and what is kept with the prediction after every instruction."""
    problem = swapping_problem(name, layout=layout, schedule=schedule, microbatches=3, dropout=0.2)
    plan = plan_of(problem, join)
    again, away = mixture
    given_up = mixed(plan, problem, recompute=again, offload=away, seed=f"{name}{layout}{schedule}{mixture}")
    judged = judge(given_up, problem)
    leaves = any(isinstance(x, Evict) for line in judged.program.ranks for x in line)
    assert leaves or not given_up.stages[0].offload or layout != "1-1", "replicas that take turns have few in flight"
    ran = run(judged, name, problem, dropout=0.2)
    check_same(ran, keeping(name, layout, schedule, join), tolerance=tolerance)
    check_saved(ran, judged)


CASES = [(name, mixture) for name in NAMES for mixture in MIXTURES]
QUICK = {("gpt_tied", (1.0, 0.0)), ("gpt_tied", (0.0, 1.0)), *((name, (0.5, 0.5)) for name in NAMES)}


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(("name", "mixture"), slow_but(QUICK, CASES))
def test_any_mixture_is_keeping_all_and_keeps_what_was_predicted(name, mixture):
    check(name, "1-1", "1f1b", mixture)


@pytest.mark.parametrize("layout", ["2-1", "1-2"])
@pytest.mark.parametrize("name", ["gpt_tied", *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:])])
def test_with_unequal_replicas_too(name, layout):
    check(name, layout, "1f1b", (0.5, 0.5))


ONE_WAY = [name for name in SCHEDULES if SCHEDULES[name].shape is not both_ways and name != "1f1b"]


@pytest.mark.parametrize("schedule", ONE_WAY)
def test_under_every_schedule(schedule):
    check("gpt_tied", "1-1", schedule, (0.4, 0.4), tolerance=ROUNDING if schedule == "2bp" else 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", NAMES)
def test_everything_recomputed_or_offloaded_under_every_schedule(name, schedule):
    """Where a rank has both holders of a tied parameter, it may add what I makes again before what W made."""
    folds = SCHEDULES[schedule].layout([(0,), (1,)], 2).stages[::3] == ((0,), (0,))
    reorders = schedule == "2bp" or (name == "gpt_tied" and folds)
    for mixture in MIXTURES:
        check(name, "1-1", schedule, mixture, tolerance=ROUNDING if reorders else 0.0)


def test_where_some_micro_batches_are_offloaded():
    """The integer program says which, and when they leave and come back."""
    problem = swapping_problem("gpt_tied", layout="1-1", schedule="milp", microbatches=4, dropout=0.2)
    judged = propose(tight(problem, share=0.65), "uniform")[0]
    copied = {(x.stage, x.microbatch) for line in judged.program.ranks for x in line if isinstance(x, Evict)}
    assert 0 < len(copied) < 4 * len({stage for stage, _ in copied})
    ran = run(judged, "gpt_tied", problem, dropout=0.2)
    check_same(ran, run(judge(plan_of(problem), problem), "gpt_tied", problem, dropout=0.2))
    check_saved(ran, judged)


@pytest.mark.parametrize(("mixture", "tolerance"), [((0.0, 0.5), 0.0), ((0.5, 0.0), ROUNDING)])
def test_with_joined_w(mixture, tolerance):
    """A stage that recomputes does not join, so that its sums are those of single micro-batches."""
    check("gpt_tied", "1-1", "2bp", mixture, join=8, tolerance=tolerance)
