"""A checkpoint around units of a replayed step saves memory, and changes no number."""

from __future__ import annotations

import gc

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_pipe.capture import Request, capture_step, flatten
from lightning_pipe.capture.allocations import Allocations
from lightning_pipe.capture.replayed.replay import Replay
from lightning_pipe.capture.replayed.stage_replayer import StageReplayer
from zoo.replaying import run_plainly, run_replayed, traced

WIDTH, DEPTH = 64, 4  # large enough for what a checkpoint keeps of the random state not to matter


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x):
        return x + nn.functional.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))), 0.2)


class Net(pl.LightningModule):
    """Blocks in checkpoints of this form; None for none."""

    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.use_reentrant = use_reentrant

    def training_step(self, batch, batch_idx):
        x = batch[0].requires_grad_()  # as the reentrant form wants it
        for block in self.blocks:
            x = block(x) if self.use_reentrant is None else checkpoint(block, x, use_reentrant=self.use_reentrant)
        return nn.functional.mse_loss(x, batch[1])


def kept_and_numbers(use_reentrant: bool | None, monkeypatch: pytest.MonkeyPatch, *, recompute: bool = False):
    """Return the bytes that F keeps, and losses and gradients of a replay and of the plain module."""
    torch.manual_seed(0)
    module = Net(use_reentrant).train()
    batch = (torch.randn(48, WIDTH), torch.randn(48, WIDTH))
    found = traced(module, batch, (16, 16, 16), parts=1)
    kept, forward = [], StageReplayer.forward

    def measured(player, *args, **kwargs):
        gc.collect()
        with Allocations() as seen:
            result = forward(player, *args, **kwargs)
            gc.collect()
        if not player.part.is_head:
            kept.append(sum(change.bytes for change in seen.changes))
        return result

    monkeypatch.setattr(StageReplayer, "forward", measured)
    gc.freeze()  # what other tests have left need not be looked through in every call
    replayed = run_replayed(found, ranks=1, schedule="gpipe", cuts=(), recompute=recompute)
    gc.unfreeze()
    monkeypatch.undo()
    return kept[-1], replayed, run_plainly(found)


@pytest.mark.parametrize("use_reentrant", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_units_in_a_checkpoint_keep_their_inputs(use_reentrant, monkeypatch):
    most, (losses, gradients), _ = kept_and_numbers(None, monkeypatch)
    least, (same_losses, same_gradients), (plain_losses, plain_gradients) = kept_and_numbers(use_reentrant, monkeypatch)
    assert least < 0.4 * most
    torch.testing.assert_close(same_losses, losses, rtol=0, atol=0)
    torch.testing.assert_close(same_gradients, gradients, rtol=0, atol=0)
    torch.testing.assert_close((plain_losses, plain_gradients), (same_losses, same_gradients))


class Repeated(pl.LightningModule):
    """One block in several checkpoints of the reentrant form, one of them inside another, between other layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.block = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU())

    def training_step(self, batch, batch_idx):
        def around(y):
            return checkpoint(self.block, self.last(y), use_reentrant=True)

        x = self.first(batch[0])
        for _ in range(2):
            x = x + checkpoint(self.block, x, use_reentrant=True)
        return nn.functional.mse_loss(checkpoint(around, x, use_reentrant=True), batch[1])


def test_reentrant_checkpoints_have_the_gradients_of_one_device_wherever_they_are_cut():
    """Gradients were lost, silently, where one is given a tensor of another stage, or is cut inside."""
    torch.manual_seed(0)
    module, batch = Repeated().train(), (torch.randn(6, 4), torch.randn(6, 4))
    found = traced(module, batch, (2, 2, 2), parts=12)
    assert len(found.trace.units) > 4
    module.training_step(batch, 0).backward()
    wanted = {name: parameter.grad for name, parameter in module.named_parameters()}
    module.zero_grad()
    replay = Replay(found.request, found.trace)
    for cut in range(1, len(found.trace.units)):
        if cut not in replay.graph.uncuttable:
            _, gradients = run_replayed(found, ranks=2, schedule="gpipe", cuts=(cut,))
            torch.testing.assert_close(gradients, wanted, msg=lambda text, cut=cut: f"cut at {cut}: {text}")


class Counted(nn.Module):
    """A module that counts the runs of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x


class Changing(pl.LightningModule):
    """A checkpoint around modules, one of which changes what its backward would change again."""

    def __init__(self, middle: nn.Module, *, is_inside: bool = True) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8), middle, nn.Linear(8, 4)
        self.is_inside = is_inside

    def training_step(self, batch, batch_idx):
        if self.is_inside:
            x = checkpoint(lambda x: self.middle(self.first(x)), batch[0], use_reentrant=False)
        else:
            x = self.middle(checkpoint(self.first, batch[0], use_reentrant=False))
        return nn.functional.mse_loss(self.last(x), batch[1])


@pytest.mark.parametrize("route", ["joint", "replay"])
def test_state_that_a_checkpointed_region_changes_is_named(route: str, recwarn: pytest.WarningsRecorder) -> None:
    batch = (torch.randn(6, 8), torch.randn(6, 4))

    def warnings_of(module: pl.LightningModule) -> list[str]:
        recwarn.clear()
        if route == "joint":
            capture_step(Request(module, "training_step", flatten(batch)[1], samples=6))
        else:
            traced(module, batch, (3, 3), parts=1)
        return [text for warning in recwarn if "under torch.utils.checkpoint" in (text := str(warning.message))]

    (text,) = warnings_of(Changing(nn.BatchNorm1d(8)))
    assert "training_step changes buffers of self.middle under" in text
    assert not warnings_of(Changing(nn.BatchNorm1d(8), is_inside=False))
    assert not warnings_of(Changing(nn.Dropout(0.1)))
    if route == "replay":  # in one graph such state is refused
        (text,) = warnings_of(Changing(Counted()))
        assert "training_step changes self.middle.calls under" in text
