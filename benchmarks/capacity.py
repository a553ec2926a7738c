"""What fits: limits that are kept, optimizer state that is shared, and the largest batch of every policy.

    python -m benchmarks.capacity                     all sections
    python -m benchmarks.capacity bert gpt            some of them

    bert        the largest micro-batch of BERT-32 (Piper's profile; its path behind `--profile`), by simulation
    gpt         the same for a GPT on four CPU ranks; then every policy's largest plan is trained under the limit
    limit       a plan under a hard limit of its peak and 5 %: 20 steps; then keeping all, with the same layout
    peaks       foreseen and measured peaks of all tensors, policy by policy, on two ranks without a limit
    replicas    two replicas with and without shared optimizer state, under a hard limit
    table5      peaks of 1F1B and GPipe on three ranks for 4, 8 and 16 micro-batches (DAPPLE's Table 5)
    exhaustive  plans under a limit against the best of all cuts, warm-ups and choices of what is recomputed

Ranks are held to limits by RLIMIT_DATA (`runtime.memory.held_to`), from the second step on: after the first one torch
and the connections have what they take for themselves, which is no tensor. Limits are a plan's peak, 5 %, and 8 MiB
for what the process takes beside tensors: a thread alone has a stack of that size.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.fits import fit_module
from benchmarks.models import GPT
from benchmarks.ranks import run_ranks
from lightning_pipe import DappleStrategy
from lightning_pipe.capture import Request, capture_step, flatten
from lightning_pipe.core.cluster import Cluster, Device, Host, Link
from lightning_pipe.core.plan import Plan, StagePlan
from lightning_pipe.core.serial import from_yaml, save_yaml, to_yaml
from lightning_pipe.cost.activations import candidates
from lightning_pipe.cost.prices import Pricer
from lightning_pipe.errors import PipeError
from lightning_pipe.freed_memory import return_freed_memory
from lightning_pipe.planner.comparison.capacity import POLICIES, Largest, largest_batches
from lightning_pipe.planner.evaluation.evaluate import Judge, Judged
from lightning_pipe.planner.evaluation.resolve import places_of
from lightning_pipe.planner.problem import EXECUTED, Constraints, Problem
from lightning_pipe.planner.registry import propose
from lightning_pipe.profiler.optimizer import counted_optimizer
from lightning_pipe.profiler.timing.operators import profile_capture
from lightning_pipe.profiles.published import load_published
from lightning_pipe.runtime.memory import held_to, state_bytes
from lightning_pipe.strategy.parameters.stand_ins import Guarded
from lightning_pipe.units import format_bytes, format_seconds

CPU = torch.device("cpu")
SLACK, PROCESS = 1.05, 8 * 2**20  # of a plan's peak; bytes that are no tensors: Python, oneDNN, small heap blocks
PATIENCE_S = 900.0  # for one fit, on a busy machine
NVLINK, PCIE = Link(5e-6, 25e9), Link(1e-5, 12e9)


# --- one fit under a limit


@dataclass(frozen=True)
class Job:
    """A fit of a GPT on ranks that are held to a limit.

    Attributes:
        model: arguments of `GPT`.
        batch: samples of a batch.
        steps: optimizer steps.
        options: of the strategy.
        plan: text of a plan; "" lets the strategy make one.
        limit: bytes of every rank; None holds nobody.
    """

    model: dict[str, int]
    batch: int
    steps: int
    options: dict[str, Any]
    plan: str = ""
    limit: int | None = None


@dataclass(frozen=True)
class Done:
    """What became of a rank.

    Attributes:
        error: what it said, "" if it has trained.
        step_s: median seconds of the steps after the first.
        foreseen: the peak that its plan foresees.
        state: bytes of its optimizer's state.
        total: sum of its parameters, to compare fits by.
    """

    error: str
    step_s: float
    foreseen: int
    state: int
    total: float


class _Watching(pl.Callback):
    """Hold the process to a limit from the second batch on, and take times."""

    def __init__(self, limit: int | None, stack: contextlib.ExitStack) -> None:
        self._limit, self._stack = limit, stack
        self.marks: list[float] = []
        self.state = 0

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, _: Any, batch_idx: int) -> None:
        if self._limit is not None and batch_idx == 1:
            here = [p for p in module.parameters() if not isinstance(p, Guarded)]
            there = state_bytes(here, optimizers=trainer.optimizers)
            self._stack.enter_context(held_to(CPU, self._limit, there_bytes=there))

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.marks.append(time.perf_counter())
        self.state = state_bytes((), optimizers=trainer.optimizers)


def trained(job: Job) -> Done:
    """Fit on all ranks of this process group, and say what became of this one."""
    return_freed_memory(at_once=True)
    torch.manual_seed(0)
    module = GPT(**job.model)
    text = torch.randint(job.model["vocabulary"], (job.batch * job.steps, job.model["context"] + 1))
    data = DataLoader(TensorDataset(text), job.batch)
    with contextlib.ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        options = {"check": False, "costs": "counted", "deadline_s": 60.0, "keep_freed_memory": False, **job.options}
        if job.plan:
            path = Path(folder) / "plan.yaml"
            save_yaml(from_yaml(Plan, job.plan), path)
            options["plan"] = str(path)
        strategy = DappleStrategy(**options)
        watching = _Watching(job.limit, stack)
        error = ""
        try:
            fit_module(module, data, strategy, callback=watching)
        except PipeError as failure:
            error = f"{type(failure).__name__}: {failure}"
        except RuntimeError as failure:
            error = f"{type(failure).__name__}: {failure}"
    steps = [end - begin for begin, end in itertools.pairwise(watching.marks)]
    foreseen = strategy.foreseen[dist.get_rank()].peak_bytes if strategy.foreseen else 0
    total = 0.0 if error else sum(float(p.detach().double().sum()) for p in module.parameters())
    return Done(error, statistics.median(steps) if steps else 0.0, foreseen, watching.state, total)


def _said(done: list[Done]) -> str:
    """Return how a fit went: the first error, or that it has trained."""
    return next((one.error for one in done if "out of memory" in one.error), "") or next(
        (one.error for one in done if one.error), "trains"
    )


def _problem_of_gpt(
    model: dict[str, int], *, ranks: int, limit: int, microbatches: int, sizes: tuple[int, ...]
) -> Problem:
    """Return the problem of a GPT with measured operations, at these samples, and the state of its own optimizer."""
    module = GPT(**model).train()
    structure = flatten([torch.zeros(4, model["context"] + 1, dtype=torch.int64)])[1]
    capture = capture_step(Request(module, "training_step", structure, samples=4, batch_dim=0, device=CPU))
    profile = profile_capture(capture, device=CPU, sizes=sizes, cache=None, progress=False)
    profile = replace(profile, optimizer=counted_optimizer(module.configure_optimizers(), device=CPU))
    host = Host("here", (Device("cpu", limit),) * ranks, inside=Link(1e-4, 1e9), network=Link(1e-4, 1e9), swap=PCIE)
    constraints = Constraints(microbatches=microbatches, replicas=(1,) * ranks)
    return Problem(capture.graph, profile, Cluster((host,)), microbatches, constraints=constraints)


# --- sections


def bert(profile_path: str | None) -> None:
    """Print the largest micro-batch of BERT-32 for two sizes of memory."""
    if profile_path is None:
        print("bert: give the path of Piper's bert32 profile with --profile")
        return
    graph, profile = load_published(profile_path, optimizer_state=2.0)
    for gigabytes in (40, 16):
        host = Host("h", (Device("A100", gigabytes * 10**9),) * 4, inside=NVLINK, network=NVLINK, swap=PCIE)
        problem = Problem(graph, profile, Cluster((host,)), 8, constraints=Constraints(microbatches=8))
        print(f"\nBERT-32, {gigabytes} GB, 4 devices, 8 micro-batches, swap 12 GB/s")
        _print_reached(list(largest_batches(problem)))


def _print_reached(found: list[Largest]) -> None:
    sizes = {one.policy: one.size for one in found}
    for one in found:
        if one.trial is None:
            print(f"  {one.policy:14s} {0:5d}  {one.reason[:80]}")
            continue
        samples = one.trial.problem.samples
        peaks = " ".join(format_bytes(peak) for peak in one.trial.peaks)
        depths = one.trial.judged.plan.options.get("warmup", "")
        print(
            f"  {one.policy:14s} {one.size:5d}  {samples / one.trial.step_s:10.4g} samples/s simulated  "
            f"warm-up {depths!s:8s} peaks {peaks}"
        )
    for name in ("gpipe", "pipedream", "vpipe", "keep all"):
        if sizes.get(name):
            print(f"  planned / {name}: {sizes['planned'] / sizes[name]:.1f}")


GPT_SMALL = {"vocabulary": 500, "context": 64, "width": 64, "depth": 8}
GPT_RANKS, GPT_MICROBATCHES, GPT_LIMIT = 4, 4, 64 * 2**20


def _plan_gpt(model: dict[str, int], limit: int) -> list[tuple[str, int, str, float, int]]:
    """Return policy, micro-batch, plan, simulated seconds and peak; in a process of its own, which may run torch."""
    problem = _problem_of_gpt(model, ranks=GPT_RANKS, limit=limit, microbatches=GPT_MICROBATCHES, sizes=(2, 16))
    found = []
    for one in largest_batches(problem, planner="uniform"):
        plan = "" if one.trial is None else to_yaml(replace(one.trial.judged.plan, graph=""))
        seconds = 0.0 if one.trial is None else one.trial.step_s
        found.append((one.policy, one.size, plan, seconds, 0 if one.trial is None else max(one.trial.peaks)))
    return found


def gpt() -> None:
    """Find the largest batch of each policy for a GPT, and train each of them under the limit."""
    (found,) = run_ranks(1, _plan_gpt, GPT_SMALL, GPT_LIMIT)
    limit = round(GPT_LIMIT * SLACK) + PROCESS
    print(f"\nGPT {GPT_SMALL}, {GPT_RANKS} ranks, {GPT_MICROBATCHES} micro-batches, planned for ", end="")
    print(f"{format_bytes(GPT_LIMIT)}, held to {format_bytes(limit)}")
    sizes = {policy: size for policy, size, *_ in found}
    for policy, size, plan, _, peak in found:
        if not size:
            print(f"  {policy:14s} {size:5d}  nothing fits")
            continue
        batch = size * GPT_MICROBATCHES
        missing = [key for key in ("recompute", "offload") if f"{key}:" in plan and key not in EXECUTED]
        if missing:
            print(f"  {policy:14s} {size:5d}  foreseen {format_bytes(peak)}; {', '.join(missing)} is not run")
            continue
        done = run_ranks(GPT_RANKS, trained, Job(GPT_SMALL, batch, 3, {}, plan, limit), deadline_s=PATIENCE_S)
        step_s = max(one.step_s for one in done)
        rate = f"{batch / step_s:8.4g} samples/s measured" if step_s else ""
        print(f"  {policy:14s} {size:5d}  foreseen {format_bytes(peak)}  {rate}  {_said(done)[:160]}", flush=True)
    for name in ("gpipe", "pipedream", "vpipe", "keep all"):
        if sizes[name]:
            print(f"  planned / {name}: {sizes['planned'] / sizes[name]:.1f}")


def _plan_limit(model: dict[str, int], part: float) -> tuple[str, str, int, int]:
    """Return a plan within a part of what keeping all takes, the same layout keeping all, and both peaks."""
    free = _problem_of_gpt(model, ranks=2, limit=1 << 50, microbatches=4, sizes=(8, LIMIT_BATCH // 4))
    free = replace(free, samples=LIMIT_BATCH, constraints=replace(free.constraints, warmup="pa"))
    whole = propose(free, "uniform")[0]
    constraints = replace(free.constraints, memory_policies=frozenset(("recompute", "offload")))
    host = replace(free.cluster.hosts[0], devices=(Device("cpu", int(part * max(whole.peak_bytes))),) * 2)
    tight = replace(free, constraints=constraints, cluster=Cluster((host,)))
    found = propose(tight, "uniform")[0]
    stages = tuple(replace(stage, recompute=(), offload=()) for stage in found.plan.stages)
    keeping = replace(found.plan, stages=stages)
    kept = Judge(free).judge(keeping)
    texts = (to_yaml(replace(plan, graph="")) for plan in (found.plan, keeping))
    return (*texts, max(found.peak_bytes), max(kept.peak_bytes))


LIMIT_MODEL = {"vocabulary": 500, "context": 64, "width": 64, "depth": 8}
LIMIT_BATCH = 192


def limit() -> None:
    """Train a plan under its own peak and 5 %, then the same layout with everything kept."""
    ((planned, keeping, peak, kept),) = run_ranks(1, _plan_limit, LIMIT_MODEL, 0.6)
    held = round(peak * SLACK) + PROCESS
    print(f"\nGPT {LIMIT_MODEL}, 2 ranks, batches of {LIMIT_BATCH}: plan foresees {format_bytes(peak)}, ", end="")
    print(f"keeping all {format_bytes(kept)}; held to {format_bytes(held)}")
    for name, plan, steps in (("planned", planned, 21), ("keep all", keeping, 3)):
        if any(f"{key}:" in plan and key not in EXECUTED for key in ("recompute", "offload")):
            print(f"  {name}: not run")
            continue
        done = run_ranks(2, trained, Job(LIMIT_MODEL, LIMIT_BATCH, steps, {}, plan, held), deadline_s=PATIENCE_S)
        print(f"  {name}, {steps - 1} steps: {_said(done)[:700]}", flush=True)


PEAK_MODEL = {"vocabulary": 500, "context": 64, "width": 64, "depth": 8}
PEAK_RANKS, PEAK_COUNT, PEAK_SAMPLES = 2, 4, 24
PEAK_POLICIES = ("keep all", "gpipe", "recompute all", "offload all")


def _plan_peaks(model: dict[str, int]) -> list[tuple[str, str]]:
    """Return policies and their plans at one size."""
    problem = _problem_of_gpt(model, ranks=PEAK_RANKS, limit=1 << 40, microbatches=PEAK_COUNT, sizes=(PEAK_SAMPLES,))
    problem = replace(problem, samples=PEAK_COUNT * PEAK_SAMPLES)
    pricer = Pricer(problem.graph, profile=problem.profile, cluster=problem.cluster)
    trials = [(name, POLICIES[name](problem, pricer, "uniform")) for name in PEAK_POLICIES]
    return [(name, to_yaml(replace(trial.judged.plan, graph=""))) for name, trial in trials]


def _peaks(plan: str) -> list[tuple[int, int]]:
    """Return the peaks of all ranks, as the run foresees them from its own measurements and as it measures them."""
    torch.manual_seed(0)
    batch = PEAK_COUNT * PEAK_SAMPLES
    text = torch.randint(PEAK_MODEL["vocabulary"], (4 * batch, PEAK_MODEL["context"] + 1))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.yaml"
        save_yaml(from_yaml(Plan, plan), path)
        strategy = DappleStrategy(plan=str(path), check=False, cache="off", measure_memory=True, deadline_s=PATIENCE_S)
        fit_module(GPT(**PEAK_MODEL), DataLoader(TensorDataset(text), batch), strategy)
    found = strategy.comparison.memory if strategy.comparison is not None else ()
    return [(round(one.total.predicted), round(one.total.measured)) for one in found]


def peaks() -> None:
    """Compare the peaks of all tensors that plans foresee with those that are measured."""
    (found,) = run_ranks(1, _plan_peaks, PEAK_MODEL)
    print(f"\nGPT {PEAK_MODEL}, {PEAK_RANKS} ranks, {PEAK_COUNT} micro-batches of {PEAK_SAMPLES}: peaks by rank")
    for policy, plan in found:
        both = run_ranks(PEAK_RANKS, _peaks, plan, deadline_s=PATIENCE_S)[0]
        shown = (f"{format_bytes(a)} foreseen, {format_bytes(b)} ({b / a - 1:+.1%})" for a, b in both)
        print(f"  {policy:14s} {'   '.join(shown)}", flush=True)


REPLICA_MODEL = {"vocabulary": 2000, "context": 8, "width": 512, "depth": 6}


def replicas() -> None:
    """Train two replicas of one stage with and without shared optimizer state."""

    def done(how: str, limit: int | None, steps: int) -> list[Done]:
        options = {"layout": "2", "microbatches": 1, "shard_optimizer": how}
        return run_ranks(2, trained, Job(REPLICA_MODEL, 8, steps, options, limit=limit))

    apart, shared = done("off", None, 5), done("on", None, 5)
    held = round(SLACK * max(one.foreseen for one in shared)) + PROCESS
    print(f"\nGPT {REPLICA_MODEL}, two replicas of one stage")
    for name, found in (("each its own", apart), ("shared", shared)):
        print(
            f"  {name:14s} foreseen {format_bytes(found[0].foreseen)}, optimizer state "
            f"{' '.join(format_bytes(one.state) for one in found)}, step {format_seconds(found[0].step_s)}"
        )
    print(f"  parameters after 5 steps are the same: {len({one.total for one in (*apart, *shared)}) == 1}")
    print(f"  shared, held to {format_bytes(held)}, 20 steps: {_said(done('on', held, 21))[:300]}")
    print(f"  each its own, held to it: {_said(done('off', held, 3))[:300]}")


def table5() -> None:
    """Measure the peaks of 1F1B and GPipe on three ranks while the number of micro-batches grows."""
    print("\nDAPPLE, Table 5: measured peak of tensors above the state of every rank, micro-batches of 8 samples")
    for schedule, count in itertools.product(("1f1b", "gpipe"), (4, 8, 16)):
        peaks = run_ranks(3, _peak_of, schedule, count)
        print(f"  {schedule:6s} M = {count:2d}  {'  '.join(format_bytes(peak) for peak in peaks)}", flush=True)


TABLE5_MODEL = {"vocabulary": 500, "context": 64, "width": 128, "depth": 6}


def _peak_of(schedule: str, count: int) -> int:
    """Return the most bytes that this rank's stages hold in a step."""
    torch.manual_seed(0)
    text = torch.randint(500, (8 * count * 3, TABLE5_MODEL["context"] + 1))
    strategy = DappleStrategy(
        planner="uniform",
        schedule=schedule,
        warmup="pa" if schedule == "1f1b" else None,
        microbatches=count,
        costs="counted",
        check=False,
    )
    held: list[int] = []
    fit_module(GPT(**TABLE5_MODEL), DataLoader(TensorDataset(text), 8 * count), strategy, callback=_Peaks(held))
    return max(held)


