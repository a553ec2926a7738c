"""Profiles against stage functions: accuracy of their predictions, and cost of measuring them.

    python -m benchmarks.profiling accuracy                  # predicted over measured F, I and W of stages, per model
    python -m benchmarks.profiling accuracy --models lstm --rounds 9 -v
    python -m benchmarks.profiling accuracy --compiled       # the same of compiled stages, also from plain times
    python -m benchmarks.profiling depth                     # a GPT of 12 and of 96 layers
    python -m benchmarks.profiling large                     # 7e9 parameters, on the meta device; takes minutes

Stages are those of random cuts. Their functions are run as the runtime runs them, with what belongs to them (gradients
are added to those of the parameters, buffers are overwritten), on real parameters, at the numbers of samples that were
profiled and at others. The runtime's own work (`Profile.call_s`) is no part of either side.

A machine that others use runs at several speeds, for seconds or minutes at a time. So profile and stages are measured
in turn, several times, and of each the fastest round counts; a round's time of a function is its median.

Memory that is freed is kept, as ranks keep it.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import models
from benchmarks.models import GPT, Model, Trained
from benchmarks.prediction import noise
from lightning_pipe.capture import Capture, Request, capture_step, flatten
from lightning_pipe.capture.stages.compiled_stages import CompiledStages, HalfKind
from lightning_pipe.capture.steps.stage_program import Half, RandomKey, StageProgram
from lightning_pipe.core.graph import Graph
from lightning_pipe.core.profile import Profile
from lightning_pipe.cost.stage import stage_works
from lightning_pipe.freed_memory import freed_memory_kept
from lightning_pipe.profiler.timing.operators import Operators, profile_capture
from lightning_pipe.units import format_bytes, format_seconds

CPU = torch.device("cpu")
PROFILED, OTHERS = (1, 4), (2, 6)  # numbers of samples
RUNS = 8  # of a function in a round; the first two are not counted
LEAST_S = 1e-4  # shorter functions are not compared
KINDS: tuple[HalfKind, ...] = ("F", "I", "W")
KEY = RandomKey(seed=0, step=0, microbatch=0)
LARGE = {"vocabulary": 50304, "context": 128, "width": 2496, "depth": 96}

Name = tuple[int, tuple[int, ...], int, str]  # samples, cuts, stage, F, I or W
Seconds = dict[Name, list[float]]  # by round


class Recurrent(Trained):
    """Predict the next token by two recurrent layers: many short operations."""

    def __init__(self, *, vocabulary: int = 1000, width: int = 128) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.layers = nn.LSTM(width, width, num_layers=2, batch_first=True)

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        text = batch[0]
        return F.cross_entropy(
            self.head(self.layers(self.tokens(text[:, :-1]))[0]).flatten(0, 1), text[:, 1:].flatten()
        )


ALL = {**models.ALL, "lstm": Model(Recurrent, lambda n: (torch.randint(1000, (n, 25)),))}


class Chain:
    """The stages of one cut, run one after the other on the parameters of a module."""

    def __init__(
        self, capture: Capture, module: pl.LightningModule, cuts: tuple[int, ...], *, compiled: Sequence[int]
    ) -> None:
        stages = CompiledStages(capture.split(cuts), CPU, trials=False)
        self._capture, self._programs = capture, stages.split.stages
        for samples, s, kind in itertools.product(compiled, range(len(self._programs)), KINDS):
            stages.compile(s, kind, samples)
        self._state = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)

    @torch.no_grad()
    def run(self, leaves: Sequence[torch.Tensor], samples: int) -> Iterator[tuple[int, str, float]]:
        """Run a micro-batch through all stages; yield (stage, F or I or W, seconds)."""
        leaves, _ = self._capture.with_totals(
            list(leaves), cut=(True,) * len(leaves), sizes=(samples,), buffers=self._state
        )
        held: list[dict[str, Any]] = [
            {name: leaves[index] for name, index in program.leaves.items()} for program in self._programs
        ]
        for s, program in enumerate(self._programs):
            seconds = self._half(program, program.forward, held[s], samples)
            yield s, "F", seconds + self._overwrite(program, held[s])
            self._pass_on(program, held, "F", keep=(program.input_grad, program.weight_grad))
        for s, program in reversed(list(enumerate(self._programs))):
            early = set(program.input_grad.outputs) if program.input_grad is not None else set()
            due = {n for n in program.gradients if n in early}
            seconds = self._half(program, program.input_grad, held[s], samples)
            yield s, "I", seconds + self._add(program, held[s], due)
            self._pass_on(program, held, "B", keep=(program.weight_grad,))
            seconds = self._half(program, program.weight_grad, held[s], samples)
            yield s, "W", seconds + self._add(program, held[s], set(program.gradients) - due)
            held[s].clear()

    def _half(self, program: StageProgram, half: Half | None, held: dict[str, Any], samples: int) -> float:
        if half is None:
            return 0.0
        inputs = [self._input(name, program, held) for name in half.inputs]
        started = time.perf_counter()
        outputs = half.run(samples, KEY, *inputs)
        seconds = time.perf_counter() - started
        held.update(zip(half.outputs, outputs, strict=True))
        return seconds

    def _input(self, name: str, program: StageProgram, held: Mapping[str, Any]) -> Any:
        if name in held:
            return held[name]
        own = {**program.parameters, **program.buffers}
        return self._state[own[name]] if name in own else torch.ones(())

    def _overwrite(self, program: StageProgram, held: Mapping[str, Any]) -> float:
        started = time.perf_counter()
        for name, value in program.mutations.items():
            self._state[name].copy_(held[value])
        return time.perf_counter() - started

    def _add(self, program: StageProgram, held: Mapping[str, Any], due: set[str]) -> float:
        started = time.perf_counter()
        for name, parameter in program.gradients.items():
            if name in due:
                self._state[parameter].grad.add_(held[name])
        return time.perf_counter() - started

    def _pass_on(
        self, program: StageProgram, held: list[dict[str, Any]], direction: str, *, keep: tuple[Half | None, ...]
    ) -> None:
        """Hand values to the stages that read them, and forget what is no longer needed."""
        own = held[program.stage]
        for (way, target), names in program.sends.items():
            if way == direction:
                held[target].update({name: own[name] for name in names})
        later = {name for half in keep if half is not None for name in half.inputs} | set(program.gradients)
        later |= {name for (way, _), names in program.sends.items() if way == "B" for name in names}
        for name in [name for name in own if name not in later]:
            del own[name]


@dataclass
class Measured:
    """Seconds of the functions of one model, predicted and measured, by round; and how long profiling took.

    Those that are predicted are also from the times of uncompiled stages, if stages are compiled.
    """

    predicted: Seconds
    plain: Seconds
    measured: Seconds
    profiling_s: list[float]

    def errors(self, predicted: Seconds) -> dict[Name, float]:
        """Return predicted over measured, less 1, of all functions that take long enough."""
        measured = {name: min(times) for name, times in self.measured.items()}
        return {n: min(predicted[n]) / own - 1 for n, own in measured.items() if own > LEAST_S}


def captured(module: pl.LightningModule, batch: tuple[torch.Tensor, ...]) -> Capture:
    """Capture the training step."""
    tensors, structure = flatten(list(batch))
    return capture_step(Request(module, "training_step", structure, samples=len(tensors[0])))


def compare(model: Model, rounds: int, *, compiled: bool) -> Measured:
    """Measure profile and stages in turn."""
    torch.manual_seed(0)
    module = model.make().train()
    capture = captured(module, model.batch(4))
    places = [k for k in range(1, len(capture.graph.nodes)) if k not in capture.graph.uncuttable]
    dice = random.Random(3)
    cuts = [(), *(tuple(sorted(dice.sample(places, count))) for count in ((2,) if compiled else (1, 2, 2, 3)))]
    sizes = (*PROFILED, *OTHERS)
    chains = {cut: Chain(capture, module, cut, compiled=sizes if compiled else ()) for cut in cuts}
    found = Measured(defaultdict(list), defaultdict(list), defaultdict(list), [])
    for _ in range(rounds):
        started = time.perf_counter()
        profile = profile_capture(capture, device=CPU, sizes=PROFILED, compiled=compiled)
        found.profiling_s.append(time.perf_counter() - started)
        plain = profile_capture(capture, device=CPU, sizes=PROFILED) if compiled else profile
        for samples in sizes:
            for cut, chain in chains.items():
                for name, seconds in measured(chain, model.batch(samples), samples, cut).items():
                    found.measured[name].append(seconds)
                for costs, seconds_of in ((profile, found.predicted), (plain, found.plain)):
                    for name, seconds in predicted(capture.graph, costs, samples, cut).items():
                        seconds_of[name].append(seconds)
    return found


def measured(chain: Chain, leaves: Sequence[torch.Tensor], samples: int, cut: tuple[int, ...]) -> dict[Name, float]:
    """Return the median seconds of every function."""
    times: dict[Name, list[float]] = defaultdict(list)
    gc.disable()
    for _ in range(RUNS):
        for stage, kind, seconds in chain.run(leaves, samples):
            times[samples, cut, stage, kind].append(seconds)
    gc.enable()
    return {name: statistics.median(seconds[2:]) for name, seconds in times.items()}


def predicted(graph: Graph, profile: Profile, samples: int, cut: tuple[int, ...]) -> dict[Name, float]:
    """Return the sums of the operations of every function."""
    return {
        (samples, cut, stage, kind): sum(profile.operation_s(o, samples) for o in half.operations)
        for stage, work in enumerate(stage_works(graph, cut))
        for kind, half in (("F", work.forward), ("I", work.input_grad), ("W", work.weight_grad))
    }


@freed_memory_kept()
def accuracy(models: Sequence[str], rounds: int, *, compiled: bool, verbose: bool) -> None:
    print(f"noise (spread of a matrix product's times): {noise():.1%}")
    print(f"{'model':8} {'samples':9} {'functions':>9} {'median':>7} {'p90':>6} {'worst':>6}   mean error")
    for model in models:
        found = compare(ALL[model], rounds, compiled=compiled)
        errors = found.errors(found.predicted)
        for what, sizes in (("profiled", PROFILED), ("others", OTHERS)):
            own = {name: error for name, error in errors.items() if name[0] in sizes}
            print(f"{model:8} {what:9} {summary(own)}")
        if compiled:
            print(f"{'':8} {'plain':9} {summary(found.errors(found.plain))}")
        print(f"{'':8} profiled in {format_seconds(statistics.median(found.profiling_s))}")
        if verbose:
            for name, error in sorted(errors.items()):
                times = format_seconds(min(found.predicted[name])), format_seconds(min(found.measured[name]))
                print(
                    f"    {name[0]} samples, cuts {name[1]}, {name[3]}{name[2]}: {times[0]} / {times[1]} {error:+.1%}"
                )
    print(f"noise afterwards: {noise():.1%}")


def summary(errors: Mapping[Name, float]) -> str:
    """Return number, median, ninth decile and largest of the errors, and their means by samples and function."""
    sizes = sorted(abs(error) for error in errors.values())
    groups: dict[str, list[float]] = defaultdict(list)
    for (samples, _, _, kind), error in sorted(errors.items()):
        groups[f"{samples}{kind}"].append(error)
    means = " ".join(f"{group} {statistics.mean(own):+.0%}" for group, own in groups.items())
    middle, high = statistics.median(sizes), sizes[int(0.9 * len(sizes))]
    return f"{len(sizes):9} {middle:7.1%} {high:6.1%} {sizes[-1]:6.1%}   {means}"


def resident_bytes() -> int:
    """Return the memory that this process uses."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


