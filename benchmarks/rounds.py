"""Rounds of a pipeline that is never flushed beside synchronous 1F1B on the same work, on ranks that sleep.

    python -m benchmarks.rounds                             # 4 and 8 ranks, 8 micro-batches, 40 rounds
    chrt --rr 20 python -m benchmarks.rounds                # where others use the cores, too
    python -m benchmarks.rounds --ranks 4 --rounds 6        # a quick look

A micro-batch takes a rank `--unit` seconds for each of F, I and W, slept rather than computed; messages really travel,
and the executor is the real one. A round is from the end of an optimizer's step to the end of the next. A figure is the
median over rounds, of the slowest rank, divided by the work of a rank. Clipping by the norm of all gradients makes all
ranks wait for each other before they step. Contestants take turns in the same processes.

Then a stage of a GPT, which really computes: what copying its weights at the step takes, as a share of a round.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.chain import CPU, ChainPrices, chain_executor, chain_job, nap, sleeping_split
from benchmarks.models import GPT
from benchmarks.ranks import run_ranks
from lightning_pipe.capture import Request, capture_step, flatten
from lightning_pipe.core.program import Layout, Seam, VerifiedProgram
from lightning_pipe.runtime.exchanges.groups import connect
from lightning_pipe.runtime.executor import Executor, run_together
from lightning_pipe.runtime.job import BatchInput
from lightning_pipe.runtime.stage import State
from lightning_pipe.runtime.transport.local import Hub
from lightning_pipe.runtime.transport.process_group import process_group_transport
from lightning_pipe.runtime.transport.protocol import Transport
from lightning_pipe.schedule import order_of
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.verification.verify import verify
from lightning_pipe.schedule.weights import POLICIES
from lightning_pipe.simulator.ahead import period
from lightning_pipe.strategy.plans.runtime_overhead import chain_traffic

BYTES = 64 << 10  # of a message
TURNS = 2
FLUSHED = "1f1b, flushed"
DEADLINE_S = 120.0


@dataclass(frozen=True)
class Case:
    """Ranks, micro-batches of a batch, seconds of each of F, I and W."""

    p: int
    count: int
    unit: float

    @property
    def layout(self) -> Layout:
        """Return a stage per rank."""
        return Layout(tuple((rank,) for rank in range(self.p)))

    @property
    def prices(self) -> ChainPrices:
        """Return what stages take, with messages that take no time."""
        return ChainPrices(((self.unit,) * 3,) * self.p, BYTES)

    @property
    def work(self) -> float:
        """Return the seconds for which a rank computes in a round."""
        return 3 * self.count * self.unit

    def round_of(self, policy: str, seam: Seam) -> VerifiedProgram:
        """Return the program of a round; micro-batches have one sample."""
        sizes = (1,) * (seam.batch + max(seam.leaves))
        traffic = chain_traffic(self.p, BYTES)
        return verify(
            lower(
                POLICIES[policy].order(self.layout, seam), layout=self.layout, sizes=sizes, traffic=traffic, seam=seam
            )
        )

    def programs(self, policy: str, rounds: int) -> Iterator[VerifiedProgram]:
        """Yield the programs of rounds that follow each other, from an empty pipeline to an empty one."""
        if policy == FLUSHED:
            order = order_of("1f1b", layout=self.layout, microbatches=self.count, options={"warmup": "pa"})
            sizes, traffic = (1,) * self.count, chain_traffic(self.p, BYTES)
            flushed = verify(lower(order, layout=self.layout, sizes=sizes, traffic=traffic))
            yield from [flushed] * rounds
            return
        known: dict[Seam, VerifiedProgram] = {}
        enters: tuple[int, ...] = ()
        for left in reversed(range(rounds)):
            seam = POLICIES[policy].seam(self.layout, self.count, enters=enters, following=(self.count,) * left)
            if seam not in known:
                known[seam] = self.round_of(policy, seam)
            enters = seam.leaves
            yield known[seam]

    def simulated(self, policy: str, *, clips: bool) -> float:
        """Return the simulated seconds of a round in the middle of many."""
        return period([*self.programs(policy, 2 * self.p + 3)][self.p + 1], self.prices, together=clips)


def measure(case: Case, rounds: int) -> dict[tuple[str, bool], list[float]]:
    """Return the seconds of rounds on this rank by contestant, while the other ranks do the same."""
    torch.set_num_threads(1)
    transport = process_group_transport(CPU, deadline_s=DEADLINE_S)
    transport.open(channels=[], groups=[tuple(range(case.p))])
    split = sleeping_split(case.prices, nap)
    seconds: dict[tuple[str, bool], list[float]] = {}
    for _ in range(TURNS):
        for policy in (FLUSHED, "pipedream", "2bw"):
            for clips in (False, True):
                programs = [*case.programs(policy, -(-rounds // TURNS) + 4)]
                connect(transport, list(dict.fromkeys(programs)))
                executor = chain_executor(case.layout, split, transport)
                dist.barrier()
                norm = partial(_sum_of_norms, transport, case.p) if clips else lambda: None
                ends = [_ended(executor, program, norm) for program in programs]
                steady = ends[2:-2]  # rounds that neither fill nor empty the pipeline, where batches are large enough
                lasted = [end - start for start, end in itertools.pairwise(steady)]
                seconds.setdefault((policy, clips), []).extend(lasted)
    transport.close()
    return seconds


def _sum_of_norms(transport: Transport, ranks: int) -> None:
    """Wait for a number of every rank, as clipping by the norm of all gradients does."""
    if not transport.all_reduce(torch.zeros(1), group=tuple(range(ranks))).wait(DEADLINE_S):
        raise TimeoutError("a norm did not arrive")


def _ended(executor: Executor, program: VerifiedProgram, norm: Callable[[], None]) -> float:
    """Run a round, and return when it has ended."""
    job = chain_job(program, BYTES)
    if program.seam is not None:
        batch = replace(job, offsets=job.offsets[: program.batch])
        job = replace(batch, following=replace(batch, following=batch))
    executor.run(program, job)
    norm()
    return time.perf_counter()


def rows(case: Case, rounds: int) -> Iterator[tuple[str, ...]]:
    """Yield a row per contestant."""
    ranks = run_ranks(case.p, measure, case, rounds, deadline_s=3600)
    slowest = {who: max(statistics.median(rank[who]) for rank in ranks) for who in ranks[0]}
    for (policy, clips), median_s in slowest.items():
        of_all = sorted(s for rank in ranks for s in rank[policy, clips])
        spread = [of_all[len(of_all) // 10], of_all[-1 - len(of_all) // 10]]
        simulated = f"{case.simulated(policy, clips=clips) / case.unit:.1f}"
        yield (
            *(str(case.p), policy, "norm" if clips else "", simulated, f"{median_s / case.unit:.2f}"),
            f"{median_s / case.work:.3f}",
            f"{slowest[FLUSHED, clips] / median_s:.2f}",
            f"{spread[0] / case.unit:.1f} to {spread[1] / case.unit:.1f}",
        )


def copies(*, stages: int, count: int, samples: int, rounds: int) -> list[tuple[str, ...]]:
    """Return, by stage of a GPT, what copying weights at the step takes, as a share of the rank's computes."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    context, vocabulary = 64, 1000
    batch = torch.randint(vocabulary, (samples * count, context + 1))
    modules = [GPT(vocabulary=vocabulary, context=context, width=256, depth=2 * stages) for _ in range(stages)]
    capture = capture_step(
        Request(modules[0], "training_step", flatten([batch[:samples]])[1], arguments=(0,), samples=samples)
    )
    split = capture.split(tuple(capture.graph.position(f"blocks.{2 * s}") for s in range(1, stages)))
    layout, hub = Layout(tuple((rank,) for rank in range(stages))), Hub()
    executors = [
        Executor(
            split,
            layout,
            state=State(dict(module.named_parameters()), dict(module.named_buffers()), CPU),
            transport=hub.endpoint(rank),
            loss=capture.record.loss,
            step=partial(_step, torch.optim.AdamW(module.parameters(), lr=1e-4)),
        )
        for rank, module in enumerate(modules)
    ]
    copied = [_timed(executor) for executor in executors]
    leaves, cut = capture.with_totals([batch], cut=(True,), sizes=(samples,) * count, buffers={})
    job = BatchInput(leaves, cut, tuple(samples * m for m in range(count)), samples=samples * count)
    job, policy, enters = replace(job, following=replace(job, following=job)), POLICIES["pipedream"], ()
    computed: list[list[float]] = [[] for _ in executors]
    for left in reversed(range(rounds)):
        seam = policy.seam(layout, count, enters=enters, following=(count,) * left)
        sizes, order = (samples,) * (count + max(seam.leaves)), policy.order(layout, seam)
        program = verify(lower(order, layout=layout, sizes=sizes, traffic=split.traffic, seam=seam))
        for rank, outcome in enumerate(run_together(executors, program, [job] * stages, record=True)):
            computed[rank].append(outcome.timeline.busy(rank))
        enters = seam.leaves
    return [
        (
            str(stage),
            f"{1e3 * statistics.median(of[1:-1]):.1f} ms",
            f"{statistics.median(all_[1:-1]):.2f} s",
            f"{statistics.median(of[1:-1]) / statistics.median(all_[1:-1]):.2%}",
        )
        for stage, (of, all_) in enumerate(zip(copied, computed, strict=True))
    ]


