"""Leaks: what many fits, one after another on two ranks, leave behind in their process.

    python -m benchmarks.leaks --fits 200

Descriptors, threads, processes, objects and memory are counted on every rank after every fit; the first fits fill
caches, so growth is counted from the tenth on. Every tenth fit fails, by an error of one rank.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import threading
from dataclasses import astuple, dataclass
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.fits import fit_module
from benchmarks.ranks import run_ranks
from lightning_pipe import DappleStrategy
from lightning_pipe.errors import PipeError

WARM = 10  # fits that fill caches


@dataclass(frozen=True)
class Held:
    """What a process holds."""

    descriptors: int
    threads: int
    children: int
    objects: int
    memory_kib: int


def held() -> Held:
    gc.collect()
    status = Path("/proc/self/status").read_text()
    memory = int(status.partition("VmRSS:")[2].split()[0])
    tasks = Path("/proc/self/task")
    children = sum(len((task / "children").read_text().split()) for task in tasks.iterdir())
    objects = len(gc.get_objects())
    return Held(len(os.listdir("/proc/self/fd")), len(list(tasks.iterdir())), children, objects, memory)


class Chain(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Fails(pl.Callback):
    """Raise on one rank."""

    def on_train_batch_end(self, *_: object) -> None:
        if dist.get_rank() == 1:
            raise ZeroDivisionError


def fits(count: int, *, failing: bool = True) -> list[Held]:
    """Fit again and again, and return what is held after each fit."""
    data = DataLoader(TensorDataset(torch.randn(16, 8), torch.randint(2, (16,))), 8)
    found = []
    for number in range(count):
        callback = Fails() if failing and number % 10 == 5 else None
        strategy = DappleStrategy(layout="1-1", microbatches=2, costs="counted", deadline_s=60.0)
        with contextlib.suppress(ZeroDivisionError, PipeError):
            fit_module(Chain(), data, strategy, callback=callback)
        del strategy, callback
        found.append(held())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fits", type=int, default=200)
    count = parser.parse_args().fits
    for rank, found in enumerate(run_ranks(2, fits, count, deadline_s=7200.0)):
        print(f"rank {rank}: descriptors, threads, children, objects, KiB")
        for number in sorted({0, min(WARM, count - 1), count // 2, count - 1}):
            print(f"  after fit {number + 1:4}: {astuple(found[number])}")
    print(f"names of this process's threads: {[thread.name for thread in threading.enumerate()]}")


if __name__ == "__main__":
    main()
