"""Unequal replication on three ranks: a module of which one part is twice as expensive as the rest.

    python -m benchmarks.replication                      # 5 rounds of three fits, 10 steps each; about 10 minutes
    python -m benchmarks.replication --rounds 2 --steps 6
    python -m benchmarks.replication --elsewhere          # the dear product takes time, but no core

The module reads 160 tokens per sample. Nearly all of its first part is one matrix product, which no cut divides and
whose parameters are few; its second part has 150 MiB of parameters and little to compute, for it sees one vector per
sample. So one rank per stage waits for the first part, data parallel training of everything sums all the gradients, and
two replicas of the first part beside one of the second do neither. Nobody tells the strategy:

    auto        DappleStrategy()                    planner and costs as they are by default
    1-1-1       DappleStrategy(layout="1-1-1")      the best plan without replicas
    3           DappleStrategy(layout="3")          data parallel

Every fit measures and plans again (`cache="off"`), and fits of the three take turns, since machines change their speed;
a ratio is formed within each round. Measured is the time between the ends of two batches as the trainer sees it, the
median over the steps of a fit; predicted is the program's time, without what Lightning does between two batches.

Ranks are processes with one thread each. Where there are fewer cores than ranks, they compete: most of all where all
ranks compute at once, so with replicas (2-1 and 3), and little in 1-1-1, whose two light stages leave a core to the
heavy one. Replicas gain less than they would on three devices, then; and as ranks measure together, plans without
replicas are predicted too slow. With `--elsewhere` the dear product is computed, so to say, on a device of its own: it
sleeps for so many seconds per sample, in forward and in both halves of the backward. All else is as before: measured,
planned, computed, sent and summed on the cores of this machine.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from benchmarks.fits import fit_module
from benchmarks.models import Model, Trained, loader
from benchmarks.prediction import Clock, noise
from benchmarks.ranks import run_ranks
from lightning_pipe import DappleStrategy

RANKS = 3
BATCH = 48
WARM_UP = 3  # batches that are not timed: in the first the optimizer makes its state, the second is slow after it
TOKENS, FEATURES, WIDTH = 160, 64, 1024
ELSEWHERE_S = 8e-3  # of each third (F, I, W) of the dear product, per sample
CASES: dict[str, dict[str, str]] = {"auto": {}, "1-1-1": {"layout": "1-1-1"}, "3": {"layout": "3"}}


@torch.library.custom_op("replication::scale", mutates_args=())
def scale(x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Multiply features by factors, slowly."""
    time.sleep(len(x) * ELSEWHERE_S)
    return x * factors


