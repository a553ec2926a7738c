"""Laws of `cuda_graphs=True` on CUDA: the numbers of what was recorded, and what cannot be recorded harms nothing."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from capture.test_recorded_pieces import Stage, any_order
from gpu.test_shared_gpu import assert_close, trained
from lightning_pipe import DappleStrategy
from lightning_pipe.capture.stages.cuda_recorder import CudaRecorder
from lightning_pipe.capture.stages.recorded_pieces import Slots
from ranks.world import World
from strategy.fits import ON
from strategy.small import Small, run
from strategy.test_compile import Ears

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(ON != "cuda", reason="LIGHTNING_PIPE_TESTS_ON is not cuda")]

DEVICE = torch.device("cuda", 0)


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """Give what is said of stages that do not run compiled, or recorded."""
    ears = Ears()
    logger = logging.getLogger("lightning_pipe.capture.stages")
    logger.addHandler(ears)
    try:
        yield ears.said
    finally:
        logger.removeHandler(ears)


@pytest.mark.parametrize("seed", range(4))
def test_values_are_those_of_the_kernels_in_any_order(seed: int) -> None:
    stage, ahead = Stage(CudaRecorder(DEVICE)), 1 + seed
    for program in range(4):
        for kind, microbatch in any_order(6, ahead, seed + 100 * program):
            stage.run(kind, microbatch, samples=3 + 200 * (microbatch % 2))
            torch.full((1 << 16,), 77.0, device=DEVICE)  # what a recording does not own may be anybody's
        for microbatch in range(6):
            stage.assert_right(microbatch)


def waits(x: torch.Tensor) -> list[torch.Tensor]:
    return [x * float(x.sum()), x[x > 0]]


def waits_unseen(x: torch.Tensor) -> list[torch.Tensor]:
    event = torch.cuda.Event()
    event.record()
    event.synchronize()
    return [x * x.sum(), x[:0]]


@pytest.mark.parametrize(
    ("kernel", "why"), [(waits, "the host waits for the device"), (waits_unseen, "captur")], ids=["seen", "unseen"]
)
def test_what_waits_for_the_device_runs_as_it_is_and_others_are_recorded_after_it(
    kernel: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = CudaRecorder(DEVICE)
    slots = Slots(recorder)
    piece = slots.piece(kernel, fixed=[False], stays=[True, True], name="waits")
    stage = Stage(recorder)
    for program in range(3):
        x = torch.randn(5, device=DEVICE)
        with slots.of("F", 0):
            found = piece(x)
        torch.testing.assert_close(found, kernel(x))
        for kind, microbatch in any_order(4, 2, program):
            stage.run(kind, microbatch)
        for microbatch in range(4):
            stage.assert_right(microbatch)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("waits runs without a CUDA graph: ")
    assert why in said
    before, stream = torch.cuda.memory_allocated(), torch.cuda.Stream()
    for _ in range(3):  # memory that two streams have used comes back
        memory = torch.empty(64 << 20, dtype=torch.uint8, device=DEVICE)
        memory.record_stream(stream)
        del memory
        torch.cuda.synchronize()
    torch.empty(1, device=DEVICE)
    assert torch.cuda.memory_allocated() <= before + (1 << 20)


def test_threads_that_copy_meanwhile_do_no_harm() -> None:
    """As transports do, on streams of their own, while a stage is recorded."""
    ends, failed = threading.Event(), list[BaseException]()

    def copy() -> None:
        stream = torch.cuda.Stream()
        try:
            with torch.cuda.stream(stream):
                while not ends.is_set():
                    host = torch.empty(1 << 18, pin_memory=True)
                    host.to(DEVICE, non_blocking=True).add_(1).cpu()
                    stream.synchronize()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=copy)
    thread.start()
    try:
        stage = Stage(CudaRecorder(DEVICE))
        for program in range(5):
            for kind, microbatch in any_order(8, 4, program):
                stage.run(kind, microbatch, samples=10 + microbatch % 3)
            for microbatch in range(8):
                stage.assert_right(microbatch)
    finally:
        ends.set()
        thread.join()
    assert not failed


class Masked(Small):
    """Writes where a mask says, for which the host waits for the device."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).clone()
        hidden[hidden < 0] = 0.25
        return self.last(torch.tanh(hidden))


def masked(options: dict[str, Any] | None) -> tuple[Any, list[str]]:
    with heard() as said:
        return run(Masked, options), said


def test_what_waits_stands_between_what_is_recorded() -> None:
    (losses, _, _, parameters), _ = masked(None)
    for found, said in World(2).run(masked, {"layout": "1-1", "microbatches": 2, "cuda_graphs": True}):
        assert not said
        assert found[0] == pytest.approx(losses, rel=1e-6)
        torch.testing.assert_close(found[3], parameters)


def trained_and_heard(options: dict[str, Any], precision: str) -> tuple[Any, list[str]]:
    with heard() as said:
        return trained(DappleStrategy(**options), precision=precision), said


ZERO_BUBBLE = {"layout": "1-1", "microbatches": 4, "schedule": "zb_h1"}


@pytest.mark.parametrize(
    ("options", "precision"),
    [
        (ZERO_BUBBLE, "32-true"),
        (ZERO_BUBBLE, "16-mixed"),
        (ZERO_BUBBLE, "bf16-mixed"),
        ({"layout": "1-1", "microbatches": 4}, "bf16-mixed"),
        ({"layout": "2", "microbatches": 2}, "bf16-mixed"),
        ({"layout": "1-1", "microbatches": 4, "compile": True}, "bf16-mixed"),
    ],
    ids=str,
)
def test_recorded_stages_train_as_one_device_does(options: dict[str, Any], precision: str) -> None:
    own = {"cuda_graphs": True, "costs": "counted", "planner": "uniform"}
    expected = trained("auto", precision=precision)
    rtol = 1e-2 if precision == "32-true" else 5e-2
    for found, said in World(2).run(trained_and_heard, own | options, precision, deadline_s=230):
        assert not said
        assert_close(found, expected, rtol=rtol, atol=rtol / 10)
