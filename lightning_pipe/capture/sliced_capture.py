"""Captured step that is cut out of the graph of the whole batch: what micro-batches make is that of the batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from lightning_pipe.capture.capture import Capture, captured_by_microbatch, refuse_held_state
from lightning_pipe.capture.graphs.gradient_nodes import with_gradients_apart
from lightning_pipe.capture.graphs.joint_graph import JointGraph
from lightning_pipe.capture.graphs.lengths import at_lengths
from lightning_pipe.capture.graphs.request import Request, takes_all_samples
from lightning_pipe.capture.graphs.trace import trace
from lightning_pipe.capture.graphs.witness import testimony
from lightning_pipe.capture.operators import is_random
from lightning_pipe.capture.slicing.sliced_step import ValuesOfBatch, sliced
from lightning_pipe.capture.stages.assign import classify
from lightning_pipe.capture.stages.graph_draws import graph_draws, named_draws
from lightning_pipe.capture.stages.node_graph import graph_of_nodes
from lightning_pipe.capture.steps.module_tables import canonical_names
from lightning_pipe.capture.steps.stage_program import FIRST_KEY, RandomKey
from lightning_pipe.collection import without_collection
from lightning_pipe.errors import BrokenRouteError, CaptureError, faults_reported
from lightning_pipe.lightning_names import rank_zero_warn


@dataclass(frozen=True, kw_only=True)
class SlicedCapture(Capture):
    """A captured step whose graph is cut out of that of the whole batch (`slicing.sliced_step`).

    Attributes:
        whole_graph: the graph of the whole batch.
        batch_values: what is computed where the batch is loaded; None if nothing is.
    """

    whole_graph: JointGraph
    batch_values: ValuesOfBatch | None
    is_exact: ClassVar[bool] = True

    @property
    def may_draw(self) -> bool:
        """Return whether the step may draw random numbers of torch."""
        return any(map(is_random, self.whole_graph.module.graph.nodes))

    @property
    def draws(self) -> tuple[str, ...]:
        """Name what the step draws at random, dropout aside, each with the user's line."""
        return named_draws(self.whole_graph)

    def buffers_by_parts(self) -> tuple[str, ...]:
        """Return nothing: buffers become what the batch makes them."""
        return ()

    def matched_draws(self, request: Request, key: RandomKey) -> AbstractContextManager[Callable[[], str]]:
        """Let a plain run of the step draw the random numbers that the graph draws, inside."""
        return graph_draws(self.whole_graph, key, request.device)

    def misfit(self, samples: int) -> str:
        """Return "" if slices of this many samples can be run, else why not: batch statistics of a single value."""
        return self._single_statistics(samples)

    def misfit_of_results(self, samples: int) -> str:
        """Return "" if the graph holds for a batch of this many samples, else why not."""
        return self.whole_graph.fits(samples)

    def with_totals(
        self,
        leaves: Sequence[Any],
        *,
        cut: Sequence[bool],
        sizes: Sequence[int],
        buffers: Mapping[str, torch.Tensor],
        key: RandomKey = FIRST_KEY,
    ) -> tuple[tuple[Any, ...], tuple[bool, ...]]:
        """Return the leaves of a whole batch as stages read them, and which are cut; arguments as of `Capture`."""
        if (values := self.batch_values) is None:
            return tuple(leaves), tuple(cut)
        cut = (*cut, *(value.rows is not None for value in values.values))
        if next(iter(leaves), None) is None:
            return (*leaves, *[None] * len(values.values)), cut
        return (*leaves, *values.of(leaves, buffers, samples=sum(sizes), key=key)), cut

    def testimony(self, request: Request) -> str:
        """Return "" if the step's Python does now what it did when it was captured (`witness`), else what."""
        lengths = frozenset[tuple[int, int]]() if self.general is None else frozenset(self.general.lengths)
        return testimony(replace(request, samples=request.total, lengths=lengths), self.whole_graph)

    def for_lengths(self, request: Request) -> Capture | None:
        """Return the step for other lengths of its batch, if this trace holds for them."""
        joint = None if self.general is None else at_lengths(self.general, request.structure.leaves)
        if joint is None or not request.total or joint.fits(request.total):
            return None
        try:
            found = _cut(joint, request, request.samples or request.total)
        except BrokenRouteError:
            return None  # it is captured anew, which says so
        return None if isinstance(found, str) else replace(found, general=self.general)


