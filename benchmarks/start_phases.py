"""Seconds from the start of a program to the end of the first step, by phases, beside Lightning's DDP.

    python -m benchmarks.start_phases                             # GPTs of 12 and 24 layers, cold, warm, and by DDP
    python -m benchmarks.start_phases --models demo cnn lstm bert 24 --rounds 3
    python -m benchmarks.start_phases --models 24 gpt2 --ranks 2

Models are a number of layers (of the GPT of `benchmarks.start`, width 256), or

    demo  the GPT of examples/01          cnn   two convolutions and a linear layer
    lstm  a cell, unrolled over 30 steps  bert  transformers' BERT of 12 layers, width 256
    gpt2  transformers' GPT-2 with 124 million parameters

Every start is a program of its own, with Adam, a batch of 4 samples and a validation of two batches before training, as
Lightning does by default. A cold one has an empty cache, a warm one that of the cold one. The first number is wall
seconds from the start of the interpreter to the end of the first step, the second processor seconds of all ranks until
they end; phases are those of fit(). Modules are built before fit(). Memory is the peak of resident memory that is
no file until the first training step begins, and while it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from benchmarks.demo import example
from benchmarks.start import GPT, SAMPLES, VOCABULARY
from lightning_pipe import DappleStrategy
from lightning_pipe.units import format_bytes

_LOOK_S = 0.02


class Trained(pl.LightningModule):
    """A module whose steps are its loss, trained by Adam.

    Args:
        model: makes the loss of a batch.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(batch)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.model(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-4)


class Transformers(nn.Module):
    """A model of transformers that predicts the words that it is given.

    Args:
        name: gpt2 or bert.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        import transformers

        if name == "gpt2":
            self.model: Any = transformers.GPT2LMHeadModel(transformers.GPT2Config())
        else:
            sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 4}
            self.model = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=VOCABULARY, **sizes))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss


class Convolutions(nn.Module):
    """A small CNN for images of the size of digits, made of words."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()
        )
        self.head = nn.Linear(32 * 16, 10)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        images = batch[:, :64].float().unflatten(1, (1, 8, 8)) / VOCABULARY
        return functional.cross_entropy(self.head(self.layers(images).flatten(1)), batch[:, 0] % 10)


class Unrolled(nn.Module):
    """An LSTM cell, called once per position."""

    def __init__(self, steps: int = 30) -> None:
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(VOCABULARY, 32), nn.LSTMCell(32, 64), nn.Linear(64, VOCABULARY)
        self.steps = steps

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden, cell = batch.new_zeros(2, len(batch), 64, dtype=torch.float32)
        losses = []
        for position in range(self.steps):
            hidden, cell = self.cell(self.embed(batch[:, position]), (hidden, cell))
            losses.append(functional.cross_entropy(self.head(hidden), batch[:, position + 1]))
        return torch.stack(losses).mean()


class Layers(GPT):
    """A GPT that is there before fit()."""

    def __init__(self, layers: int) -> None:
        super().__init__(256, layers)
        self.configure_model()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-4)


_MODELS: dict[str, Callable[[], pl.LightningModule]] = {
    "gpt2": lambda: Trained(Transformers("gpt2")),
    "bert": lambda: Trained(Transformers("bert")),
    "cnn": lambda: Trained(Convolutions()),
    "lstm": lambda: Trained(Unrolled()),
}


def module_and_data(model: str, *, context: int) -> tuple[pl.LightningModule, Any]:
    """Return a module and its data: a data module, or a loader for training and validation."""
    if model == "demo":
        gpt = example()
        return gpt.GPT(), gpt.PythonSource(batch_size=16)
    module = _MODELS[model]() if model in _MODELS else Layers(int(model))
    return module, DataLoader(torch.randint(VOCABULARY, (2 * SAMPLES, context + 1)), batch_size=SAMPLES)


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
        self.before, self.within, self.ended = 0, 0, 0.0

    def setup(self, *_: Any, **__: Any) -> None:
        self._lap("processes")

    def on_train_batch_start(self, *_: Any) -> None:
        self._lap("hooks and data")
        self.before = self._peaks.take()

    def on_train_batch_end(self, *_: Any) -> None:
        self._lap("first step")
        self.ended = time.time()
        self.within = self._peaks.take()

    def _lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = now - self._begin
        self._begin = now


