"""Schedules beside torch's own, on ranks that sleep: the same stages, messages and micro-batches in one run.

    python -m benchmarks.emulated_peers                                  # 4 ranks, 8 micro-batches, 1 MiB
    python -m benchmarks.emulated_peers --ranks 4 8 --microbatches 8 32 --mib 1 16 --json figures.json
    python -m benchmarks.emulated_peers --ranks 2 --busy                 # computes keep a core each busy
    python -m benchmarks.emulated_peers --drowsy                         # cores may sleep when ranks do

A micro-batch takes a rank 20 ms forward and 40 ms backward (20 I and 20 W), slept rather than computed, in as many
stages as the schedule gives a rank; what crosses between stages really travels. So the ideal is known (the simulation
with messages that take no time), and what is above it is what schedule and runtime make of messages. Ranks that sleep
need few cores, but messages of many MiB keep them busy: two cores cannot carry what four ranks could. And a core that
slept is slow for some tenths of a millisecond, at the end of every compute, which real computes do not know. So every
core runs a process of the idle class meanwhile, which gives way to ranks at once (Linux; `--drowsy` does without).
`--busy` has computes that do not sleep, for as many ranks as there are cores.

Contestants run one after another, in rounds, in the same processes. A step is from a barrier to the end of the last
rank; a figure is the median over rounds. `simulated` prices messages as a ping-pong of this run does.

Legend: p ranks, m micro-batches, v stages per rank.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

from benchmarks.chain import CPU, ChainPrices, burn, chain_executor, chain_job, chain_program, nap, sleeping_split
from benchmarks.emulation import ping
from benchmarks.ranks import run_ranks
from lightning_pipe.core.program import Options, VerifiedProgram
from lightning_pipe.freed_memory import freed_memory_kept
from lightning_pipe.report import step_seconds
from lightning_pipe.runtime.exchanges.groups import connect
from lightning_pipe.runtime.transport.process_group import process_group_transport
from lightning_pipe.runtime.transport.protocol import Transport
from lightning_pipe.schedule import SCHEDULES
from lightning_pipe.simulator import simulate
from lightning_pipe.strategy.plans.runtime_overhead import ELEMENT_BYTES

FORWARD_S, HALF_S = 0.020, 0.020  # of a micro-batch on a rank: F, and each of I and W
DEADLINE_S = 120.0

Step = Callable[[], None]


@dataclass(frozen=True)
class Case:
    """Ranks, micro-batches, bytes of a message, and whether computes keep a core busy instead of sleeping."""

    p: int
    m: int
    message_bytes: int
    busy: bool = False

    @property
    def wait(self) -> Callable[[float], None]:
        """Return what a compute does for so many seconds."""
        return burn if self.busy else nap


@dataclass(frozen=True)
class Pair:
    """A schedule of ours and torch's of the same name, if it has one; both with v stages per rank."""

    schedule: str
    options: Options
    torch_name: str | None
    v: int


PAIRS = {
    "1f1b": Pair("1f1b", {"warmup": "pb"}, "Schedule1F1B", 1),
    "interleaved": Pair("interleaved", {}, "ScheduleInterleaved1F1B", 2),
    "breadth_first": Pair("breadth_first", {}, "ScheduleLoopedBFS", 2),
    "zb_h1": Pair("zb_h1", {}, None, 1),
    "zb_v": Pair("zb_v", {}, "ScheduleZBVZeroBubble", 2),
}


def prices(pair: Pair, case: Case) -> ChainPrices:
    """Return the seconds of stages, for micro-batches of one sample."""
    stage = (FORWARD_S / pair.v, HALF_S / pair.v, HALF_S / pair.v)
    return ChainPrices((stage,) * (case.p * pair.v), case.message_bytes)


def program_of(pair: Pair, case: Case) -> VerifiedProgram:
    """Return our program."""
    layout = SCHEDULES[pair.schedule].layout([(rank,) for rank in range(case.p)], pair.v)
    return chain_program(
        layout,
        microbatches=case.m,
        schedule=pair.schedule,
        options=pair.options,
        bytes_per_sample=case.message_bytes,
        samples=1,
    )


def ours(pair: Pair, case: Case, transport: Transport) -> Step:
    """Return a step of our executor."""
    program = program_of(pair, case)
    connect(transport, [program])
    executor = chain_executor(program.layout, sleeping_split(prices(pair, case), case.wait), transport)
    job = chain_job(program, case.message_bytes)

    def step() -> None:
        executor.run(program, job)

    return step


class _Nap(torch.autograd.Function):
    """Sleep forward and, for its gradient, backward."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float, wait: Callable[[float], None]
    ) -> torch.Tensor:
        ctx.seconds, ctx.wait = backward_s, wait
        return _made(x, forward_s, wait)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _made(gradient, ctx.seconds, ctx.wait), None, None, None


def _made(like: torch.Tensor, seconds: float, wait: Callable[[float], None]) -> torch.Tensor:
    """Return zeros, which took so long."""
    begin = time.perf_counter()
    zeros = torch.zeros_like(like)
    wait(begin + seconds - time.perf_counter())
    return zeros


class _Sleeping(nn.Module):
    """A stage: I is the gradient of what comes in, W that of its weight."""

    def __init__(self, v: int, wait: Callable[[float], None]) -> None:
        super().__init__()
        self.weight, self._v, self._wait = nn.Parameter(torch.zeros(1)), v, wait

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.requires_grad:  # a part of the batch: its gradient is made, and not added to one of the whole batch
            x = x.detach().requires_grad_()
        y: torch.Tensor = _Nap.apply(x, FORWARD_S / self._v, HALF_S / self._v, self._wait)
        w: torch.Tensor = _Nap.apply(self.weight, 0.0, HALF_S / self._v, self._wait)
        return _Joined.apply(y, w)


class _Joined(torch.autograd.Function):
    """Return x, which both have a gradient from; no view of x, as torch detaches outputs in place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, torch.zeros(1)


