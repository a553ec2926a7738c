"""How long training waits for a checkpoint: the plain file, a directory, and one that is written behind it.

    python -m benchmarks.saves

42 million parameters with AdamW on 2 ranks, a checkpoint every 15 of 40 steps that replaces the one before. A row for
each kind: the median step, and the steps in which a checkpoint was saved.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipe import DappleStrategy

KINDS: dict[str, dict[str, Any]] = {
    "plain file": {},
    "directory": {"save_distributed_checkpoint": True},
    "behind training": {"save_distributed_checkpoint": True, "async_checkpoint": True},
}
WIDTH, LAYERS, STEPS, EVERY = 1024, 40, 40, 15


class Layers(pl.LightningModule):
    """A chain of equal layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)), nn.Linear(WIDTH, 1))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Steps(pl.Callback):
    """Seconds from the start of a step to that of the next, by the number of steps before it."""

    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}
        self._since = 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        now = time.perf_counter()
        self.seconds[trainer.global_step] = now - self._since
        self._since = now


def fit(kind: str, folder: str) -> None:
    """Train, and print the seconds of the steps, on rank 0."""
    torch.manual_seed(0)
    data = DataLoader(TensorDataset(torch.randn(8 * STEPS, WIDTH), torch.randn(8 * STEPS, 1)), batch_size=8)
    steps, saving = Steps(), ModelCheckpoint(folder, every_n_train_steps=EVERY)
    trainer = pl.Trainer(
        strategy=DappleStrategy(layout="1-1", microbatches=2, costs="counted", check=False, **KINDS[kind]),
        accelerator="cpu", devices=2, max_epochs=1, logger=False, enable_progress_bar=False, callbacks=[steps, saving],
    )  # fmt: skip
    trainer.fit(Layers(), data)
    if trainer.is_global_zero:
        print(json.dumps(steps.seconds))


def main() -> None:
    """Print a row for each kind, each in processes of its own."""
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "benchmarks.saves", kind, folder]
            told = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], check=True)
            seconds = {int(step): one for step, one in json.loads(told.stdout.splitlines()[-1]).items()}
        saved = [seconds.pop(step) for step in range(EVERY, STEPS, EVERY)]
        usual = statistics.median(one for step, one in seconds.items() if step > 1)
        print(f"{kind:16} step {usual:.2f} s; with a save {', '.join(f'{one:.2f}' for one in saved)} s", flush=True)


if __name__ == "__main__":
    fit(*sys.argv[1:]) if len(sys.argv) > 1 else main()
