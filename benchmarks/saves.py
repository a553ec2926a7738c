"""What a checkpoint costs: the plain file, collected in memory or in files, a directory, and one behind training.

    python -m benchmarks.saves

42 million parameters with AdamW on 2 ranks, a checkpoint every 15 of 40 steps that replaces the one before. A row for
each kind: the median step, the steps in which a checkpoint was saved, and by how much the anonymous memory of rank 0
rises above that of the other steps then. The plain file is collected in files where memory is short; here, as if it
were.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.start_phases import Peaks
from lightning_pipe import DappleStrategy
from lightning_pipe.strategy.checkpoints import mapped
from lightning_pipe.units import format_bytes

KINDS: dict[str, dict[str, Any]] = {
    "plain file": {},
    "through files": {},
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
    """Seconds from the start of a step to that of the next, by the number of steps before it, and peaks of memory."""

    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}
        self.peaks: dict[int, int] = {}
        self._looking, self._since = Peaks(), 0.0
        self._looking.start()

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        now = time.perf_counter()
        self.seconds[trainer.global_step] = now - self._since
        self.peaks[trainer.global_step] = self._looking.take()
        self._since = now


def fit(kind: str, folder: str) -> None:
    """Train, and print the seconds of the steps, on rank 0."""
    torch.manual_seed(0)
    data = DataLoader(TensorDataset(torch.randn(8 * STEPS, WIDTH), torch.randn(8 * STEPS, 1)), batch_size=8)
    steps, saving = Steps(), ModelCheckpoint(folder, every_n_train_steps=EVERY)
    trainer = pl.Trainer(
        strategy=DappleStrategy(layout="1-1", microbatches=2, costs="counted", check=False, **KINDS[kind]),
        accelerator="cpu", devices=2, max_epochs=1, logger=False, enable_progress_bar=False, callbacks=[steps, saving],
        default_root_dir=folder,
    )  # fmt: skip
    short = mock.patch.object(mapped, "room_bytes", return_value=0)
    with short if kind == "through files" else contextlib.nullcontext():
        trainer.fit(Layers(), data)
    if trainer.is_global_zero:
        print(json.dumps([steps.seconds, steps.peaks]))


def main() -> None:
    """Print a row for each kind, each in processes of its own."""
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "benchmarks.saves", kind, folder]
            told = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], check=True)
            told_s, told_bytes = json.loads(told.stdout.splitlines()[-1])
        seconds, peaks = ({int(step): one for step, one in found.items()} for found in (told_s, told_bytes))
        times, most = ([found.pop(step) for step in range(EVERY, STEPS, EVERY)] for found in (seconds, peaks))
        usual = statistics.median(one for step, one in seconds.items() if step > 1)
        rise = max(0, max(most) - max(one for step, one in peaks.items() if step > 1))
        with_a_save = ", ".join(f"{one:.2f}" for one in times)
        print(f"{kind:16} step {usual:.2f} s; with a save {with_a_save} s, {format_bytes(rise)} more", flush=True)


if __name__ == "__main__":
    fit(*sys.argv[1:]) if len(sys.argv) > 1 else main()
