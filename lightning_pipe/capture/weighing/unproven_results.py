"""Results of a graph of which its operations do not prove how micro-batches make those of the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lightning_pipe.capture.graphs.joint_graph import JointGraph
from lightning_pipe.capture.graphs.sample_flow import Flow, SampleRows
from lightning_pipe.capture.graphs.sample_mixing import mixed_beside_loss, reads_samples
from lightning_pipe.capture.weighing.derived_results import Derived
from lightning_pipe.capture.weighing.parts_and_whole import TriedResult


def unproven_results(joint: JointGraph, flow: Flow, derived: Sequence[Derived]) -> tuple[str, ...]:
    """Name the results, and the loss, into which the number of samples may have entered as a number."""
    said = joint.results[: len(joint.results) - len(joint.record.guards)]
    loss = () if joint.loss is None else (joint.loss,)
    made = {one.name for one in derived}
    return tuple(sorted(reads_samples(joint, flow, {*loss, *({*said} - made)})))


def picked_results(joint: JointGraph, flow: Flow) -> tuple[str, ...]:
    """Name the results that may be of single samples of the batch, such as its first ones: operations do not tell."""
    said = joint.results[: len(joint.results) - len(joint.record.guards)]
    return tuple(sorted({name for name in said if flow.roles[name] in ("mixed", "linear")} - {joint.loss}))


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
    found = {name for name, role in flow.roles.items() if role in ("mixed", "linear")} - {one.name for one in derived}
    found |= mixed_beside_loss(joint, flow) - tried.keys()
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
