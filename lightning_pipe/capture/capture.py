"""Captured step: the pure graph for planners, and stage programs for any cut of it.

capture = captured_by_microbatch(Request(module, "training_step", structure, samples=4))
split = capture.split((17, 40))      # three stages
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import nn

from lightning_pipe.capture.closed_stages import closed
from lightning_pipe.capture.graphs.gradient_nodes import with_gradients_apart
from lightning_pipe.capture.graphs.joint_graph import JointGraph
from lightning_pipe.capture.graphs.lengths import at_lengths
from lightning_pipe.capture.graphs.request import Request
from lightning_pipe.capture.graphs.sample_flow import UNKNOWN_MIXING, Flow, single_statistics
from lightning_pipe.capture.graphs.trace import trace
from lightning_pipe.capture.graphs.witness import testimony
from lightning_pipe.capture.operators import is_random
from lightning_pipe.capture.python.places import Place
from lightning_pipe.capture.recording.unit_state import tensors_in
from lightning_pipe.capture.slicing.accumulated import accumulated, uncut
from lightning_pipe.capture.slicing.results import LateValue
from lightning_pipe.capture.stages.assign import Kinds, classify, moved
from lightning_pipe.capture.stages.graph_draws import graph_draws, named_draws
from lightning_pipe.capture.stages.node_graph import graph_of_nodes
from lightning_pipe.capture.stages.split import Splitter
from lightning_pipe.capture.stages.state_once import state_by_parts, state_once
from lightning_pipe.capture.steps.batch import numbers_in
from lightning_pipe.capture.steps.hazards import hazard
from lightning_pipe.capture.steps.module_tables import canonical_names
from lightning_pipe.capture.steps.record import StepRecord
from lightning_pipe.capture.steps.stage_program import FIRST_KEY, NOT_HELD, RandomKey, Split
from lightning_pipe.capture.tracked.number_expressions import Situation
from lightning_pipe.core.graph import Graph
from lightning_pipe.core.policy import ActivationPolicy
from lightning_pipe.errors import CaptureError


@dataclass(frozen=True)
class Capture:
    """A captured step, the route `joint` (`capture.route`).

    Attributes:
        graph: what planners see.
        record: what the step said besides its loss.
        joint, kinds, flow: the traced graph and what is known of it.
        aliases: parameter name -> canonical name.
        device: where it will run.
        batch_dim: dimension of the samples in the tensors of the batch.
        general: the traced graph with symbols for lengths; None where these are constants.
        late_values, whole, ..., is_exact: as for every `capture.route.Route`.
    """

    graph: Graph
    record: StepRecord
    joint: JointGraph
    kinds: Kinds
    flow: Flow
    aliases: dict[str, str]
    device: torch.device
    batch_dim: int = 0
    general: JointGraph | None = None
    late_values: tuple[LateValue, ...] = ()
    by_parts: tuple[str, ...] = ()
    whole: str = ""
    plays: ClassVar[None] = None
    name: ClassVar[str] = "joint"
    is_exact: ClassVar[bool] = False

    @property
    def identity(self) -> str:
        """Return a hash of all that the graph was made from; "" if that is not known."""
        return self.joint.identity

    @property
    def is_sliceable(self) -> bool:
        """Return whether replicas of a stage may share the samples of a micro-batch."""
        return not self.whole

    @property
    def timing(self) -> Capture:
        """Return this graph, whose operations are to be timed."""
        return self

    @property
    def writes(self) -> frozenset[str]:
        """Return the names of the parameters and buffers that every micro-batch writes to."""
        return frozenset(self.joint.mutations) - state_once(self.joint, self.flow)

    @property
    def may_draw(self) -> bool:
        """Return whether the step may draw random numbers of torch."""
        return any(map(is_random, self.joint.module.graph.nodes))

    @property
    def draws(self) -> tuple[str, ...]:
        """Name what the step draws at random, dropout aside, each with the user's line."""
        return named_draws(self.joint)

    def buffers_by_parts(self) -> tuple[str, ...]:
        """Name the buffers that micro-batches change one after another, to something else than the batch would."""
        return state_by_parts(self.joint, self.flow)

    def told(self) -> str:
        """Return in a line by which route the step was captured, and why."""
        return f"one graph of {len(self.graph.nodes)} nodes (joint)."

    def begin(self, arguments: tuple[int, ...], template: Any) -> list[float]:
        """Return the tracked numbers that the graph reads, for the next batch."""
        return self.numbers(Situation(arguments, numbers_in(template)))

    def matched_draws(self, request: Request, key: RandomKey) -> AbstractContextManager[Callable[[], str]]:
        """Let a plain run of the step draw the random numbers that the graph draws, inside."""
        return graph_draws(self.joint, key, request.device)

    def for_lengths(self, request: Request) -> Capture | None:
        """Return the step for other lengths of its batch, if this trace holds for them.

        Args:
            request: the same step with another batch.

        Raises:
            CaptureError: if no graph can hold the step.
        """
        return None if self.general is None else _captured_at_lengths(self.general, request)

    def split(
        self,
        cuts: tuple[int, ...],
        *,
        policies: Sequence[ActivationPolicy] = (),
        exact_ties: bool = False,
        held: Mapping[str, Set[int]] = NOT_HELD,
        reads_twice: bool = False,
    ) -> Split:
        """Cut the graph before the nodes at these positions; `()` is one stage.

        Args:
            cuts: positions.
            policies: what each stage does with what it saves, in names of this graph; () if all keep everything.
            exact_ties: whether gradients of a parameter that several stages use travel and are added for every
                micro-batch, so that all sums keep the order of one device, instead of once per step.
            held: stages that hold a copy of a parameter, whether they use it in this graph or not.
            reads_twice: whether the backward may read other weights than F.

        Raises:
            PlanError: if the cuts make no stages.
        """
        if self.joint.loss is None:
            cuts = moved(cuts, count=len(self.graph.nodes), forbidden=self.graph.uncuttable)

        splitter = Splitter(
            self.joint,
            kinds=self.kinds,
            flow=self.flow,
            aliases=self.aliases,
            device=self.device,
            exact_ties=exact_ties,
            held=held,
            reads_twice=reads_twice,
        )
        return closed(splitter.split(cuts, policies))

    def misfit(self, samples: int) -> str:
        """Return "" if slices of this many samples can be run, else why not."""
        return self._single_statistics(samples) or self.joint.fits(samples)

    def _single_statistics(self, samples: int) -> str:
        """Return "" if no batch norm sees one value per channel in slices of this many samples, else which does."""
        if samples not in self._single:
            self._single[samples] = single_statistics(self.joint, self.flow, samples)
        return self._single[samples]

    @cached_property
    def _single(self) -> dict[int, str]:
        """Return what was found of numbers of samples so far: a batch norm that would see one value per channel."""
        return {}

    def misfit_of_results(self, samples: int) -> str:
        """Return "": results are made of those of micro-batches, whatever their number."""
        return ""

    def with_totals(
        self,
        leaves: Sequence[Any],
        *,
        cut: Sequence[bool],
        sizes: Sequence[int],
        buffers: Mapping[str, torch.Tensor],
        key: RandomKey = FIRST_KEY,
    ) -> tuple[tuple[Any, ...], tuple[bool, ...]]:
        """Return the leaves of a whole batch as stages read them, and which are cut: as they are.

        Args:
            leaves: tensors of the batch; None in their place on ranks that have none.
            cut: which are cut into samples.
            sizes: samples of the micro-batches.
            buffers: by name; on ranks that have leaves, those of the first stage.
            key: of the random numbers of the batch.
        """
        return tuple(leaves), tuple(cut)

    def without_slices(self) -> Capture:
        """Return the same step with every node taken for one that may mix samples, so that replicas share none."""
        unknown = dict.fromkeys((name for name in self.kinds.placed if name not in self.flow.coupled), UNKNOWN_MIXING)
        flow = replace(self.flow, coupled={**self.flow.coupled, **unknown})
        graph = graph_of_nodes(self.joint, self.kinds, flow, self.aliases, self.graph.head)
        return replace(self, flow=flow, graph=graph)

    def left_whole(self, reason: str) -> Capture:
        """Return the same step for batches that are not cut, for a reason."""
        graph = replace(self.graph, unsliceable=frozenset())  # replicas share no samples of it
        return replace(self, whole=reason, graph=graph)

    def changed(self, situation: Situation) -> str:
        """Return "" if what the step's Python read is as it was, else what has changed."""
        return self.joint.guards.broken(situation)

    def testimony(self, request: Request) -> str:
        """Return "" if the step's Python does now what it did when it was captured (`witness`), else what."""
        lengths = frozenset[tuple[int, int]]() if self.general is None else frozenset(self.general.lengths)
        return testimony(replace(request, symbolic=self.joint.symbol is not None, lengths=lengths), self.joint)

    def varying(self) -> tuple[Place, ...]:
        """List the places of numbers that the step read and that have become other numbers."""
        return self.joint.guards.varying()

    def numbers(self, situation: Situation) -> list[float]:
        """Return the tracked numbers that the graph reads, for the next batch."""
        return self.joint.guards.numbers.vector(situation)

    @property
    def number_names(self) -> list[str]:
        """Return where each of these numbers comes from, as the user would write it."""
        return self.joint.guards.numbers.input_names()


