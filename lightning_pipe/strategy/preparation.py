"""Preparation of captured steps on this rank: a call is captured, cut by the plan, and becomes a step that runs.

    captured = preparation.captured(call, samples)    so that a batch of this size can be cut
    step = preparation.built(captured)                stages and an executor on this rank

Everything here is called on all ranks together.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch

from lightning_pipe.capture.graphs.lengths import Lengths
from lightning_pipe.capture.steps.stage_program import Split
from lightning_pipe.config import DappleConfig
from lightning_pipe.core.graph import Graph
from lightning_pipe.core.plan import Plan
from lightning_pipe.errors import BatchError, BrokenRouteError, CaptureError, PipeError, UncapturedError
from lightning_pipe.lightning_names import rank_zero_warn
from lightning_pipe.planner.candidates.microbatch_share import count_by_share
from lightning_pipe.planner.evaluation.rounds import refuse_rounds
from lightning_pipe.runtime.activations.host import host_of
from lightning_pipe.schedule.weights import POLICIES
from lightning_pipe.strategy.gradients.post_validation import PostValidation
from lightning_pipe.strategy.known_steps import KnownSteps
from lightning_pipe.strategy.plans.batch_cuts import BatchCuts
from lightning_pipe.strategy.plans.plan_warnings import (
    tell_of_draws,
    warn_of_buffers_by_parts,
    warn_of_parts_seen,
    warn_of_results_by_parts,
)
from lightning_pipe.strategy.plans.planning import cut_other, in_turns, policies_for
from lightning_pipe.strategy.refusals import check_written
from lightning_pipe.strategy.start.compilation import Compilation, recorder_of
from lightning_pipe.strategy.step_check import StepCheck
from lightning_pipe.strategy.steps.batch_shapes import ShapesCaptured, different_traces, symbolic_lengths
from lightning_pipe.strategy.steps.captured import Captured
from lightning_pipe.strategy.steps.step_calls import TRAINING, StepRequest
from lightning_pipe.strategy.steps.step_capture import RankSetup, StepCapture
from lightning_pipe.strategy.steps.step_runtime import RankStep, agree, slices
from lightning_pipe.strategy.versions.predicted_weights import refuse_recompute

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlannedCuts:
    """The plan, and the graph that it was made for with its cuts."""

    plan: Plan
    graph: Graph
    cuts: tuple[int, ...]


Moved: TypeAlias = Callable[[Mapping[str, tuple[int, ...]]], None]  # is given the ranks that stepped each parameter


class Preparation:
    """Prepare the steps of one module on one rank.

    Args:
        setup: of this rank.
        later: looks whether optimizer steps were right; None where ranks wait for each other.
        moved: called when ranks hold other parameters than before, with the ranks that stepped each of them.

    Attributes:
        setup: as given.
        cuts: how batches are cut.
        known: the steps that were prepared.
        checks: compares captured steps with the plain ones.
        host: where this rank offloads to.
        whole: why batches are not cut, though the step may be one graph; "" if they may be.
    """

    def __init__(
        self,
        setup: RankSetup,
        *,
        later: PostValidation | None,
        moved: Moved,
    ) -> None:
        self.setup, self._later, self._moved = setup, later, moved
        self.cuts = BatchCuts(setup.config)
        self.known = KnownSteps(setup.module, cuts=self.cuts, batch_dim=setup.config.batch_dim)
        self.host = host_of(setup.device)
        self.whole = ""
        self.checks = StepCheck(setup, self.cuts)
        self._capture = StepCapture(setup)
        config = setup.config
        self._compilation = _compilation(config, setup.device)
        self._planned: PlannedCuts | None = None
        self._held: dict[str, set[int]] = {}  # stages that hold a parameter, as it was placed
        self._shapes = ShapesCaptured()
        self._warned: set[str] = set()  # results, sub-modules, buffers and draws, in words

    @property
    def planned(self) -> PlannedCuts | None:
        """Return the plan and its graph, once there are any."""
        return self._planned

    def plan_by(self, planned: PlannedCuts | None) -> None:
        """Cut by this plan from now on; None: there is none any more."""
        self._planned = planned
        self.cuts.plan = None if planned is None else planned.plan
        self._capture.may_skip = planned is not None

    def snapshot(self) -> Callable[[], None]:
        """Return a function that brings back the plan of now, and the steps that were prepared by it."""
        planned, held, steps = self._planned, {name: {*stages} for name, stages in self._held.items()}, self.known.steps

        def restore() -> None:
            self.plan_by(planned)
            self._held = held
            self.known.steps = steps

        return restore

    def forget_placed(self) -> None:
        """Forget the steps that were prepared, and which stages hold parameters: all will be placed anew."""
        self.known.steps = {}
        self._held = {}

    def note_placed(self, split: Split) -> None:
        """Remember which stages hold parameters, as they were placed."""
        for program in split.stages:
            for name in {*program.parameters.values(), *program.gradients.values()}:
                self._held.setdefault(name, set()).add(program.stage)

    def capture(
        self,
        call: StepRequest,
        samples: int,
        *,
        symbolic: bool = True,
        lengths: Lengths = frozenset(),
        reason: str = "",
        uncut: str = "",
        answered: tuple[bool, ...] = (),
    ) -> Captured:
        """Capture a step with this many samples; arguments as of `StepCapture.capture`.

        Raises:
            CaptureError: if it cannot be captured.
        """
        if self._later is not None:
            self._later.settle()
        is_cut = self.cuts.can_cut(call.structure)
        traced = (max(2, samples) if symbolic else samples) if is_cut else None
        captured = self._capture.capture(
            call, traced, symbolic=symbolic, lengths=lengths, reason=reason, uncut=uncut, answered=answered
        )
        return self._left_whole(captured if is_cut else captured.left_whole(self.cuts.uncut(call.structure)))

    def captured(self, call: StepRequest, samples: int) -> Captured:
        """Capture a step so that a batch of this size can be cut.

        Raises:
            CaptureError: if it cannot be captured.
            BatchError: if there is no way to cut the batch.
        """
        layout = self.cuts.planned.layout
        relatives = self.known.relatives(call)
        for step in different_traces(relatives):
            other = step.for_lengths(call)
            if other is not None and self.cuts.sizes(other.capture, samples):
                return self._left_whole(other)
        begin = time.perf_counter()
        lengths = symbolic_lengths([step.captured for step in relatives], call, batch_dim=self.setup.config.batch_dim)
        found = self.capture(call, self.cuts.largest_slice(samples), lengths=lengths)
        self._shapes.note(call, time.perf_counter() - begin)
        if self.cuts.sizes(found.capture, samples):
            return found
        whole = max(slices(layout, (samples,)))  # a symbolic graph may demand more than one sample, say
        fixed = self.capture(call, whole, symbolic=False)
        if self.cuts.sizes(fixed.capture, samples):
            return fixed
        why = [one.capture.misfit(whole) or one.capture.whole for one in (found, fixed)]
        raise BatchError(
            f"A batch of {samples} samples cannot be cut for this step and layout {layout.stages}: "
            f"{next(filter(None, why), 'it holds for other numbers of samples')}. Use batches that replicas can share "
            "equally, or one rank per stage."
        )

    def prepared(self, call: StepRequest, samples: int) -> RankStep:
        """Capture a step for batches of this size, and make it ready to run, by the first route that does.

        Raises:
            CaptureError: if no route can hold it.
        """
        relatives = self.known.relatives(call)
        captured = self.captured(call, samples)
        general = captured.capture.general
        is_derived = general is not None and any(step.capture.general is general for step in relatives)
        return self._ready(call, samples, captured, is_checked=is_derived)

    def rerouted(self, call: StepRequest, samples: int, captured: Captured, fault: PipeError) -> RankStep:
        """Make a step ready to run by the route after the one that fails, in the place of how it was captured."""
        step = self._ready(call, samples, self._by_next_route(call, samples, captured, fault))
        self.known.put(call, step)
        return step

    def _ready(self, call: StepRequest, samples: int, captured: Captured, *, is_checked: bool = False) -> RankStep:
        """Compare a captured step with the plain one, and make it ready to run; by the next route where that fails."""
        while True:
            try:
                if self.setup.config.check and not is_checked:
                    self.checks.check(captured, call, samples)
                self.warn_of_results(captured, samples)
                return self._built_later(captured)
            except (CaptureError, BrokenRouteError) as fault:
                captured, is_checked = self._by_next_route(call, samples, captured, fault), False

    def _by_next_route(self, call: StepRequest, samples: int, captured: Captured, fault: PipeError) -> Captured:
        uncut, reason = next_route(captured, fault, allowed=self.setup.config.capture)
        return self.capture(call, self.cuts.largest_slice(samples), uncut=uncut, reason=reason)

    def _built_later(self, captured: Captured) -> RankStep:
        """Return a step that was captured when parameters were placed already."""
        step = self.built(captured)
        if captured.request.method != TRAINING:
            self._warn_of_buffers_by_replicas(step)
        else:
            if borrowed := step.borrowed_parameters():
                self._hold_too(step, borrowed)
            self.setup.weights.adopt(step.split, self.cuts.planned.layout)
            self.note_placed(step.split)
        return step

    def _warn_of_buffers_by_replicas(self, step: RankStep) -> None:
        """Warn of buffers that replicas change by their own samples in evaluation, where nothing is averaged."""
        layout, method = self.cuts.planned.layout, step.captured.request.method
        changed = {n for p in step.split.stages if len(layout.stages[p.stage]) > 1 for n in p.mutations} - self._warned
        if changed:
            self._warned |= changed
            rank_zero_warn(
                f"{method} changes {', '.join(sorted(changed))}, each replica of a stage by its own samples: no rank "
                "has what one device has. Use a torchmetrics object, or give the stage one rank."
            )

    def _hold_too(self, step: RankStep, borrowed: Mapping[str, Sequence[int]]) -> None:
        """Let stages hold what they train from now on and other stages hold; earlier steps do not sum it over both."""
        name, stages = next(iter(borrowed.items()))
        others = f" and {len(borrowed) - 1} other parameters" * (len(borrowed) > 1)
        rank_zero_warn(
            f"{step.captured.request.method} was captured again as another graph, in which stage {stages[0]} uses "
            f"{name}{others}, of other stages. Both hold them from now on, with optimizer state, and sum gradients, "
            "which was not planned for. Use them from the first batch on, multiplied by zero where that is not wanted, "
            "to have them planned for."
        )
        weights = self.setup.weights
        stepped = weights.steppers()
        weights.hold_too(step.split, self.cuts.planned.layout)
        self.known.forget(TRAINING)
        self._moved(stepped)

    def skipping(self, call: StepRequest, samples: int, answers: tuple[bool, ...]) -> RankStep | None:
        """Make a step ready to run as it is with these answers to its first questions, if it gives no loss then."""
        try:
            captured = self.capture(call, self.cuts.largest_slice(samples), answered=answers)
        except CaptureError:
            return None
        if captured.capture.record.loss is not None:
            return None
        step = self._built_later(captured)
        self.known.put(call, step, answers=answers)
        return step

    def replayed(self, call: StepRequest, samples: int, reason: str, *, traced: StepRequest | None = None) -> RankStep:
        """Make a step ready to run by replay, in the place of how it was captured before.

        Args:
            call: the call.
            samples: of its batch.
            reason: why it is replayed.
            traced: another call of the same kind, by which is found what the step does; None for this one.
        """
        log.info("%s is replayed from now on: %s.", call.method, reason)
        captured = self.capture(traced or call, self.cuts.largest_slice(samples), reason=reason)
        self.warn_of_results(captured, samples)
        step = self._built_later(captured)
        self.known.put(call, step)
        return step

    def note_varying(self, steps: list[RankStep]) -> None:
        """Remember the numbers that steps have read and that have become other numbers."""
        for step in steps:
            self._capture.note_varying(step.varying())

    def warn_of_results(self, captured: Captured, samples: int) -> None:
        """Warn once of each result, and each buffer, that micro-batches change; tell of draws of random numbers."""
        self._warned |= tell_of_draws(captured, known=self._warned)
        if (count := len(self.cuts.parts(captured.capture, samples))) > 1:
            self._warned |= warn_of_results_by_parts(captured, known=self._warned)
            share = count_by_share(samples, ranks=self.setup.links.control.ranks)
            sizes = self.cuts.sizes(captured.capture, samples)
            self._warned |= warn_of_parts_seen(captured, sizes=sizes, share=share, known=self._warned)
            self._warned |= warn_of_buffers_by_parts(captured, count=count, known=self._warned)

    def built(self, captured: Captured, cuts: tuple[int, ...] | None = None) -> RankStep:
        """Make a captured step ready to run.

        Args:
            captured: the step.
            cuts: of its graph; None for those that correspond to the plan's.
        """
        plan, graph = self.cuts.planned, captured.capture.graph
        cuts = self.cuts_of(graph) if cuts is None else cuts
        agree(self.setup.links, {"captured graph": graph.fingerprint})
        if captured.request.method == TRAINING:
            check_written(captured.capture, self.setup.module, microbatches=plan.microbatches, layout=plan.layout)
        plan = plan if captured.capture.is_sliceable else in_turns(plan)
        split, versions = self.split(captured, cuts), self.setup.config.versions
        is_ahead = self._later is not None or versions != "sync"
        if versions != "sync" and captured.request.method == TRAINING:
            pairs = zip(split.traffic.buckets, split.bucket_parameters, strict=True)
            refuse_rounds(plan, versions=versions, ties=[n for b, names in pairs if len(b.stages) > 1 for n in names])
        return RankStep(
            captured,
            split,
            plan=plan,
            links=self.setup.links,
            weights=self.setup.weights,
            device=self.setup.device,
            host=self.host,
            compilation=self._compilation,
            early=is_ahead and captured.request.method == TRAINING and captured.capture.plays is None,
        )

    def cuts_of(self, graph: Graph) -> tuple[int, ...]:
        """Return the cuts of a graph that correspond to those of the planned one."""
        assert self._planned is not None, "planned before anything is run"
        return cut_other(graph, planned=self._planned.graph, cuts=self._planned.cuts)

    def _left_whole(self, captured: Captured) -> Captured:
        """Return a captured step that takes whole batches if training does."""
        return captured.left_whole(self.whole) if self.whole and captured.request.method == TRAINING else captured

    def split(self, captured: Captured, cuts: tuple[int, ...]) -> Split:
        """Cut a captured step, whose stages do with what they save what the plan says."""
        assert self._planned is not None, "planned before anything is run"
        capture, plan, exact_ties = captured.capture, self._planned.plan, self.setup.config.exact_ties
        policies, missing = policies_for(
            plan, capture.graph, cuts, planned=self._planned.graph, may_offload=capture.plays is None
        )
        if missing and captured.request.method == TRAINING:  # others save nothing
            rank_zero_warn(
                f"{captured.request.method} was captured again as another graph, which cannot recompute or offload all "
                f"that the plan says. It keeps {missing}, and may need more memory."
            )
        versions, training = self.setup.config.versions, captured.request.method == TRAINING
        reads_twice = versions != "sync" and training and capture.plays is None and POLICIES[versions].reads_twice
        if reads_twice and any(policy.backward is not None for policy in policies):
            refuse_recompute(versions)
        split = partial(capture.split, cuts, policies=policies, exact_ties=exact_ties, held=self._held)
        return self.setup.links.control.made(lambda: split(reads_twice=reads_twice), what="its stages")


def next_route(captured: Captured, fault: PipeError, *, allowed: str) -> tuple[str, str]:
    """Return `uncut` and `reason` of `Preparation.capture` for a step that fails as it was captured.

    A graph that is cut into micro-batches is left whole; one that is whole, or gives other numbers, is replayed.

    Args:
        captured: the step.
        fault: how it fails.
        allowed: the option `capture`.

    Raises:
        UncapturedError: for an evaluation without another route, which runs as it is.
        PipeError: the fault, if there is no other route.
    """
    route, method = captured.capture, captured.request.method
    is_cut = route.plays is None and not route.whole and captured.request.samples is not None
    if isinstance(fault, BrokenRouteError) and is_cut:
        rank_zero_warn(f"{method} is not cut into micro-batches: {fault}.")
        return str(fault), ""
    if route.plays is None and allowed == "auto":
        rank_zero_warn(f"{method} is replayed: {fault}")
        return "", str(fault)
    if method != TRAINING:
        raise UncapturedError(str(fault)) from fault
    raise fault


def _compilation(config: DappleConfig, device: torch.device) -> Compilation | None:
    """Return what compiles stages; None if they run as they are."""
    recorder = recorder_of(device) if config.cuda_graphs else None
    if recorder is not None and config.memory_limit is not None:
        rank_zero_warn(
            "cuda_graphs=True takes memory that is not in the plan, and may pass memory_limit: about what one "
            "micro-batch saves and computes with, once more. Set a lower memory_limit if it does not fit."
        )
    if not config.compile and recorder is None:
        return None
    return Compilation(device, trials=config.check, kernels=config.compile, recorder=recorder)