class _Peaks(pl.Callback):
    """Measure how far the memory of tensors rises in the second training step."""

    def __init__(self, found: list[int]) -> None:
        self._found = found

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        from lightning_pipe.runtime.memory import PeakMemory

        self._peak = PeakMemory(CPU)
        if batch_idx == 1:
            self._peak.__enter__()

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self._peak.__exit__(None, None, None)
            self._found.append(self._peak.bytes)


def exhaustive() -> None:
    """Compare plans under a limit with the best of everything that could have been chosen, on small problems."""
    ratios = []
    for seed in range(EXHAUSTIVE_PROBLEMS):
        problem = _any_problem(random.Random(seed))
        best = min(_everything(problem), key=lambda one: one.rank(problem.cluster))
        if best.overflow(problem.cluster) > 0:
            continue
        ratios.append(propose(problem, "auto")[0].step_s / best.step_s)
    within = sum(ratio <= 1.03 for ratio in ratios)
    print(
        f"\nPlans under a limit on {len(ratios)} chains of {EXHAUSTIVE_LAYERS} layers, two devices, against the best of"
    )
    print("all cuts, warm-ups and choices of what is recomputed: step time, over the best")
    print(f"  median {statistics.median(ratios):.3f}, worst {max(ratios):.3f}, within 3 %: {within}")


