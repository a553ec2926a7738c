"""Seconds of every phase between fit() and the end of the first step, and what every rank holds at most before it.

    python -m benchmarks.start_phases                             # GPTs of 12 and 24 layers, cold, warm, and by DDP
    python -m benchmarks.start_phases --models 24 gpt2 --ranks 2

Models are a number of layers (of the GPT of `benchmarks.start`, width 256) or gpt2, transformers' with 124 million
parameters. Every start is a process of its own, with Adam, and a batch of 4 samples; a cold one has an empty cache, a
warm one that of the cold one. Modules are built before fit(). Memory is the peak of resident memory that is no file
until the first training step begins, and while it runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from benchmarks.start import GPT, SAMPLES, VOCABULARY
from lightning_pipe import DappleStrategy
from lightning_pipe.units import format_bytes

_LOOK_S = 0.02


class GPT2(pl.LightningModule):
    """The GPT-2 of transformers, with the vocabulary of the others."""

    def __init__(self) -> None:
        super().__init__()
        import transformers

        self.model = transformers.GPT2LMHeadModel(transformers.GPT2Config())

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-4)


class Layers(GPT):
    """A GPT that is there before fit()."""

    def __init__(self, layers: int) -> None:
        super().__init__(256, layers)
        self.configure_model()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-4)


class Peaks(threading.Thread):
    """The most anonymous memory of this process since it was asked last."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._status = open("/proc/self/status", encoding="ascii")  # noqa: SIM115  # a step must open no files
        self._lock = threading.Lock()  # one of two threads that read would find the end of the file
        self._most = 0

    def run(self) -> None:
        while True:
            self._look()
            time.sleep(_LOOK_S)

    def _look(self) -> None:
        with self._lock:
            self._status.seek(0)
            line = next(line for line in self._status if line.startswith("RssAnon:"))
            self._most = max(self._most, int(line.split()[1]) * 1024)

    def take(self) -> int:
        """Return the peak, and begin anew."""
        self._look()
        most, self._most = self._most, 0
        return most


class Told(pl.Callback):
    """Note when the first step begins and ends, and the peaks of memory until then."""

    def __init__(self, peaks: Peaks) -> None:
        self._peaks, self._begin = peaks, time.perf_counter()
        self.seconds: dict[str, float] = {}
        self.before, self.within = 0, 0

    def setup(self, *_: Any, **__: Any) -> None:
        self._lap("processes")

    def on_train_batch_start(self, *_: Any) -> None:
        self._lap("hooks and data")
        self.before = self._peaks.take()

    def on_train_batch_end(self, *_: Any) -> None:
        self._lap("first step")
        self.within = self._peaks.take()

    def _lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = now - self._begin
        self._begin = now


def fit(options: argparse.Namespace) -> None:
    """Make one step, and write down what this rank saw."""
    torch.set_num_threads(1)
    pl.seed_everything(0, verbose=False)
    module = GPT2() if options.model == "gpt2" else Layers(int(options.model))
    batches = torch.randint(VOCABULARY, (SAMPLES, options.context + 1))
    pipeline: Any = DappleStrategy(cache=options.cache, deadline_s=600.0)
    peaks = Peaks()
    peaks.start()
    told = Told(peaks)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=options.ranks,
        strategy=pipeline if options.strategy == "dapple" else options.strategy,
        max_steps=1,
        callbacks=[told],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(batches, batch_size=SAMPLES))
    seconds = trainer.strategy.start_seconds if options.strategy == "dapple" else told.seconds
    size = sum(parameter.nbytes for parameter in module.parameters())
    found = {"seconds": dict(seconds), "before": told.before, "within": told.within, "size": size}
    Path(options.out, f"rank{trainer.global_rank}.json").write_text(json.dumps(found), encoding="utf-8")


def started(options: argparse.Namespace, model: str, strategy: str, cache: str) -> list[dict[str, Any]]:
    """Start once in processes of their own; return what every rank saw."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "benchmarks.start_phases", "--fit", f"--models={model}", f"--out={out}"]
        command += [f"--strategy={strategy}", f"--cache={cache}"]
        command += [f"--ranks={options.ranks}", f"--context={options.context}"]
        subprocess.run(command, check=True, stderr=None if options.verbose else subprocess.DEVNULL)
        return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(out).glob("rank*.json"))]


def told(found: list[dict[str, Any]]) -> str:
    """Return the seconds of rank 0 and the memory of all ranks as a line."""
    seconds: Mapping[str, float] = found[0]["seconds"]
    parts = ", ".join(f"{phase} {value:.1f}" for phase, value in seconds.items() if value >= 0.05)
    before, within = (" ".join(format_bytes(one[name]) for one in found) for name in ("before", "within"))
    return f"{sum(seconds.values()):5.1f} s ({parts}); at most {before} before the first step, {within} in it"


def main() -> None:
    """Print a line for every start."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=["12", "24"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--starts", nargs="+", default=["cold", "warm", "ddp"])
    parser.add_argument("--cache", default="", help="of warm starts; by default that of the cold one")
    parser.add_argument("--verbose", action="store_true", help="show what the fits say")
    for hidden in ("fit", "strategy", "out"):
        is_flag: Any = {"action": "store_true"} if hidden == "fit" else {"default": "dapple"}
        parser.add_argument(f"--{hidden}", help=argparse.SUPPRESS, **is_flag)
    options = parser.parse_args()
    if options.fit:
        (options.model,) = options.models
        fit(options)
        return
    for model in options.models:
        with tempfile.TemporaryDirectory() as folder:
            for start in options.starts:
                found = started(options, model, "ddp" if start == "ddp" else "dapple", options.cache or folder)
                print(f"{model:>5} {start}: {told(found)}", flush=True)


if __name__ == "__main__":
    main()
