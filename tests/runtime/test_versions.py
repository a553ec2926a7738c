"""Rounds on executors: losses and weights are those of recursions and of autograd that know nothing of programs.

A chain of numbers is compared with the recursion of its policy, modules with autograd that is given, for every
micro-batch, the weights that its stages read. All ranks run in one thread.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from lightning_pipe.capture.capture import Capture, Request, capture_step
from lightning_pipe.capture.steps.batch import flatten
from lightning_pipe.capture.steps.stage_program import Split
from lightning_pipe.core.plan import Plan, StagePlan
from lightning_pipe.core.program import Layout, VerifiedProgram
from lightning_pipe.errors import PipelineError
from lightning_pipe.planner.memory.policies import policies_of
from lightning_pipe.runtime.executor import Executor, run_together
from lightning_pipe.runtime.job import BatchInput
from lightning_pipe.runtime.stage import State
from lightning_pipe.runtime.transport.local import Hub
from lightning_pipe.runtime.waiting import drive_together
from lightning_pipe.runtime.weights.corrections import Correction
from lightning_pipe.runtime.weights.prediction import Prediction
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.verification.verify import verify
from lightning_pipe.schedule.weights import POLICIES, VersionOptions
from models.number_chain import (
    MOMENTUM,
    RATE,
    SIZE,
    Batch,
    Drains,
    Gates,
    Numbers,
    numbers,
    recursion,
    round_of_forward,
)

CPU, WIDTH = torch.device("cpu"), 4
PLAIN = VersionOptions()


@dataclass
class Fit:
    """Executors of all ranks in one thread, an optimizer for each."""

    executors: Sequence[Executor]
    steps: Sequence[torch.optim.Optimizer]
    split: Split
    loss: str
    policy: str
    batch: Callable[[int], Batch]
    microbatches: int
    options: VersionOptions

    def run(self, rounds: int, drains: Drains) -> list[float]:
        """Train so many batches and return their losses."""
        policy, layout, enters = self.options.of(POLICIES[self.policy]), self.executors[0].layout, tuple[int, ...]()
        losses, programs = [], dict[object, VerifiedProgram]()
        for t in range(rounds):
            last = min([d for d, given_up in drains.items() if not given_up and d >= t], default=rounds - 1)
            following = (self.microbatches,) * (last - t)
            seam = policy.seam(layout, self.microbatches, enters=enters, following=following)
            if seam not in programs:
                sizes = (SIZE,) * (seam.batch + max(seam.leaves))
                order, traffic = policy.order(layout, seam), self.split.traffic
                programs[seam] = verify(lower(order, layout=layout, sizes=sizes, traffic=traffic, seam=seam))
            losses.append(self._round(programs[seam], t, rounds))
            if drains.get(t):
                drive_together([x._exchange.give_up_flight() for x in self.executors])
                for executor in self.executors:
                    executor.give_up_flight(wait=lambda wait: None)
            enters = () if t in drains else seam.leaves
        return losses

    def _round(self, program: VerifiedProgram, t: int, rounds: int) -> float:
        assert program.seam is not None
        ahead = -(-max(program.seam.leaves) // self.microbatches)
        outcomes = run_together(self.executors, program, [self._job(t, t + 1 + ahead)] * len(self.executors))
        pieces = [piece for outcome in outcomes for piece in outcome.results.get(self.loss, ())]
        assert sorted({piece.microbatch for piece in pieces}) == [*range(self.microbatches)]
        return sum(float(piece.content) * len(piece.samples) for piece in pieces) / (SIZE * self.microbatches)

    def _job(self, t: int, stop: int) -> BatchInput | None:
        if t == stop:
            return None
        count, offsets = self.microbatches, tuple(SIZE * m for m in range(self.microbatches))
        job = BatchInput(self.batch(t), (True, True), offsets, step=t, samples=SIZE * count)
        return replace(job, following=self._job(t + 1, stop))


def fit_of(
    capture: Capture,
    split: Split,
    layout: Layout,
    modules: Sequence[pl.LightningModule],
    optimizer: Callable[[pl.LightningModule], torch.optim.Optimizer],
    policy: str,
    batch: Callable[[int], Batch],
    microbatches: int,
    options: VersionOptions = PLAIN,
) -> Fit:
    """Return a fit of modules, one per rank."""
    hub, steps = Hub(), [optimizer(module) for module in modules]
    chosen, stage_of = options.of(POLICIES[policy]), {r: s for s, ranks in enumerate(layout.stages) for r in ranks}
    corrections = [
        Correction(
            step,
            chosen.correction,
            anneal=options.anneal,
            decay=options.decay,
            delay=chosen.mean_delay(layout, microbatches, stage_of[rank]),
            is_ahead=True,
        )
        for rank, step in enumerate(steps)
    ]

    def step_of(own: torch.optim.Optimizer, correction: Correction) -> Callable[[], None]:
        def step() -> None:
            correction.begin()
            own.step()
            correction.end()
            own.zero_grad()

        return step

    executors = [
        Executor(
            split,
            layout,
            state=State(dict(module.named_parameters()), dict(module.named_buffers()), CPU),
            transport=hub.endpoint(rank),
            loss=capture.record.loss,
            step=step_of(steps[rank], corrections[rank]),
        )
        for rank, module in enumerate(modules)
    ]
    for executor, correction in zip(executors, corrections, strict=True):
        if correction.kind == "discrepancy":
            executor.versions.prediction = correction
    if horizons := POLICIES[policy].horizons:
        for executor, own in zip(executors, steps, strict=True):
            executor.versions.prediction = Prediction(
                own,
                horizons=lambda stage: horizons(stage, len(layout.stages), microbatches),
                form=POLICIES[policy].prediction,
                once=POLICIES[policy].predicts_once,
                rates=lambda count, of=own: [[group["lr"] for group in of.param_groups]] * count,
            )
    assert capture.record.loss is not None
    return Fit(executors, steps, split, capture.record.loss, policy, batch, microbatches, options)


def sgd_of(module: pl.LightningModule) -> torch.optim.Optimizer:
    """Return the optimizer of the recursions."""
    return torch.optim.SGD(module.parameters(), lr=RATE, momentum=MOMENTUM)


def chain_fit(
    captured: tuple[Capture, Split],
    modules: Sequence[Numbers],
    policy: str,
    count: int,
    optimizer: Callable[[pl.LightningModule], torch.optim.Optimizer] = sgd_of,
    options: VersionOptions = PLAIN,
) -> Fit:
    """Return a fit of chains of factors, one for each rank, in batches of so many micro-batches."""
    layout = Layout(tuple((r,) for r in range(len(modules))))
    return fit_of(*captured, layout, modules, optimizer, policy, lambda t: numbers(t, count), count, options)


def last_of(fit: Fit) -> list[float]:
    """Return the factor of each rank."""
    return [float(step.param_groups[0]["params"][rank].detach()) for rank, step in enumerate(fit.steps)]


@pytest.fixture(scope="module")
def captured() -> Callable[[int], tuple[Capture, Split]]:
    """Return a function that captures a chain of factors, cut between all of them."""
    found: dict[int, tuple[Capture, Split]] = {}

    def of(stages: int) -> tuple[Capture, Split]:
        if stages not in found:
            request = Request(Numbers(stages), "training_step", flatten(numbers(0, 1))[1], arguments=(0,), samples=SIZE)
            capture = capture_step(request)
            starts = [i for i, node in enumerate(capture.graph.nodes) if any("w." in name for name in node.parameters)]
            found[stages] = capture, capture.split(tuple(starts[1:]))
        return found[stages]

    return of


DRAINS = ({}, {3: False, 4: False, 8: False}, {3: True, 4: True, 8: True})
COUNTS = [1, 2, 4]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_chain_of_numbers_trains_by_the_recursion_of_its_policy(
    policy: str, stages: int, captured: Callable[[int], tuple[Capture, Split]]
) -> None:
    """Whatever micro-batches there are, and whenever the pipeline is emptied as planned or forwards are given up."""
    for count in COUNTS:
        for drains in DRAINS:
            fit = chain_fit(captured(stages), [Numbers(stages) for _ in range(stages)], policy, count)
            losses, weights = recursion(policy, stages, count, 12, drains)
            assert fit.run(12, drains) == pytest.approx(losses, abs=1e-12)
            assert last_of(fit) == pytest.approx(weights, abs=1e-12)


@pytest.mark.parametrize("policy", ["spectrain", "xpipe", "pb_lwpv"])
@pytest.mark.parametrize(
    ("optimizer", "adam", "by_difference"),
    [
        (torch.optim.Adam, True, False),
        (partial(torch.optim.AdamW, weight_decay=0.0, foreach=True), True, False),
        (partial(torch.optim.AdamW, weight_decay=0.0, fused=True), True, False),
        (partial(torch.optim.Adam, amsgrad=False, maximize=False, foreach=False), True, False),
        (type("Derived", (torch.optim.Adam,), {}), True, True),
        (type("Derived", (torch.optim.SGD,), {}), False, True),
    ],
)
def test_what_an_optimizer_keeps_is_what_is_predicted_from(
    policy: str,
    optimizer: Callable[..., torch.optim.Optimizer],
    adam: bool,
    by_difference: bool,
    captured: Callable[[int], tuple[Capture, Split]],
) -> None:
    """By exact type: nobody knows what a class that is derived from one of torch's does with its state."""
    options = {} if adam else {"momentum": MOMENTUM}
    make = lambda module: optimizer(module.parameters(), lr=RATE, **options)  # noqa: E731
    for count, drains in ((1, DRAINS[0]), (2, DRAINS[2])):
        fit = chain_fit(captured(3), [Numbers(3) for _ in range(3)], policy, count, make)
        losses, weights = recursion(policy, 3, count, 12, drains, adam=adam, by_difference=by_difference)
        assert fit.run(12, drains) == pytest.approx(losses, abs=1e-9)
        assert last_of(fit) == pytest.approx(weights, abs=1e-9)