def capture_step(request: Request) -> Capture:
    """Trace a step and describe its graph: cut out of that of the whole batch, if batches are cut.

    Batches are not cut where cutting fails for a fault of this package, or where an evaluation needs all samples in the
    middle of the model. A training step takes what a micro-batch has there, with a warning; not with
    `whole_batch="exact"`, where batch statistics are such a need, too.

    Raises:
        CaptureError: if a graph would freeze something, naming the hazard and the user's line.
    """
    uncut = request.uncut
    with without_collection():
        if request.samples is not None and request.total and not uncut:
            takes_own = request.method == "training_step" and request.whole_batch != "exact"
            try:
                found = _sliced(replace(request, samples=request.total), request.samples)
            except BrokenRouteError as fault:
                found, takes_own = str(fault), False
            if not isinstance(found, str) and request.whole_batch == "exact" and found.graph.by_microbatch:
                found = takes_all_samples(found.graph.by_microbatch)
            if not isinstance(found, str):
                return found
            if takes_own:
                _warn(found, request)
                captured = captured_by_microbatch(request)
                changed = (*captured.graph.by_microbatch, request.method)
                return replace(captured, graph=replace(captured.graph, by_microbatch=changed))
            if request.method != "training_step" or request.whole_batch != "exact":  # which its plan says
                rank_zero_warn(f"{request.method} is not cut into micro-batches: {found}.")
            uncut = found
        if uncut and request.samples is not None:
            return captured_by_microbatch(replace(request, samples=request.total, uncut=uncut)).left_whole(uncut)
        return captured_by_microbatch(request)


def _sliced(request: Request, samples: int) -> SlicedCapture | str:
    """Return the step cut along samples; in words, what needs more than the forwards of all micro-batches."""
    if request.lengths:
        with contextlib.suppress(CaptureError):
            general = trace(request)
            joint = at_lengths(general, request.structure.leaves)
            if joint is not None:
                found = _cut(joint, request, samples)
                return found if isinstance(found, str) else replace(found, general=general)
        request = replace(request, lengths=frozenset())
    return _cut(trace(request), request, samples)


def _cut(joint: JointGraph, request: Request, samples: int) -> SlicedCapture | str:
    """Return a traced step cut along samples; in words, what needs more than the forwards of all micro-batches.

    Raises:
        CaptureError: if no graph can hold the step.
        BrokenRouteError: if it cannot be cut for a fault of this package.
    """
    refuse_held_state(joint, request)
    with faults_reported("its micro-batches"):
        return _cut_along_samples(joint, request, samples)


def _cut_along_samples(joint: JointGraph, request: Request, samples: int) -> SlicedCapture | str:
    total, dim, device = request.total, request.batch_dim, request.device
    step = sliced(
        with_gradients_apart(joint),
        samples=samples,
        total=total,
        batch_dim=dim,
        device=device,
        whole_batch=request.whole_batch,
    )
    if isinstance(step, str):
        return step
    kinds, aliases = classify(step.joint), canonical_names(request.module)
    return SlicedCapture(
        graph=graph_of_nodes(step.joint, kinds, step.flow, aliases, step.head),
        record=step.joint.record,
        joint=step.joint,
        kinds=kinds,
        flow=step.flow,
        aliases=aliases,
        device=device,
        batch_dim=dim,
        late_values=step.late_values,
        whole_graph=step.whole,
        batch_values=step.batch,
        by_parts=step.by_parts,
    )


def _warn(need: str, request: Request) -> None:
    """Say what micro-batches change; not where that was asked for."""
    if request.whole_batch == "by_microbatch":
        return
    exact = "microbatches=1 is exact"
    if request.whole_batch == "auto":
        exact = f"whole_batch='exact' runs all that follows on the last stage, and {exact}"
    time = "" if request.batch_dim else " If dimension 0 of the batch is time, batch_dim=1 cuts it along its samples."
    rank_zero_warn(
        f"{request.method}: {need}. Every micro-batch takes its own there, as gradient accumulation does; {exact}."
        + time
    )
