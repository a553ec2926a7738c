"""DAPPLE's three headline figures: as printed, in simulation, and on ranks that sleep.

    python -m benchmarks.headlines

After Fan et al., DAPPLE (PPoPP 2021), on the authors' profiles:

    planner     how many times faster than the plan of PipeDream's planner, both run synchronously: VGG-19, batches of
                1,024 on 2 x 8 V100 (the abstract's 3.23; Figure 12 has 9.6 over 3.0)
    runtime     throughput of 1F1B with 16 micro-batches over GPipe with the 2 that fit: BERT-48, two V100 of 16 GB at
                25 Gbit/s, 2 samples each (Table 5: 8.18 over 5.10 samples per second)
    memory      mean of the ranks' peaks at that, 1F1B's over GPipe's (Table 5: 10.6 over 12.1 GB)

Simulated are the programs that would run. Emulated is `runtime` on two processes: stages sleep for what the profile
says and hand on tensors of the profile's size, and the executor runs the program. It is not done for `planner`, whose
sums of 548 MB on 16 ranks would measure this machine. Table 5 prints peaks, not what they are made of: they are taken
to be those of a rank that holds 6.1 GB, and 3.0 GB per micro-batch in flight, which agrees with GPipe's and with
1F1B's. In flight is what the simulation, and the ranks of the emulation, hold at most.
"""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.chain import CPU, ChainPrices, chain_executor, chain_job, chain_program, sleeping_split
from benchmarks.planners.dapple import MODELS, PROFILES, problem
from benchmarks.ranks import run_ranks
from lightning_pipe.core.cluster import Cluster, Device, Host, Link
from lightning_pipe.core.plan import Plan, StagePlan
from lightning_pipe.core.program import Compute, ComputeKind, Layout, Options, VerifiedProgram
from lightning_pipe.planner.evaluation.evaluate import Judge, Judged
from lightning_pipe.planner.problem import Problem
from lightning_pipe.planner.registry import propose
from lightning_pipe.profiles.published import load_published
from lightning_pipe.runtime.exchanges.groups import connect
from lightning_pipe.runtime.transport.process_group import process_group_transport

BASE_BYTES, MICROBATCH_BYTES = 6.1e9, 3.0e9  # of a rank of BERT-48, from Table 5
SAMPLES = 2  # of a micro-batch
NETWORK = 0.8e9  # bytes per second of a flow at 25 Gbit/s, as the authors' planner takes it
ROUNDS = 3
KINDS: tuple[ComputeKind, ...] = ("F", "I", "W")


@dataclass(frozen=True)
class Run:
    """A schedule with so many micro-batches."""

    schedule: str
    microbatches: int
    warmup: str = ""

    @property
    def options(self) -> Options:
        """Return the options of the schedule."""
        return {"warmup": self.warmup} if self.warmup else {}


GPIPE, DAPPLE = Run("gpipe", 2), Run("1f1b", 16, "pa")


@dataclass(frozen=True)
class Seen:
    """Seconds of a step, and the most micro-batches in flight, by rank."""

    step_s: float
    in_flight: tuple[int, ...]

    def throughput(self, run: Run) -> float:
        """Return samples per second."""
        return run.microbatches * SAMPLES / self.step_s

    @property
    def peak_bytes(self) -> float:
        """Return the mean of the ranks' peaks."""
        return statistics.fmean(BASE_BYTES + MICROBATCH_BYTES * count for count in self.in_flight)


def vgg() -> Problem:
    """Return the problem of the planners."""
    return problem(replace(next(model for model in MODELS if model.name == "vgg-19"), batch=1024), "a")


def proposed(entry: Problem, planner: str) -> float:
    """Return the seconds of a step of the plan that our implementation of a planner makes."""
    return propose(entry, planner)[0].step_s


def of_table_6(entry: Problem, starts: tuple[int, ...], replicas: tuple[int, ...]) -> float:
    """Return the seconds of a step of a plan in Table 6, with the number of micro-batches that suits it best.

    Args:
        entry: the problem.
        starts: first layer of every stage.
        replicas: devices of every stage, which are numbered through.
    """
    judge, ends = Judge(entry), [*itertools.accumulate(replicas)]
    stages = tuple(
        StagePlan(entry.graph.nodes[start].name if start else "", tuple(range(end - count, end)))
        for start, count, end in zip(starts, replicas, ends, strict=True)
    )
    return min(judge.judge(Plan(stages, m, "1f1b", {"warmup": "pa"})).step_s for m in (2, 4, 8, 16, 32))


