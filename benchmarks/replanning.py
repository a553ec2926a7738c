"""Planning again between two hosts whose network is slower than their cluster file says.

    python -m benchmarks.replanning          # as root; needs `ip` and `tc`

Prints plans and seconds of a step of a GPT with one rank on each host: by Lightning's DDP, by the file with
replan=False, by the file, and with measured links. Returns 1 if the second plan is slower than the first or losses
differ, 2 if hosts cannot be made.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader

from benchmarks.fits import fit_module
from benchmarks.two_hosts import NoNamespacesError, run_on_both, two_hosts
from lightning_pipe import DappleStrategy
from lightning_pipe.core.plan import Plan
from lightning_pipe.examples.gpt import GPT
from lightning_pipe.units import format_seconds

RATE_BIT_S = 3e8
SAID = """
hosts:
- {name: a, devices: [{kind: cpu, count: 1, memory: 8 GiB}], network: {latency: 50 us, bandwidth: 25 Gbit/s}}
- {name: b, devices: [{kind: cpu, count: 1, memory: 8 GiB}], network: {latency: 50 us, bandwidth: 25 Gbit/s}}
"""
BATCH = 16  # samples of both ranks together
STEPS, LAST = 40, 20  # steps in all, and those at the end that are counted
ALLOWED = 1e-4  # relative difference of losses: sums of float32 in another order


@dataclass
class Steps(pl.Callback):
    """Note plans, losses and when steps end."""

    plans: list[Plan] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        self.ends.append(time.perf_counter())
        self.losses.append(float(outputs["loss"]))
        plan = trainer.strategy.plan if isinstance(trainer.strategy, DappleStrategy) else None
        if plan is not None and (not self.plans or self.plans[-1] != plan):
            self.plans.append(plan)

    @property
    def step_s(self) -> float:
        """Return the median of the last steps."""
        ends = self.ends[-LAST - 1 :]
        return median(after - before for before, after in pairwise(ends))


@dataclass(frozen=True)
class Ran:
    """A fit on rank 0: its plans in words, seconds of its last steps, and its losses."""

    plans: tuple[str, ...]
    step_s: float
    losses: tuple[float, ...]


def run(options: dict[str, Any] | None) -> Ran:
    """Fit on this rank, with options of the strategy; by Lightning's DDP, on half of every batch, without."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    module, steps = GPT(4, 256, 4, context=64, vocabulary=2048), Steps()
    strategy = "ddp" if options is None else DappleStrategy(cache="off", **options)
    batch_size = BATCH // 2 if options is None else BATCH
    batches = DataLoader(torch.randint(0, 2048, (BATCH * STEPS, 65)), batch_size=batch_size)  # type: ignore[arg-type]
    fit_module(module, batches, strategy, callback=steps, hosts=2)
    return Ran(tuple(map(_words, steps.plans)), steps.step_s, tuple(steps.losses))


def _words(plan: Plan) -> str:
    return f"{plan.replicas_text}, {plan.microbatches} micro-batches"


def main() -> int:
    """Print the table."""
    table = Table("costs of links", "plan", "second plan", "step", box=box.SIMPLE)
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder) / "cluster.yaml"
        said.write_text(SAID)
        cases: dict[str, dict[str, Any] | None] = {
            "Lightning's DDP": None,
            "25 Gbit/s by the file, replan=False": {"cluster": str(said), "replan": False},
            "25 Gbit/s by the file": {"cluster": str(said)},
            "measured": {},
        }
        try:
            with two_hosts(RATE_BIT_S) as hosts:
                found = {name: run_on_both(hosts, run, options)[0] for name, options in cases.items()}
        except NoNamespacesError as error:
            print(error, file=sys.stderr)
            return 2
    for name, ran in found.items():
        table.add_row(
            name, ran.plans[0] if ran.plans else "-", " then ".join(ran.plans[1:]) or "-", format_seconds(ran.step_s)
        )
    Console(width=120).print(table)
    ddp, by_file, second, measured = found.values()
    apart = max(abs(a - b) / abs(b) for a, b in zip(second.losses, by_file.losses, strict=True))
    print(
        f"the second plan takes {second.step_s / by_file.step_s:.2f} of the first; losses differ by {apart:.1e} at most"
    )
    print(f"with measured links a step takes {measured.step_s / ddp.step_s:.2f} of DDP's")
    return 0 if second.step_s < by_file.step_s and apart <= ALLOWED else 1


if __name__ == "__main__":
    sys.exit(main())
