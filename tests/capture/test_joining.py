"""Which weight halves are joined, in small steps: those that are give the same gradients, and the traps are not joined.

Every trap is shown to be one: with its rule left out, gradients differ.
"""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cost.test_joined import SIZES, Runs
from lightning_pipe.capture import Capture, Request, capture_step, flatten
from lightning_pipe.capture.stages import batched_weight_grad as joining

BATCH, LENGTH, WIDTH = sum(SIZES), 4, 5


class Step(pl.LightningModule):
    """Two linear layers around something special; the loss is a mean, in float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.double().train()

    def training_step(self, batch, batch_idx):
        x, rows = batch
        errors = self.last(self.special(torch.tanh(self.first(x)), rows)).mean(-1) - rows.double()[:, None]
        return errors.square().mean()

    def special(self, h, rows):
        return h


class Normalised(Step):
    """Batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(LENGTH).double()

    def special(self, h, rows):
        return self.norm(h)


class Noisy(Step):
    """Dropout, which is drawn in F; W reads what it drew."""

    def special(self, h, rows):
        return F.dropout(h, 0.5)


class Transposed(Step):
    """Samples lie in the second dimension of what W reads."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(LENGTH, 1, WIDTH, dtype=torch.float64))

    def special(self, h, rows):
        return (torch.tanh(h.transpose(0, 1).contiguous()) * self.scale).transpose(0, 1)


def batch():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, LENGTH, (BATCH,), generator=generator)


def captured(module: pl.LightningModule) -> Capture:
    return capture_step(Request(module, "training_step", flatten(batch())[1], samples=SIZES[0]))


def difference(module: pl.LightningModule, capture: Capture) -> float:
    """Return by how much a joined W of the whole step differs from single ones, relative to the largest gradient."""
    runs = Runs(capture, module, batch(), ())
    alone, together = runs.gradients(1), runs.gradients(len(SIZES))
    scale = max(float(gradient.abs().max()) for gradient in alone.values())
    return max(float((together[key] - gradient).abs().max()) for key, gradient in alone.items()) / scale


@pytest.mark.parametrize("step", [Step, Noisy, Transposed])
def test_w_of_a_whole_step_is_joined_with_its_tangent(step):
    module = step()
    capture = captured(module)
    assert capture.split(()).traffic.joinable == (0,)
    assert difference(module, capture) < 1e-12
    (program,) = capture.split(()).stages
    assert (1 in program.weight_grad.along.values()) == (step is Transposed)


TRAPS = [Normalised]


@pytest.mark.parametrize("step", TRAPS)
def test_a_trap_is_not_joined(step):
    assert captured(step()).split(()).traffic.joinable == ()


@pytest.mark.parametrize("step", TRAPS)
def test_a_trap_is_one(step, monkeypatch):
    """If everything could be read (in rows where there are samples) and run, gradients would differ, or W fail."""
    module = step()

    def everything(joint, kinds, flow):
        names = frozenset(node.name for node in joint.module.graph.nodes)
        before = {f"{name}_before" for name in joint.buffers}
        return joining.Joining(names | before, {name: where.dim for name, where in flow.samples.items()}, names)

    monkeypatch.setattr("lightning_pipe.capture.stages.split.joining", everything)
    capture = captured(module)
    assert capture.split(()).traffic.joinable == (0,)
    assert difference(module, capture) > 1e-3


def test_the_order_of_micro_batches_matters(monkeypatch):
    """Pieces of one input in reverse are seen."""
    module = Step()
    capture = captured(module)
    cat = torch.cat

    def reversed_activations(tensors, dim=0):
        return cat(tensors[::-1] if tensors[0].shape[-1] == WIDTH else tensors, dim=dim)

    monkeypatch.setattr(torch, "cat", reversed_activations)
    assert difference(module, capture) > 1e-3


def test_what_stands_for_the_joined_w_is_the_weights_of_all_its_micro_batches():
    """A mean over unequal micro-batches: each weighs as many samples as it has, and so does the joined W."""
    module = Step()
    runs = Runs(captured(module), module, batch(), ())
    module.zero_grad()
    x, rows = batch()
    loss = module.training_step((x, rows), 0)
    expected = dict(
        zip(("weight", "bias"), torch.autograd.grad(loss, [module.first.weight, module.first.bias]), strict=True)
    )
    together = runs.gradients(len(SIZES))
    for name, gradient in expected.items():
        torch.testing.assert_close(together[0, f"first.{name}"], gradient, rtol=1e-12, atol=1e-14)
