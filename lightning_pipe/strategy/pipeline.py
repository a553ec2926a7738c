"""Pipeline of one rank: steps captured once per kind of batch, cut by one plan, run as programs.

    pipeline.plan_for(call)            capture on all ranks, plan on rank 0, place parameters, agree
    pipeline.run(call, turn) -> Ran    a verified program for this batch, and its outputs on every rank

A step is captured again when a batch has another structure, or when what the graph depends on has changed: modes,
frozen parameters, attributes that the step reads. All captured steps share the plan. Everything here is called on all
ranks together.
"""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_pipe.capture import Request, Route, Structure
from lightning_pipe.capture.graphs.lengths import Lengths
from lightning_pipe.capture.graphs.witness import is_due
from lightning_pipe.capture.python.places import Place
from lightning_pipe.capture.recording.unit_trace import trace_units
from lightning_pipe.capture.recording.units import UnitTrace
from lightning_pipe.capture.replayed.replay import Replay
from lightning_pipe.capture.steps.batch import outline
from lightning_pipe.capture.steps.record import AnswerGuard
from lightning_pipe.capture.steps.stage_program import Split
from lightning_pipe.config import DappleConfig
from lightning_pipe.core.cluster import limited
from lightning_pipe.core.graph import Graph
from lightning_pipe.core.plan import Plan, keeps_all, microbatch_sizes
from lightning_pipe.core.serial import to_yaml
from lightning_pipe.errors import BatchError, CaptureError, PlanError
from lightning_pipe.lightning_names import pl, rank_zero_warn
from lightning_pipe.planner.evaluation.evaluate import Judged
from lightning_pipe.planner.evaluation.resolve import resolve
from lightning_pipe.runtime.activations.host import host_of
from lightning_pipe.strategy.gradients.post_validation import PostValidation
from lightning_pipe.strategy.lightning_private import on_host
from lightning_pipe.strategy.parameters.weights import Weights
from lightning_pipe.strategy.plans.plan_costs import PlanCosts
from lightning_pipe.strategy.plans.planning import (
    Planned,
    check_samples,
    cut_other,
    given_plan,
    in_turns,
    policies_for,
    propose,
)
from lightning_pipe.strategy.ranks.connections import Connections
from lightning_pipe.strategy.ranks.limit import Foreseen, foreseen
from lightning_pipe.strategy.refusals import check_written
from lightning_pipe.strategy.start.stopwatch import Stopwatch
from lightning_pipe.strategy.steps.batch_shapes import ShapesCaptured, different_traces, symbolic_lengths
from lightning_pipe.strategy.steps.capture_route import captured_by
from lightning_pipe.strategy.steps.captured import Captured
from lightning_pipe.strategy.steps.check import check_captured
from lightning_pipe.strategy.steps.metrics import wrong_answer
from lightning_pipe.strategy.steps.runner import Runner
from lightning_pipe.strategy.steps.state_snapshot import StateSnapshot
from lightning_pipe.strategy.steps.step_calls import TRAINING, RunOptions, StepRequest, StepResult
from lightning_pipe.strategy.steps.step_runtime import RankStep, agree, pieces, slices
from lightning_pipe.strategy.steps.string_fields import StringReads
from lightning_pipe.strategy.steps.whole_batch import (
    Role,
    cut_by_numbers,
    fewest_samples,
    kept_by_replicas,
    warn_of_buffers_by_parts,
    warn_of_fewer_parts,
    warn_of_mixed_logs,
    warn_of_shared_samples,
    warn_of_unknown_role,
)

log = logging.getLogger(__name__)

_MOST_CAPTURES = 64
_MOST_VARIANTS = 8  # graphs of one step for what its Python read; then it is replayed
Contexts = Mapping[str, Callable[[], AbstractContextManager[Any]]]


@dataclass(frozen=True)
class _Planned:
    """The plan, and the graph that it was made for with its cuts."""

    plan: Plan
    graph: Graph
    cuts: tuple[int, ...]


class _WrongCapture(CaptureError):
    """The captured graph of a step does not compute what the step computes."""


