"""A stage keeps a value until its last use and no longer, and gradients that are nobody else's."""

from __future__ import annotations

from collections import Counter

import torch

from lightning_pipe.capture.steps.stage_program import Half, RandomKey, StageProgram, Value
from lightning_pipe.runtime.stage import Slice, Stage, State

CPU = torch.device("cpu")
SLICE = Slice(2, RandomKey(0, 0, 0), mean_weight=0.25, sum_weight=3.0)


def forward(samples: int, key: RandomKey, w: torch.Tensor, b: torch.Tensor, x: torch.Tensor, seen: torch.Tensor):
    y = x * w + b
    return y, x + 0, y.sum(), seen + samples


def input_grad(samples: int, key: RandomKey, w: torch.Tensor, gy: torch.Tensor):
    return gy * w, gy


def weight_grad(samples: int, key: RandomKey, gb: torch.Tensor, saved: torch.Tensor, tangent: torch.Tensor):
    return gb * saved + tangent, gb.view_as(gb)


PROGRAM = StageProgram(
    stage=1,
    parameters={"w": "weight", "b": "bias"},
    buffers={"seen": "seen"},
    leaves={},
    tangents=("tangent",),
    forward=Half(("w", "b", "x", "seen"), ("y", "saved", "loss", "seen_new"), forward),
    input_grad=Half(("w", "gy"), ("gx", "gb"), input_grad),
    weight_grad=Half(("gb", "saved", "tangent"), ("dw", "db"), weight_grad),
    receives={("F", 0): ("x",), ("B", 2): ("gy",)},
    sends={("F", 2): ("y",), ("B", 0): ("gx",)},
    mutations={"seen": "seen_new"},
    gradients={"dw": "weight", "db": "bias"},
    results=("loss",),
)
X = torch.tensor([1.0, 2.0])
GY = torch.tensor([10.0, 20.0])


def stage_and_state(combine: str = "mean", *, training: bool = True) -> tuple[Stage, State]:
    parameters = {"weight": torch.tensor([3.0, 4.0]), "bias": torch.tensor([0.5, 0.5])}
    state = State(parameters, {"seen": torch.zeros((), dtype=torch.int64)}, CPU)
    loss = Value("loss", torch.float32, lambda samples: (), None, combine=combine)
    stage = Stage(PROGRAM, {"loss": loss}, state=state, loss="loss")
    sends = {("F", 2, 0): 1, ("B", 0, 0): 2} if training else {("F", 2, 0): 1}
    stage.begin(Counter(sends), training=training)
    return stage, state


def backward(stage: Stage) -> None:
    stage.receive(0, {"gy": GY.clone()})
    stage.compute("I", 0, SLICE)
    stage.compute("W", 0, SLICE)


def test_values_are_dropped_at_their_last_use() -> None:
    stage, _ = stage_and_state()
    stage.receive(0, {"x": X})
    stage.compute("F", 0, SLICE)
    assert set(stage.left()) == {"0:y", "0:saved"}
    assert torch.equal(stage.outgoing("F", 2, 0)["y"], X * torch.tensor([3.0, 4.0]) + 0.5)
    assert set(stage.left()) == {"0:saved"}
    stage.receive(0, {"gy": GY})
    stage.compute("I", 0, SLICE)
    assert set(stage.left()) == {"0:saved", "0:gx", "0:gb"}
    stage.compute("W", 0, SLICE)
    assert set(stage.left()) == {"0:gx"}
    stage.outgoing("B", 0, 0)
    assert set(stage.left()) == {"0:gx"}, "a second replica takes it too"
    stage.outgoing("B", 0, 0)
    assert stage.left() == ()


def test_a_forward_only_program_keeps_nothing_for_a_backward() -> None:
    stage, _ = stage_and_state(training=False)
    stage.receive(0, {"x": X})
    stage.compute("F", 0, SLICE)
    assert set(stage.left()) == {"0:y"}
    stage.free(0)
    assert stage.left() == ()


def test_b_is_i_then_w() -> None:
    (split, split_state), (fused, fused_state) = stage_and_state(), stage_and_state()
    for stage in (split, fused):
        stage.receive(0, {"x": X})
        stage.compute("F", 0, SLICE)
    backward(split)
    fused.receive(0, {"gy": GY})
    fused.compute("B", 0, SLICE)
    for name, parameter in split_state.parameters.items():
        assert torch.equal(parameter.grad, fused_state.parameters[name].grad)
    assert torch.equal(split.outgoing("B", 0, 0)["gx"], fused.outgoing("B", 0, 0)["gx"])


def test_the_tangent_is_the_share_of_the_loss() -> None:
    for combine, weight in (("mean", 0.25), ("sum", 3.0)):
        stage, state = stage_and_state(combine)
        stage.receive(0, {"x": X})
        stage.compute("F", 0, SLICE)
        backward(stage)
        assert torch.equal(state.parameters["weight"].grad, GY * X + weight)


def test_a_gradient_that_shares_memory_with_a_value_is_copied() -> None:
    stage, state = stage_and_state()
    stage.receive(0, {"x": X})
    stage.compute("F", 0, SLICE)
    gradient = GY.clone()
    stage.receive(0, {"gy": gradient})
    stage.compute("I", 0, SLICE)
    stage.compute("W", 0, SLICE)
    bias = state.parameters["bias"]
    assert torch.equal(bias.grad, GY)
    assert bias.grad.data_ptr() != gradient.data_ptr(), "db is a view of what was received"
    gradient.zero_()
    assert torch.equal(bias.grad, GY)


def test_gradients_of_micro_batches_are_added() -> None:
    stage, state = stage_and_state()
    for _ in range(2):
        stage.receive(0, {"x": X})
        stage.compute("F", 0, SLICE)
        backward(stage)
    assert torch.equal(state.parameters["bias"].grad, 2 * GY)


def test_results_are_taken_once_and_state_is_written_back() -> None:
    stage, state = stage_and_state()
    stage.receive(0, {"x": X})
    stage.compute("F", 0, SLICE)
    assert stage.results(0)["loss"].item() == 12.0
    assert stage.results(0) == {}
    assert state.buffers["seen"].item() == 2


def test_a_profiler_sees_the_computes_by_name() -> None:
    stage, _ = stage_and_state()
    stage.receive(0, {"x": X})
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        stage.compute("F", 0, SLICE)
    assert "PP:1F0" in {event.name for event in profile.events()}