def _step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def _timed(executor: Executor) -> list[float]:
    """Return a list that will have the seconds of the copies before every step."""
    seconds: list[float] = []
    copy: Callable[[], None] = executor.versions.before_step

    def timed() -> None:
        begin = time.perf_counter()
        copy()
        seconds.append(time.perf_counter() - begin)

    vars(executor.versions)["before_step"] = timed
    return seconds


def _show(title: str, headings: tuple[str, ...], lines: list[tuple[str, ...]]) -> None:
    table = Table(*headings, title=title, title_justify="left")
    for line in lines:
        table.add_row(*line)
    Console(width=130).print(table)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--unit", type=float, default=0.010, help="seconds of each of F, I and W")
    options = parser.parse_args()
    print(f"load of the machine: {' '.join(f'{load:.1f}' for load in os.getloadavg())}", flush=True)
    headings = (
        "ranks",
        "contestant",
        "clips by",
        "simulated",
        "measured",
        "of the work",
        "flushed/this",
        "10 % to 90 %",
    )
    for p in options.ranks:
        case = Case(p, options.microbatches, options.unit)
        _show(f"A round of {case.count} micro-batches, in units of F", headings, [*rows(case, options.rounds)])
    print(f"load of the machine: {' '.join(f'{load:.1f}' for load in os.getloadavg())}", flush=True)
    lines = copies(stages=4, count=8, samples=4, rounds=6)
    _show("A GPT of 8 blocks of width 256, PipeDream", ("stage", "copies", "computes of a round", "share"), lines)


if __name__ == "__main__":
    main()
