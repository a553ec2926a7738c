"""A fit that goes on from a checkpoint, at any batch, is to the last bit the fit that wrote it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from ranks.world import World
from strategy.fits import Losses, dapple, make_trainer
from strategy.reading_steps import PLAN, Reading, Reads
from strategy.small import samples
from strategy.test_resumed_loaders import Counting

POLICIES = ["pipedream", "2bw", "spectrain", "xpipe", "pipemare", "pipedream_vertical", "pb_sc"]
FAST = ("2bw", "pipemare")
TABLE = [
    pytest.param(policy, seed, marks=() if seed == 0 and policy in FAST else pytest.mark.slow)
    for policy in POLICIES
    for seed in range(4)
]
BATCHES = 7
READS = Reads((("dropout", "data"), ("global_step", "between"), ("counter", "loss")))


class Adaptive(Reading):
    """With AdamW, whose state is saved as well."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Momentum(Reading):
    """With SGD, which spike compensation is defined for."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)


class Saves(pl.Callback):
    """Save after a batch."""

    def __init__(self, path: Path, after: int) -> None:
        self.path, self.after = path, after

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.fit_loop.total_batch_idx == self.after:
            trainer.save_checkpoint(self.path)


def fit(policy: str, path: Path, after: int, resumed: Path | None) -> tuple[list[float], list[torch.Tensor]]:
    """Fit two epochs, from the beginning or from a checkpoint; a worker function."""
    pl.seed_everything(3, verbose=False)
    module, losses = (Momentum if policy == "pb_sc" else Adaptive)(READS), Losses()
    pipeline = dapple(plan=str(path.with_suffix(".yaml")), versions=policy, cache="off")
    trainer = make_trainer(pipeline, callbacks=[losses, Saves(path, after)], max_epochs=2)
    trainer.fit(module, Counting(samples(4 * BATCHES), 4), ckpt_path=resumed)
    return losses.losses, [p.detach().clone() for p in module.parameters()]


@pytest.mark.parametrize(("policy", "seed"), TABLE)
def test_a_resumed_fit_is_the_fit_that_wrote_the_checkpoint(policy: str, seed: int, tmp_path: Path) -> None:
    """Both run the forwards that were in flight again, with the weights of the checkpoint."""
    after = random.Random(f"{policy} {seed}").randrange(2 * BATCHES - 2)
    after += after >= BATCHES - 1  # from a hook of the last batch, Lightning skips epochs on one device, too
    path = tmp_path / "saved.ckpt"
    path.with_suffix(".yaml").write_text(PLAN.format(2))
    written = World(2).run(fit, policy, path, after, None)
    for (losses, weights), (rest, last) in zip(written, World(2).run(fit, policy, path, -1, path), strict=True):
        assert rest == losses[after + 1 :], after
        assert all(torch.equal(a, b) for a, b in zip(weights, last, strict=True))