def judged(run: Run) -> Judged:
    """Return BERT-48 in two equal stages."""
    graph, profile = load_published(PROFILES / "bert-48-pbs-2.txt", optimizer_state=2.0)
    host = Host("a", (Device("V100", 1 << 50),), inside=Link(0.0, NETWORK), network=Link(0.0, NETWORK))
    cluster = Cluster((host, replace(host, name="b")))
    middle = graph.nodes[len(graph.nodes) // 2].name
    stages = (StagePlan("", (0,)), StagePlan(middle, (1,)))
    asked = Problem(graph, profile, cluster, run.microbatches * SAMPLES)
    return Judge(asked).judge(Plan(stages, run.microbatches, run.schedule, run.options))


def in_flight(program: VerifiedProgram) -> tuple[int, ...]:
    """Return the most micro-batches, by rank, of which F has run and not the end of the backward."""
    most = []
    for line in program.ranks:
        now = peak = 0
        for one in line:
            if isinstance(one, Compute):
                now += (one.kind == "F") - (one.kind in ("B", "W"))
                peak = max(peak, now)
        most.append(peak)
    return tuple(most)


def simulated(run: Run) -> Seen:
    """Return what the simulation says."""
    found = judged(run)
    return Seen(found.step_s, in_flight(found.program))


def emulated(run: Run) -> Seen:
    """Return what two processes measure that sleep for the stages' prices."""
    found = judged(run)
    computes = tuple(
        tuple(found.prices.compute_s(Compute(stage, kind, 0), stage, SAMPLES) / SAMPLES for kind in KINDS)
        for stage in range(2)
    )
    edge = int(max(edge.bytes_per_sample for edge in found.program.traffic.edges))
    prices = ChainPrices(computes, edge)  # type: ignore[arg-type]  # three numbers each
    ranks = run_ranks(2, _measured, run, prices)
    seconds = [max(rank[0][k] for rank in ranks) for k in range(ROUNDS)]
    return Seen(statistics.median(seconds), tuple(rank[1] for rank in ranks))


def _measured(run: Run, prices: ChainPrices) -> tuple[list[float], int]:
    """Run a program some times on this rank; return the seconds of each step, and the most inputs that it held."""
    torch.set_num_threads(1)
    program = _chain(run, prices.bytes_per_sample)
    transport = process_group_transport(CPU, deadline_s=60)
    connect(transport, [program])
    executor = chain_executor(program.layout, sleeping_split(prices), transport)
    job = chain_job(program, prices.bytes_per_sample)
    seconds = []
    for _ in range(ROUNDS + 1):  # the first opens connections
        dist.barrier()
        begin = time.perf_counter()
        executor.run(program, job)
        seconds.append(time.perf_counter() - begin)
    alone = _chain(replace(run, microbatches=1), prices.bytes_per_sample)
    most, of_one = (
        max(held for _, held in executor.run(of, chain_job(of, prices.bytes_per_sample), record_memory=True).memory)
        for of in (program, alone)
    )
    transport.close()
    return seconds[1:], round(most / of_one)


def _chain(run: Run, bytes_per_sample: int) -> VerifiedProgram:
    return chain_program(
        Layout(((0,), (1,))),
        microbatches=run.microbatches,
        schedule=run.schedule,
        options=run.options,
        bytes_per_sample=bytes_per_sample,
        samples=SAMPLES,
    )


def main() -> None:
    """Print the figures."""
    table = Table("", "printed", "simulated", "emulated", title="DAPPLE's headline figures")
    entry = vgg()
    printed = of_table_6(entry, (0, 11, 17, 19), (8, 6, 1, 1)) / of_table_6(entry, (0, 17), (14, 2))
    table.add_row("planner: PipeDream's step over DAPPLE's, plans of Table 6", "3.23", f"{printed:.2f}", "")
    ours = proposed(entry, "pipedream") / proposed(entry, "dapple")
    table.add_row("  the same, plans of our planners", "", f"{ours:.2f}", "")
    ways = [{run: way(run) for run in (GPIPE, DAPPLE)} for way in (simulated, emulated)]
    gains = [f"{of[DAPPLE].throughput(DAPPLE) / of[GPIPE].throughput(GPIPE):.2f}" for of in ways]
    table.add_row("runtime: 1F1B's samples/s over GPipe's", "1.60", *gains)
    savings = [f"{of[DAPPLE].peak_bytes / of[GPIPE].peak_bytes - 1:.0%}" for of in ways]
    table.add_row("memory: 1F1B's mean peak beside GPipe's", "-12%", *savings)
    for name, run, printed in (("GPipe, M=2", GPIPE, "5.10; 12.1 GB"), ("1F1B, M=16", DAPPLE, "8.18; 10.6 GB")):
        seen = [f"{of[run].throughput(run):.2f}; {of[run].peak_bytes / 1e9:.1f} GB" for of in ways]
        table.add_row(f"  {name}: samples/s; mean peak", printed, *seen)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