@pytest.mark.parametrize("policy", ["stale", "2bw", "spectrain", "xpipe", "pb_lwpv"])
def test_a_backward_makes_what_depends_on_weights_alone_of_those_that_it_reads(policy: str) -> None:
    """What F has made of its weights is of another version than what I and W read; with one version it stays."""
    request = Request(Gates(3), "training_step", flatten(numbers(0, 1))[1], arguments=(0,), samples=SIZE)
    capture = capture_step(request)
    starts = [i for i, node in enumerate(capture.graph.nodes) if any("w." in name for name in node.parameters)]
    split = capture.split(tuple(starts[1:]), reads_twice=POLICIES[policy].reads_twice)
    factor, slope = (lambda w: 1 / (1 + math.exp(-w))), (lambda w: math.exp(-w) / (1 + math.exp(-w)) ** 2)
    for count in (1, 4):
        fit = chain_fit((capture, split), [Gates(3) for _ in range(3)], policy, count)
        losses, weights = recursion(policy, 3, count, 12, {}, factor=factor, slope=slope)
        assert fit.run(12, {}) == pytest.approx(losses, abs=1e-12)
        assert last_of(fit) == pytest.approx(weights, abs=1e-12)


def test_both_forms_are_one_for_momentum_at_a_constant_rate(
    captured: Callable[[int], tuple[Capture, Split]],
) -> None:
    """Kosson et al. (2021)."""
    velocity, difference = (
        chain_fit(captured(3), [Numbers(3) for _ in range(3)], policy, 2).run(12, {})
        for policy in ("pb_lwpv", "pb_lwpd")
    )
    assert velocity == pytest.approx(difference, abs=1e-12)


