"""Buffers that a step updates once per batch, whatever the number of micro-batches.

A step that counts its calls in a buffer, or takes a step of a power iteration on a weight, does so once per batch on
one device. Its new content is the same for every micro-batch that begins with the old one, so it is written once, after
all of them. Content that depends on the samples (statistics of BatchNorm) goes from micro-batch to micro-batch, as with
gradient accumulation, and so does what it is computed with.
"""

from __future__ import annotations

from lightning_pipe.capture.graphs.joint_graph import JointGraph
from lightning_pipe.capture.graphs.sample_flow import Flow

_COUNTS_STATISTICS = "num_batches_tracked"  # how often statistics beside it were updated


def state_once(joint: JointGraph, flow: Flow) -> frozenset[str]:
    """Name the buffers and parameters whose new content depends on no sample, and on no state that does."""
    places = {state: p for p, state in {**joint.parameters, **joint.buffers}.items() if state in joint.mutations}
    reads = _states_read(joint, places)
    once = {
        state
        for state, new in joint.mutations.items()
        if flow.roles.get(new) == "same" and not state.endswith(_COUNTS_STATISTICS)
    }
    while True:
        others = joint.mutations.keys() - once
        mixed = {s for s in once if reads[s] & others or any(s in reads[other] for other in others)}
        if not mixed:
            return frozenset(once)
        once -= mixed


def _states_read(joint: JointGraph, places: dict[str, str]) -> dict[str, set[str]]:
    """Return, for every state that is overwritten, which such state its new content is computed from."""
    states = {place: state for state, place in places.items()}
    found: dict[str, set[str]] = {}
    for node in joint.module.graph.nodes:
        own = {states[node.name]} if node.name in states else set[str]()
        found[node.name] = own.union(*(found.get(n.name, set()) for n in node.all_input_nodes))
    return {state: found[new] for state, new in joint.mutations.items()}
