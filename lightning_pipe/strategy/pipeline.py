"""Pipeline of one rank: steps captured once per kind of batch, cut by one plan, run as programs.

    pipeline.plan_for(call)            capture on all ranks, plan on rank 0, place parameters, agree
    pipeline.run(call, turn) -> Ran    a verified program for this batch, and its outputs on every rank

A step is captured again when a batch has another structure, or when what the graph depends on has changed: modes,
frozen parameters, attributes that the step reads. All captured steps share the plan. Everything here is called on all
ranks together.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.optim import Optimizer

from lightning_pipe.capture import Structure
from lightning_pipe.capture.graphs.witness import is_due
from lightning_pipe.capture.route import Plays
from lightning_pipe.capture.steps.record import AnswerGuard
from lightning_pipe.capture.steps.stage_program import RandomKey
from lightning_pipe.core.graph import Graph
from lightning_pipe.core.plan import Plan
from lightning_pipe.errors import BrokenRouteError, CaptureError, UncapturedError
from lightning_pipe.lightning_names import rank_zero_warn
from lightning_pipe.strategy.gradients.post_validation import PostValidation
from lightning_pipe.strategy.plan_maker import PlanMaker
from lightning_pipe.strategy.plans.planning import Planned
from lightning_pipe.strategy.preparation import Moved, Preparation
from lightning_pipe.strategy.ranks.limit import Foreseen
from lightning_pipe.strategy.start.stopwatch import Stopwatch
from lightning_pipe.strategy.steps.metrics import wrong_answer
from lightning_pipe.strategy.steps.runner import Runner
from lightning_pipe.strategy.steps.state_snapshot import StateSnapshot
from lightning_pipe.strategy.steps.step_calls import (
    TRAINING,
    FollowingBatch,
    RunOptions,
    StepRequest,
    StepResult,
    StepSaid,
)
from lightning_pipe.strategy.steps.step_capture import RankSetup
from lightning_pipe.strategy.steps.step_runtime import RankStep
from lightning_pipe.strategy.steps.uncaptured import UncapturedSteps

log = logging.getLogger(__name__)

_MOST_VARIANTS = 8  # graphs of one step for what its Python read; then it is replayed


class Pipeline:
    """The steps of one module on one rank.

    Args:
        setup: of this rank.
        later: looks whether optimizer steps were right; None where ranks wait for each other.
        stopwatch: measures how long the start takes.
        moved: called when ranks hold other parameters than before, with the ranks that stepped each of them.

    Attributes:
        runner: runs captured steps.
    """

    def __init__(
        self,
        setup: RankSetup,
        *,
        later: PostValidation | None = None,
        stopwatch: Stopwatch,
        moved: Moved,
    ) -> None:
        self._module, self._config, self._links = setup.module, setup.config, setup.links
        self._weights = setup.weights
        self._preparation = Preparation(setup, later=later, moved=moved)
        self._maker = PlanMaker(self._preparation, stopwatch=stopwatch)
        self._cuts, self._known = self._preparation.cuts, self._preparation.known
        self._batches, self._epoch = 0, 0  # that were trained, and of the last one
        self._last: tuple[RankStep | None, StepRequest | None] = (None, None)  # of those that may skip a batch
        self._uncaptured = UncapturedSteps(setup)
        self.runner = Runner(
            setup.links,
            weights=setup.weights,
            later=later,
            versions=setup.config.versions,
            policy=setup.config.weight_policy,
            batch_dim=setup.config.batch_dim,
            device=setup.device,
        )

    @property
    def planned(self) -> tuple[Plan, Graph] | None:
        """Return the plan and its graph, once there are any."""
        planned = self._preparation.planned
        return None if planned is None else (planned.plan, planned.graph)

    @property
    def foreseen(self) -> tuple[Foreseen, ...]:
        """Return the memory that the plan foresees, by rank; () before there is one."""
        return self._maker.foreseen

    @property
    def proposal(self) -> Planned | None:
        """Return the plan with what it was made for, on rank 0, once there is one."""
        return self._maker.proposal

    def close(self) -> None:
        """Release what offloading has taken of the host."""
        self._preparation.host.close()

    def samples(self, structure: Structure) -> int:
        """Return the number of samples of a batch; that of its first tensor if it cannot be cut.

        Raises:
            BatchError: if its tensors disagree, or it is empty.
        """
        return self._cuts.samples(structure)

    def plan_for(self, call: StepRequest, *, optimizers: Sequence[Optimizer] = ()) -> None:
        """Make the plan for this call's step, and place parameters by it.

        Args:
            call: the call.
            optimizers: what will step, if anything will.

        Raises:
            CaptureError: if the step cannot be captured.
            PlanError: if a given plan does not fit, or no plan can be made.
            BatchError: if the batch cannot be cut as the plan demands.
        """
        self.runner.seed = self._maker.make_plan(call, optimizers=optimizers)

    def take(self, other: Planned | None, call: StepRequest) -> bool:
        """Take another plan for this call's step (on rank 0; None if the present one stays); return whether it was."""
        step, _ = self._step(call, self._cuts.samples(call.structure))
        return self._maker.take(other, call, step.captured)

    def evaluate(self, call: StepRequest, turn: RunOptions) -> StepSaid:
        """Run a step of an evaluation on a batch; as it is, where no route can hold it.

        Raises:
            CaptureError, BatchError, PipelineError: as `run` does.
        """
        if call.method not in self._uncaptured:
            try:
                return self.run(call, turn)
            except UncapturedError as reason:
                self._uncaptured.add(call.method, reason)
        key = RandomKey(self.runner.seed, turn.number, 0)
        return self._uncaptured.run(call, samples=self._cuts.samples(call.structure), key=key)

    def run(self, call: StepRequest, turn: RunOptions) -> StepResult:
        """Run a step on a batch; by its next route from now on, where no program can be made for it.

        Raises:
            CaptureError: if the step has changed and cannot be captured.
            BatchError: if the batch cannot be cut.
            PipelineError: if the program fails on any rank.
        """
        while True:
            try:
                return self._run_captured(call, turn)
            except BrokenRouteError as fault:
                samples = self._cuts.samples(call.structure)
                step, _ = self._step(call, samples)
                self._preparation.rerouted(call, samples, step.captured, fault)

    def _run_captured(self, call: StepRequest, turn: RunOptions) -> StepResult:
        samples = self._cuts.samples(call.structure)
        step, sizes = self._step(call, samples)
        if call.method == TRAINING and self._config.witness and self._witness_is_due():
            step, sizes = self._witnessed(step, sizes, call, samples)
        before = StateSnapshot(self._weights, step.split) if self._may_be_undone(step, call) else None
        if before is not None:
            turn = replace(turn, leave_sums=False)
        ran = self._run(step, sizes, call, turn)
        if before is not None and (new := before.trained_since()):
            before.restore()
            step, sizes = self._replayed(call, samples, f"it lets {new[0]} be trained")
            ran = self._run(step, sizes, call, turn)
        if before is not None and ran.is_unlike_trace:
            before.restore()
            step, sizes = self._replayed(call, samples, "it changes state that it did not change before")
            ran = self._run(step, sizes, call, turn)
        if before is not None and step.capture.plays is not None:
            before.forget_frozen()  # which stages that do not come to the end of the step have not heard in time
        guard = wrong_answer(ran.record, ran.values) if before is not None else None
        if before is not None and guard is not None:
            before.restore()
            step, sizes = self._answered(step, call, samples, guard)
            ran = self._run(step, sizes, call, turn)
        if ran.differing and (plays := step.capture.plays) is not None and len(sizes) > 1:
            self._leave_whole(plays, call.method, ran.differing)
            if before is not None:
                before.restore()
            ran = self._run(step, (samples,), call, turn)
        if call.method == TRAINING:
            if ran.is_skipped and before is not None:
                before.restore_gradients()  # what the step has changed besides stays, as on one device
            elif before is not None:
                self._last = step, call
            self.runner.note_trained(synchronised=turn.synchronise)
            self._batches += 1
        return ran

    def _leave_whole(self, plays: Plays, method: str, reason: str) -> None:
        """Take whole batches of a step from now on."""
        plays.leave_whole(reason)
        rank_zero_warn(
            f"{method} takes whole batches from now on, as one micro-batch each, since {reason}. So ranks work one "
            "after another; what is made of tensors of all samples can be put together (see docs/capture.md)."
        )

    def _witness_is_due(self) -> bool:
        """Return whether a witness runs before this batch: at growing distances, and at the beginning of epochs."""
        epoch, before = self._module.trainer.current_epoch, self._epoch
        self._epoch = epoch
        return is_due(self._batches) or (epoch != before and is_due(epoch))

    def _witnessed(
        self, step: RankStep, sizes: tuple[int, ...], call: StepRequest, samples: int
    ) -> tuple[RankStep, tuple[int, ...]]:
        """Return how a step is run after its Python was seen to be what was captured; by replay if it was not.

        Raises:
            CaptureError: on every rank, if it was not, and nothing but a graph is wanted.
        """
        begin = time.perf_counter()
        why = step.testimony(call)
        log.debug("The Python of %s was run again in %.3f s.", call.method, time.perf_counter() - begin)
        control = self._links.control
        differ = control.sum(torch.tensor([float(bool(why))]), what="whether the step is what was captured")
        if not differ:
            return step, sizes
        said = [control.broadcast(why, source=rank, what="how the step differs") for rank in range(control.ranks)]
        why = next(filter(None, said))
        if self._config.capture != "auto":
            raise CaptureError(f"{call.method} no longer does what was captured: {why}")
        return self._replayed(call, samples, why)

    def _may_be_undone(self, step: RankStep, call: StepRequest) -> bool:
        """Return whether a batch may have to be run again, or skipped, when it has been run."""
        if step.capture.plays is not None:  # which may turn out to differ
            return call.method == TRAINING
        return bool(step.capture.record.guards) and self._config.capture == "auto"

    def _answered(
        self, step: RankStep, call: StepRequest, samples: int, guard: AnswerGuard
    ) -> tuple[RankStep, tuple[int, ...]]:
        """Return how a batch is run for which a question has another answer: not, if the step skips it then."""
        guards = step.capture.record.guards
        answers = tuple(bool(one.expected) for one in guards[: guards.index(guard)])
        answers = (*answers, not guard.expected)
        skipping = self._known.answering(call, answers)
        if skipping is None:
            skipping = self._preparation.skipping(call, samples, answers)
        if call.method != TRAINING or skipping is None:
            trained, by = self._last
            traced = by if trained is step else None  # this batch may give no loss, by which nothing is found
            return self._replayed(call, samples, f"the answer to the question at {guard.line} has changed", traced)
        return skipping, self._cuts.sizes(skipping.capture, samples)

    @property
    def lookahead(self) -> int:
        """Return how many batches behind the one at hand may be needed."""
        planned = self._preparation.planned
        return 0 if planned is None else self.runner.rounds.lookahead(planned.plan)

    def _known_batch(self, batch: FollowingBatch) -> FollowingBatch:
        """Return a batch that follows with what is known of its step."""
        call = batch.call
        samples = self._cuts.samples(call.structure)
        with batch.at_turn():
            step = next((step for step in self._known.steps_like(call) if not step.misfit(call)), None)
            sizes = () if step is None else self._cuts.sizes(step.capture, samples)
            numbers = None if step is None or not sizes else step.foreseen_numbers(call)
        if numbers is None:
            return batch
        return replace(batch, step=step, sizes=sizes, numbers=numbers, cut=self._cuts.leaves_cut(call.structure))

    def _run(self, step: RankStep, sizes: tuple[int, ...], call: StepRequest, turn: RunOptions) -> StepResult:
        turn = replace(turn, following=tuple(map(self._known_batch, turn.following)))
        return self.runner.run(step, call, turn, sizes=sizes, cut=self._cuts.leaves_cut(call.structure))

    def _replayed(
        self, call: StepRequest, samples: int, reason: str, traced: StepRequest | None = None
    ) -> tuple[RankStep, tuple[int, ...]]:
        """Capture a step by replay, in the place of how it was captured before; perhaps with another batch."""
        step = self._preparation.replayed(call, samples, reason, traced=traced)
        return step, self._cuts.sizes(step.capture, samples)

    def _step(self, call: StepRequest, samples: int) -> tuple[RankStep, tuple[int, ...]]:
        """Return the captured step for a call, and the micro-batches of its batch."""
        steps = self._known.steps_like(call)
        for step in steps:
            sizes = self._cuts.sizes(step.capture, samples)
            if sizes and not step.misfit(call):
                return step, sizes
        if steps:
            log.info("%s is captured again: %s", call.method, steps[-1].misfit(call))
            self._preparation.note_varying(steps)
        if len(steps) >= _MOST_VARIANTS and self._config.capture == "auto":
            changed = f"what its Python reads has changed {len(steps)} times; last: {steps[-1].misfit(call)}"
            return self._replayed(call, samples, changed)
        step = self._preparation.prepared(call, samples)
        self._known.add(call, step)
        return step, self._cuts.sizes(step.capture, samples)
