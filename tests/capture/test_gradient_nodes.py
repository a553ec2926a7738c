"""Every parameter has a gradient of its own."""

from __future__ import annotations

import copy
from collections import Counter

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_pipe.capture import Request, capture_step, flatten
from lightning_pipe.capture.steps.stage_program import RandomKey
from lightning_pipe.runtime.stage import Slice, Stage, State

SLICE = Slice(4, RandomKey(0, 0, 0), mean_weight=1.0, sum_weight=1.0)


class Twins(pl.LightningModule):
    """Two parameters whose gradients are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.full((4, 8), value)) for value in (0.5, 0.25))
        self.linear = nn.Linear(8, 8)

    def training_step(self, batch, batch_idx):
        return (self.linear(self.a + self.b).tanh() * batch[0].mean()).square().mean()


def test_parameters_with_the_same_gradient_both_get_it():
    """Once only the last of them did."""
    torch.manual_seed(0)
    module, batch = Twins(), (torch.randn(4, 8),)
    capture = capture_step(Request(module, "training_step", flatten(list(batch))[1], samples=4))
    split, own = capture.split(()), copy.deepcopy(module)
    state = State(dict(own.named_parameters()), {}, torch.device("cpu"))
    stage = Stage(split.stages[0], split.values, state=state, loss=capture.record.loss)
    leaves, _ = capture.with_totals(list(batch), cut=(False,), sizes=(4,), buffers={})
    for _ in range(2):  # the second is added to what the first has left
        stage.begin(Counter(), training=True)
        stage.load(0, dict(enumerate(leaves)))
        for kind in ("F", "I", "W"):
            stage.compute(kind, 0, SLICE)
        module.training_step(batch, 0).backward()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(own.get_parameter(name).grad, parameter.grad, rtol=0, atol=0, msg=name)
    assert own.a.grad.data_ptr() != own.b.grad.data_ptr()
