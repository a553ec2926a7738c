"""Laws of recorded pieces: whatever order micro-batches come in, values are those of the kernels that were recorded."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from capture.recorders import Again
from lightning_pipe.capture.stages.cuda_recorder import LaunchRecorder
from lightning_pipe.capture.stages.recorded_pieces import RecordedPiece, Slots

WIDTH = 5


def forward(weight: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
    """Return what is sent, two values that share memory and stay, and a view of what was given."""
    hidden = x @ weight
    sent = hidden.relu()
    return [sent, hidden, hidden.t(), x.t()]


def back(weight: torch.Tensor, hidden: torch.Tensor, turned: torch.Tensor, gradient: torch.Tensor) -> list[Any]:
    """Return what is sent, and what is left for W."""
    inner = gradient * (hidden > 0) + 0 * turned.t()
    return [inner @ weight.t(), inner]


def weights(x_turned: torch.Tensor, inner: torch.Tensor) -> list[torch.Tensor]:
    return [x_turned @ inner]


class Stage:
    """F, I and W of one stage, recorded, with the values that wait in between."""

    def __init__(self, recorder: LaunchRecorder) -> None:
        self.slots, self.device = Slots(recorder), recorder.device
        self.pieces: dict[int, tuple[RecordedPiece, ...]] = {}
        self.weight = torch.randn(WIDTH, WIDTH, device=self.device)
        self.held: dict[int, tuple[torch.Tensor, ...]] = {}
        self.given: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.found: dict[int, list[torch.Tensor]] = {}

    def _made(self, samples: int) -> tuple[RecordedPiece, ...]:
        make = self.slots.piece
        return (
            make(forward, fixed=[True, False], stays=[False, True, True, True], name=f"F of {samples}"),
            make(back, fixed=[True, False, False, False], stays=[False, True], name=f"I of {samples}"),
            make(weights, fixed=[False, False], stays=[False], name=f"W of {samples}"),
        )

    def run(self, kind: str, microbatch: int, samples: int = 3) -> None:
        if samples not in self.pieces:
            self.pieces[samples] = self._made(samples)
        run_f, run_i, run_w = self.pieces[samples]
        with self.slots.of(kind, microbatch):
            if kind == "F":
                x, gradient = torch.randn(2, samples, WIDTH, device=self.device)
                sent, *kept = run_f(self.weight, x)
                self.given[microbatch], self.held[microbatch] = (x.clone(), gradient), tuple(kept)
                self.found[microbatch] = [sent]
            elif kind == "I":
                hidden, turned, x_turned = self.held[microbatch]
                sent, inner = run_i(self.weight, hidden, turned, self.given[microbatch][1].clone())
                self.held[microbatch] = x_turned, inner
                self.found[microbatch].append(sent)
            else:
                self.found[microbatch] += run_w(*self.held.pop(microbatch))

    def assert_right(self, microbatch: int, *, weight: torch.Tensor | None = None) -> None:
        x, gradient = self.given[microbatch]
        weight = self.weight if weight is None else weight
        sent, hidden, turned, x_turned = forward(weight, x)
        back_sent, inner = back(weight, hidden, turned, gradient)
        expected = [sent, back_sent, *weights(x_turned, inner)]
        exactness = {"rtol": 0, "atol": 0} if self.device.type == "cpu" else {}
        torch.testing.assert_close(self.found[microbatch], expected, **exactness)


def any_order(microbatches: int, ahead: int, seed: int) -> list[tuple[str, int]]:
    """Return F, I and W of micro-batches in an order that keeps that of each, with at most so many under way."""
    draw, left = random.Random(seed), {m: ["F", "I", "W"] for m in range(microbatches)}
    line: list[tuple[str, int]] = []
    while left:
        begun = [m for m, kinds in left.items() if len(kinds) < 3]
        fresh = [m for m, kinds in left.items() if len(kinds) == 3][:1] if len(begun) < ahead else []
        microbatch = draw.choice([*begun, *fresh])
        line.append((left[microbatch].pop(0), microbatch))
        left = {m: kinds for m, kinds in left.items() if kinds}
    return line


@pytest.mark.parametrize("seed", range(12))
def test_values_are_those_of_the_kernels_in_any_order(seed: int) -> None:
    recorder, ahead = Again(), 1 + seed % 4
    stage = Stage(recorder)
    for program in range(3):
        for kind, microbatch in any_order(6, ahead, seed + 100 * program):
            stage.run(kind, microbatch, samples=3 + (microbatch + program) % 2)
        for microbatch in range(6):
            stage.assert_right(microbatch)
    assert recorder.recorded <= 2 * 3 * ahead, "a slot per micro-batch under way"
    assert recorder.launched == 3 * 3 * 6, "everything was launched"


def test_memory_that_somebody_refers_to_is_not_overwritten() -> None:
    """Even a view of a view of what has stayed, when the schedule is through with it."""
    stage = Stage(Again())
    stage.run("F", 0)
    view = stage.held[0][0][1:].t()
    expected = view.clone()
    stage.run("I", 0)
    stage.run("W", 0)
    for microbatch in range(1, 4):
        for kind in "FIW":
            stage.run(kind, microbatch)
        stage.assert_right(microbatch)
    torch.testing.assert_close(view, expected, rtol=0, atol=0)


def test_memory_is_used_again_when_nothing_refers_to_it() -> None:
    recorder = Again()
    stage = Stage(recorder)
    for microbatch in range(5):
        for kind in "FIW":
            stage.run(kind, microbatch)
    assert recorder.recorded == 3


def test_a_program_that_is_left_and_begun_again_has_its_own_values() -> None:
    stage = Stage(Again())
    for kind, microbatch in [("F", 0), ("F", 1), ("I", 0)]:
        stage.run(kind, microbatch)
    stage.held.clear()
    for kind, microbatch in any_order(3, 2, seed=0):
        stage.run(kind, microbatch)
    for microbatch in range(3):
        stage.assert_right(microbatch)


def test_what_was_written_to_a_parameter_is_read_and_another_one_in_its_place_too() -> None:
    stage = Stage(Again())
    for change in [lambda: None, lambda: stage.weight.mul_(2), lambda: setattr(stage, "weight", stage.weight + 1)] * 2:
        change()
        for kind, microbatch in any_order(3, 2, seed=1):
            stage.run(kind, microbatch)
        for microbatch in range(3):
            stage.assert_right(microbatch)


def test_a_parameter_that_changes_places_between_f_and_i_is_read_where_it_is() -> None:
    stage = Stage(Again())
    for _ in range(2):
        for kind in "FIW":
            stage.run(kind, 0)
    for _ in range(2):
        stage.run("F", 0)
        stage.weight = stage.weight.clone()
        stage.run("I", 0)
        stage.run("W", 0)
        stage.assert_right(0)


def test_what_cannot_be_recorded_runs_as_it_is_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage(Again(fails=True))
    for kind, microbatch in any_order(4, 2, seed=2):
        stage.run(kind, microbatch)
    for microbatch in range(4):
        stage.assert_right(microbatch)
    said = sorted(record.getMessage() for record in caplog.records)
    why = "runs without a CUDA graph: operation not permitted when stream is capturing"
    assert said == [f"{kind} of 3 {why}" for kind in "FIW"]


@pytest.mark.parametrize(
    ("kernel", "given"),
    [
        (lambda x: [x + 1, x[1:], x.t()], torch.randn(3, 4)[:, 1:3]),
        (lambda x: [x * 2], torch.randn(4, 1).expand(4, 3)),
        (lambda x: [x[:0], x.sum(), None, 3], torch.randn(4, 3)),
        (lambda x: [x * 2, torch.view_as_real(x * 1)], torch.randn(4, 3, dtype=torch.complex64)),
        (lambda x: [x * 2, x.conj()], torch.randn(4, 3, dtype=torch.complex64)),
        (lambda x: [x * 2, x.imag], torch.randn(4, 3, dtype=torch.complex64).conj()),
        (lambda x: [(x + 1).chunk(3)[1], (x + 1).long(), x > 0], torch.randn(6, 3)),
        (lambda x: [x.new_empty_strided((3, 2), (1, 3)).copy_(x)], torch.randn(3, 2)),
    ],
    ids=["slices", "expanded", "empty", "complex", "conjugated", "negated", "types", "turned"],
)
@pytest.mark.parametrize("stays", [True, False])
def test_forms_of_tensors_are_kept(kernel: Callable[..., Any], given: torch.Tensor, stays: bool) -> None:
    slots = Slots(Again())
    piece = slots.piece(kernel, fixed=[False], stays=[stays] * 4, name="F")
    for _ in range(3):
        given = given + 1 if given.is_contiguous() else given
        with slots.of("F", 0):
            found = piece(given)
        for one, other in zip(found, kernel(given), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
            if isinstance(one, torch.Tensor):
                assert one.stride() == other.stride()


def test_what_only_i_leaves_waits_for_w_of_its_own_microbatch() -> None:
    """F leaves nothing in its slot, so that the next micro-batch may have the same one."""
    slots, weight, kept, expected = Slots(Again()), torch.randn(WIDTH, WIDTH), {}, {}
    begins = slots.piece(lambda x: [x.relu(), x.t()], fixed=[False], stays=[False, True], name="F")
    back = slots.piece(lambda w, x_turned: [x_turned.t() @ w], fixed=[True, False], stays=[True], name="I")
    for _ in range(3):
        for microbatch in range(3):
            with slots.of("F", microbatch):
                _, kept[microbatch] = begins(x := torch.randn(3, WIDTH))
            expected[microbatch] = x @ weight
        for microbatch in range(3):
            with slots.of("I", microbatch):
                kept[microbatch] = back(weight, kept[microbatch])
        for microbatch in range(3):
            torch.testing.assert_close(kept.pop(microbatch), [expected[microbatch]], rtol=0, atol=0)
