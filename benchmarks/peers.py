"""Step times beside the peers, in one run: the same module, batches and optimizer on two ranks.

    python -m benchmarks.peers                             # a GPT of 12 blocks of width 256, two ranks on this host
    python -m benchmarks.peers --case mlp --rounds 5       # fixed costs: four small layers, 1, 4 and 16 micro-batches
    python -m benchmarks.peers --case gpt2                 # GPT-2 of transformers (`pip install transformers`)
    python -m benchmarks.peers --case wide --link 1e9      # two hosts (namespaces) at 1 Gbit/s: sums of 100 MB
    python -m benchmarks.peers --case wide_adamw --link 1e9  # the same with an optimizer that takes longer
    python -m benchmarks.peers --compiled --only data      # data parallel beside DDP, both with torch's compiler too
    python -m benchmarks.peers --json figures.json --plot figures.png

Contestants run one after another, in rounds, in the same two processes; a figure is the median of the steps of a round
(from the end of a batch to the end of the next), then over the rounds. Losses of the first steps must be those of
Lightning's DDP, or the run ends. Peak is the most resident memory of the larger rank while it trained, above what it
had before, without what others have freed; in processes of their own contestants, DDP above all, take more. CPU is the
seconds that all threads of the busier rank computed per step: on a machine that others use, too, it says more than the
step. Peers without Lightning run in bare loops (`benchmarks.bare_loops`), their two stages cut by hand in the middle.
DeepSpeed and Megatron-core are no dependencies of this project, and are listed as absent where they are; an environment
of their own has them after

    pip install -e . deepspeed megatron-core

Legend: m micro-batches.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader

from benchmarks import bare_loops
from benchmarks.bare_loops import RANKS, mean_loss
from benchmarks.fits import fit_module
from benchmarks.models import Block
from benchmarks.ranks import run_ranks
from benchmarks.two_hosts import run_on_both, two_hosts
from lightning_pipe import DappleStrategy
from lightning_pipe.freed_memory import return_freed_memory

WARM_UP = 3  # steps that are not counted
REFERENCE = "Lightning DDP"
SAME = 1e-4  # relative difference of losses that are the same in float32


PIPELINES = {
    "torch 1F1B": bare_loops.torch_1f1b,
    "DeepSpeed 1F1B": bare_loops.deepspeed_1f1b,
    "Megatron 1F1B": bare_loops.megatron_1f1b,
}


class Row(nn.Sequential):
    """A model that is a row of layers, so that peers can cut it."""


class Embedding(nn.Module):
    """Tokens and positions."""

    def __init__(self, vocabulary: int, context: int, width: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.tokens(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        return found


class Flat(nn.Module):
    """Put samples and positions together."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(0, 1)


