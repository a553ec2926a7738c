"""Every schedule trains under the trainer, on two processes, as one process does.

Micro-batches of 3, 3 and 2 samples; a GPT with tied embeddings and dropout, and a U-Net whose values skip stages. What
is compared with is the strategy on one device, so that dropout draws the same numbers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest

from lightning_pipe.capture import Capture
from lightning_pipe.core.plan import Plan, StagePlan
from lightning_pipe.core.serial import save_yaml
from lightning_pipe.runtime.stage import Stage
from lightning_pipe.schedule import SCHEDULES, order_of
from lightning_pipe.schedule.construct.layout_shapes import looping
from lightning_pipe.schedule.formats.torch_csv import write_csv
from ranks.world import World
from slow import slow_but
from strategy.fits import Case, Fitted, assert_same, dapple, fit, fit_as_pipeline

ROUNDING = 1e-9  # float64: sums in another order, over some steps
OTHERS = [name for name in SCHEDULES if name not in ("gpipe", "1f1b")]  # which are in test_parity
IN_THE_SUITE = {"interleaved", "zb_v", "chimera"}  # tests/parity has all
SHORT = {"max_steps": 4, "limit_val_batches": 0}
DROPOUT = {"gpt_tied": 0.3, "unet_skips": 0.0}


def case_of(name: str, **options) -> Case:
    return Case(name, {"microbatches": 3, **options}, SHORT, dropout=DROPOUT[name])


@functools.cache
def on_one_device(name: str) -> Fitted:
    case = case_of(name)
    return fit(case, dapple(**case.options))


@pytest.mark.parametrize("schedule", slow_but(IN_THE_SUITE, OTHERS))
def test_a_schedule_trains_as_one_device_does(schedule):
    name = list(DROPOUT)[OTHERS.index(schedule) % len(DROPOUT)]
    for found in World(2).run(fit_as_pipeline, case_of(name, schedule=schedule)):
        assert_same(found, on_one_device(name), rtol=ROUNDING)


@pytest.mark.parametrize("schedule", ["chimera", pytest.param("bitpipe", marks=pytest.mark.slow)])
def test_two_pipes_on_four_devices_train_as_one_device_does(schedule):
    for found in World(4).run(fit_as_pipeline, case_of("gpt_tied", schedule=schedule)):
        assert_same(found, on_one_device("gpt_tied"), rtol=ROUNDING)


@dataclass(frozen=True)
class Joining:
    """What a fit with joined W has run: micro-batches of each, and what was said."""

    fitted: Fitted
    joined: list[int]
    said: list[str]


def fit_joining(case: Case, most: int) -> Joining:
    """Fit on all ranks of this world, where graphs hold for so many samples; a worker function."""
    joined, said, join = [], [], Stage.join
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_pipe.strategy.steps.step_runtime.rank_zero_warn", said.append)
        patch.setattr(Stage, "join", lambda stage, ms, slice_: (joined.append(len(ms)), join(stage, ms, slice_)))
        patch.setattr(Capture, "misfit", lambda capture, samples: "" if samples <= most else f"{samples} samples")
        return Joining(fit_as_pipeline(case), joined, said)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("most", [8, 7])
def test_a_plan_that_joins_w_trains_as_one_device_does(most, tmp_path):
    """Where the graph does not hold for the samples of all micro-batches together, W stay apart, and this is said."""
    stages = (StagePlan("", (0,)), StagePlan("blocks.1", (1,)))
    save_yaml(Plan(stages, 3, "2bp", {"join": 3}), tmp_path / "plan.yaml")
    case = Case("gpt_tied", {"plan": str(tmp_path / "plan.yaml")}, SHORT, dropout=DROPOUT["gpt_tied"])
    first, second = World(2).run(fit_joining, case, most)
    for found in (first, second):
        assert_same(found.fitted, on_one_device("gpt_tied"), rtol=ROUNDING)
        assert set(found.joined) == {3}  # with `most` of 7 in the last batch, which has 6 samples
        assert len(found.said) == (most == 7)
        assert all("the graph does not hold for their samples: 8 samples" in text for text in found.said)


def test_the_order_in_a_file_is_run(tmp_path):
    """Two chunks on each of two ranks, as the file says, and three micro-batches."""
    order = order_of("breadth_first", layout=looping([(0,), (1,)], 2), microbatches=3)
    path = tmp_path / "order.csv"
    path.write_text(write_csv(order))
    for found in World(2).run(fit_as_pipeline, case_of("gpt_tied", schedule=str(path))):
        assert_same(found, on_one_device("gpt_tied"), rtol=ROUNDING)
