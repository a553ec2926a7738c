"""Law of faults of this package: whatever fails while a step is cut, and its programs are made, it trains on."""

from __future__ import annotations

import random
import sys
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from ranks.world import World
from strategy.small import Small, assert_alike, run, samples

_FOLDERS = ("/capture/slicing/", "/capture/stages/", "/schedule/lower/", "/schedule/verification/")
_RUNS_WITH_BATCHES = {"of", "_laid_out", "__call__", "at", "size", "constant", "undisturbed_run", "give"}
_FILES_OF_BATCHES = ("placement.py", "compiled_stages.py", "cuda_recorder.py", "operation_calls.py")


class Injected(Exception):
    """A fault that is no mistake of the user."""


class Faults:
    """Raise an error at one call of what cuts steps and makes programs.

    Args:
        at: number of the call; 0 for none.

    Attributes:
        calls: how many there were so far.
    """

    def __init__(self, at: int) -> None:
        self._at, self.calls = at, 0

    def __enter__(self) -> Faults:
        sys.setprofile(self._look)
        return self

    def __exit__(self, *error: Any) -> None:
        sys.setprofile(None)

    def _look(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or not any(folder in frame.f_code.co_filename for folder in _FOLDERS):
            return
        code = frame.f_code
        if code.co_name in _RUNS_WITH_BATCHES or code.co_filename.endswith(_FILES_OF_BATCHES):
            return
        self.calls += 1
        if self.calls == self._at:
            raise Injected(f"in {code.co_name}")


class Contrasted(Small):
    """A step with a head, and validation."""

    data = staticmethod(lambda: DataLoader(samples(20), 8))
    validation = staticmethod(lambda: DataLoader(samples(12, 2), 8))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        z = self(batch[0])
        loss = F.cross_entropy(z, batch[1]) - (z @ z.T).log_softmax(1).diagonal().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", F.cross_entropy(self(batch[0]), batch[1]).sqrt(), batch_size=len(batch[0]))


OPTIONS = {"layout": "1-1", "microbatches": 2, "check": True, "replan": False}


def fitted(at: tuple[int, int], options: dict[str, Any] | None) -> Any:
    """Fit with a fault at a call of each rank; return what it gives and the calls that there were."""
    with Faults(0 if options is None else at[torch.distributed.get_rank()]) as faults:
        result = run(Contrasted, options)
    return result, faults.calls


@pytest.fixture(scope="module")
def counted() -> tuple[Any, list[int]]:
    """Return what one device gives, and how many calls each rank makes."""
    expected, _ = fitted((0, 0), None)
    ranks = World(2).run(fitted, (0, 0), OPTIONS)
    for result, _ in ranks:
        assert_alike(result, expected)
    return expected, [calls for _, calls in ranks]


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[pytest.mark.slow] * (seed >= 2)) for seed in range(50)])
def test_a_fault_sends_a_step_to_its_next_route(counted: tuple[Any, list[int]], seed: int) -> None:
    expected, calls = counted
    share, alone = random.Random(seed).random(), seed % 3  # on all ranks, or on one of them
    at = tuple(0 if alone and alone - 1 != rank else 1 + int(share * count) for rank, count in enumerate(calls))
    for result, _ in World(2).run(fitted, at, OPTIONS):
        assert_alike(result, expected)
