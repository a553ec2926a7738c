"""Captured step: the pure graph for planners, and stage programs for any cut of it.

capture = captured_by_microbatch(Request(module, "training_step", structure, samples=4))
split = capture.split((17, 40))      # three stages
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from lightning_pipe.capture.graphs.gradient_nodes import with_gradients_apart
from lightning_pipe.capture.graphs.joint_graph import JointGraph
from lightning_pipe.capture.graphs.lengths import at_lengths
from lightning_pipe.capture.graphs.request import Request
from lightning_pipe.capture.graphs.sample_flow import (
    UNKNOWN_MIXING,
    Flow,
    follow,
)
from lightning_pipe.capture.graphs.sample_mixing import may_mix, mixing_places, single_statistics
from lightning_pipe.capture.graphs.trace import trace
from lightning_pipe.capture.graphs.value_roles import Role
from lightning_pipe.capture.graphs.variants import Variants, is_fixed
from lightning_pipe.capture.graphs.witness import testimony
from lightning_pipe.capture.operators import is_random
from lightning_pipe.capture.python.places import Place
from lightning_pipe.capture.recording.unit_loss import loss_calls
from lightning_pipe.capture.recording.unit_state import tensors_in
from lightning_pipe.capture.slicing.results import Derived
from lightning_pipe.capture.stages.assign import Kinds, classify, moved
from lightning_pipe.capture.stages.graph_draws import graph_draws
from lightning_pipe.capture.stages.node_graph import graph_of_nodes
from lightning_pipe.capture.stages.split import Splitter
from lightning_pipe.capture.stages.state_once import state_by_parts, state_kept_by_replicas, state_once
from lightning_pipe.capture.steps.batch import numbers_in
from lightning_pipe.capture.steps.hazards import hazard
from lightning_pipe.capture.steps.module_tables import canonical_names
from lightning_pipe.capture.steps.numbers import calls_of_samples, leaves_said, numbers_said, of_samples
from lightning_pipe.capture.steps.record import Read, Ref, StepRecord
from lightning_pipe.capture.steps.stage_program import FIRST_KEY, NOT_HELD, RandomKey, Split
from lightning_pipe.capture.steps.step_function import NUMBERS
from lightning_pipe.capture.tracked.number_expressions import Situation
from lightning_pipe.capture.weighing.denominator_totals import totals_of_batch, with_totals
from lightning_pipe.capture.weighing.derived_results import graph_of_batch, with_sources
from lightning_pipe.capture.weighing.loss_terms import with_one_kind_of_term
from lightning_pipe.capture.weighing.parts_and_whole import TriedResult
from lightning_pipe.capture.weighing.unproven_results import (
    flow_with,
    mixed_results,
    picked_results,
    refuse_lists,
    scattered_results,
    unproven_results,
)
from lightning_pipe.capture.weighing.whole_batches import goes_by_count, needs_all, unlike_said
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
        variants: graphs for other numbers of samples, if this one holds for one number only; None if it holds for
            others too, or if the batch cannot be cut.
        general: the traced graph with symbols for lengths; None where these are constants.
        of_batch: the traced graph for the whole batch, which tells how results are made; None if there is none.
        tried: results of which numbers have shown how micro-batches make them, or do not.
        derived, whole, ..., has_unweighed_terms: as for every `capture.route.Route`.
    """

    graph: Graph
    record: StepRecord
    joint: JointGraph
    kinds: Kinds
    flow: Flow
    aliases: dict[str, str]
    device: torch.device
    batch_dim: int = 0
    variants: Variants | None = None
    general: JointGraph | None = None
    of_batch: JointGraph | None = None
    derived: tuple[Derived, ...] = ()
    tried: Mapping[str, TriedResult] = field(default_factory=dict)
    whole: str = ""
    plays: ClassVar[None] = None
    name: ClassVar[str] = "joint"
    fallback: ClassVar[str] = "replay"
    is_fixed: ClassVar[bool] = True
    is_exact: ClassVar[bool] = False
    can_run_ahead: ClassVar[bool] = True
    may_offload: ClassVar[bool] = True
    kept: ClassVar[str] = ""
    is_random_in_python: ClassVar[bool] = False
    has_unweighed_terms: ClassVar[bool] = False

    @property
    def identity(self) -> str:
        """Return a hash of all that the graph was made from; "" if that is not known, or there are several graphs."""
        return "" if self.variants is not None else self.joint.identity

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
    def sets_first(self) -> frozenset[str]:
        """Return nothing: a step that does otherwise in its first call is no graph."""
        return frozenset()

    @property
    def may_draw(self) -> bool:
        """Return whether the step may draw random numbers of torch."""
        return self.variants is not None or any(map(is_random, self.joint.module.graph.nodes))

    @property
    def loss_role(self) -> Role:
        """Return how losses of slices make that of the batch, "mixed" if operations do not tell."""
        return self.flow.loss

    @property
    def mixes_samples(self) -> bool:
        """Return whether samples meet each other on the way to the loss, or lie where nobody has followed them."""
        return self.variants is not None or may_mix(self.joint, self.flow)

    def averaged_buffers(self) -> tuple[str, ...]:
        """Name the buffers that replicas of a stage must not change apart: their mean is not what one device has.

        The mean of the replicas is right for averages over samples, and is what batch statistics become.
        """
        return state_kept_by_replicas(self.joint, self.flow)

    def buffers_by_parts(self) -> tuple[str, ...]:
        """Name the buffers that micro-batches change one after another, to something else than the batch would."""
        return state_by_parts(self.joint, self.flow)

    def told(self) -> str:
        """Return in a line by which route the step was captured, and why."""
        return f"one graph of {len(self.graph.nodes)} nodes (joint)."

    def mixed_results(self) -> tuple[str, ...]:
        """Return, in words, where it says what micro-batches do not make together."""
        return self._places(mixed_results(self.joint, self.flow, self.derived, self.tried))

    def scattered_results(self) -> tuple[str, ...]:
        """Return, in words, where it says what has samples that cannot be put together from those of micro-batches."""
        return self._places(scattered_results(self.joint, self.flow, self.derived))

    def _places(self, names: Set[str]) -> tuple[str, ...]:
        said = leaves_said(self.record.returned, self.record.calls, self.record.kept)
        return tuple(dict.fromkeys(str(x) for x in said if isinstance(x.value, Ref | Read) and x.value.name in names))

    def mixing(self) -> str:
        """Return, in words and as far as known, where the step mixes its samples so that micro-batches change it."""
        return mixing_places(self.joint, self.flow)

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
        return None if self.general is None else captured_at_lengths(self.general, request)

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

        def split_of(joint: JointGraph) -> Split:
            splitter = Splitter(
                joint,
                kinds=self.kinds,
                flow=self.flow,
                aliases=self.aliases,
                device=self.device,
                exact_ties=exact_ties,
                held=held,
                later={one.name for one in self.derived if one.has_parts} - {self.record.loss or ""},
                reads_twice=reads_twice,
            )
            return splitter.split(cuts, policies)

        return split_of(self.joint) if self.variants is None else self.variants.dispatch(split_of)

    def misfit(self, samples: int) -> str:
        """Return "" if slices of this many samples can be run, else why not."""
        if single := self._single_statistics(samples):
            return single
        if self.variants is None:
            return self.joint.fits(samples)
        try:
            self.variants.graph(samples)
        except CaptureError as error:
            return str(error)
        return ""

    def _single_statistics(self, samples: int) -> str:
        """Return "" if no batch norm sees one value per channel in slices of this many samples, else which does."""
        if samples not in self._single:
            self._single[samples] = single_statistics(self.joint, self.flow, samples)
        return self._single[samples]

    @cached_property
    def _single(self) -> dict[int, str]:
        """Return what was found of numbers of samples so far: a batch norm that would see one value per channel."""
        return {}

    @property
    def tells_of_batch(self) -> bool:
        """Return whether its operations tell how the results of the batch are made, and not those of parts alone."""
        return self.of_batch is not None

    def misfit_of_results(self, samples: int) -> str:
        """Return "" if results of a batch of this many samples are made as far as was found, else why not."""
        return "" if self.of_batch is None else self.of_batch.fits(samples)

    def with_totals(
        self,
        leaves: Sequence[Any],
        *,
        cut: Sequence[bool],
        sizes: Sequence[int],
        buffers: Mapping[str, torch.Tensor],
        key: RandomKey = FIRST_KEY,
    ) -> tuple[tuple[Any, ...], tuple[bool, ...]]:
        """Return the leaves of a whole batch as stages read them, and which are cut: totals come behind the others.

        Args:
            leaves: tensors of the batch; None in their place on ranks that have none.
            cut: which are cut into samples.
            sizes: samples of the micro-batches.
            buffers: by name; on ranks that have leaves, those of the first stage.
        """
        if self.joint.totals is None:
            return tuple(leaves), tuple(cut)
        if next(iter(leaves), None) is None:
            return (*leaves, None), (*cut, False)
        totals = totals_of_batch(
            self.joint, self.variants, leaves, cut=cut, sizes=sizes, buffers=buffers, batch_dim=self.batch_dim
        )
        return (*leaves, totals), (*cut, False)

    def loss_calls(self) -> Mapping[str, str]:
        """Return the traced calls, and the line of each."""
        return loss_calls(self.joint.calls)

    @property
    def unproven(self) -> tuple[str, ...]:
        """Return the names of results whose operations do not prove how micro-batches make that of the batch."""
        return unproven_results(self.joint, self.flow, self.derived)

    @property
    def picked(self) -> tuple[str, ...]:
        """Return the names of results that may be of single samples."""
        return picked_results(self.joint, self.flow, self.derived)

    @property
    def unproven_buffers(self) -> frozenset[str]:
        """Return the names of state that depends on samples, or on their number in a graph that does not tell."""
        return frozenset(self.joint.mutations) if self.joint.symbol is None else self.writes

    def result_role(self, name: str) -> Role:
        """Return how a result of micro-batches makes that of the batch, as operations say it."""
        return self.flow.roles.get(name, "same")

    def with_results(self, found: Mapping[str, TriedResult]) -> Capture:
        """Return the same step with results combined as numbers have shown, by name."""
        mixed = {name for name, tried in found.items() if tried.is_mixed}
        derived = tuple(one for one in self.derived if mixed.isdisjoint(one.half.inputs))
        return replace(self, flow=flow_with(found, self.flow, self.joint), derived=derived, tried=found)

    def with_role(self, role: Literal["mean", "sum"]) -> Capture:
        """Return the same step with losses of micro-batches combined as means or as sums."""
        return replace(self, flow=self.flow.with_loss(self.joint, role))

    def without_slices(self) -> Capture:
        """Return the same step with every node taken for one that may mix samples, so that replicas share none."""
        unknown = dict.fromkeys((name for name in self.kinds.placed if name not in self.flow.coupled), UNKNOWN_MIXING)
        flow = replace(self.flow, coupled={**self.flow.coupled, **unknown})
        graph = replace(graph_of_nodes(self.joint, self.kinds, flow, self.aliases), head=self.graph.head)
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
        return testimony(replace(request, symbolic=self.variants is None, lengths=lengths), self.joint)

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

    @property
    def unwritten_buffers(self) -> frozenset[str]:
        """Return the names of the module's buffers that the graph reads and does not change."""
        return frozenset(self.joint.buffers.values()) - {NUMBERS, *self.joint.mutations}