def peers(pair: Pair, case: Case) -> Step | None:
    """Return a step of torch's schedule; None if it has none like it."""
    kind: Any = getattr(schedules, pair.torch_name, None) if pair.torch_name else None
    if kind is None:
        return None
    rank, count = dist.get_rank(), case.p * pair.v
    is_v = pair.torch_name == "ScheduleZBVZeroBubble"
    own = (rank, count - 1 - rank) if is_v else range(rank, count, case.p)
    stages = [PipelineStage(_Sleeping(pair.v, case.wait), number, count, CPU) for number in own]
    schedule = kind(stages if pair.v > 1 else stages[0], case.m, loss_fn=lambda out, wanted: out.flatten()[0] * 0.0)
    x = torch.zeros(case.m, case.message_bytes // ELEMENT_BYTES)
    wanted, last = torch.zeros(case.m), count - 1 in own

    def step() -> None:
        arguments = (x,) if rank == 0 else ()
        schedule.step(*arguments, **({"target": wanted, "losses": []} if last else {}))

    return step


@freed_memory_kept()
def measure(case: Case, names: list[str], rounds: int) -> dict[str, Any]:
    """Run everyone in rounds; on every rank. Return the seconds of every step, and what a message takes."""
    torch.set_num_threads(1)
    transport = process_group_transport(CPU, deadline_s=DEADLINE_S)
    transport.open(channels=[(0, 1), (1, 0)], groups=[])
    latency_s, posting_s = ping(transport, case.message_bytes)
    found: dict[str, Any] = {"latency_s": latency_s, "posting_s": posting_s}
    for name in names:
        steps = {"ours": ours(PAIRS[name], case, transport), "torch": peers(PAIRS[name], case)}
        seconds: dict[str, list[float]] = {who: [] for who, step in steps.items() if step is not None}
        for number in range(rounds + 1):  # the first opens connections
            for who in seconds:
                spent = _timed(steps[who])  # type: ignore[arg-type]  # none of them is None
                if number:
                    seconds[who].append(spent)
        found[name] = seconds
        steps.clear()
        gc.collect()
    transport.close()
    return found


def _timed(step: Step) -> float:
    dist.barrier()
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


@contextlib.contextmanager
def awake_cores() -> Iterator[None]:
    """Keep every core that this process may use from sleeping inside, by processes that give way to any other."""
    context = multiprocessing.get_context("fork")
    spinners = [context.Process(target=_spin, args=(core,), daemon=True) for core in os.sched_getaffinity(0)]
    for spinner in spinners:
        spinner.start()
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()


def _spin(core: int) -> None:
    os.sched_setaffinity(0, {core})
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    while True:
        pass


def figures(case: Case, names: list[str], rounds: int) -> list[dict[str, Any]]:
    """Return a row per schedule."""
    ranks = run_ranks(case.p, measure, case, names, rounds, deadline_s=3600)
    rows = []
    for name in names:
        pair, program = PAIRS[name], program_of(PAIRS[name], case)
        ideal = step_seconds(simulate(program, prices(pair, case)))
        slow = {"latency_s": ranks[0]["latency_s"], "posting_s": ranks[0]["posting_s"]}
        simulated = step_seconds(simulate(program, ChainPrices(**{**vars(prices(pair, case)), **slow})))
        walls = {
            who: statistics.median(max(spent) for spent in zip(*(rank[name][who] for rank in ranks), strict=True))
            for who in ranks[0][name]
        }
        row = {"p": case.p, "m": case.m, "MiB": case.message_bytes / 2**20, "schedule": name, "ideal": ideal}
        rows.append({**row, "simulated": simulated, **walls})
    return rows


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8])
    parser.add_argument("--mib", type=float, nargs="+", default=[1.0])
    parser.add_argument("--schedules", nargs="+", choices=PAIRS, default=[*PAIRS])
    parser.add_argument("--busy", action="store_true", help="computes keep a core busy; for as many ranks as cores")
    parser.add_argument("--drowsy", action="store_true", help="let cores sleep when no rank uses them")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    table = Table(
        "p", "m", "MiB", "schedule", "ideal", "simulated", "ours", "torch", "ideal/ours", "ours/simulated", "ours/torch"
    )
    rows = []
    keeps_awake = sys.platform == "linux" and not (options.drowsy or options.busy)
    for p, m, mib in itertools.product(options.ranks, options.microbatches, options.mib):
        with awake_cores() if keeps_awake else contextlib.nullcontext():
            found = figures(Case(p, m, int(mib * 2**20), options.busy), options.schedules, options.rounds)
        for row in found:
            rows.append(row)
            peer = row.get("torch")
            seconds = [f"{row[key]:.3f}" if key in row else "" for key in ("ideal", "simulated", "ours", "torch")]
            ratios = [row["ideal"] / row["ours"], row["ours"] / row["simulated"], row["ours"] / peer if peer else None]
            table.add_row(
                str(p),
                str(m),
                f"{mib:g}",
                row["schedule"],
                *seconds,
                *("" if r is None else f"{r:.3f}" for r in ratios),
            )
    Console(width=130).print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