@torch.library.custom_op("replication::scale_factors", mutates_args=())
def scale_factors(x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the factors, slowly."""
    time.sleep(len(x) * ELSEWHERE_S)
    return (x * gradient).flatten(0, -2).sum(0)


@scale.register_fake
def _(x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@scale_factors.register_fake
def _(x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[-1])


def _keep(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, factors = ctx.saved_tensors
    return scale(gradient, factors), scale_factors(x, gradient)


scale.register_autograd(_backward, setup_context=_keep)


class Elsewhere(nn.Module):
    """Stand for a product that another device computes: few parameters, no work for the cores, and time."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = scale(x, self.factors)
        return scaled


class Unbalanced(Trained):
    """Classify texts: one dear product over all tokens, then many parameters over their mean."""

    def __init__(self, wide: nn.Module, *, hidden: int = 2048, depth: int = 10, classes: int = 10) -> None:
        super().__init__()
        self.lift, self.wide = nn.Linear(FEATURES, WIDTH), wide
        self.layers = nn.ModuleList(nn.Linear(WIDTH if layer == 0 else hidden, hidden) for layer in range(depth))
        self.head = nn.Linear(hidden, classes)

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        tokens, labels = batch
        x = self.wide(torch.relu(self.lift(tokens))).mean(1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.cross_entropy(self.head(x), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def model(*, elsewhere: bool) -> Model:
    """Return the module with its batches; elsewhere one token is as slow as all others together."""
    tokens = 1 if elsewhere else TOKENS
    return Model(
        lambda: Unbalanced(Elsewhere() if elsewhere else nn.Linear(WIDTH, WIDTH)),
        lambda n: (torch.randn(n, tokens, FEATURES), torch.randint(10, (n,))),
    )


@dataclass(frozen=True)
class Planned:
    """What a strategy decided: ranks per stage, where stages begin, micro-batches, and the seconds it predicted."""

    layout: str
    cuts: tuple[str, ...]
    microbatches: int
    predicted_s: float


@dataclass(frozen=True)
class Fitted:
    """One fit: its plan (None for one process), the median seconds between two batches, and all losses."""

    planned: Planned | None
    step_s: float
    losses: tuple[float, ...]


class Course(Clock):
    """Keep the losses too."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *rest: Any) -> None:
        super().on_train_batch_end(trainer, module, outputs, *rest)
        self.losses.append(float(outputs["loss"]))


def fitted(trained: Model, strategy: DappleStrategy | None, steps: int) -> Fitted:
    """Fit with a strategy, or in one process; on all ranks. What the fit was like is for rank 0."""
    data = loader(trained, batch_size=BATCH, batches=WARM_UP + steps)
    torch.manual_seed(0)
    course = Course()
    fit_module(trained.make(), data, strategy or "auto", callback=course)
    seconds = [later - earlier for earlier, later in itertools.pairwise(course.ends[WARM_UP - 1 :])]
    planned = planned_by(strategy) if strategy is not None and dist.get_rank() == 0 else None
    return Fitted(planned, statistics.median(seconds), tuple(course.losses))


def planned_by(strategy: DappleStrategy) -> Planned:
    """Return what a strategy has decided; on rank 0 after a fit."""
    plan, found = strategy.plan, strategy.comparison
    assert plan is not None and found is not None, "planned and compared on rank 0"
    layout = plan.replicas_text
    return Planned(layout, tuple(stage.at for stage in plan.stages[1:]), plan.microbatches, found.step.predicted)


def rounds(trained: Model, count: int, steps: int) -> list[dict[str, Fitted]]:
    """Fit all cases so many times, in turn; on all ranks together."""
    return [
        {name: fitted(trained, DappleStrategy(cache="off", **options), steps) for name, options in CASES.items()}
        for _ in range(count)
    ]


def apart(found: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest relative difference of losses."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def fit_lines(found: Sequence[dict[str, Fitted]], single: Fitted) -> Iterator[str]:
    """Yield a line per fit."""
    heads = (
        "round",
        f"{'case':6}",
        f"{'layout':7}",
        f"{'stages begin at':24}",
        " m",
        " predicted",
        "  measured",
        " losses",
    )
    yield " ".join(heads)
    for number, (name, fit) in ((n, item) for n, of_round in enumerate(found) for item in of_round.items()):
        plan = fit.planned
        assert plan is not None, "made by the strategy"
        yield (
            f"{number:5} {name:6} {plan.layout:7} {', '.join(plan.cuts):24} {plan.microbatches:2} "
            f"{1e3 * plan.predicted_s:7.0f} ms {1e3 * fit.step_s:7.0f} ms  {apart(fit.losses, single.losses):.1e}"
        )


def summary(found: Sequence[dict[str, Fitted]], single: Fitted) -> Iterator[str]:
    """Yield medians over the rounds, and ratios within rounds."""
    layouts = [fit.planned.layout for of_round in found if (fit := of_round["auto"]).planned is not None]
    yield f"auto picked 2-1 in {layouts.count('2-1')} of {len(layouts)} fits"
    for name in CASES:
        steps = [of_round[name].step_s for of_round in found]
        predicted = [fit.planned.predicted_s for of_round in found if (fit := of_round[name]).planned is not None]
        yield (
            f"{name:6} step: median {1e3 * statistics.median(steps):.0f} ms of {1e3 * min(steps):.0f} to "
            f"{1e3 * max(steps):.0f} ms; predicted {1e3 * statistics.median(predicted):.0f} ms"
        )
    yield f"one process, alone: {1e3 * single.step_s:.0f} ms"
    for name in (name for name in CASES if name != "auto"):
        ratios = [of_round["auto"].step_s / of_round[name].step_s for of_round in found]
        medians = [statistics.median(of_round[case].step_s for of_round in found) for case in ("auto", name)]
        yield (
            f"auto over {name}: {medians[0] / medians[1]:.2f} of medians; within rounds {min(ratios):.2f} to "
            f"{max(ratios):.2f}, faster in {sum(ratio < 1 for ratio in ratios)} of {len(ratios)}"
        )
    largest = max(apart(fit.losses, single.losses) for of_round in found for fit in of_round.values())
    yield f"losses differ from those of one process by at most {largest:.1e} (relative, float32)"


def main() -> None:
    """Print a line per fit, and what follows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="fits of every case, each with a profile of its own")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a fit")
    parser.add_argument("--elsewhere", action="store_true", help="the dear product takes time, but no core")
    args = parser.parse_args()
    torch.set_num_threads(1)
    before, trained = noise(), model(elsewhere=args.elsewhere)
    single: Fitted = run_ranks(1, fitted, trained, None, args.steps, deadline_s=600)[0]
    found: list[dict[str, Fitted]] = run_ranks(RANKS, rounds, trained, args.rounds, args.steps, deadline_s=3600)[0]
    print("\n".join((*fit_lines(found, single), "", *summary(found, single))))
    print(f"noise of this machine (spread of a matrix product's times): {before:.1%} before, {noise():.1%} after")
    print(f"load on its {os.cpu_count()} cores in the last minute, with the {RANKS} ranks: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
