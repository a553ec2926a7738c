"""Results of a graph of which its operations do not prove how micro-batches make those of the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_pipe.capture.graphs.joint_graph import JointGraph
from lightning_pipe.capture.graphs.request import Request
from lightning_pipe.capture.graphs.sample_flow import Flow, SampleRows
from lightning_pipe.capture.graphs.sample_mixing import mixed_beside_loss, reads_samples
from lightning_pipe.capture.slicing.results import Derived
from lightning_pipe.capture.steps.hazards import hazard
from lightning_pipe.capture.steps.numbers import lists_said
from lightning_pipe.capture.steps.record import BatchText, Read, Ref, StepRecord
from lightning_pipe.capture.steps.trees import branches, found_in
from lightning_pipe.capture.text_fields import MarkedText
from lightning_pipe.capture.weighing.parts_and_whole import TriedResult


def unproven_results(joint: JointGraph, flow: Flow, derived: Sequence[Derived]) -> tuple[str, ...]:
    """Name the results, and the loss, into which the number of samples may have entered as a number."""
    said = joint.results[: len(joint.results) - len(joint.record.guards)]
    loss = () if joint.loss is None else (joint.loss,)
    made = {one.name for one in derived}
    return tuple(sorted(reads_samples(joint, flow, {*loss, *({*said} - made)})))


def picked_results(joint: JointGraph, flow: Flow, derived: Sequence[Derived]) -> tuple[str, ...]:
    """Name the results that may be of single samples of the batch, such as its first ones: operations do not tell."""
    said = joint.results[: len(joint.results) - len(joint.record.guards)]
    made = {joint.loss, *(one.name for one in derived)}
    return tuple(sorted({name for name in said if flow.roles[name] in ("mixed", "linear")} - made))


def scattered_results(joint: JointGraph, flow: Flow, derived: Sequence[Derived]) -> set[str]:
    """Name the results of which micro-batches give samples that lie in no rows of their own, and nothing is made of."""
    said = joint.results[: len(joint.results) - len(joint.record.guards)]
    made = {joint.loss, *(one.name for one in derived)}
    return {name for name in said if flow.roles[name] == "cat" and name not in flow.samples} - made


def mixed_results(
    joint: JointGraph, flow: Flow, derived: Sequence[Derived], tried: Mapping[str, TriedResult]
) -> set[str]:
    """Name the values that micro-batches do not make together: no sum, mean or extreme over samples, nor made of such.

    Args:
        joint: the graph.
        flow: how its values are combined.
        derived: results that are made of others.
        tried: what numbers have shown of results.
    """
    found = {name for name, role in flow.roles.items() if role in ("mixed", "linear")}
    found |= mixed_beside_loss(joint, flow) - tried.keys()
    found -= {one.name for one in derived}
    return found | {name for name, one in tried.items() if one.is_mixed}


def flow_with(found: Mapping[str, TriedResult], flow: Flow, joint: JointGraph) -> Flow:
    """Return how values are combined, with what numbers have shown of results."""
    roles, samples = dict(flow.roles), dict(flow.samples)
    for name, tried in found.items():
        samples.pop(name, None)
        match tried.how:
            case None:
                roles[name] = "cat"
            case SampleRows():
                roles[name], samples[name] = "cat", tried.how
            case "first":
                roles[name] = "same"  # of which the first is taken
            case "unknown":
                roles[name] = "mean" if roles.get(name) == "cat" else roles.get(name, "same")
            case _:
                roles[name] = tried.how
    loss = flow.loss if joint.loss is None else roles[joint.loss]
    return replace(flow, roles=roles, samples=samples, loss=loss if loss in ("mean", "sum") else flow.loss)


def refuse_lists(record: StepRecord, request: Request) -> None:
    """Refuse a graph of some samples that says a list with an item for each of them: it has as many for any batch.

    Raises:
        CaptureError: if it does, or returns a dict by texts of its batch.
    """
    count = request.count
    if count in (1, request.total):
        return
    if _has_marked_key(record.returned):
        raise hazard("it returns a dict by texts of its batch", "")
    for _, one in lists_said(record.returned, record.calls, record.kept):
        if len(one) == count and next(found_in(one, (Ref, Read, BatchText)), None) is not None:
            raise hazard(f"it returns, keeps or logs a list of {count} items, as many as it was given samples", "")


def _has_marked_key(value: Any) -> bool:
    inside = branches(value) or {}
    return any(isinstance(key, MarkedText) for key in inside) or any(map(_has_marked_key, inside.values()))