class Blocks(pl.LightningModule):
    """Three blocks; variants have skip connections, batch norm, dropped units, or blocks that are computed again."""

    skips = norm = again = is_oracle = False
    of_forward: Mapping[nn.Module, nn.Module] = {}  # by layer, the same with the weights that F reads

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.normed = nn.BatchNorm1d(WIDTH) if self.norm else nn.Identity()

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        x, y = batch
        early = torch.tanh(self.normed(self._block(self.first, x)))
        late = torch.tanh(self._block(self.second, early))
        return nn.functional.mse_loss(self._block(self.third, late * early if self.skips else late), y)

    def _block(self, linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if linear in self.of_forward:  # of the values of F, and the derivatives of the weights that the backward reads
            back = linear(x)
            return back + (self.of_forward[linear](x) - back).detach()
        if not self.again:
            return linear(x)
        run = lambda value: torch.sigmoid(linear(value)) * 2  # noqa: E731
        return run(x) if self.is_oracle else checkpoint(run, x, use_reentrant=False)


class Skips(Blocks):
    """What the first block makes is used behind the second, too."""

    skips = True


class Normed(Blocks):
    """Batch norm whose statistics change with every micro-batch."""

    norm = True


class Again(Blocks):
    """Blocks are checkpoints, so that stages recompute."""

    again = True


def module_of(kind: type[Blocks]) -> Blocks:
    """Return a module, the same on every call."""
    torch.manual_seed(0)
    return kind().double()


def rows(t: int, count: int) -> Batch:
    """Return a batch of rows."""
    generator = torch.Generator().manual_seed(t)
    x, y = (torch.randn(SIZE * count, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y


def by_autograd(
    kind: type[Blocks],
    policy: str,
    count: int,
    rounds: int,
    stage_of: dict[str, int],
    optimizer: Callable[[pl.LightningModule], torch.optim.Optimizer],
    drains: Drains,
) -> tuple[list[float], Blocks]:
    """Train by autograd with, for every micro-batch, the weights that its stages read."""
    module = module_of(kind)
    module.is_oracle = True  # a checkpoint would compute again with the weights of the module
    stages = 1 + max(stage_of.values())
    ahead = POLICIES[policy].ahead(Layout(tuple((r,) for r in range(stages))), count)
    step, kept, losses = optimizer(module), list[dict[str, torch.Tensor]](), list[float]()

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.m = module

        def forward(self, x: Batch) -> torch.Tensor:
            return self.m.training_step(x, 0)

    for b in range(rounds):
        kept.append({name: x.detach().clone() for name, x in module.named_parameters()})
        total = 0.0
        for j in range(count):
            began = {name: round_of_forward(b * count + j, ahead[s], count, drains) for name, s in stage_of.items()}
            if policy == "2bw":
                began = dict.fromkeys(stage_of, round_of_forward(b * count, ahead[0], count, drains))
            if POLICIES[policy].reads_twice:
                module.of_forward = {}
                other = copy.deepcopy(module)
                other.load_state_dict({name: kept[began[name]][name] for name in stage_of}, strict=False)
                module.of_forward = {getattr(module, x): getattr(other, x) for x in ("first", "second", "third")}
                began = dict.fromkeys(stage_of, b)
            read = {name: kept[began[name]][name].clone().requires_grad_() for name in stage_of}
            x, y = (part[SIZE * j : SIZE * (j + 1)] for part in rows(b, count))
            given = {**read, **dict(module.named_buffers())}
            loss = functional_call(Whole(), {f"m.{name}": value for name, value in given.items()}, ((x, y),))
            total += float(loss.detach()) / count
            for (name, _), gradient in zip(
                read.items(), torch.autograd.grad(loss / count, [*read.values()]), strict=True
            ):
                parameter = module.get_parameter(name)
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        losses.append(total)
        step.step()
        step.zero_grad()
    return losses, module


SHAPES = [(((0,), (1,), (2,)), ("second", "third")), (((0, 1), (2,)), ("second",)), (((0,), (1,)), ("third",))]


@pytest.mark.parametrize(
    ("kind", "policy"),
    [(kind, policy) for kind in (Blocks, Skips, Normed, Again) for policy in ("pipedream", "2bw")]
    + [(Blocks, "pb"), (Skips, "stale")],
)
def test_modules_train_with_the_weights_that_their_stages_read(kind: type[Blocks], policy: str) -> None:
    """Gradients of every micro-batch are those of autograd, running statistics those of the order of forwards."""
    draw = random.Random(f"{kind.__name__} {policy}")
    for _ in range(4):
        stages, cuts = draw.choice(SHAPES[:1] + SHAPES[2:] if kind is Normed else SHAPES)
        count = draw.choice([1, 2, 3])
        rate = draw.choice([0.02, 0.05])
        sgd = lambda m, rate=rate: torch.optim.SGD(m.parameters(), lr=rate, momentum=0.5)  # noqa: E731
        adamw = lambda m, rate=rate: torch.optim.AdamW(m.parameters(), lr=rate)  # noqa: E731
        optimizer = draw.choice([sgd, adamw])
        drains = {t: draw.random() < 0.5 for t in range(8) if draw.random() < 0.2}
        layout = Layout(stages)
        request = Request(module_of(kind), "training_step", flatten(rows(0, 1))[1], arguments=(0,), samples=SIZE)
        capture = capture_step(request)
        places = tuple(capture.graph.position(at) for at in cuts)
        plan = Plan(tuple(StagePlan(at, ranks) for at, ranks in zip(("", *cuts), stages, strict=True)), count)
        policies = policies_of(plan, capture.graph, places)
        split = capture.split(places, policies=policies, reads_twice=POLICIES[policy].reads_twice)
        modules = [module_of(kind) for _ in range(layout.ranks)]
        fit = fit_of(capture, split, layout, modules, optimizer, policy, lambda t, count=count: rows(t, count), count)
        losses = fit.run(8, drains)
        stage_of = {name: part.stage for part in split.stages for name in part.parameters.values()}
        wanted, module = by_autograd(kind, policy, count, 8, stage_of, optimizer, drains)
        assert losses == pytest.approx(wanted, abs=1e-9)
        for name, stage in stage_of.items():
            for rank in stages[stage]:
                torch.testing.assert_close(modules[rank].get_parameter(name), module.get_parameter(name))
        for part in split.stages:
            for name in part.mutations:
                found = modules[stages[part.stage][0]].get_buffer(name)
                torch.testing.assert_close(found, module.get_buffer(name))


def test_a_program_that_takes_over_other_forwards_is_refused(
    captured: Callable[[int], tuple[Capture, Split]],
) -> None:
    """A round of another plan, or a skipped batch, would read what is not there."""
    fit = chain_fit(captured(2), [Numbers(2) for _ in range(2)], "pipedream", 2)
    layout, policy, traffic = fit.executors[0].layout, POLICIES["pipedream"], fit.split.traffic
    seam = policy.seam(layout, 2, enters=(1, 0), following=(2,))
    program = verify(lower(policy.order(layout, seam), layout=layout, sizes=(2,) * 3, traffic=traffic, seam=seam))
    with pytest.raises(PipelineError, match="takes over forwards"):
        fit._round(program, 1, 3)


@pytest.mark.parametrize(
    ("policy", "copies"),
    [
        ("stale", [0, 0, 0, 0]),
        ("pipedream", [0, 2, 1, 0]),
        ("2bw", [1, 1, 1, 1]),
        ("spectrain", [1, 1, 1, 1]),
        ("xpipe", [1, 1, 2, 2]),
        ("pb", [0, 0, 0, 0]),
        ("pb_lwpv", [1, 1, 1, 0]),
        ("pb_lwpd", [2, 2, 2, 0]),
    ],
)
def test_what_nothing_reads_is_not_copied_and_copies_are_used_again(
    policy: str, copies: list[int], captured: Callable[[int], tuple[Capture, Split]]
) -> None:
    """Memory that was taken once for versions is never given back, so no instruction ever had more of them.

    The first of a chain of factors needs no gradient of its input, so its backward reads no weight. Others of XPipe's
    copies are missing where the backward is predicted for no update. The difference of weights takes one more.
    """
    fit = chain_fit(captured(4), [Numbers(4) for _ in range(4)], policy, 1)
    fit.run(20, {})
    versions = [executor.versions for executor in fit.executors]
    last = [0 if x.prediction is None else len(x.prediction._buffers) for x in versions]
    taken = [sum(len(x) for names in of._buffers.values() for x in names.values()) for of in versions]
    assert [a + b for a, b in zip(taken, last, strict=True)] == copies