def fit(options: argparse.Namespace) -> None:
    """Make one step, and write down what this rank saw."""
    torch.set_num_threads(1)
    pl.seed_everything(0, verbose=False)
    module, data = module_and_data(options.model, context=options.context)
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
    loaders = {"datamodule": data} if isinstance(data, pl.LightningDataModule) else {}
    trainer.fit(module, **(loaders or {"train_dataloaders": data, "val_dataloaders": data}))
    seconds = trainer.strategy.start_seconds if options.strategy == "dapple" else told.seconds
    size = sum(parameter.nbytes for parameter in module.parameters())
    wall_s = told.ended - float(os.environ["START_PHASES_BEGIN"])
    used = resource.getrusage(resource.RUSAGE_SELF)
    seen = {"seconds": dict(seconds), "before": told.before, "within": told.within, "size": size, "wall_s": wall_s}
    seen["used_s"] = used.ru_utime + used.ru_stime
    Path(options.out, f"rank{trainer.global_rank}.json").write_text(json.dumps(seen), encoding="utf-8")


def started(options: argparse.Namespace, model: str, strategy: str, cache: str) -> list[dict[str, Any]]:
    """Start once in processes of their own; return what every rank saw."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "benchmarks.start_phases", "--fit", f"--models={model}", f"--out={out}"]
        command += [f"--strategy={strategy}", f"--cache={cache}"]
        command += [f"--ranks={options.ranks}", f"--context={options.context}"]
        environment = {**os.environ, "START_PHASES_BEGIN": str(time.time()), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, stderr=None if options.verbose else subprocess.DEVNULL, env=environment)
        return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(out).glob("rank*.json"))]


def as_line(ranks: list[dict[str, Any]]) -> str:
    """Return the seconds of rank 0 and the memory of all ranks as a line."""
    seconds: Mapping[str, float] = ranks[0]["seconds"]
    parts = ", ".join(f"{phase} {value:.1f}" for phase, value in seconds.items() if value >= 0.05)
    at_start, within = (" ".join(format_bytes(rank[name]) for rank in ranks) for name in ("before", "within"))
    used_s = sum(rank["used_s"] for rank in ranks)
    times = f"{ranks[0]['wall_s']:5.1f} s, {used_s:5.1f} s of processors"
    return f"{times} ({parts}); at most {at_start} before the first step, {within} in it"


def main() -> None:
    """Print a line for every start."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=["12", "24"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--starts", nargs="+", default=["cold", "warm", "ddp"])
    parser.add_argument("--rounds", type=int, default=1, help="of all starts in turns; medians follow")
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
        times: dict[str, list[dict[str, float]]] = {start: [] for start in options.starts}
        for _ in range(options.rounds):
            with tempfile.TemporaryDirectory() as folder:
                for start in options.starts:
                    ranks = started(options, model, "ddp" if start == "ddp" else "dapple", options.cache or folder)
                    times[start].append({"wall_s": ranks[0]["wall_s"], "used_s": sum(rank["used_s"] for rank in ranks)})
                    print(f"{model:>5} {start}: {as_line(ranks)}", flush=True)
        for name, text in (("wall_s", "seconds"), ("used_s", "seconds of processors")):
            medians = {start: statistics.median(of_round[name] for of_round in of) for start, of in times.items()}
            print(f"{model:>5} {text}: " + ", ".join(f"{start} {value:.1f}" for start, value in medians.items()))


if __name__ == "__main__":
    main()
