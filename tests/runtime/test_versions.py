"""Rounds on executors: losses and weights of a chain of numbers are those of a recursion that knows no programs.

All ranks run in one thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import lightning.pytorch as pl
import pytest
import torch

from lightning_pipe.capture import Capture, Request, capture_step
from lightning_pipe.capture.steps.batch import flatten
from lightning_pipe.capture.steps.stage_program import Split
from lightning_pipe.core.program import Compute, Layout, Order, VerifiedProgram
from lightning_pipe.errors import PipelineError
from lightning_pipe.runtime.executor import Executor
from lightning_pipe.runtime.guard.watch import Unwatched
from lightning_pipe.runtime.job import BatchInput
from lightning_pipe.runtime.stage import State
from lightning_pipe.runtime.transport.local import Hub
from lightning_pipe.runtime.waiting import drive_together
from lightning_pipe.runtime.weights.corrections import Correction
from lightning_pipe.runtime.weights.prediction import Prediction
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.verification.verify import verify
from lightning_pipe.schedule.weights import POLICIES, VersionOptions
from models.number_chain import MOMENTUM, RATE, SIZE, Batch, Drains, Gates, Numbers, numbers, recursion

CPU = torch.device("cpu")
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
    in_parts: bool = False  # whether parameters step beside sums of the gradients of others
    join: int = 1  # micro-batches whose W is one
    watches: Sequence[Unwatched] = ()  # of what ranks do

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
                order, traffic = with_late_weights(policy.order(layout, seam), self.join), self.split.traffic
                program = lower(order, layout=layout, sizes=sizes, traffic=traffic, seam=seam, join=self.join)
                programs[seam] = verify(program)
            losses.append(self._round(programs[seam], t, rounds))
            if drains.get(t):
                drive_together([x._exchange.give_up_flight() for x in self.executors])
                for executor in self.executors:
                    executor.give_up_flight(wait=lambda wait: None)
            enters = () if t in drains else seam.leaves
        return losses

    def _land(self) -> None:
        walks = []
        for executor, step in zip(self.executors, self.steps, strict=True):
            among = [x for group in step.param_groups for x in group["params"]]
            walks.append(executor._gradients.land(step.step, among=among))
        drive_together(walks)
        for step in self.steps:
            step.zero_grad()

    def _round(self, program: VerifiedProgram, t: int, rounds: int) -> float:
        assert program.seam is not None
        ahead = -(-max(program.seam.leaves) // self.microbatches)
        job = self._job(t, t + 1 + ahead)
        ranks = zip(self.executors, self.watches or [None] * len(self.executors), strict=True)
        outcomes = drive_together([x.walk(program, job, watch=w, leave_sums=self.in_parts) for x, w in ranks])
        if self.in_parts:
            self._land()
        pieces = [piece for outcome in outcomes for piece in outcome.results.get(self.loss, ())]
        assert sorted({piece.microbatch for piece in pieces}) == [*range(self.microbatches)]
        return sum(float(piece.content) for piece in pieces)  # each is the share of its samples

    def _job(self, t: int, stop: int) -> BatchInput | None:
        if t == stop:
            return None
        count, offsets = self.microbatches, tuple(SIZE * m for m in range(self.microbatches))
        job = BatchInput(self.batch(t), (True, True), offsets, step=t, samples=SIZE * count)
        return replace(job, following=self._job(t + 1, stop))


def with_late_weights(order: Order, join: int) -> Order:
    """Return an order in which so many W follow each other, so that some can be one."""
    return order if join == 1 else tuple(tuple(_late(line, join)) for line in order)


def _late(line: Sequence[Compute], join: int) -> Iterator[Compute]:
    waiting: list[Compute] = []
    for number, compute in enumerate(line):
        if compute.kind != "B":
            yield compute
            continue
        yield replace(compute, kind="I")
        waiting.append(replace(compute, kind="W"))
        if len(waiting) == join or number + 1 == len(line):
            yield from waiting
            waiting = []
    yield from waiting


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


@pytest.mark.sampled
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
        ("xpipe", [1, 1, 2, 1]),
        ("pb", [0, 0, 0, 0]),
        ("pb_lwpv", [1, 1, 1, 0]),
        ("pb_lwpd", [2, 2, 2, 0]),
    ],
)
def test_what_nothing_reads_is_not_copied_and_copies_are_used_again(
    policy: str, copies: list[int], captured: Callable[[int], tuple[Capture, Split]]
) -> None:
    """Memory that was taken once for versions is never given back, so no instruction ever had more of them.

    The first of a chain of factors needs no gradient of its input, so its backward reads no weight. XPipe's second
    copies are missing where the backward is predicted for no update, and where forward and backward of a batch read one
    prediction. The difference of weights takes one more.
    """
    fit = chain_fit(captured(4), [Numbers(4) for _ in range(4)], policy, 1)
    fit.run(20, {})
    versions = [executor.versions for executor in fit.executors]
    last = [0 if x.prediction is None else len(x.prediction._buffers) for x in versions]
    taken = [sum(len(x) for names in of._buffers.values() for x in names.values()) for of in versions]
    assert [a + b for a, b in zip(taken, last, strict=True)] == copies
