"""A backward that adds gradients, or does not scale with those that come in, gives what it gives on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_pipe.capture import Request, flatten
from lightning_pipe.capture.recording.unit_trace import trace_units
from strategy.small import Small, assert_alike, loader, run


class AddsAuxiliaryLoss(torch.autograd.Function):
    """Pass a tensor on, and give an auxiliary loss a gradient of its own, as mixtures of experts do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.shape = loss.shape
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient, torch.full(ctx.shape, 0.9, dtype=gradient.dtype)


class Passes(torch.autograd.Function):
    """Pass a tensor on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()


class Signs(Passes):
    """Give a tensor the signs of its gradient."""

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.sign() / 10


class Halves(Passes):
    """Give a tensor half of its gradient."""

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / 2


class Middle(nn.Module):
    """A layer with a gate, and a backward of some kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.gate, self.kind = nn.Linear(8, 8).double(), nn.Linear(8, 2).double(), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.layer(x).tanh()
        if self.kind == "mean":
            return AddsAuxiliaryLoss.apply(made, self.gate(x).logsumexp(-1).square().mean())
        if self.kind == "balance":
            return AddsAuxiliaryLoss.apply(made, self.gate(x).softmax(-1).mean(0).square().sum())
        if self.kind == "hook" and made.requires_grad:
            made.register_hook(lambda gradient: gradient / (gradient.norm() + 1e-6))
        return {"signs": Signs.apply, "halves": Halves.apply}.get(self.kind, torch.clone)(made)


class Net(Small):
    kind = "mean"

    def __init__(self) -> None:
        super().__init__()
        self.middle = Middle(self.kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(torch.tanh(self.first(x))))


class HookOnParameter(Net):
    """Its hook is for the gradient of a batch, and runs once for it."""

    kind = "none"

    def __init__(self) -> None:
        super().__init__()
        self.first.weight.register_hook(lambda gradient: gradient / (gradient.norm() + 1e-6))


KINDS = {
    "mean": True,
    "balance": True,
    "signs": True,
    "hook": True,
    "halves": False,
    "none": False,
}  # and whether a gradient is no multiple of the loss's


def kind_of(name: str) -> type[Net]:
    return HookOnParameter if name == "on a parameter" else type("Kind", (Net,), {"kind": name})


@pytest.mark.parametrize("capture", ["joint", "replay"])
@pytest.mark.parametrize("name", ["mean", "hook"])
def test_it_is_that_of_one_device_however_batches_are_cut(name: str, capture: str) -> None:
    """Replay added the gradient of an auxiliary loss once per micro-batch."""
    options = {"microbatches": 2, "capture": capture}
    expected, found = (run(kind_of(name), one, accumulate_grad_batches=2) for one in (None, options))
    assert_alike(found, expected)


@pytest.mark.parametrize("name", [*KINDS, "on a parameter"])
def test_replay_does_not_cut_batches_of_a_step_whose_backward_is_not_linear(name: str) -> None:
    tensors, structure = flatten(next(iter(loader())))
    whole = trace_units(Request(kind_of(name)(), "training_step", structure, samples=2), tensors, parts=1).whole
    assert ("no multiple of the loss's" in whole) == bool(whole) == KINDS.get(name, False)
