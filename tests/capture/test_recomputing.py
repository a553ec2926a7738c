"""What `torch.utils.checkpoint` in a module would not keep is found, and is recomputed with the same numbers."""

from __future__ import annotations

import copy

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from capture.sequential import run_stages
from lightning_pipe.capture import Capture, Request, capture_step, flatten
from lightning_pipe.capture.steps.stage_program import RandomKey
from lightning_pipe.core.plan import Plan, StagePlan
from lightning_pipe.cost.activations import checkpointed
from lightning_pipe.cost.stage import Cutter
from lightning_pipe.planner.memory.policies import policies_of

KEY, SAMPLES, WIDTH = RandomKey(seed=1, step=0, microbatch=0), 4, 8


class Net(pl.LightningModule):
    """Three residual blocks with dropout, each in a checkpoint of this form; None for no checkpoint."""

    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, WIDTH))
            for _ in range(3)
        )
        self.use_reentrant = use_reentrant

    def training_step(self, batch, batch_idx):
        x = self.first(batch[0])
        for block in self.blocks:
            x = x + (block(x) if self.use_reentrant is None else self.checkpointed(block, x))
        return nn.functional.mse_loss(x, batch[1])

    def checkpointed(self, block, x):
        return checkpoint(block, x, use_reentrant=self.use_reentrant)


class Nested(Net):
    def checkpointed(self, block, x):
        def inner(y):
            return checkpoint(block[1:], block[0](y), use_reentrant=False)

        return checkpoint(inner, x, use_reentrant=False)


def batch():
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(SAMPLES, WIDTH, generator=generator) for _ in range(2))


def captured(module) -> Capture:
    return capture_step(Request(module, "training_step", flatten(batch())[1], samples=SAMPLES))


def plan(**options) -> Plan:
    return Plan((StagePlan("", (0,)),), 1, **options)


@pytest.mark.parametrize("module", [Net(False), Net(True), Nested(False)], ids=["plain", "reentrant", "nested"])
def test_a_checkpoint_keeps_what_it_is_given_and_changes_no_number(module):
    capture = captured(module.train())
    (work,) = Cutter(capture.graph).works(())
    dropped = checkpointed(capture.graph, work)
    kept = {capture.graph.tensors[m].name for m in work.saved if m not in dropped}
    assert all(capture.graph.tensors[m].maker >= 0 for m in dropped)
    assert len(kept) <= 6, f"inputs of three blocks, of the loss, and the batch: {kept}"
    runs = []
    for policies in ((), policies_of(plan(), capture.graph, ())):
        split = capture.split((), policies=policies)
        runs.append(run_stages(split, copy.deepcopy(module), batch(), key=KEY, weight=1.0))
        saved = {*split.stages[0].weight_grad.inputs} & {capture.graph.tensors[m].name for m in dropped}
        assert bool(saved) == (not policies)
    (results, gradients), (other_results, other_gradients) = runs
    torch.testing.assert_close(results, other_results, rtol=0, atol=0)
    torch.testing.assert_close(gradients, other_gradients, rtol=0, atol=0)


def test_a_plan_may_ignore_checkpoints():
    capture = captured(Net(False).train())
    (policy,) = policies_of(plan(ignore_checkpoints=True), capture.graph, ())
    assert policy.backward is None
    (policy,) = policies_of(plan(), capture.graph, ())
    assert policy.backward is not None


def test_a_module_without_checkpoints_keeps_all():
    capture = captured(Net(None).train())
    (work,) = Cutter(capture.graph).works(())
    assert not checkpointed(capture.graph, work)


def test_a_reentrant_checkpoint_of_what_needs_no_gradient_gives_none():
    """So it is without us, and torch warns of it."""

    class First(Net):
        def training_step(self, batch, batch_idx):
            x = checkpoint(self.first, batch[0], use_reentrant=True)
            return nn.functional.mse_loss(self.blocks[0](x), batch[1])

    capture = captured(First(True).train())
    assert not {name for _, name in capture.graph.gradients if name.startswith("first")}
