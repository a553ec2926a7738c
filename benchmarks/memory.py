"""Memory that a run gives up against what its plan gives up, and its cost. One section per claim.

    python -m benchmarks.memory                         # all sections
    python -m benchmarks.memory --sections saved cost   # some

    saved         mixtures of keep, recompute and offload: numbers bit-equal to keeping all, bytes kept as simulated
    checkpoint    torch.utils.checkpoint in the module: what eager keeps with it, and what the pipeline keeps
    gradients     how far memory rises in W above what is there, gradients included, against the largest gradient
    cost          seconds of a step that recomputes everything, against one that keeps all
    resident      memory of the process with and without offloading to a file
    lane          a copy lane of 200 MB/s: seconds of a step, simulated and measured, on ranks that sleep

Modules run on the local transport, on one or two ranks in this process; `lane` on forked ranks. Times are medians.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.chain import CPU, SAMPLES, ChainPrices, chain_job, chain_traffic, sleeping_split
from benchmarks.emulation import Overheads, ping
from benchmarks.models import GPT, MODELS
from benchmarks.ranks import run_ranks
from lightning_pipe.capture import Capture, Request, capture_step, flatten
from lightning_pipe.capture.allocations import Allocations, highest
from lightning_pipe.capture.steps.stage_program import Split
from lightning_pipe.core.effects import OwnWork
from lightning_pipe.core.plan import Plan, microbatch_sizes
from lightning_pipe.core.program import Compute, Evict, Fetch, Instruction, Layout, VerifiedProgram
from lightning_pipe.core.timeline import Timeline
from lightning_pipe.cost.activations import candidates
from lightning_pipe.cost.stage import Cutter
from lightning_pipe.freed_memory import return_freed_memory
from lightning_pipe.planner.evaluation.evaluate import Judged, judge
from lightning_pipe.planner.evaluation.resolve import places_of
from lightning_pipe.planner.memory.policies import policies_of
from lightning_pipe.planner.problem import Constraints, Problem, counted_problem
from lightning_pipe.planner.registry import propose
from lightning_pipe.report import step_seconds
from lightning_pipe.runtime.activations.plain import FileHost
from lightning_pipe.runtime.exchanges.groups import connect
from lightning_pipe.runtime.executor import Executor, run_together
from lightning_pipe.runtime.job import BatchInput, ProgramResult
from lightning_pipe.runtime.stage import Stage, State
from lightning_pipe.runtime.transport.local import Hub
from lightning_pipe.runtime.transport.process_group import process_group_transport
from lightning_pipe.schedule import order_of
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.verification.verify import verify
from lightning_pipe.simulator import simulate
from lightning_pipe.units import format_bytes, format_seconds

BATCH, MICROBATCHES, RUNS = 16, 4, 7
LANE_BYTES_PER_S = 200e6
Section = Callable[[Console], None]


@dataclass
class Pipeline:
    """A captured module on ranks of this process."""

    capture: Capture
    judged: Judged
    split: Split
    modules: list[pl.LightningModule]
    executors: list[Executor]
    job: BatchInput

    def step(self, **record: bool) -> list[ProgramResult]:
        """Run one batch; gradients begin at nothing."""
        for module in self.modules:
            module.zero_grad()
        return run_together(self.executors, self.judged.program, [self.job] * len(self.modules), **record)

    def gradients(self) -> list[dict[str, torch.Tensor]]:
        return [{n: p.grad for n, p in m.named_parameters() if p.grad is not None} for m in self.modules]


def captured(module: pl.LightningModule, tensors: Sequence[torch.Tensor]) -> Capture:
    samples = microbatch_sizes(BATCH, MICROBATCHES)[0]
    return capture_step(Request(module, "training_step", flatten(list(tensors))[1], samples=samples))


def problem_of(capture: Capture, ranks: int, schedule: str = "1f1b") -> Problem:
    problem = counted_problem(capture.graph, ranks=ranks, samples=BATCH)
    warmup = "pa" if schedule == "1f1b" else None
    return replace(problem, constraints=Constraints(MICROBATCHES, (1,) * ranks, schedule, warmup))


def plan_of(problem: Problem, *, recompute: float = 0.0, offload: float = 0.0) -> Plan:
    """Return a plan whose stages recompute and offload these shares of what they save, drawn at random.

    It waits for the copies to the host, so that micro-batches leave that are away for four computes.
    """
    plan, dice = propose(problem, "uniform")[0].plan, random.Random(f"{recompute} {offload}")
    works, stages = Cutter(problem.graph).works(judge(plan, problem).cuts), []
    for stage, work in zip(plan.stages, works, strict=True):
        found = candidates(problem.graph, work)
        can = [c.memory for c in found if c.is_remakeable]
        again = dice.sample(can, round(recompute * len(can)))
        rest = [c.memory for c in found if c.memory not in again and c.memory not in work.forward.given]
        away = dice.sample(rest, round(offload * len(rest)))
        places = places_of(problem.graph, work, again), places_of(problem.graph, work, away)
        stages.append(replace(stage, recompute=places[0], offload=places[1], beside_copy=0))
    return replace(plan, stages=tuple(stages))


def pipeline(
    module: pl.LightningModule, tensors: Sequence[torch.Tensor], capture: Capture, plan: Plan, problem: Problem
) -> Pipeline:
    judged = judge(plan, problem)
    split = capture.split(judged.cuts, policies=policies_of(plan, capture.graph, judged.cuts))
    modules, hub = [copy.deepcopy(module) for _ in range(plan.layout.ranks)], Hub()
    states = [State(dict(m.named_parameters(remove_duplicate=False)), dict(m.named_buffers()), CPU) for m in modules]
    executors = [
        Executor(split, plan.layout, state=state, transport=hub.endpoint(rank), loss=capture.record.loss)
        for rank, state in enumerate(states)
    ]
    sizes = microbatch_sizes(BATCH, MICROBATCHES)
    cut = (True,) * len(tensors)
    leaves, cut = capture.with_totals(list(tensors), cut=cut, sizes=sizes, buffers=states[0].buffers)
    job = BatchInput(leaves, cut, tuple(itertools.accumulate((0, *sizes[:-1]))), seed=1)
    return Pipeline(capture, judged, split, modules, executors, job)


def saved(console: Console) -> None:
    """Compare mixtures with keeping all, in numbers and in bytes."""
    table = Table("module", "recompute", "offload", "numbers", "saved, simulated", "measured", "by keeping all")
    for name, model in MODELS.items():
        torch.manual_seed(0)
        module, tensors = model.make().train(), model.batch(BATCH)
        capture = captured(module, tensors)
        problem = problem_of(capture, ranks=2, schedule="gpipe")  # in which micro-batches wait for long
        keeping = pipeline(module, tensors, capture, plan_of(problem), problem)
        keeping.step()
        wanted = keeping.gradients()
        most = sum(curve.peak_bytes for curve in keeping.judged.curves)
        for recompute, offload in ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (0.5, 0.5), (0.3, 0.3)):
            plan = plan_of(problem, recompute=recompute, offload=offload)
            run = pipeline(module, tensors, capture, plan, problem)
            outcomes = run.step(record_memory=True)
            equal = all(
                a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
                for a, b in zip(run.gradients(), wanted, strict=True)
            )
            measured = [max(held for _, held in outcome.memory) for outcome in outcomes]
            simulated = [max(held for _, held in kept_in_order(run.judged, rank)) for rank in range(2)]
            figures = (simulated, measured, [most])
            shown = [format_bytes(sum(figure)) for figure in figures]
            shown[1] += " (equal)" if simulated == measured else " (DIFFERENT)"
            numbers = "bit-equal" if equal else "DIFFERENT"
            table.add_row(name, f"{recompute:.0%}", f"{offload:.0%}", numbers, *shown)
    console.print(table)


def kept_in_order(judged: Judged, rank: int) -> Iterator[tuple[Instruction, int]]:
    """Yield the instructions of a rank's list, each with the bytes that are kept after it."""
    prices, program, held = judged.prices, judged.program, 0
    waiting: dict[tuple[int, int], int] = {}
    for x in program.ranks[rank]:
        key = (getattr(x, "stage", -1), getattr(x, "microbatch", -1))
        samples = program.sizes[key[1]] if key[1] >= 0 else 0
        match type(x).__name__, getattr(x, "kind", ""):
            case "Compute", "F":
                held += prices.saved_bytes(key[0], samples)
            case "Compute", "I":
                waiting[key] = prices.kept_bytes(key[0], samples)
                held += waiting[key] - prices.saved_bytes(key[0], samples)
            case "Compute", "W":
                held -= waiting.pop(key)
            case "Vacate", _:
                held -= prices.offloaded_bytes(key[0], samples)
            case "Fetch", _:
                held += prices.offloaded_bytes(key[0], samples)
        yield x, held


