"""Every schedule trains as one device does: in float32, on the local transport, with unequal micro-batches.

Batches have 8 samples in micro-batches of 3, 3 and 2, the last one 6 in threes of two.
"""

from __future__ import annotations

import pytest
import torch

from lightning_pipe.schedule import SCHEDULES
from lightning_pipe.schedule.construct.layout_shapes import both_ways
from models.parity import make_module
from parity.training import TOLERANCE, accumulation, assert_same_training, close, expected, pipeline, train

STEPS = 4
OTHERS = [name for name in SCHEDULES if name not in ("gpipe", "1f1b")]  # which are in the matrix
ONE_WAY = [name for name in OTHERS if SCHEDULES[name].shape is not both_ways]
BOTH_WAYS = [name for name in OTHERS if SCHEDULES[name].shape is both_ways]
MODULES = ["gpt_tied", "unet_skips"]


def layout_of(devices: int) -> str:
    return "-".join("1" * devices)


def trained(name: str, schedule: str, devices: int) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return losses and parameters of a pipeline on so many devices."""
    module = make_module(name).train()
    return train(module, name, pipeline(module, name, layout=layout_of(devices), schedule=schedule), steps=STEPS)


@pytest.mark.sampled
@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("schedule", ONE_WAY)
@pytest.mark.parametrize("name", MODULES)
def test_training_is_that_of_one_device(name, schedule, devices):
    assert_same_training(trained(name, schedule, devices), expected(name, accumulation, steps=STEPS))


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("schedule", BOTH_WAYS)
@pytest.mark.parametrize("name", MODULES)
def test_two_pipes_with_the_same_weights_train_as_one_device(name, schedule, devices):
    assert_same_training(trained(name, schedule, devices), expected(name, accumulation, steps=STEPS))


@pytest.mark.parametrize("layout", ["1-1-1", "2-1"])
@pytest.mark.parametrize("name", MODULES)
def test_with_joined_w_too_but_for_the_rounding_of_sums(name, layout):
    module = make_module(name).train()
    found = train(module, name, pipeline(module, name, layout=layout, schedule="2bp", join=8), steps=STEPS)
    assert_same_training(found, expected(name, accumulation, steps=STEPS))


def test_joined_w_draw_the_dropout_of_single_ones():
    parameters = []
    for join in (1, 8):
        module = make_module("gpt_tied", dropout=0.3).train()
        update = pipeline(module, "gpt_tied", layout="1-1", schedule="2bp", dropout=0.3, join=join)
        parameters.append(train(module, "gpt_tied", update, steps=2)[1])
    for name, value in parameters[0].items():
        close(parameters[1][name], value, name)


@pytest.mark.parametrize("schedule", OTHERS)
def test_dropout_is_that_of_one_device(schedule):
    runs = []
    for layout, name in (("1", "gpipe"), (layout_of(2), schedule)):
        module = make_module("gpt_tied", dropout=0.3).train()
        update = pipeline(module, "gpt_tied", layout=layout, schedule=name, dropout=0.3)
        runs.append([float(loss) for loss in train(module, "gpt_tied", update, steps=2)[0]])
    assert runs[1] == pytest.approx(runs[0], rel=TOLERANCE)
    assert len(set(runs[0])) == len(runs[0])