def _trained_and_written(module: nn.Module, joint: JointGraph) -> list[str]:
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return [name for name in joint.mutations if name in parameters and parameters[name].requires_grad]


def captured_by_microbatch(request: Request) -> Capture:
    """Trace a step on a micro-batch and describe its graph.

    Raises:
        CaptureError: if a graph would freeze something, naming the hazard and the user's line.
    """
    of_all = replace(request, samples=request.total)
    try:
        captured = _captured_at_any(request)
    except CaptureError:
        if not (reason := needs_all(request)):
            raise
        return _captured_at_any(of_all).left_whole(reason)
    reason = captured.whole or goes_by_count(request, captured.joint)
    if not reason:
        return captured
    if request.total not in (0, request.samples):
        captured = _captured_at_any(of_all)
    return captured.left_whole(reason)


def _captured_at_any(request: Request) -> Capture:
    """Return the step with symbols for the lengths of a request, or with constants where no graph holds for others."""
    if request.lengths:
        with contextlib.suppress(CaptureError):
            if (found := captured_at_lengths(trace(request), request)) is not None:
                return found
        request = replace(request, lengths=frozenset())
    return _captured(trace(request), request)


def captured_at_lengths(general: JointGraph, request: Request) -> Capture | None:
    """Return the step for the sizes of a request from a graph with symbols for them; None if it does not hold there."""
    joint = at_lengths(general, request.structure.leaves)
    return None if joint is None else replace(_captured(joint, request), general=general)


