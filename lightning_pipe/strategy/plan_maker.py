"""Plan of a fit, from its first step: captured on all ranks, planned on rank 0, checked, placed, ready to run.

Everything here is called on all ranks together.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.optim import Optimizer

from lightning_pipe.collection import without_collection
from lightning_pipe.config import DappleConfig
from lightning_pipe.core.cluster import limited
from lightning_pipe.core.plan import Plan
from lightning_pipe.core.serial import to_yaml
from lightning_pipe.errors import (
    BrokenRouteError,
    CaptureError,
    FewPlacesError,
    PlanError,
    UnsupportedError,
    faults_reported,
)
from lightning_pipe.lightning_names import pl, rank_zero_warn
from lightning_pipe.planner.comparison.alternatives import chosen_options
from lightning_pipe.planner.evaluation.evaluate import Judged
from lightning_pipe.planner.evaluation.resolve import resolve
from lightning_pipe.planner.problem import Problem
from lightning_pipe.strategy.plans.plan_costs import PlanCosts
from lightning_pipe.strategy.plans.plan_warnings import kept_by_replicas, warn_of_few_samples, warn_of_whole_batches
from lightning_pipe.strategy.plans.planning import Planned, check_samples, given_plan, propose
from lightning_pipe.strategy.preparation import PlannedCuts, Preparation, next_route
from lightning_pipe.strategy.ranks.limit import Foreseen, foreseen
from lightning_pipe.strategy.start.stopwatch import Stopwatch
from lightning_pipe.strategy.steps.captured import Captured
from lightning_pipe.strategy.steps.step_calls import TRAINING, StepRequest
from lightning_pipe.strategy.steps.step_runtime import agree

log = logging.getLogger(__name__)


class _WrongCapture(CaptureError):
    """The captured graph of a step does not compute what the step computes."""


class _StaysWhole(Exception):  # no error: another plan follows
    """Batches are not cut, for a reason that follows "since"."""


class PlanMaker:
    """Make the plan of one module.

    Args:
        preparation: prepares its steps.
        stopwatch: measures how long the start takes.

    Attributes:
        proposal: the plan with what it was made for, on rank 0; None before there is one.
        foreseen: the memory that the plan foresees, by rank; () before there is one.
    """

    def __init__(self, preparation: Preparation, *, stopwatch: Stopwatch) -> None:
        self._preparation, self._stopwatch = preparation, stopwatch
        setup = self._setup = preparation.setup
        self._config, self._links = setup.config, setup.links
        self._cuts = preparation.cuts
        self._costs = PlanCosts(setup.config, setup.links, device=setup.device, host=preparation.host)
        self.proposal: Planned | None = None
        self.foreseen: tuple[Foreseen, ...] = ()

    def make_plan(self, call: StepRequest, *, optimizers: Sequence[Optimizer]) -> int:
        """Make the plan for this call's step, place parameters by it, and make the step ready to run.

        Args:
            call: the call.
            optimizers: what will step, if anything will.

        Returns:
            The seed that all ranks draw random numbers from.

        Raises:
            CaptureError: if the step cannot be captured.
            PlanError: if a given plan does not fit, or no plan can be made.
            BatchError: if the batch cannot be cut as the plan demands.
        """
        control, config = self._links.control, self._config
        self._cuts.given = control.agreed(lambda: given_plan(config), source=0, what="the plan file")
        mine = torch.initial_seed() if config.seed is None else config.seed
        seed = control.broadcast(mine, source=0, what="the seed") % (1 << 62)
        self._preparation.checks.seed = seed
        self._stopwatch.lap("first batch")
        with without_collection():
            self._capture_and_plan(call, optimizers)
        return seed

    def _capture_and_plan(self, call: StepRequest, optimizers: Sequence[Optimizer]) -> None:
        """Capture a step, and make the plan for it; by replay where its graph turns out to be wrong."""
        captured = self._first_capture(call)
        is_planned = False
        while not is_planned:
            try:
                self._plan_by(call, captured, optimizers)
                is_planned = True
            except _StaysWhole as reason:
                self._preparation.plan_by(None)
                self._preparation.whole, captured = str(reason), captured.left_whole(str(reason))
            except _WrongCapture as wrong:
                self._preparation.plan_by(None)
                log.info("%s is replayed: %s", call.method, wrong)
                captured = self._first_capture(call, reason=str(wrong))
            except BrokenRouteError as fault:
                self._preparation.plan_by(None)
                uncut, replayed = next_route(captured, fault, allowed=self._config.capture)
                captured = self._first_capture(call, uncut=uncut, reason=replayed)

    def _first_capture(self, call: StepRequest, *, reason: str = "", uncut: str = "") -> Captured:
        log.info("Capturing %s.", call.method)
        samples = self._cuts.first_slice(self._cuts.samples(call.structure))
        captured = self._preparation.capture(call, samples, reason=reason, uncut=uncut)
        if call.method == TRAINING and captured.capture.plays is None:
            self._preparation.whole = captured.capture.whole  # also for batches of other sizes
        return captured

    def _plan_by(self, call: StepRequest, captured: Captured, optimizers: Sequence[Optimizer]) -> None:
        """Make the plan for a captured step, and place parameters by it.

        Raises:
            _WrongCapture: on every rank, if the step is one graph that does not compute what the step computes, and
                replay may be tried.
            _StaysWhole: on every rank, if another plan is needed.
            PlanError: on every rank, if the step computes nothing.
        """
        training = call.method == TRAINING
        if not captured.capture.graph.nodes:
            raise PlanError(
                f"{call.method} computes nothing of its batch and its module, so there is nothing to plan: it returns "
                f"{captured.capture.record.returned!r:.60}. Call a module in it, or run it by another strategy."
            )
        samples = self._cuts.samples(call.structure)
        if training:
            check_samples(self._cuts.wanted_microbatches, samples)
        agree(self._links, {"captured graph": captured.capture.graph.fingerprint})
        self._stopwatch.lap("capture")
        problem = self._costs.problem(
            captured.capture,
            samples=samples if training else max(samples, self._cuts.wanted_microbatches),  # later ones may be larger
            given=self._cuts.given,
            optimizers=optimizers,
            training=training,
            takes_back=self._clips_by_norm,
        )
        self._stopwatch.lap("profile")
        log.info("Planning.")
        planned = self._agreed_plan(captured, problem)
        self._stopwatch.lap("plan")
        self._make_ready(call, captured, planned, samples)

    def _agreed_plan(self, captured: Captured, problem: Problem | None) -> PlannedCuts:
        """Plan on rank 0, and tell all ranks."""
        control, graph = self._links.control, captured.capture.graph
        candidates: list[Judged] = []  # on rank 0
        wanted, may_offload = self._config, captured.capture.plays is None

        def make() -> Plan:
            nonlocal problem, wanted
            assert problem is not None, "made on rank 0"
            problem = replace(problem, cluster=limited(problem.cluster, self._config.memory_limits))
            if problem.cluster.ranks > 1 and captured.capture.plays is None:  # a step that is replayed is flushed
                problem = replace(problem, steps_together=self._steps_together)
                problem = problem.with_versions(self._config.versions)
            if captured.capture.whole:  # replicas share no samples, so they take turns
                problem = replace(problem, graph=replace(graph, coupled=tuple(node.name for node in graph.nodes)))
            try:
                wanted = self._wanted(captured)
                with faults_reported("its plan"):
                    candidates.extend(propose(problem, wanted, given=self._cuts.given, may_offload=may_offload))
            except PlanError as error:
                method, plays = captured.request.method, captured.capture.plays
                if graph.uncuttable and plays is not None and (kept := plays.kept):
                    raise PlanError(f"{error} {method} keeps state for its next call: {kept}.") from error
                if problem.training or self._cuts.given is not None or not isinstance(error, FewPlacesError):
                    raise
                rank_zero_warn(
                    f"{method} runs by another plan than planner={wanted.planner} with layout={wanted.layout} "
                    f"makes. {error}"
                )
                wanted = replace(
                    wanted, planner="auto", layout=None, stages_per_device=None, schedule=None, warmup=None
                )
                candidates.extend(propose(problem, wanted, given=None, may_offload=may_offload))
            return candidates[0].plan

        plan = control.agreed(make, source=0, what="the plan")
        cuts = resolve(plan, graph, ranks=control.ranks)
        mine = () if problem is None else foreseen(problem, candidates[0])
        self.foreseen = control.broadcast(mine, source=0, what="the memory that is foreseen")
        planned = PlannedCuts(plan, graph, cuts)
        self._preparation.plan_by(planned)
        if problem is not None:
            self.proposal = Planned(
                plan,
                cuts,
                problem,
                tuple(candidates),
                captured.told(),
                wanted,
                may_offload,
                chosen=chosen_options(self._config.constraints, has_plan=self._cuts.given is not None),
                whole=captured.capture.whole,
                is_disturbed=self._costs.is_disturbed,
            )
        versions = {
            "Python": platform.python_version(),
            "torch": torch.__version__,
            "Lightning": vars(pl)["__version__"],
        }
        agree(self._links, {"plan": to_yaml(plan), **versions})
        return planned

    def take(self, other: Planned | None, call: StepRequest, captured: Captured) -> bool:
        """Take another plan for the step that is planned; on all ranks together.

        Args:
            other: the plan, on rank 0; None if the present one stays.
            call: a call of the step.
            captured: the step.

        Returns:
            Whether it was taken: not if it cuts batches in another way where that changes what is trained.
        """
        control, graph = self._links.control, captured.capture.graph
        if other is not None and other.problem.graph.fingerprint != graph.fingerprint:
            other = None
        plan = control.broadcast(None if other is None else other.plan, source=0, what="the second plan")
        if plan is None:
            return False
        samples = self._cuts.samples(call.structure)
        parts = self._cuts.parts(captured.capture, samples)
        restore = self._preparation.snapshot()
        planned = PlannedCuts(plan, graph, resolve(plan, graph, ranks=control.ranks))
        self._preparation.plan_by(planned)
        agree(self._links, {"second plan": to_yaml(plan)})
        try:
            if self._cuts.parts(captured.capture, samples) != parts and graph.coupled:
                raise _StaysWhole("it cuts batches otherwise, which changes what is trained")
            if not self._cuts.sizes(captured.capture, samples):
                raise _StaysWhole("its batches cannot be cut like that")
            self._leave_whole_for_replicas(captured, planned.cuts)
            self._preparation.forget_placed()
            self._place(call, captured, planned, planned.cuts)
        except (_StaysWhole, UnsupportedError) as reason:
            log.info("The second plan is not taken, since %s", reason)
            restore()
            return False
        mine = () if other is None else foreseen(other.problem, other.judged[0])
        self.foreseen = control.broadcast(mine, source=0, what="the memory that is foreseen")
        self.proposal = other
        return True

    def _make_ready(self, call: StepRequest, captured: Captured, planned: PlannedCuts, samples: int) -> None:
        """Check a captured step by numbers, place parameters, and have it among the steps that run.

        Raises:
            _StaysWhole, _WrongCapture: on every rank, if another plan or capture is needed.
        """
        preparation, cuts, training = self._preparation, planned.cuts, call.method == TRAINING
        if not self._cuts.sizes(captured.capture, samples):
            captured = preparation.captured(call, samples)
            cuts = preparation.cuts_of(captured.capture.graph)
        if training:
            self._leave_whole_for_replicas(captured, cuts)
        if self._config.check:
            log.info("Comparing %s as captured with the plain step.", call.method)
            self._check(captured, call, samples)
            self._stopwatch.lap("check")
        preparation.warn_of_results(captured, samples)
        is_open = self._cuts.given is None and self._config.microbatches is None
        if training and is_open and self._links.control.ranks > 1 and planned.plan.microbatches == 1:
            warn_of_few_samples(captured, samples=samples, ranks=self._links.control.ranks)
        self._place(call, captured, planned, cuts)
        self._stopwatch.lap("stages")

    def _place(self, call: StepRequest, captured: Captured, planned: PlannedCuts, cuts: tuple[int, ...]) -> None:
        """Make a captured step ready to run, and place parameters where its stages use them."""
        preparation, plan = self._preparation, planned.plan
        step = preparation.built(captured, cuts)
        self._setup.weights.place(
            step.split, plan.layout, device=self._setup.device, shard_optimizer=plan.shard_optimizer
        )
        preparation.known.put(call, step)
        preparation.note_placed(step.split)

    def _leave_whole_for_replicas(self, captured: Captured, cuts: tuple[int, ...]) -> None:
        """Look whether replicas would keep what the samples of the others have no part in.

        Raises:
            _StaysWhole: if they would.
        """
        if captured.capture.whole or not captured.capture.buffers_by_parts():
            return
        if names := kept_by_replicas(captured, self._preparation.split(captured, cuts), self._cuts.planned.layout):
            raise _StaysWhole(f"what it keeps in the buffer {', '.join(names)} depends on the samples")

    def _wanted(self, captured: Captured) -> DappleConfig:
        """Return the options that the planner keeps to; a batch that must not be cut is one micro-batch."""
        whole = captured.capture.whole
        if not whole:
            return self._config
        if self._config.microbatches != 1 or max(self._config.replicas or (1,)) > 1:  # else they are what was asked for
            warn_of_whole_batches(captured.request.method, whole)
        return replace(self._config, microbatches=1) if self._cuts.given is None else self._config

    def _check(self, captured: Captured, call: StepRequest, samples: int) -> None:
        """Compare a captured step with the plain one.

        Raises:
            _WrongCapture: on every rank, if they differ and replay may be tried.
            CaptureError: on every rank, if they differ and nothing else is left.
        """
        try:
            self._preparation.checks.check(captured, call, samples)
        except CaptureError as error:
            if self._config.capture != "auto" or captured.capture.plays is not None:
                raise
            raise _WrongCapture(str(error)) from error

    @property
    def _steps_together(self) -> bool:
        """Return whether a step asks for the gradients of all ranks: for their norm, or for the scale of the loss."""
        return self._clips_by_norm or self._setup.module.trainer.precision == "16-mixed"

    @property
    def _clips_by_norm(self) -> bool:
        trainer = self._setup.module.trainer
        return bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm in (None, "norm")