def cost(options: Mapping[str, int], sizes: tuple[int, ...]) -> float:
    """Print what capturing and profiling a GPT from meta parameters costs, and return the seconds of profiling."""
    with torch.device("meta"):
        module = GPT(**options).train()
    started, before = time.perf_counter(), resident_bytes()
    capture = captured(module, (torch.zeros(4, options["context"] + 1, dtype=torch.long),))
    capture_s, started = time.perf_counter() - started, time.perf_counter()
    operators = Operators(capture, device=CPU, sizes=sizes)
    prepare_s = time.perf_counter() - started
    timings = operators.measure({}, progress=True)
    profile = operators.assemble(timings)
    profile_s = time.perf_counter() - started
    step_s = sum(seconds[-1] for seconds in profile.seconds)
    print(
        f"{options['depth']} layers, {sum(p.numel() for p in module.parameters()):.2e} parameters "
        f"({format_bytes(sum(p.nbytes for p in module.parameters()))}): captured in {format_seconds(capture_s)}, "
        f"profiled in {format_seconds(profile_s)} ({format_seconds(prepare_s)} of it text), "
        f"{len(capture.graph.operations)} operations, {len(timings)} measurements; memory "
        f"{format_bytes(before)} before, {format_bytes(resident_bytes())} after; "
        f"a step on {sizes[-1]} samples takes {format_seconds(step_s)}"
    )
    return profile_s


@freed_memory_kept()
def depth() -> None:
    few, many = (cost({"vocabulary": 1000, "context": 64, "width": 256, "depth": d}, (1, 2, 4)) for d in (12, 96))
    print(f"96 layers take {many / few:.2f} times as long to profile as 12 (asked: less than 1.5)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["accuracy", "depth", "large"])
    parser.add_argument("--models", nargs="+", default=list(ALL), choices=list(ALL))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compiled", action="store_true", help="compile stages and windows, two cuts each")
    parser.add_argument("-v", "--verbose", action="store_true", help="print every function")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.what == "accuracy":
        accuracy(args.models, args.rounds, compiled=args.compiled, verbose=args.verbose)
    elif args.what == "depth":
        depth()
    else:
        cost(LARGE, (1, 2))


if __name__ == "__main__":
    main()
