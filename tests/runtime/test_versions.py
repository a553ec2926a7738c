"""Rounds on executors: losses and weights of a chain of numbers are those of a recursion that knows no programs.

All ranks run in one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import lightning.pytorch as pl
import pytest
import torch

from lightning_pipe.capture.capture import Capture, Request, capture_step
from lightning_pipe.capture.steps.batch import flatten
from lightning_pipe.capture.steps.stage_program import Split
from lightning_pipe.core.program import Compute, Layout, Order, VerifiedProgram
from lightning_pipe.errors import PipelineError
from lightning_pipe.runtime.executor import Executor
from lightning_pipe.runtime.job import BatchInput
from lightning_pipe.runtime.stage import Stage, State
from lightning_pipe.runtime.transport.local import Hub
from lightning_pipe.runtime.waiting import drive_together
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.verification.verify import verify
from lightning_pipe.schedule.weights import POLICIES
from models.number_chain import MOMENTUM, RATE, SIZE, Batch, Drains, Numbers, numbers, recursion

CPU = torch.device("cpu")


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
    in_parts: bool = False  # whether parameters step beside sums of the gradients of others
    join: int = 1  # micro-batches whose W is one

    def run(self, rounds: int, drains: Drains) -> list[float]:
        """Train so many batches and return their losses."""
        policy, layout, enters = POLICIES[self.policy], self.executors[0].layout, tuple[int, ...]()
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
        outcomes = drive_together([x.walk(program, job, leave_sums=self.in_parts) for x in self.executors])
        if self.in_parts:
            self._land()
        pieces = [piece for outcome in outcomes for piece in outcome.results.get(self.loss, ())]
        assert sorted({piece.microbatch for piece in pieces}) == [*range(self.microbatches)]
        return sum(float(piece.content) * len(piece.samples) for piece in pieces) / (SIZE * self.microbatches)

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
) -> Fit:
    """Return a fit of modules, one per rank."""
    hub, steps = Hub(), [optimizer(module) for module in modules]

    def step_of(own: torch.optim.Optimizer) -> Callable[[], None]:
        def step() -> None:
            own.step()
            own.zero_grad()

        return step

    executors = [
        Executor(
            split,
            layout,
            state=State(dict(module.named_parameters()), dict(module.named_buffers()), CPU),
            transport=hub.endpoint(rank),
            loss=capture.record.loss,
            step=step_of(steps[rank]),
        )
        for rank, module in enumerate(modules)
    ]
    assert capture.record.loss is not None
    return Fit(executors, steps, split, capture.record.loss, policy, batch, microbatches)


def chain_fit(captured: tuple[Capture, Split], modules: Sequence[Numbers], policy: str, count: int) -> Fit:
    """Return a fit of chains of factors, one for each rank, in batches of so many micro-batches."""

    def sgd(module: pl.LightningModule) -> torch.optim.Optimizer:
        return torch.optim.SGD(module.parameters(), lr=RATE, momentum=MOMENTUM)

    layout = Layout(tuple((r,) for r in range(len(modules))))
    return fit_of(*captured, layout, modules, sgd, policy, lambda t: numbers(t, count), count)


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


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_chain_of_numbers_trains_by_the_recursion_of_its_policy(
    policy: str, stages: int, captured: Callable[[int], tuple[Capture, Split]]
) -> None:
    """Whatever micro-batches there are, and whenever the pipeline is emptied as planned or forwards are given up."""
    for count in (1, 2, 4):
        for drains in ({}, {3: False, 4: False, 8: False}, {3: True, 4: True, 8: True}):
            modules = [Numbers(stages) for _ in range(stages)]
            fit = chain_fit(captured(stages), modules, policy, count)
            for rank, executor in enumerate(fit.executors):
                executor.versions.predicted = _predictor(modules[rank], fit.steps[rank], rank, stages)
            losses, weights = recursion(policy, stages, count, 12, drains)
            assert fit.run(12, drains) == pytest.approx(losses, abs=1e-12)
            last = [float(module.w[r].detach()) for r, module in enumerate(modules)]
            assert last == pytest.approx(weights, abs=1e-12)


def _predictor(module: Numbers, step: torch.optim.Optimizer, rank: int, stages: int):
    """Return SpecTrain's prediction: the velocity goes on for as many updates as a micro-batch is under way."""

    def predicted(stage: Stage, kind: str) -> dict[str, torch.Tensor]:
        velocity = step.state.get(module.w[rank], {}).get("momentum_buffer")
        horizon = rank // 2 + (stages - 1 - rank if kind == "F" else 0)
        return {
            name: x.detach() - (0.0 if velocity is None else RATE * horizon * velocity)
            for name, x in stage.parameters_now().items()
        }

    return predicted


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


def test_what_no_backward_reads_is_not_copied_and_copies_are_used_again(
    captured: Callable[[int], tuple[Capture, Split]],
) -> None:
    """The first of a chain of factors needs no gradient of its input, so its backward reads no weight."""
    fit = chain_fit(captured(4), [Numbers(4) for _ in range(4)], "pipedream", 1)
    fit.run(20, {})
    copies = [sum(len(x) for names in e.versions._buffers.values() for x in names.values()) for e in fit.executors]
    assert copies == [0, 2, 1, 0]