class _SlicesDiffer(Exception):  # no error: another plan follows
    """Replicas would share the samples of micro-batches, but slices of them do not give what the whole gives."""


class _ReplicasKeep(Exception):  # no error: another plan follows
    """Replicas would change buffers for their own samples, whose mean is not what one device has."""


class Pipeline:
    """The steps of one module on one rank.

    Args:
        module: the user's module.
        config: options.
        links: to the other ranks.
        weights: where parameters live.
        contexts: step method -> context that the step runs in (autocast, no_grad).
        device: where this rank computes.
        later: looks whether optimizer steps were right; None where ranks wait for each other.
        stopwatch: measures how long the start takes.

    Attributes:
        runner: runs captured steps.
        foreseen: the memory that the plan foresees, by rank; () before there is one.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        *,
        config: DappleConfig,
        links: Connections,
        weights: Weights,
        contexts: Contexts,
        device: torch.device,
        later: PostValidation | None = None,
        stopwatch: Stopwatch,
    ) -> None:
        self._stopwatch = stopwatch
        self._modules = tuple(module.modules())
        self._module, self._config, self._links, self._weights = module, config, links, weights
        self._contexts, self._device = contexts, device
        self._steps: dict[tuple[Any, ...], list[RankStep]] = {}
        self._varying: dict[Any, Place] = {}
        self._held: dict[str, set[int]] = {}  # stages that hold a parameter, as it was placed
        self._planned: _Planned | None = None
        self._proposal: Planned | None = None
        self._shapes = ShapesCaptured()
        self._batches, self._epoch = 0, 0  # that were trained, and of the last one
        self._host = host_of(device)
        self._costs = PlanCosts(config, links, device=device, host=self._host)
        self._given: Plan | None = None
        self._role: Role | None = None
        self._slices = True  # whether replicas may share the samples of a micro-batch
        self._fewest = 1  # samples of a micro-batch
        self._whole = ""  # why batches are not cut, though the step may be one graph
        self._warned_logs: set[tuple[str, str]] = set()  # name and line
        self.foreseen: tuple[Foreseen, ...] = ()
        self._later = later
        self.runner = self._runner = Runner(
            links, weights=weights, later=later, batch_dim=config.batch_dim, device=device
        )

    @property
    def planned(self) -> tuple[Plan, Graph] | None:
        """Return the plan and its graph, once there are any."""
        return None if self._planned is None else (self._planned.plan, self._planned.graph)

    def close(self) -> None:
        """Release what offloading has taken of the host."""
        self._host.close()

    @property
    def is_measured(self) -> bool:
        """Return whether it was measured, and said, what micro-batches change."""
        return self._role is not None

    @property
    def proposal(self) -> Planned | None:
        """Return the plan with what it was made for, on rank 0, once there is one."""
        return self._proposal

    def samples(self, structure: Structure) -> int:
        """Return the number of samples of a batch; that of its first tensor if it cannot be cut.

        Raises:
            BatchError: if its tensors disagree, or it is empty.
        """
        dim = self._config.batch_dim
        if self._divisible(structure):
            if samples := structure.samples(dim):
                return samples
            raise BatchError("The batch has no samples. Set drop_last, or let the sampler skip empty batches.")
        return next((leaf.shape[dim] for leaf in structure.leaves if len(leaf.shape) > dim), 1)

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
        control, config = self._links.control, self._config
        self._given = control.agreed(lambda: given_plan(config), source=0, what="the plan file")
        mine = torch.initial_seed() if config.seed is None else config.seed
        self._runner.seed = control.broadcast(mine, source=0, what="the seed") % (1 << 62)
        self._stopwatch.lap("first batch")
        captured = self._capture(call, self._first_slice(self.samples(call.structure)))
        while self._planned is None:
            try:
                self._plan_by(call, captured, optimizers)
            except _SlicesDiffer:
                warn_of_shared_samples(captured)
                self._planned, self._slices, captured = None, False, captured.without_slices()
            except _ReplicasKeep as kept:
                self._planned, self._whole, captured = None, str(kept), captured.left_whole(str(kept))
            except _WrongCapture as wrong:
                log.info("%s is replayed: %s", call.method, wrong)
                self._planned = None
                captured = self._capture(call, self._first_slice(self.samples(call.structure)), reason=str(wrong))

    def _plan_by(self, call: StepRequest, captured: Captured, optimizers: Sequence[Optimizer]) -> None:
        """Make the plan for a captured step, and place parameters by it.

        Raises:
            _WrongCapture: on every rank, if the step is one graph that does not compute what the step computes, and
                replay may be tried.
            _SlicesDiffer, _ReplicasKeep: on every rank, if another plan is needed.
        """
        control, config = self._links.control, self._config
        training = call.method == TRAINING
        samples = self.samples(call.structure)
        if training:
            check_samples(self._wanted_microbatches, samples)
        graph = captured.capture.graph
        agree(self._links, {"captured graph": graph.fingerprint})
        self._stopwatch.lap("capture")
        problem = self._costs.problem(
            captured.capture,
            samples=samples if training else max(samples, self._wanted_microbatches),  # later batches may be larger
            given=self._given,
            optimizers=optimizers,
            training=training,
            takes_back=self._clips_by_norm,
        )
        self._stopwatch.lap("profile")
        candidates: list[Judged] = []  # on rank 0

        def make() -> Plan:
            nonlocal problem
            assert problem is not None, "made on rank 0"
            problem = replace(problem, cluster=limited(problem.cluster, config.memory_limits))
            try:
                wanted, replayed = self._wanted(captured), not captured.capture.saves_by_plan
                candidates.extend(propose(problem, wanted, given=self._given, replayed=replayed))
            except PlanError as error:
                if graph.uncuttable and (kept := captured.capture.kept):
                    raise PlanError(f"{error} {call.method} keeps state for its next call: {kept}.") from error
                raise
            return candidates[0].plan

        plan = control.agreed(make, source=0, what="the plan")
        cuts = resolve(plan, graph, ranks=control.ranks)
        mine = () if problem is None else foreseen(problem, candidates[0])
        self.foreseen = control.broadcast(mine, source=0, what="the memory that is foreseen")
        self._planned = _Planned(plan, graph, cuts)
        if problem is not None:
            self._proposal = Planned(plan, cuts, problem, tuple(candidates), captured.capture.told())
        versions = {
            "Python": platform.python_version(),
            "torch": torch.__version__,
            "Lightning": vars(pl)["__version__"],
        }
        agree(self._links, {"plan": to_yaml(plan), **versions})
        self._stopwatch.lap("plan")
        if not self._sizes(captured.capture, samples):
            captured = self._capture_for(call, samples)
            cuts = self._cuts(captured.capture.graph)
        if training:
            self._leave_whole_for_replicas(captured, cuts)
        if training and config.check:
            captured = self._checked(captured, call, samples)
            self._stopwatch.lap("check")
        if training and self._role is None and len(self._parts(captured, samples)) > 1:
            warn_of_unknown_role(captured)
        self._warn_of_logs(captured, samples)
        step = self._build(captured, cuts)
        if training:
            warn_of_buffers_by_parts(captured, count=len(self._sizes(captured.capture, samples)))
        shard = plan.shard_optimizer
        self._weights.place(step.split, plan.layout, device=self._device, shard_optimizer=shard)
        self._steps[self._key(call)] = [step]
        self._note_held(step.split)
        self._stopwatch.lap("stages")

    def _leave_whole_for_replicas(self, captured: Captured, cuts: tuple[int, ...]) -> None:
        """Look whether replicas would keep what the samples of the others have no part in.

        Raises:
            _ReplicasKeep: with the reason why batches are not cut, if they would.
        """
        if captured.capture.whole or not captured.capture.averaged_buffers():
            return
        if names := kept_by_replicas(captured, self._split(captured, cuts), self._plan_now.layout):
            raise _ReplicasKeep(f"what it keeps in the buffer {', '.join(names)} depends on the samples")

    def _note_held(self, split: Split) -> None:
        """Remember which stages hold which parameters, now that these are placed."""
        for program in split.stages:
            for name in {*program.parameters.values(), *program.gradients.values()}:
                self._held.setdefault(name, set()).add(program.stage)

    def _wanted(self, captured: Captured) -> DappleConfig:
        """Return the options that the planner keeps to; a batch that must not be cut is one micro-batch."""
        whole = captured.capture.whole
        if not whole:
            return self._config
        rank_zero_warn(
            f"{captured.request.method} takes whole batches, as one micro-batch each, since {whole}. So ranks work one "
            "after another; a step that keeps nothing that depends on the samples is faster."
        )
        return replace(self._config, microbatches=1) if self._given is None else self._config

    def _checked(self, captured: Captured, call: StepRequest, samples: int) -> Captured:
        """Compare a captured step with the plain one, and let numbers decide how its losses are combined."""
        control, layout = self._links.control, self._plan_now.layout
        if refusal := control.broadcast(self._weights.too_large(), source=0, what="what rank 0 has room for"):
            log.warning("%s as captured is not compared with the plain step: %s.", call.method, refusal)
            return captured
        with self._weights.whole():
            if len(wanted := self._parts(captured, samples)) > 1:
                self._fewest = fewest_samples(captured, call, control=control)
                count = len(self._parts(captured, samples))
                warn_of_fewer_parts(captured, self._fewest, wanted=len(wanted), count=count)
            first = max(slices(layout, self._sizes(captured.capture, samples)[:1]))
            try:
                seconds = check_captured(captured, call, samples=first, control=control, seed=self._runner.seed)
            except CaptureError as error:
                if self._config.capture != "auto" or not captured.capture.fallback:
                    raise
                self._planned = None
                raise _WrongCapture(str(error)) from error
            return self._weighed(captured, call, seconds=seconds)

    def _weighed(self, captured: Captured, call: StepRequest, *, seconds: float) -> Captured:
        """Let numbers decide how losses of micro-batches are combined, where a batch is cut; rank 0 has all values."""
        sizes = self._sizes(captured.capture, self.samples(call.structure))
        parts = self._parts(captured, sum(sizes))
        if len(parts) > 1:
            control = self._links.control
            cut = cut_by_numbers(captured, call, sizes=sizes, parts=parts, control=control, seconds=seconds)
            if cut is not None and cut.slices_differ:
                raise _SlicesDiffer
            self._role = None if cut is None else cut.role
        return captured.with_role(self._role)

    def _parts(self, captured: Captured, samples: int) -> tuple[int, ...]:
        """Return the samples of the smallest parts in which a batch is computed."""
        sizes = self._sizes(captured.capture, samples)
        return pieces(self._plan_now.layout, sizes) if self._slices and sizes else sizes

    def run(self, call: StepRequest, turn: RunOptions) -> StepResult:
        """Run a step on a batch.

        Raises:
            CaptureError: if the step has changed and cannot be captured.
            BatchError: if the batch cannot be cut.
            PipelineError: if the program fails on any rank.
        """
        samples = self.samples(call.structure)
        step, sizes = self._step(call, samples)
        if call.method == TRAINING and self._config.witness and self._witness_is_due():
            step, sizes = self._witnessed(step, sizes, call, samples)
        before = StateSnapshot(self._weights) if self._may_be_undone(step, call) else None
        ran = self._run(step, sizes, call, turn)
        guard = wrong_answer(ran.record, ran.values) if before is not None else None
        if before is not None and guard is not None:
            before.restore()
            step, sizes = self._answered(step, call, samples, guard)
            ran = self._run(step, sizes, call, turn)
        if ran.differing and (plays := step.capture.plays) is not None:
            log.info("%s takes whole batches from now on: %s.", call.method, ran.differing)
            plays.leave_whole(ran.differing)
            if before is not None:
                before.restore()
            ran = self._run(step, (samples,), call, turn)
        if call.method == TRAINING:
            if ran.is_skipped and before is not None:
                before.restore()
            self._runner.note_trained(synchronised=turn.synchronise)
            self._batches += 1
        return ran

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
        key = (*self._key(call), *answers, not guard.expected)
        if key not in self._steps:
            try:
                captured = self._capture(call, self._largest_slice(samples), answered=(*answers, not guard.expected))
            except CaptureError:
                captured = None
            if captured is not None and captured.capture.record.loss is None:
                self._steps[key] = [self._built_later(captured)]
        if call.method != TRAINING or key not in self._steps:
            return self._replayed(call, samples, f"the answer to the question at {guard.line} has changed")
        (skipping,) = self._steps[key]
        return skipping, self._sizes(skipping.capture, samples)

    def _run(self, step: RankStep, sizes: tuple[int, ...], call: StepRequest, turn: RunOptions) -> StepResult:
        structure = call.structure
        is_cut = self._divisible(structure)
        cut = structure.cut(self._config.batch_dim) if is_cut else (False,) * len(turn.tensors)
        return self._runner.run(step, call, turn, sizes=sizes, cut=cut)

    def _replayed(self, call: StepRequest, samples: int, reason: str) -> tuple[RankStep, tuple[int, ...]]:
        """Capture a step by replay, in the place of how it was captured before."""
        log.info("%s is replayed from now on: %s.", call.method, reason)
        captured = self._capture(call, self._largest_slice(samples), reason=reason)
        step = self._built_later(captured)
        self._steps[self._key(call)] = [step]
        return step, self._sizes(step.capture, samples)

    def _largest_slice(self, samples: int) -> int:
        plan = self._plan_now
        return max(slices(plan.layout, microbatch_sizes(samples, plan.microbatches)))

    def _step(self, call: StepRequest, samples: int) -> tuple[RankStep, tuple[int, ...]]:
        """Return the captured step for a call, and the micro-batches of its batch."""
        key = self._key(call)
        steps = self._steps.pop(key, [])
        self._steps[key] = steps  # now the youngest
        for step in steps:
            sizes = self._sizes(step.capture, samples)
            if sizes and not step.misfit(call):
                return step, sizes
        if steps:
            log.info("%s is captured again: %s", call.method, steps[-1].misfit(call))
            self._varying.update((slot.place, slot) for step in steps for slot in step.varying())
        if len(steps) >= _MOST_VARIANTS and self._config.capture == "auto":
            changed = f"what its Python reads has changed {len(steps)} times; last: {steps[-1].misfit(call)}"
            return self._replayed(call, samples, changed)
        captured = self._capture_for(call, samples)
        self._warn_of_logs(captured, samples)
        step = self._built_later(captured)
        steps[:] = [*steps[1 - _MOST_CAPTURES :], step]
        if len(self._steps) > _MOST_CAPTURES:
            del self._steps[next(iter(self._steps))]
        return step, self._sizes(step.capture, samples)

    def _warn_of_logs(self, captured: Captured, samples: int) -> None:
        """Warn once of each logged number that micro-batches change."""
        if len(self._parts(captured, samples)) > 1:
            self._warned_logs |= warn_of_mixed_logs(captured, known=self._warned_logs)

    def _key(self, call: StepRequest) -> tuple[Any, ...]:
        """Return what a captured step is kept under: everything that its graph depends on from the start."""
        dim = self._config.batch_dim
        leaves = tuple((*leaf.shape[:dim], *leaf.shape[dim + 1 :], leaf.dtype) for leaf in call.structure.leaves)
        divisible = self._divisible(call.structure)
        shapes = leaves if divisible else call.structure.leaves
        modes = tuple(module.training for module in self._modules)
        frozen = tuple(p.requires_grad for m in self._modules for p in m._parameters.values() if p is not None)
        return (call.method, outline(call.structure.template), shapes, call.arguments[1:], modes, frozen)

    def _capture_for(self, call: StepRequest, samples: int) -> Captured:
        """Capture a step so that a batch of this size can be cut.

        Raises:
            BatchError: if there is no way to cut the batch.
        """
        layout = self._plan_now.layout
        relatives = self._relatives(call)
        for step in different_traces(relatives):
            other = step.for_lengths(call)
            if other is not None and self._sizes(other.capture, samples):
                return self._as_found(other)
        begin = time.perf_counter()
        lengths = symbolic_lengths([step.captured for step in relatives], call, batch_dim=self._config.batch_dim)
        found = self._capture(call, self._largest_slice(samples), lengths=lengths)
        self._shapes.note(call, time.perf_counter() - begin)
        if self._sizes(found.capture, samples):
            return found
        whole = max(slices(layout, (samples,)))  # a symbolic graph may demand more than one sample, say
        fixed = self._capture(call, whole, symbolic=False)
        if self._sizes(fixed.capture, samples):
            return fixed
        raise BatchError(
            f"A batch of {samples} samples cannot be cut for this step and layout {layout.stages}: "
            f"{found.capture.misfit(whole) or fixed.capture.misfit(whole)}. Use batches that replicas can share "
            "equally, or one rank per stage."
        )

    def _relatives(self, call: StepRequest) -> list[RankStep]:
        """List the captured steps that differ from a call in the shapes of its batch only; the youngest last."""
        method, texts, _, *others = self._key(call)
        keys = [key for key in self._steps if (key[0], key[1], [*key[3:]]) == (method, texts, others)]
        return [step for key in keys for step in self._steps[key]]

    def _capture(
        self,
        call: StepRequest,
        samples: int,
        *,
        symbolic: bool = True,
        lengths: Lengths = frozenset(),
        reason: str = "",
        answered: tuple[bool, ...] = (),
    ) -> Captured:
        """Capture a step; by replay if there is a reason."""
        if self._later is not None:
            self._later.settle()
        answers, reader = call.answers, StringReads()
        request = Request(
            module=self._module,
            method=call.method,
            structure=replace(call.structure, template=reader.marked(call.structure.template)),
            arguments=call.arguments,
            samples=(max(2, samples) if symbolic else samples) if self._divisible(call.structure) else None,
            batch_dim=self._config.batch_dim,
            device=self._device,
            context=self._contexts[call.method],
            symbolic=symbolic,
            lengths=lengths,
            varying=tuple(self._varying.values()),
            may_skip=self._planned is not None,
            answered=answered,
        )
        if answers is not None:
            asked = request

            def agreed_answers() -> tuple[bool, ...]:
                with self._weights.whole():
                    return self._links.control.agreed(
                        lambda: answers(asked), source=0, what="the answers that the step asks of its tensors"
                    )

            request = replace(request, answers=agreed_answers)
        with torch.inference_mode(False):
            traced = partial(self._traced, call)
            if reason:
                found: Route = Replay(request, traced(request), reason=reason)
            else:
                found = captured_by(self._config.capture, request, traced=traced, refusals=self._refusals)
        captured = Captured(found, replace(request, answers=None), reader, call.structure.template)
        return self._as_found(captured)

    def _as_found(self, captured: Captured) -> Captured:
        """Return a captured step with what the numbers of the first one said."""
        if captured.request.method != TRAINING:
            return captured
        captured = captured if self._slices else captured.without_slices()
        return (captured.left_whole(self._whole) if self._whole else captured).with_role(self._role)

    def _refusals(self, refuses: bool) -> tuple[int, int]:
        """Return how many ranks refuse to make a graph of a step, and how many there are."""
        control = self._links.control
        told = control.sum(torch.tensor(float(refuses)), what="whether the step can be one graph")
        return int(told), control.ranks

    def _traced(self, call: StepRequest, request: Request) -> UnitTrace:
        """Find the units of a step by a real run on rank 0, where the whole module is for that long."""
        control = self._links.control
        mine = None if call.tensors is None else [tensor.cpu() for tensor in call.tensors]
        tensors = control.to_first(mine, source=call.holder, what="the batch that the step is traced with")

        def trace() -> UnitTrace:
            assert tensors is not None, "rank 0 was sent the batch"
            with on_host(request.module):
                return trace_units(request, tensors, parts=control.ranks)

        with self._weights.whole():
            return control.agreed(trace, source=0, what="the units of the step")

    def _built_later(self, captured: Captured) -> RankStep:
        """Return a step that was captured when parameters were placed already.

        Raises:
            PlanError: if it trains a parameter in a stage that does not hold it.
        """
        step = self._build(captured, self._cuts(captured.capture.graph))
        if captured.request.method == TRAINING:
            step.refuse_borrowed()
            self._weights.adopt(step.split, self._plan_now.layout)
            self._note_held(step.split)
        return step

    def _build(self, captured: Captured, cuts: tuple[int, ...]) -> RankStep:
        agree(self._links, {"captured graph": captured.capture.graph.fingerprint})
        if captured.request.method == TRAINING:
            check_written(captured.capture, self._module, microbatches=self._plan_now.microbatches)
        return RankStep(
            captured,
            self._split(captured, cuts),
            plan=self._plan_now if captured.capture.is_sliceable else in_turns(self._plan_now),
            links=self._links,
            weights=self._weights,
            device=self._device,
            host=self._host,
            early=self._later is not None and captured.request.method == TRAINING and captured.capture.can_run_ahead,
        )

    def _split(self, captured: Captured, cuts: tuple[int, ...]) -> Split:
        """Cut a captured step, whose stages do with what they save what the plan says."""
        assert self._planned is not None, "planned before anything is run"
        capture, plan, exact_ties = captured.capture, self._planned.plan, self._config.exact_ties
        if not capture.saves_by_plan:
            if capture.graph.gradients and not all(keeps_all(stage) for stage in plan.stages):
                rank_zero_warn(
                    f"{captured.request.method} is replayed, and keeps all that its modules save, although the plan "
                    "recomputes or offloads; it may need more memory."
                )
            return capture.split(cuts, exact_ties=exact_ties, held=self._held)
        policies, missing = policies_for(plan, capture.graph, cuts, planned=self._planned.graph)
        if missing:
            rank_zero_warn(
                f"{captured.request.method} was captured again as another graph, which cannot recompute or offload all "
                f"that the plan says. It keeps {missing}, and may need more memory."
            )
        return capture.split(cuts, policies=policies, exact_ties=exact_ties, held=self._held)

    def _cuts(self, graph: Graph) -> tuple[int, ...]:
        assert self._planned is not None, "planned before anything is run"
        return cut_other(graph, planned=self._planned.graph, cuts=self._planned.cuts)

    @property
    def _clips_by_norm(self) -> bool:
        trainer = self._module.trainer
        return bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm in (None, "norm")

    @property
    def _plan_now(self) -> Plan:
        assert self._planned is not None, "planned before anything is run"
        return self._planned.plan

    def _sizes(self, capture: Route, samples: int) -> tuple[int, ...]:
        """Return the micro-batches of a batch: as many as planned, fewer where the graph needs it; () if none fit."""
        layout = self._plan_now.layout
        for count in range(min(samples, 1 if capture.whole else self._plan_now.microbatches), 0, -1):
            sizes = microbatch_sizes(samples, count)
            parts = slices(layout, sizes)
            if (count == 1 or min(parts) >= self._fewest) and not any(capture.misfit(size) for size in parts):
                return sizes
        return ()

    def _first_slice(self, samples: int) -> int:
        """Guess the size of a micro-batch before there is a plan."""
        return max(microbatch_sizes(samples, self._wanted_microbatches))

    @property
    def _wanted_microbatches(self) -> int:
        """Return how many micro-batches the user wants, in the plan's file or else as an option; 1 if that is open."""
        wanted = self._given.microbatches if self._given is not None else self._config.microbatches
        return wanted or 1

    def _divisible(self, structure: Structure) -> bool:
        """Return whether batches like this can be cut; others are left whole where nobody asks to cut them."""
        if not self._leaves_batches_whole:
            return True
        try:
            structure.samples(self._config.batch_dim)
        except BatchError:
            return False
        return True

    @property
    def _leaves_batches_whole(self) -> bool:
        plan = self._given if self._planned is None else self._planned.plan
        if plan is not None:
            return plan.microbatches == 1 and all(len(stage.ranks) == 1 for stage in plan.stages)
        return self._config.microbatches == 1 and set(self._config.replicas or (1,)) == {1}
