"""Emulation of programs against the simulator: stages that sleep, tensors that really travel.

    python -m benchmarks.emulation

Every stage of a linear chain sleeps for the price of its compute instead of computing, and hands on tensors of the
edge's size. The real executor runs the real program over gloo; what it records is set against what the simulator
predicts from the same prices, plus two that are measured first: what the runtime adds to a compute (a chain of one
stage on one rank), and the latency of a message (a ping-pong whose ends sleep in between, as ranks do that wait).

Sleeping ranks need no core, so eight ranks can be emulated on two cores, if these are free. Where others use them too,
`chrt --rr 20 python -m benchmarks.emulation` wakes the ranks on time.

Legend: s stage, m micro-batches.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.chain import (
    CPU,
    SAMPLES,
    ChainPrices,
    chain_executor,
    chain_job,
    chain_program,
    nap,
    sleeping_split,
)
from benchmarks.ranks import run_ranks
from lightning_pipe.core.program import Layout, Options, VerifiedProgram
from lightning_pipe.core.timeline import Timeline
from lightning_pipe.report import step_seconds
from lightning_pipe.runtime.exchanges.groups import connect
from lightning_pipe.runtime.transport.process_group import process_group_transport
from lightning_pipe.runtime.transport.protocol import Transport
from lightning_pipe.runtime.waiting import Handle
from lightning_pipe.simulator import simulate
from lightning_pipe.units import format_bytes, format_seconds

RUNS = 5
PINGS = 20
DEADLINE_S = 60.0
ALLOWED = 0.05  # deviation of the measured from the simulated time


@dataclass(frozen=True)
class Case:
    """One line of the benchmark."""

    replicas: tuple[int, ...]
    computes: tuple[tuple[float, float, float], ...]  # seconds of F, I and W of a micro-batch, by stage
    schedule: str
    options: Options
    microbatches: int
    head_s: float | None = None  # of a batch, on the last stage

    @property
    def layout(self) -> Layout:
        """Return the ranks of the stages, numbered in order."""
        starts = [sum(self.replicas[:s]) for s in range(len(self.replicas))]
        return Layout(tuple(tuple(range(a, a + n)) for a, n in zip(starts, self.replicas, strict=True)))

    @property
    def prices(self) -> ChainPrices:
        """Return the prices per sample."""
        computes = tuple((f / SAMPLES, i / SAMPLES, w / SAMPLES) for f, i, w in self.computes)
        head = None if self.head_s is None else self.head_s / (SAMPLES * self.microbatches)
        return ChainPrices(computes, head=head)

    def program(self) -> VerifiedProgram:
        """Return the program of this case."""
        return chain_program(
            self.layout,
            microbatches=self.microbatches,
            schedule=self.schedule,
            options=self.options,
            bytes_per_sample=self.prices.bytes_per_sample,
            has_head=self.head_s is not None,
        )


@dataclass(frozen=True)
class Overheads:
    """What the runtime and the transport of this machine add.

    Attributes:
        call_s: seconds per compute.
        latency_s: seconds per message.
        posting_s: seconds for which the posting of a message keeps its sender.
    """

    call_s: float
    latency_s: float
    posting_s: float


def measure(cases: Sequence[Case]) -> tuple[Overheads, list[list[Timeline]]]:
    """Run every case several times on this rank, while the other ranks do the same.

    Returns:
        Overheads (as rank 0 sees them), and the timelines of this rank by case and run.
    """
    transport = process_group_transport(CPU, deadline_s=DEADLINE_S)
    transport.open(channels=[(0, 1), (1, 0)], groups=[])
    alone = Case((1,), (EVEN,), "gpipe", {}, 16)
    computes = alone.microbatches * len(EVEN)
    extra = [step_seconds(run) / computes for run in _runs(alone, transport)] if transport.rank == 0 else []
    dist.barrier()
    call_s = statistics.median(extra) - sum(EVEN) / len(EVEN) if extra else 0.0
    overheads = Overheads(call_s, *ping(transport, alone.prices.bytes_per_sample * SAMPLES))
    timelines = [_runs(case, transport, start=dist.barrier) for case in cases]
    transport.close()
    return overheads, timelines


def _runs(case: Case, transport: Transport, *, start: Callable[[], None] = lambda: None) -> list[Timeline]:
    program = case.program()
    connect(transport, [program])
    executor = chain_executor(case.layout, sleeping_split(case.prices), transport)
    job = chain_job(program, case.prices.bytes_per_sample)
    recorded = []
    for _ in range(RUNS + 1):  # the first opens connections
        start()
        recorded.append(executor.run(program, job, record=True).timeline)
    return recorded[1:]


def ping(transport: Transport, count: int) -> tuple[float, float]:
    """Time messages of `count` bytes from rank 0 to rank 1 and back.

    Returns:
        Half of the median seconds of a round, and the median seconds that posting a message takes.
    """
    rank, rounds, posted = transport.rank, [], []
    if rank > 1:
        return 0.0, 0.0

    def send() -> None:
        start = time.perf_counter()
        handle = transport.send([tensor], peer=1 - rank)
        posted.append(time.perf_counter() - start)
        _settle(handle)

    tensor = torch.zeros(count, dtype=torch.uint8)
    for _ in range(PINGS):
        fresh = [torch.empty(count, dtype=torch.uint8)]  # as a stage receives
        arriving = transport.receive(fresh, peer=1 - rank, owners=fresh)
        nap(EVEN[0] if rank == 0 else 0.0)
        start = time.perf_counter()
        if rank == 0:
            send()
        _settle(arriving)
        rounds.append(time.perf_counter() - start)
        if rank == 1:
            send()
    return statistics.median(rounds) / 2, statistics.median(posted)


def _settle(handle: Handle) -> None:
    if not handle.wait(DEADLINE_S):
        raise TimeoutError("a message of the ping-pong did not arrive")


EVEN = (0.009, 0.010, 0.008)
LARGER = (0.0135, 0.015, 0.012)
DOUBLE = (0.018, 0.020, 0.016)
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[tuple[float, float, float], ...]]] = {
    "1-1-1-1": ((1, 1, 1, 1), (EVEN,) * 4),
    "1-1-1-1, stage 2 slow": ((1, 1, 1, 1), (EVEN, EVEN, LARGER, EVEN)),
    "2-1-1": ((2, 1, 1), (DOUBLE, EVEN, EVEN)),
    "1-1-1-1-1-1-1-1": ((1,) * 8, (EVEN,) * 8),
    "2-3-2-1": ((2, 3, 2, 1), (DOUBLE, DOUBLE, DOUBLE, EVEN)),
}
SCHEDULES: dict[str, tuple[str, Options]] = {
    "gpipe": ("gpipe", {}),
    "1f1b pa": ("1f1b", {"warmup": "pa"}),
    "1f1b pb": ("1f1b", {"warmup": "pb"}),
}
MICROBATCHES = (4, 8, 16)
HEAD_S = 0.02
HEADED = {f"{layout}, head": layout for layout in ("1-1-1-1", "2-1-1", "2-3-2-1")}  # all forwards first


@dataclass(frozen=True)
class Row:
    """Seconds of a step, as simulated and as measured in every run."""

    simulated_s: float
    measured_s: tuple[float, ...]

    @property
    def deviation(self) -> float:
        """Return by which share the median run is longer than simulated."""
        return statistics.median(self.measured_s) / self.simulated_s - 1


def rows(cases: Sequence[Case]) -> tuple[Overheads, list[Row]]:
    """Run cases of one number of ranks; return the overheads found and a row per case."""
    found: list[tuple[Overheads, list[list[Timeline]]]] = run_ranks(cases[0].layout.ranks, measure, cases)
    overheads = found[0][0]
    return overheads, [_row(case, [of[1][c] for of in found], overheads) for c, case in enumerate(cases)]


def _row(case: Case, timelines: Sequence[Sequence[Timeline]], overheads: Overheads) -> Row:
    """Compare a case; `timelines` are the runs of each rank."""
    prices = replace(case.prices, **vars(overheads))
    runs = [Timeline(tuple(event for part in parts for event in part.events)) for parts in zip(*timelines, strict=True)]
    simulated_s = step_seconds(simulate(case.program(), prices))
    return Row(simulated_s, tuple(step_seconds(run) for run in runs))


def main() -> int:
    """Print the table; return 1 if a deviation is larger than allowed."""
    named = {
        (layout, schedule, m): Case(*LAYOUTS[layout], *SCHEDULES[schedule], m)
        for layout in LAYOUTS
        for schedule in SCHEDULES
        for m in MICROBATCHES
    }
    named |= {
        (name, "gpipe", m): Case(*LAYOUTS[layout], *SCHEDULES["gpipe"], m, HEAD_S)
        for name, layout in HEADED.items()
        for m in MICROBATCHES
    }
    started = time.perf_counter()
    results: dict[tuple[str, str, int], Row] = {}
    for ranks in sorted({case.layout.ranks for case in named.values()}):
        names = [name for name, case in named.items() if case.layout.ranks == ranks]
        overheads, found = rows([named[name] for name in names])
        call, latency = format_seconds(overheads.call_s), format_seconds(overheads.latency_s)
        size = format_bytes(named[names[0]].prices.bytes_per_sample * SAMPLES)
        print(f"{ranks} ranks: the runtime adds {call} to a compute, a message of {size} takes {latency}")
        results.update(zip(names, found, strict=True))
    worst = max(abs(row.deviation) for row in results.values())
    _print(results)
    print(f"largest deviation {worst:.1%} of {len(results)} cases in {time.perf_counter() - started:.0f} s")
    return 0 if worst <= ALLOWED else 1


def _print(results: dict[tuple[str, str, int], Row]) -> None:
    table = Table(box=box.SIMPLE, title=f"Seconds of a step, median of {RUNS} runs", title_justify="left")
    for heading in ("layout", "schedule"):
        table.add_column(heading, no_wrap=True)
    for heading in ("micro-batches", "simulated", "measured", "fastest", "slowest", "deviation"):
        table.add_column(heading, justify="right")
    for (layout, schedule, m), row in results.items():
        times = (row.simulated_s, statistics.median(row.measured_s), min(row.measured_s), max(row.measured_s))
        table.add_row(layout, schedule, str(m), *map(format_seconds, times), f"{row.deviation:+.1%}")
    Console(width=120).print(table)


if __name__ == "__main__":
    sys.exit(main())
