"""How does one rank run the steps of a module? Captured once per kind of batch, cut by one plan, run as programs.

    pipeline.plan_for(call)            capture on all ranks, plan on rank 0, place parameters, agree
    pipeline.run(call, turn) -> Ran    a verified program for this batch, and its outputs on every rank

A step is captured again when a batch has another structure, or when what the graph depends on has changed: modes,
frozen parameters, attributes that the step reads. All captured steps share the plan. Everything here is called on all
ranks together.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch.optim import Optimizer

from lightning_pipe.capture import Capture, Request, Structure
from lightning_pipe.capture.replay import Replay
from lightning_pipe.capture.unit_trace import trace_units
from lightning_pipe.capture.units import UnitTrace
from lightning_pipe.config import DappleConfig
from lightning_pipe.core.graph import Graph
from lightning_pipe.core.plan import Plan, microbatch_sizes
from lightning_pipe.core.serial import to_yaml
from lightning_pipe.errors import BatchError
from lightning_pipe.planner.judge import Judged
from lightning_pipe.planner.resolve import resolve
from lightning_pipe.strategy.calls import TRAINING, Call, Ran, Turn
from lightning_pipe.strategy.check import check_captured
from lightning_pipe.strategy.costs import Costs
from lightning_pipe.strategy.lightning_private import on_host
from lightning_pipe.strategy.links import Links
from lightning_pipe.strategy.metrics import wrong_answer
from lightning_pipe.strategy.planning import Planned, check_samples, cut_other, given_plan, in_turns, propose
from lightning_pipe.strategy.post_validation import PostValidation
from lightning_pipe.strategy.routes import captured_by, told
from lightning_pipe.strategy.runner import Runner
from lightning_pipe.strategy.step import Captured, Step, agree, slices
from lightning_pipe.strategy.texts import Reader, texts, without_texts
from lightning_pipe.strategy.undo import Before
from lightning_pipe.strategy.weights import Weights
from lightning_pipe.strategy.whole import Role, role_by_numbers, warn_of_unknown_role

log = logging.getLogger(__name__)

_MOST_CAPTURES = 64
Contexts = Mapping[str, Callable[[], AbstractContextManager[Any]]]


@dataclass(frozen=True)
class _Planned:
    """The plan, and the graph that it was made for with its cuts."""

    plan: Plan
    graph: Graph
    cuts: tuple[int, ...]


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
    """

    def __init__(
        self,
        module: pl.LightningModule,
        *,
        config: DappleConfig,
        links: Links,
        weights: Weights,
        contexts: Contexts,
        device: torch.device,
        later: PostValidation | None = None,
    ) -> None:
        self._modules = tuple(module.modules())
        self._module, self._config, self._links, self._weights = module, config, links, weights
        self._contexts, self._device = contexts, device
        self._steps: dict[tuple[Any, ...], list[Step]] = {}
        self._planned: _Planned | None = None
        self._proposal: Planned | None = None
        self._costs = Costs(config, links, device=device)
        self._given: Plan | None = None
        self._role: Role | None = None
        self._later = later
        self._runner = Runner(links, weights=weights, later=later, batch_dim=config.batch_dim, device=device)

    @property
    def planned(self) -> tuple[Plan, Graph] | None:
        """Return the plan and its graph, once there are any."""
        return None if self._planned is None else (self._planned.plan, self._planned.graph)

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

    def plan_for(self, call: Call, *, optimizers: Sequence[Optimizer] = ()) -> None:
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
        samples = self.samples(call.structure)
        captured = self._capture(call, self._first_slice(samples))
        graph = captured.capture.graph
        problem = self._costs.problem(
            captured.capture,
            samples=samples,
            given=self._given,
            optimizers=optimizers,
            training=call.method == TRAINING,
            takes_back=self._clips_by_norm,
        )
        candidates: list[Judged] = []  # on rank 0

        def make() -> Plan:
            assert problem is not None, "made on rank 0"
            candidates.extend(propose(problem, config, given=self._given))
            return candidates[0].plan

        plan = control.agreed(make, source=0, what="the plan")
        check_samples(plan, samples)
        cuts = resolve(plan, graph, ranks=control.ranks)
        self._planned = _Planned(plan, graph, cuts)
        if problem is not None:
            self._proposal = Planned(plan, cuts, problem, tuple(candidates), told(captured.capture))
        versions = {"Python": platform.python_version(), "torch": torch.__version__, "Lightning": pl.__version__}
        agree(self._links, {"plan": to_yaml(plan), **versions})
        if not self._sizes(captured.capture, samples):
            captured = self._capture_for(call, samples)
            cuts = self._cuts(captured.capture.graph)
        if call.method == TRAINING and config.check:
            first = max(slices(plan.layout, self._sizes(captured.capture, samples)[:1]))
            seconds = check_captured(captured, call, samples=first, control=control, seed=self._runner.seed)
            captured = self._weighed(captured, call, seconds=seconds)
        if call.method == TRAINING and self._role is None and plan.microbatches > 1:
            warn_of_unknown_role(captured)
        step = self._build(captured, cuts)
        self._weights.place(step.split, plan.layout)
        self._steps[self._key(call)] = [step]

    def _weighed(self, captured: Captured, call: Call, *, seconds: float) -> Captured:
        """Let numbers decide how losses of micro-batches are combined, where a batch is cut."""
        sizes = self._sizes(captured.capture, self.samples(call.structure))
        if len(sizes) > 1:
            self._role = role_by_numbers(captured, call, sizes=sizes, control=self._links.control, seconds=seconds)
        return captured.with_role(self._role)

    def run(self, call: Call, turn: Turn) -> Ran:
        """Run a step on a batch.

        Raises:
            CaptureError: if the step has changed and cannot be captured.
            BatchError: if the batch cannot be cut.
            PipelineError: if the program fails on any rank.
        """
        samples = self.samples(call.structure)
        step, sizes = self._step(call, samples)
        before = Before(self._weights) if step.capture.record.guards and self._config.capture == "auto" else None
        ran = self._run(step, sizes, call, turn)
        if before is not None and (guard := wrong_answer(ran.record, ran.values)) is not None:
            before.restore()
            log.info(
                "%s is replayed from now on: the answer to the question at %s has changed.", call.method, guard.line
            )
            step, sizes = self._replayed(call, samples)
            ran = self._run(step, sizes, call, turn)
        if call.method == TRAINING:
            self._runner.note_trained(synchronised=turn.synchronise)
        return ran

    def _run(self, step: Step, sizes: tuple[int, ...], call: Call, turn: Turn) -> Ran:
        structure = call.structure
        is_cut = self._divisible(structure)
        cut = structure.cut(self._config.batch_dim) if is_cut else (False,) * len(turn.tensors)
        return self._runner.run(step, call, turn, sizes=sizes, cut=cut)

    def _replayed(self, call: Call, samples: int) -> tuple[Step, tuple[int, ...]]:
        """Capture a step by replay, in the place of how it was captured before."""
        captured = self._capture(call, self._largest_slice(samples), route="replay")
        step = self._build(captured, self._cuts(captured.capture.graph))
        self._steps[self._key(call)] = [step]
        return step, self._sizes(step.capture, samples)

    def _largest_slice(self, samples: int) -> int:
        plan = self._plan_now
        return max(slices(plan.layout, microbatch_sizes(samples, plan.microbatches)))

    def _step(self, call: Call, samples: int) -> tuple[Step, tuple[int, ...]]:
        """Return the captured step for a call, and the micro-batches of its batch."""
        key = self._key(call)
        steps = self._steps.pop(key, [])
        self._steps[key] = steps  # now the youngest
        for step in steps:
            sizes = self._sizes(step.capture, samples)
            if sizes and not step.misfit(call.structure.template):
                return step, sizes
        if steps:
            log.info("%s is captured again: %s", call.method, steps[-1].misfit(call.structure.template))
        captured = self._capture_for(call, samples)
        step = self._build(captured, self._cuts(captured.capture.graph))
        if call.method == TRAINING:
            step.refuse_borrowed()
        steps[:] = [*[s for s in steps if not s.capture.changed()][1 - _MOST_CAPTURES :], step]
        if len(self._steps) > _MOST_CAPTURES:
            del self._steps[next(iter(self._steps))]
        return step, self._sizes(step.capture, samples)

    def _key(self, call: Call) -> tuple[Any, ...]:
        """Return what a captured step is kept under: everything that its graph depends on from the start."""
        dim = self._config.batch_dim
        leaves = tuple((*leaf.shape[:dim], *leaf.shape[dim + 1 :], leaf.dtype) for leaf in call.structure.leaves)
        divisible = self._divisible(call.structure)
        shapes = leaves if divisible else call.structure.leaves
        modes = tuple(module.training for module in self._modules)
        frozen = tuple(p.requires_grad for m in self._modules for p in m._parameters.values() if p is not None)
        return (call.method, without_texts(call.structure.template), shapes, call.arguments[1:], modes, frozen)

    def _capture_for(self, call: Call, samples: int) -> Captured:
        """Capture a step so that a batch of this size can be cut.

        Raises:
            BatchError: if there is no way to cut the batch.
        """
        layout = self._plan_now.layout
        found = self._capture(call, self._largest_slice(samples))
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

    def _capture(self, call: Call, samples: int, *, symbolic: bool = True, route: str | None = None) -> Captured:
        if self._later is not None:
            self._later.settle()
        answers, reader = call.answers, Reader()
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
        )
        if answers is not None:
            asked = request
            request = replace(
                request,
                answers=lambda: self._links.control.agreed(
                    lambda: answers(asked), source=0, what="the answers that the step asks of its tensors"
                ),
            )
        with torch.inference_mode(False):
            found = captured_by(route or self._config.capture, request, traced=partial(self._traced, call))
        captured = Captured(found, replace(request, answers=None), reader, texts(call.structure.template))
        return captured.with_role(self._role if call.method == TRAINING else None)

    def _traced(self, call: Call, request: Request) -> UnitTrace:
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

    def _build(self, captured: Captured, cuts: tuple[int, ...]) -> Step:
        agree(self._links, {"captured graph": captured.capture.graph.fingerprint})
        is_replay = isinstance(captured.capture, Replay)
        return Step(
            captured,
            captured.capture.split(cuts, exact_ties=self._config.exact_ties),
            plan=in_turns(self._plan_now) if is_replay else self._plan_now,
            links=self._links,
            weights=self._weights,
            device=self._device,
            early=self._later is not None and captured.request.method == TRAINING and not is_replay,
        )

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

    def _sizes(self, capture: Capture, samples: int) -> tuple[int, ...]:
        """Return the micro-batches of a batch: as many as planned, fewer where the graph needs it; () if none fit."""
        layout = self._plan_now.layout
        for count in range(min(samples, self._plan_now.microbatches), 0, -1):
            sizes = microbatch_sizes(samples, count)
            if not any(capture.misfit(size) for size in slices(layout, sizes)):
                return sizes
        return ()

    def _first_slice(self, samples: int) -> int:
        """Guess the size of a micro-batch before there is a plan."""
        wanted = self._given.microbatches if self._given is not None else self._config.microbatches
        return max(microbatch_sizes(samples, wanted or 1))

    def _divisible(self, structure: Structure) -> bool:
        """Say whether batches like this can be cut; those that cannot are left whole where nobody wants to cut them."""
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