def _trained_and_written(module: nn.Module, joint: JointGraph) -> list[str]:
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return [name for name in joint.mutations if name in parameters and parameters[name].requires_grad]


def captured_by_microbatch(request: Request) -> Capture:
    """Trace a step on a micro-batch and describe its graph: micro-batches are steps of their own.

    Raises:
        CaptureError: if a graph would freeze something, naming the hazard and the user's line.
    """
    if request.lengths:
        with contextlib.suppress(CaptureError):
            if (captured := _captured_at_lengths(trace(request), request)) is not None:
                return captured
        request = replace(request, lengths=frozenset())
    return _captured(trace(request), request)


def _captured_at_lengths(general: JointGraph, request: Request) -> Capture | None:
    """Return the step for the sizes of a request from a graph with symbols for them; None if it does not hold there."""
    joint = at_lengths(general, request.structure.leaves)
    return None if joint is None else replace(_captured(joint, request), general=general)


def _captured(joint: JointGraph, request: Request) -> Capture:
    """Describe a fresh graph.

    Raises:
        CaptureError: if no graph can hold the step.
    """
    refuse_held_state(joint, request)
    joint = with_gradients_apart(joint)
    is_cut = request.samples is not None and not request.uncut
    flow = accumulated(joint, batch_dim=request.batch_dim) if is_cut else uncut(joint)
    kinds, aliases = classify(joint), canonical_names(request.module)
    graph = graph_of_nodes(joint, kinds, flow, aliases)
    capture = Capture(graph, joint.record, joint, kinds, flow, aliases, request.device, request.batch_dim)
    return capture if request.samples is None else capture.without_slices()


def refuse_held_state(joint: JointGraph, request: Request) -> None:
    """Refuse a step that returns or writes what stages cannot hold.

    Raises:
        CaptureError: naming it.
    """
    _refuse_overwritten_ties(joint, canonical_names(request.module))
    if next(tensors_in(joint.record.returned, objects=True), None) is not None:
        raise hazard("it returns an object that holds tensors", "")
    if written := _trained_and_written(request.module, joint):
        raise hazard(f"it writes to the parameter {written[0]}, whose gradient it makes", "")


def _refuse_overwritten_ties(joint: JointGraph, aliases: dict[str, str]) -> None:
    """Refuse a step that writes to a parameter which hangs in several places: each is an input of its own."""
    places = Counter(aliases[name] for name in joint.parameters.values())
    for name in joint.mutations:
        if places[aliases.get(name, name)] > 1:
            raise hazard(f"it writes to the parameter {name}, which hangs in several modules", "")
