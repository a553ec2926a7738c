"""Buffers that a step updates once per batch, whatever the number of micro-batches.

A step that counts its calls in a buffer, or takes a step of a power iteration on a weight, does so once per batch on
one device. Its new content is the same for every micro-batch that begins with the old one, so it is written once, after
all of them. An average of activations, and so a running statistic of BatchNorm, is such a mean over samples too: that
of the contents which micro-batches make of the old one, on whatever ranks. Other content that depends on the samples (a
memory bank) goes from micro-batch to micro-batch, as with gradient accumulation, and so does what it is computed with.
"""

from __future__ import annotations

from lightning_pipe.capture.graphs.joint_graph import JointGraph
from lightning_pipe.capture.graphs.sample_flow import BATCH_STATISTICS, Flow
from lightning_pipe.capture.steps.stage_program import Combine


def state_once(joint: JointGraph, flow: Flow) -> frozenset[str]:
    """Name the buffers and parameters whose new content depends on no sample, and on no state that does."""
    return _apart(joint, flow, ways=("same",))


def state_averaged(joint: JointGraph, flow: Flow) -> frozenset[str]:
    """Name the buffers whose new content is a mean over samples, and is computed with no other state that is not."""
    return _apart(joint, flow, ways=("same", "mean")) - state_once(joint, flow)


def is_statistics(joint: JointGraph, flow: Flow, new: str) -> bool:
    """Return whether the new content of a buffer is that of a batch norm."""
    nodes = {node.name: node for node in joint.module.graph.nodes}
    sources = {new, *(node.name for node in nodes[new].all_input_nodes)}
    return any(flow.coupled.get(name) == BATCH_STATISTICS for name in sources)


def state_by_parts(joint: JointGraph, flow: Flow) -> tuple[str, ...]:
    """Name the buffers that micro-batches change one after another for their samples, but for batch statistics."""
    written = ((state, new) for state, new in joint.mutations.items() if flow.combine.get(new) != "same")
    return tuple(sorted(state for state, new in written if not is_statistics(joint, flow, new)))


def _apart(joint: JointGraph, flow: Flow, *, ways: tuple[Combine, ...]) -> frozenset[str]:
    """Name the state whose new content is made so, and apart from all other state that is written."""
    places = {state: p for p, state in {**joint.parameters, **joint.buffers}.items() if state in joint.mutations}
    reads = _states_read(joint, places)
    once = {state for state, new in joint.mutations.items() if flow.combine.get(new) in ways}
    while True:
        others = joint.mutations.keys() - once
        entangled = {s for s in once if reads[s] & others or any(s in reads[other] for other in others)}
        if not entangled:
            return frozenset(once)
        once -= entangled


def _states_read(joint: JointGraph, places: dict[str, str]) -> dict[str, set[str]]:
    """Return, for every state that is overwritten, which such state its new content is computed from."""
    states = {place: state for state, place in places.items()}
    found: dict[str, set[str]] = {}
    for node in joint.module.graph.nodes:
        own = {states[node.name]} if node.name in states else set[str]()
        found[node.name] = own.union(*(found.get(n.name, set()) for n in node.all_input_nodes))
    return {state: found[new] for state, new in joint.mutations.items()}