def gpt(*, width: int, depth: int, vocabulary: int = 1000, context: int = 128) -> Row:
    """Return a GPT as a row."""
    blocks = [Block(width, heads=max(1, width // 64)) for _ in range(depth)]
    head = nn.Linear(width, vocabulary, bias=False)
    return Row(Embedding(vocabulary, context, width), *blocks, nn.LayerNorm(width), head, Flat())


def text(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens, and the tokens to be told."""
    return torch.randint(1000, (samples, 128)), torch.randint(1000, (samples, 128))


class GPT2(nn.Module):
    """GPT-2 as transformers has it: 124 million parameters, random ones, no dropout."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
        self.model = GPT2LMHeadModel(config)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.model(text).logits.flatten(0, 1)
        return found


@dataclass(frozen=True)
class Case:
    """A model, its batches, and the numbers of micro-batches of pipelines.

    A row of one layer cannot be cut by hand, so peers without a capture of their own do not take part.
    """

    make: Callable[[], Row]
    batch: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    samples: int
    steps: int
    microbatches: tuple[int, ...]
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW


CASES = {
    "gpt": Case(lambda: gpt(width=256, depth=12), text, 16, 9, (8,)),
    "gpt2": Case(lambda: Row(GPT2()), text, 8, 7, (6,)),
    "wide": Case(lambda: gpt(width=512, depth=8), text, 8, 8, (4,), torch.optim.SGD),
    "wide_adamw": Case(lambda: gpt(width=512, depth=8), text, 8, 8, (4,)),
    "mlp": Case(
        lambda: Row(*(nn.Linear(32, 32) for _ in range(4))),
        lambda n: (torch.randn(n, 32), torch.randint(32, (n,))),
        64,
        60,
        (1, 4, 16),
    ),
}


class Module(pl.LightningModule):
    """A row and its loss."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.row, self.case = case.make(), case
        self.losses: list[float] = []

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        return mean_loss(self.row(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.case.optimizer(self.parameters(), lr=1e-3)


@dataclass
class Steps(pl.Callback):
    """When batches ended, and with which losses."""

    ends: list[float] = field(default_factory=list)
    computed: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def on_train_batch_end(self, _: Any, __: Any, outputs: Any, *___: Any) -> None:
        self.ends.append(time.perf_counter())
        self.computed.append(time.process_time())
        self.losses.append(float(outputs["loss"]))

    def median_s(self) -> float:
        """Return the median seconds of a step after the first ones."""
        return self._median(self.ends)

    def cpu_s(self) -> float:
        """Return the median seconds that this process computed in a step after the first ones."""
        return self._median(self.computed)

    @staticmethod
    def _median(clock: list[float]) -> float:
        pairs = zip(clock[WARM_UP - 1 :], clock[WARM_UP:], strict=False)
        return statistics.median(end - start for start, end in pairs)


@dataclass(frozen=True)
class Figure:
    """What one contestant showed on one rank."""

    step_s: float
    cpu_s: float
    peak_bytes: int
    losses: tuple[float, ...]


@contextmanager
def _resident_peak() -> Iterator[Callable[[], int]]:
    """Yield a function that returns the most resident memory so far above what was there."""
    gc.collect()
    return_freed_memory()  # of an earlier contestant
    before, most, over = _resident(), [0], threading.Event()

    def look() -> None:
        while not over.wait(0.01):
            most[0] = max(most[0], _resident() - before)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield lambda: most[0]
    finally:
        over.set()
        thread.join()


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def fitted(case: Case, strategy: Callable[[], Any], *, compiled: bool = False) -> Figure:
    """Fit the module with a strategy of Lightning; its batches are those of one device."""
    torch.manual_seed(0)
    x, y = case.batch(case.samples * case.steps)
    torch.manual_seed(0)
    module, steps, made = Module(case), Steps(), strategy()
    if compiled:
        module.row.compile()
    is_ddp = made == "ddp"
    batches = [*zip(x.split(case.samples), y.split(case.samples), strict=True)]
    if is_ddp:  # which gives every rank its part of each
        part = case.samples // RANKS
        batches = [(here.split(part)[dist.get_rank()], wanted.split(part)[dist.get_rank()]) for here, wanted in batches]
    with _resident_peak() as peak:
        fit_module(module, DataLoader(batches, batch_size=None), made, callback=steps, use_distributed_sampler=False)  # type: ignore[arg-type]
    losses = torch.tensor(steps.losses[:WARM_UP])
    if is_ddp:
        dist.all_reduce(losses)
        losses /= RANKS
    return Figure(steps.median_s(), steps.cpu_s(), peak(), tuple(losses.tolist()))


def looped(case: Case, peer: Callable[..., bare_loops.Train], microbatches: int = 1) -> Figure:
    """Train with a peer in a loop of its own; every rank has the whole batch."""
    torch.manual_seed(0)
    x, y = case.batch(case.samples * case.steps)

    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return case.make()

    train = peer(make, partial(case.optimizer, lr=1e-3), microbatches)
    steps = Steps()
    with _resident_peak() as peak:
        for here, wanted in zip(x.split(case.samples), y.split(case.samples), strict=True):
            loss = train(here, wanted)
            steps.on_train_batch_end(None, None, {"loss": torch.zeros(()) if loss is None else loss})
    losses = torch.tensor(steps.losses[:WARM_UP])
    dist.broadcast(losses, RANKS - 1)
    return Figure(steps.median_s(), steps.cpu_s(), peak(), tuple(losses.tolist()))


def contestants(case: Case, *, compiled: bool) -> dict[str, Callable[[Case], Figure]]:
    """Return who takes part, by name; with a compiler too, if that is wanted."""

    def ours(**options: Any) -> Callable[[Case], Figure]:
        return lambda case: fitted(case, lambda: DappleStrategy(**options))

    found: dict[str, Callable[[Case], Figure]] = {
        REFERENCE: lambda case: fitted(case, lambda: "ddp"),
        "default": ours(),
        "data parallel": ours(layout="2"),
    }
    if compiled:
        found["data parallel, compiled"] = ours(layout="2", compile=True)
        found["data parallel, DDP compiled"] = lambda case: fitted(case, lambda: "ddp", compiled=True)
    with torch.device("meta"):
        can_be_cut = len(case.make()) > 1
    if can_be_cut:
        found["FSDP2"] = partial(looped, peer=bare_loops.fsdp2)
    for m in case.microbatches:
        found[f"pipeline, m={m}"] = ours(layout="1-1", microbatches=m)
        if m < RANKS or not can_be_cut:  # torch demands as many
            continue
        for name, peer in PIPELINES.items():
            found[f"{name}, m={m}"] = partial(looped, peer=peer, microbatches=m)
    return found


def run(name: str, rounds: int, only: str, compiled: bool) -> dict[str, list[Figure]]:
    """Let everyone train, in rounds; on every rank."""
    torch.set_num_threads(1)
    case = CASES[name]
    chosen = {
        who: train
        for who, train in contestants(case, compiled=compiled).items()
        if who == REFERENCE or (only in who and bare_loops.is_installed(who))
    }
    found: dict[str, list[Figure]] = {who: [] for who in chosen}
    for _ in range(rounds):
        for who, train in chosen.items():
            dist.barrier()
            found[who].append(train(case))
    return found


def compared(ranks: list[dict[str, list[Figure]]]) -> dict[str, dict[str, float]]:
    """Return medians over rounds of every contestant, the slower and larger rank's.

    Raises:
        SystemExit: if somebody's losses are not those of the reference.
    """
    expected = ranks[0][REFERENCE][0].losses
    figures = {}
    for who, rows in ranks[0].items():
        for figure in rows:
            if not all(map(_same, figure.losses, expected)):
                raise SystemExit(f"{who} had losses {figure.losses}; expected {expected}")
        figures[who] = {
            kind: statistics.median(max(vars(rank[who][i])[kind] for rank in ranks) for i in range(len(rows)))
            for kind in ("step_s", "cpu_s", "peak_bytes")
        }
    return figures


def _same(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=SAME)


def plot(figures: dict[str, dict[str, float]], *, title: str, path: Path) -> None:
    """Draw the steps as bars, the fastest on top."""
    from matplotlib.figure import Figure as Picture

    names = sorted(figures, key=lambda who: figures[who]["step_s"], reverse=True)
    picture = Picture(figsize=(8, 0.4 * len(names) + 1), layout="constrained")
    axes = picture.subplots()
    bars = axes.barh(names, [figures[who]["step_s"] * 1e3 for who in names])
    reference = figures[REFERENCE]["step_s"]
    axes.bar_label(bars, [f"{figures[who]['step_s'] / reference:.2f}" for who in names], padding=3)
    axes.set(xlabel=f"ms per step, and the ratio to {REFERENCE}", title=title)
    picture.savefig(path)


def main() -> None:
    """Run the contestants and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, default="gpt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--link", type=float, help="bits per second between two hosts; without it, one host")
    parser.add_argument("--only", default="", help="contestants whose name has this, and the reference")
    parser.add_argument("--compiled", action="store_true", help="data parallel and DDP with torch's compiler too")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="picture of the steps")
    options = parser.parse_args()
    arguments = (options.case, options.rounds, options.only, options.compiled)
    if options.link:
        with two_hosts(options.link) as hosts:
            ranks = run_on_both(hosts, run, *arguments)
    else:
        ranks = run_ranks(RANKS, run, *arguments, deadline_s=1800)
    figures = compared(ranks)
    table = Table(
        "", "step", "of DDP's", "CPU", "of DDP's", "peak", "of DDP's", title=f"{options.case}, {options.rounds} rounds"
    )
    reference = figures[REFERENCE]
    for who, found in figures.items():
        ratios = {key: found[key] / reference[key] if reference[key] else math.nan for key in found}
        texts = {key: f"{found[key] * 1e3:.1f} ms" for key in ("step_s", "cpu_s")}
        texts["peak_bytes"] = f"{found['peak_bytes'] / 2**20:.0f} MiB"
        table.add_row(who, *(cell for key in found for cell in (texts[key], f"{ratios[key]:.2f}")))
    for who in contestants(CASES[options.case], compiled=options.compiled):
        if options.only in who and who not in figures:
            table.add_row(who, "absent", *[""] * 5)
    Console(width=110).print(table)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    if options.plot:
        plot(figures, title=str(table.title), path=options.plot)


if __name__ == "__main__":
    main()