def _captured(joint: JointGraph, request: Request) -> Capture:
    """Describe a fresh graph.

    Raises:
        CaptureError: if no graph can hold the step.
    """
    refuse_held_state(joint, request)
    variants, whole = None, ""
    if request.samples is not None and is_fixed(joint):
        joint = _prepared(trace(replace(request, symbolic=False)), request)
        refuse_lists(joint.record, request)
        variants = _variants(request, joint)
        joint, whole = _with_sizes(joint, variants, request)
        variants = replace(variants, base=joint)
    else:
        joint = _prepared(joint, request)
    flow, derived, of_batch = follow(joint), tuple[Derived, ...](), None
    if request.samples is not None and variants is None:
        whole_request = replace(request, samples=request.total or request.samples)

        def retrace() -> JointGraph:
            return trace(whole_request)

        of_batch = graph_of_batch(joint, request.total, retrace, lambda traced: _prepared(traced, whole_request))
        sources = None
        if of_batch is not None:
            sources = with_sources(joint, flow, of_batch, request.device, retrace=retrace)
        if sources is None:
            of_batch, sources = None, with_sources(joint, flow, joint, request.device)
        joint, flow, derived = sources or (joint, flow, ())
    kinds = classify(joint)
    aliases = canonical_names(request.module)
    graph = graph_of_nodes(joint, kinds, flow, aliases)
    known = (joint, kinds, flow, aliases, request.device, request.batch_dim, variants)
    return Capture(graph, joint.record, *known, of_batch=of_batch, derived=derived, whole=whole)


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