EXHAUSTIVE_PROBLEMS, EXHAUSTIVE_LAYERS, EXHAUSTIVE_COUNT = 24, 6, 4


def _any_problem(draw: random.Random) -> Problem:
    """Return a chain of layers on two devices, with memory between half of what keeping all takes and all of it."""
    line = "node{0} -- Layer -- " + ", ".join(
        f"{name}={{{place}}}"
        for place, name in enumerate(
            ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size"), start=1
        )
    )
    layers = [
        line.format(k, draw.randint(2, 9), draw.randint(4, 18), draw.randint(1, 9) * 10**6, draw.randint(1, 9) * 10**5)
        for k in range(EXHAUSTIVE_LAYERS)
    ]
    links = [f"\tnode{k} -- node{k + 1}" for k in range(EXHAUSTIVE_LAYERS - 1)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "chain-pbs-4.txt"
        path.write_text("\n".join([*layers, *links]) + "\n", encoding="utf-8")
        graph, profile = load_published(path, optimizer_state=2.0)
    constraints = Constraints(EXHAUSTIVE_COUNT, (1, 1), "1f1b", memory_policies=frozenset(("recompute",)))

    def asked(memory: int) -> Problem:
        host = Host("h", (Device("x", memory),) * 2, inside=NVLINK, network=NVLINK)
        return Problem(graph, profile, Cluster((host,)), 4 * EXHAUSTIVE_COUNT, constraints=constraints)

    whole = propose(asked(1 << 50), "uniform")[0]
    return asked(int(draw.uniform(0.5, 0.95) * max(whole.peak_bytes)))


def _everything(problem: Problem) -> Iterator[Judged]:
    """Yield every plan of two stages: each cut, each warm-up, each choice of what both recompute."""
    judge, graph = Judge(problem), problem.graph
    for cut, depth in itertools.product(range(1, len(graph.nodes)), range(1, EXHAUSTIVE_COUNT + 1)):
        stages = (StagePlan("", (0,)), StagePlan(graph.nodes[cut].name, (1,)))
        works = judge.pricer.works((cut,))
        choices = [
            [
                places_of(graph, work, chosen)
                for memories in [[c.memory for c in candidates(graph, work) if c.is_remakeable]]
                for count in range(len(memories) + 1)
                for chosen in itertools.combinations(memories, count)
            ]
            for work in works
        ]
        for given_up in itertools.product(*choices):
            parts = zip(stages, given_up, strict=True)
            recomputing = tuple(replace(stage, recompute=places) for stage, places in parts)
            yield judge.judge(Plan(recomputing, EXHAUSTIVE_COUNT, "1f1b", {"warmup": f"{depth},1"}))


SECTIONS: dict[str, Callable[[], None]] = {
    "gpt": gpt,
    "limit": limit,
    "peaks": peaks,
    "replicas": replicas,
    "table5": table5,
    "exhaustive": exhaustive,
}


def main() -> None:
    """Print the sections that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", help=f"some of bert, {', '.join(SECTIONS)}; all by default")
    parser.add_argument("--profile", help="path of Piper's profile of BERT-32")
    asked = parser.parse_args()
    for name in asked.sections or ["bert", *SECTIONS]:
        if name == "bert":
            bert(asked.profile)
        else:
            SECTIONS[name]()


if __name__ == "__main__":
    main()
