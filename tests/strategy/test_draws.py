"""Random numbers that a step draws are not those of one device: the log names them, and hooks draw one device's."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal

from lightning_pipe.capture import Request, capture_step, flatten
from lightning_pipe.capture.recording.unit_trace import trace_units
from lightning_pipe.capture.replayed.replay import Replay
from ranks.world import World
from strategy.small import LAYOUTS, Small, assert_as_on_one_device, run


class Masking(nn.Module):
    """Hides some numbers of every sample."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.bernoulli(torch.full_like(x, 0.5))


class Drawing(Small):
    """Draws in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.masking, self.dropout = how, Masking(), nn.Dropout(0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.cross_entropy(self(getattr(self, self.how)(x)), y)

    def windows(self, x: torch.Tensor) -> torch.Tensor:
        return x.roll(1, 1) * torch.randint(4, (1,))

    def negatives(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.multinomial(torch.ones(4), 4)

    def order(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, torch.randperm(4)]

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rand(())

    def noise(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn_like(x)

    def sample(self, x: torch.Tensor) -> torch.Tensor:
        return Normal(x, 1.0).rsample()

    def mask(self, x: torch.Tensor) -> torch.Tensor:
        return self.masking(x)

    def nothing(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.dropout(x))


NAMES = {
    "windows": "randint",
    "negatives": "multinomial",
    "order": "randperm",
    "scale": "rand",
    "noise": "randn_like",
    "sample": "normal",
    "mask": "bernoulli",
    "nothing": "",
}


@pytest.mark.parametrize("route", ["joint", "replay"])
@pytest.mark.parametrize("how", NAMES)
def test_a_step_names_what_it_draws_and_where(how: str, route: str) -> None:
    module = Drawing(how)
    tensors, structure = flatten((torch.randn(6, 4, dtype=torch.float64), torch.arange(6) % 3))
    request = Request(module, "training_step", structure, samples=3)
    step = capture_step(request) if route == "joint" else Replay(request, trace_units(request, tensors, parts=2))
    assert len(step.draws) == (how != "nothing"), step.draws
    for draw in step.draws:
        assert draw.startswith(f"{NAMES[how]} at ")
        assert f"in {'forward' if how == 'mask' else how}" in draw
        assert "test_draws.py" in draw


class InPython(Drawing):
    def python(self, x: torch.Tensor) -> torch.Tensor:
        return x * random.random()


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def logged(how: str, options: dict[str, Any]) -> list[str]:
    """Fit, and return the lines of the log that tell of draws; a worker function."""
    handler, logger = Lines(), logging.getLogger("lightning_pipe")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    run(lambda: InPython(how), options)
    return [line for line in handler.lines if "draws random numbers" in line]


@pytest.mark.parametrize(("how", "name"), [("windows", "randint"), ("python", "Python's"), ("nothing", "")])
def test_one_line_tells_of_draws_before_training(how: str, name: str) -> None:
    lines, others = World(2).run(logged, how, LAYOUTS[how == "windows"])
    assert len(lines) == (how != "nothing")
    assert all(name in line and "on_train_batch_start" in line for line in lines)
    assert not others


class InHook(Small):
    """Draws where the log says."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.start, self.scale = int(torch.randint(4, ())), torch.rand(4, dtype=torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.cross_entropy(self(x.roll(self.start, 1) * self.scale), y)


def hooked(name: str, options: dict[str, Any] | None) -> tuple[Any, ...]:
    """Fit it; a worker function."""
    return run(InHook, options)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("options", LAYOUTS, ids=lambda options: "-".join(map(str, options.values())))
def test_what_hooks_draw_is_what_one_device_draws(options: dict[str, Any]) -> None:
    assert_as_on_one_device(hooked, "", options)