def _prepared(joint: JointGraph, request: Request) -> JointGraph:
    """Rewrite a fresh graph so that it can be cut, and its micro-batches weighed."""
    joint = with_gradients_apart(joint)
    if request.samples is None:  # it is never cut into samples
        return joint
    return with_one_kind_of_term(with_totals(joint, request.device))


def _refuse_overwritten_ties(joint: JointGraph, aliases: dict[str, str]) -> None:
    """Refuse a step that writes to a parameter which hangs in several places: each is an input of its own."""
    places = Counter(aliases[name] for name in joint.parameters.values())
    for name in joint.mutations:
        if places[aliases.get(name, name)] > 1:
            raise hazard(f"it writes to the parameter {name}, which hangs in several modules", "")


def _variants(request: Request, joint: JointGraph) -> Variants:
    answers = tuple(bool(guard.expected) for guard in joint.record.guards)

    def retrace(samples: int) -> JointGraph:
        return _prepared(trace(replace(request, samples=samples, symbolic=False, answers=lambda: answers)), request)

    return Variants(joint, retrace, lambda base, other, samples: unlike_said(base.record, other.record, samples))


def _with_sizes(joint: JointGraph, variants: Variants, request: Request) -> tuple[JointGraph, str]:
    """Return a graph whose recorded numbers are functions of the samples, where other graphs show that they depend.

    Also why batches must not be cut, if some number is no such function.
    """
    record, samples = joint.record, joint.samples
    if not numbers_said(record.returned, record.calls):
        return joint, ""
    counts = (samples, samples - 1 if samples > 1 else samples + 2, samples + 1)
    try:
        records = [record, *(variants.retrace(count).record for count in counts[1:])]
    except CaptureError:  # it holds for this number only
        return joint, ""
    try:
        calls = tuple(calls_of_samples([one.calls for one in records], counts))
        returned = of_samples([one.returned for one in records], counts, f"What {request.method} returns")
    except CaptureError as reason:
        if request.total:
            return joint, f"a number that it says goes by the number of samples ({reason})"
        raise
    return replace(joint, record=replace(record, calls=calls, returned=returned)), ""