class CheckpointedGPT(GPT):
    """A GPT whose blocks call torch.utils.checkpoint."""

    def __init__(self, *, use_reentrant: bool, **options: int) -> None:
        super().__init__(**options)
        self.use_reentrant = use_reentrant

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        text = batch[0]
        x = self.tokens(text[:, :-1]) + self.positions(torch.arange(text.shape[1] - 1, device=text.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        logits = self.head(self.norm(x)).flatten(0, 1)
        return nn.functional.cross_entropy(logits, text[:, 1:].flatten())


def kept_by_eager(module: pl.LightningModule, tensors: Sequence[torch.Tensor]) -> int:
    """Return the bytes of tensors that are there after the forward of a step, and were not before."""
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    with Allocations() as seen:
        loss = module.training_step(list(tensors), 0)
    kept = sum(change.bytes for change in seen.changes)
    del loss
    return kept


def checkpoints(console: Console) -> None:
    """Compare what is kept for the backward with torch.utils.checkpoint in the module."""
    table = Table("module", "kept by eager", "kept by the pipeline, per micro-batch", "of it saved, simulated")
    depth, samples = 8, microbatch_sizes(BATCH, MICROBATCHES)[0]
    modules = {
        "8 blocks": GPT(depth=depth),
        "checkpoint(use_reentrant=False)": CheckpointedGPT(depth=depth, use_reentrant=False),
        "checkpoint(use_reentrant=True)": CheckpointedGPT(depth=depth, use_reentrant=True),
    }
    for name, module in modules.items():
        tensors = MODELS["gpt"].batch(BATCH)
        eager = kept_by_eager(copy.deepcopy(module).train(), [t[:samples] for t in tensors])
        capture = captured(module.train(), tensors)
        problem = problem_of(capture, ranks=1)
        run = pipeline(module, tensors, capture, plan_of(problem), problem)
        measured: list[int] = []
        for executor in run.executors:
            note_after_first_forward(executor.stages[0], measured)
        run.step()
        simulated = run.judged.prices.saved_bytes(0, samples)
        table.add_row(name, *map(format_bytes, (eager, measured[0], simulated)))
    console.print(table)


def note_after_first_forward(stage: Stage, found: list[int]) -> None:
    """Append what a stage keeps after its first forward."""
    compute = stage.compute

    def noting(kind: Any, microbatch: int, slice_: Any) -> None:
        compute(kind, microbatch, slice_)
        if kind == "F" and not found:
            found.append(sum(stage.saved_storages().values()))

    stage.compute = noting  # type: ignore[method-assign]


def gradients(console: Console) -> None:
    """Measure how far memory rises in W above what is there when it begins; few tokens, so that gradients are most."""
    table = Table("module", "parameters", "largest gradient", "most made at once in W", "ratio")
    for name, module, tensors in wide_modules():
        capture = captured(module, tensors)
        problem = problem_of(capture, ranks=1)
        run = pipeline(module, tensors, capture, plan_of(problem), problem)
        sizes = [p.numel() * p.element_size() for p in module.parameters()]
        rise = weight_rise(run)
        table.add_row(name, *map(format_bytes, (sum(sizes), max(sizes), rise)), f"{rise / max(sizes):.2f}")
    console.print(table)


def wide_modules() -> Iterator[tuple[str, pl.LightningModule, Sequence[torch.Tensor]]]:
    """Yield modules whose parameters are larger than their activations."""
    for width, depth in ((1024, 1), (512, 4)):
        (text,) = MODELS["gpt"].batch(BATCH)
        yield f"gpt, {depth} blocks of width {width}", GPT(width=width, depth=depth).train(), (text[:, :5],)


def weight_rise(run: Pipeline) -> int:
    """Return the most by which memory rises in a later W, with gradients there, above what was there when it began."""
    (stage,) = run.executors[0].stages.values()
    compute, rises = stage.compute, list[int]()

    def measured(kind: Any, microbatch: int, slice_: Any) -> None:
        if kind != "W" or microbatch == 0:
            compute(kind, microbatch, slice_)
            return
        with Allocations() as seen:
            compute(kind, microbatch, slice_)
        rises.append(highest(seen.changes))

    stage.compute = measured  # type: ignore[method-assign]
    run.step()
    return max(rises)


def cost(console: Console) -> None:
    """Time a step that recomputes everything against one that keeps all, in turn."""
    table = Table("module", "keeping all", "recomputing all", "ratio of medians", "saved")
    for name, model in MODELS.items():
        torch.manual_seed(0)
        module, tensors = model.make().train(), model.batch(BATCH)
        capture = captured(module, tensors)
        problem = problem_of(capture, ranks=1)
        runs = [pipeline(module, tensors, capture, plan_of(problem, recompute=share), problem) for share in (0.0, 1.0)]
        seconds: list[list[float]] = [[], []]
        for _ in range(RUNS):
            for run, found in zip(runs, seconds, strict=True):
                start = time.perf_counter()
                run.step()
                found.append(time.perf_counter() - start)
        keep, again = (statistics.median(found[1:]) for found in seconds)
        bytes_ = [run.judged.curves[0].peak_bytes for run in runs]
        part = f"{format_bytes(bytes_[1])} of {format_bytes(bytes_[0])}"
        table.add_row(name, format_seconds(keep), format_seconds(again), f"{again / keep:.2f}", part)
    console.print(table)


def resident(console: Console) -> None:
    """Measure the resident memory of this process after all forwards of a step."""
    table = Table("policy", "saved, simulated, after all forwards", "resident memory above that before them")
    return_freed_memory(at_once=True)
    module, tensors = GPT(depth=8).train(), MODELS["gpt"].batch(BATCH)
    capture = captured(module, tensors)
    problem = problem_of(capture, ranks=1, schedule="gpipe")
    for name, share in (("keep all", 0.0), ("offload all", 1.0)):
        run = pipeline(module, tensors, capture, plan_of(problem, offload=share), problem)
        run.step()  # touches what stays
        found: dict[str, int] = {}
        stage = run.executors[0].stages[0]
        compute = stage.compute

        def noting(kind: Any, m: int, slice_: Any, compute: Any = compute, found: dict[str, int] = found) -> None:
            found[kind] = found.get(kind) or resident_bytes()  # before the first of its kind
            compute(kind, m, slice_)

        stage.compute = noting  # type: ignore[method-assign]
        run.step()
        order = [*kept_in_order(run.judged, 0)]
        first = next(i for i, (x, _) in enumerate(order) if isinstance(x, Compute) and x.kind == "I")
        kept = order[first - 1][1]
        table.add_row(name, format_bytes(kept), format_bytes(found["I"] - found["F"]))
    console.print(table)


def resident_bytes() -> int:
    """Return the anonymous resident memory of this process, without what its allocator has free."""
    gc.collect()
    return_freed_memory(at_once=True)
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


@dataclass(frozen=True)
class LanePrices(ChainPrices):
    """Prices of a chain whose stages offload what they save over a slow lane."""

    def offloaded_bytes(self, stage: int, samples: int) -> int:
        return self.bytes_per_sample * samples

    def own_work_s(self, work: OwnWork, rank: int, samples: int) -> float:
        copied = isinstance(work, Evict | Fetch)
        return self.offloaded_bytes(work.stage, samples) / LANE_BYTES_PER_S if copied else 0.0


LANES = {  # bytes per sample: hidden behind computes, about as long as these, and longer; and whether they are copied
    "none": (1 << 20, False),
    "short": (1 << 17, True),
    "as long as computes": (1 << 20, True),
    "longer than computes": (1 << 21, True),
}


def lane_program(prices: LanePrices, microbatches: int, *, copies: bool) -> tuple[VerifiedProgram, Split]:
    """Return a chain of three stages that offload what they save."""
    layout = Layout(((0,), (1,), (2,)))
    traffic = replace(chain_traffic(3, prices.bytes_per_sample), offloads=(0, 1, 2) if copies else ())
    order = order_of("1f1b", layout=layout, microbatches=microbatches, options={"warmup": "pb"})
    program = verify(lower(order, layout=layout, sizes=(SAMPLES,) * microbatches, traffic=traffic))
    split = sleeping_split(prices)
    stages = tuple(
        replace(stage, offloaded=frozenset(stage.weight_grad.inputs))  # what arrived: the bytes of a message
        for stage in split.stages
        if stage.input_grad is not None and stage.weight_grad is not None
    )
    return program, replace(split, stages=stages, traffic=traffic)


def lane_runs(prices: LanePrices, microbatches: int, copies: bool) -> tuple[Overheads, list[Timeline]]:
    """Return what messages and making them add, and the timelines of several runs but the first."""
    program, split = lane_program(prices, microbatches, copies=copies)
    transport = process_group_transport(CPU, deadline_s=60.0)
    transport.open(channels=[(0, 1), (1, 0)], groups=[])
    size = prices.bytes_per_sample * SAMPLES
    overheads = Overheads(making_s(size), *ping(transport, size))
    connect(transport, [program])
    host = FileHost(bytes_per_s=LANE_BYTES_PER_S)
    state = State({f"w{s}": torch.zeros(1) for s in range(3)}, {}, CPU)
    executor = Executor(split, program.layout, state=state, transport=transport, host=host)
    job = chain_job(program, prices.bytes_per_sample)
    found = [executor.run(program, job, record=True).timeline for _ in range(RUNS)]
    host.close()
    transport.close()
    return overheads, found[1:]


def making_s(count: int) -> float:
    """Return the seconds in which a stage that sleeps makes so many bytes to hand on."""
    seconds = []
    for _ in range(RUNS):
        start = time.perf_counter()
        torch.zeros(count, dtype=torch.uint8)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def lane(console: Console) -> None:
    """Compare simulated and measured seconds of steps whose copies go over a slow lane."""
    table = Table("copies", "simulated", "measured (median)", "deviation", "a copy", "a message", "posting")
    for name, (size, copies) in LANES.items():
        prices = LanePrices(((0.02 / SAMPLES, 0.02 / SAMPLES, 0.015 / SAMPLES),) * 3, bytes_per_sample=size)
        ranks = run_ranks(3, lane_runs, prices, 8, copies)
        prices = replace(prices, **vars(ranks[0][0]))
        simulated = simulate(lane_program(prices, 8, copies=copies)[0], prices)
        timelines = zip(*(found for _, found in ranks), strict=True)
        runs = [Timeline(tuple(event for part in parts for event in part.events)) for parts in timelines]
        measured_s, simulated_s = statistics.median(map(step_seconds, runs)), step_seconds(simulated)
        table.add_row(
            name,
            *map(format_seconds, (simulated_s, measured_s)),
            f"{measured_s / simulated_s - 1:+.1%}",
            format_seconds(prices.own_work_s(Evict(0, 0), 0, SAMPLES) if copies else 0.0),
            format_seconds(prices.latency_s),
            format_seconds(prices.posting_s),
        )
    console.print(table)


SECTIONS: dict[str, Section] = {
    "lane": lane,  # first: it forks, and this process has not computed yet
    "saved": saved,
    "checkpoint": checkpoints,
    "gradients": gradients,
    "cost": cost,
    "resident": resident,
}


def main() -> None:
    """Print the sections that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="*", default=list(SECTIONS), choices=list(SECTIONS))
    wanted = parser.parse_args().sections
    console = Console(width=140)
    torch.set_num_threads(1)
    for name, section in SECTIONS.items():
        if name in wanted:
            console.print(f"\n{name}")
            section(console)


if __name__ == "__main__":
    main()
