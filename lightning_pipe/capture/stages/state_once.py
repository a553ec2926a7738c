"""Buffers that a step updates once per batch, whatever the number of micro-batches.

A step that counts its calls in a buffer, or takes a step of a power iteration on a weight, does so once per batch on
one device. Its new content is the same for every micro-batch that begins with the old one, so it is written once, after
all of them. An average of activations is such a mean over samples too: that of the contents which micro-batches make
of the old one. Other content that depends on the samples (a memory bank), and the statistics of BatchNorm, go from
micro-batch to micro-batch, as with gradient accumulation, and so does what they are computed with.
"""

from __future__ import annotations

from torch import fx

from lightning_pipe.capture.graphs.joint_graph import JointGraph
from lightning_pipe.capture.graphs.sample_flow import BATCH_STATISTICS, Flow, leading_to
from lightning_pipe.capture.graphs.sample_mixing import mixed_beside_loss
from lightning_pipe.capture.graphs.value_roles import Role, sized_inputs
from lightning_pipe.capture.torch_private import operator_name

_ACCUMULATING: dict[str, Role] = {"add": "sum", "maximum": "max", "minimum": "min"}
_COUNTS_STATISTICS = "num_batches_tracked"  # how often statistics beside it were updated


def state_once(joint: JointGraph, flow: Flow) -> frozenset[str]:
    """Name the buffers and parameters whose new content depends on no sample, and on no state that does."""
    return _apart(joint, flow, roles=("same",))


def state_averaged(joint: JointGraph, flow: Flow) -> frozenset[str]:
    """Name the buffers whose new content is a mean over samples, and is computed with no other state that is not."""
    found = _apart(joint, flow, roles=("same", "mean")) - state_once(joint, flow)
    return frozenset(s for s in found if leading_to([joint.mutations[s]], joint).isdisjoint(flow.assumed))


def state_accumulated(joint: JointGraph, flow: Flow) -> frozenset[str]:
    """Name the buffers to which sums over samples are added, or which are the largest or smallest value so far.

    Micro-batch by micro-batch they become what they become on one device.
    """
    nodes = {node.name: node for node in joint.module.graph.nodes}
    places = {state: nodes[p] for p, state in joint.buffers.items() if state in joint.mutations}
    return frozenset(s for s, place in places.items() if _accumulates(nodes[joint.mutations[s]], place, joint, flow))


def _accumulates(node: fx.Node, state: fx.Node, joint: JointGraph, flow: Flow) -> bool:
    role = _ACCUMULATING.get(operator_name(node))
    operands = [n for n in node.all_input_nodes if n is not state]
    if role is None or state not in node.all_input_nodes or len(operands) != 1:
        return False
    return flow.roles.get(operands[0].name) == role or (role == "sum" and sized_inputs(node, joint) == 1)


def is_statistics(joint: JointGraph, flow: Flow, new: str) -> bool:
    """Return whether the new content of a buffer is that of a batch norm."""
    nodes = {node.name: node for node in joint.module.graph.nodes}
    sources = {new, *(node.name for node in nodes[new].all_input_nodes)}
    return any(flow.coupled.get(name) == BATCH_STATISTICS for name in sources)


def state_kept_by_replicas(joint: JointGraph, flow: Flow) -> tuple[str, ...]:
    """Name the buffers that replicas must not change apart: their mean is not what one device has."""
    averaged = state_averaged(joint, flow)
    return tuple(name for name in _depending(joint, flow) if name not in averaged)


def state_by_parts(joint: JointGraph, flow: Flow) -> tuple[str, ...]:
    """Name the buffers that micro-batches change one after another, to something else than the batch would."""
    right = state_averaged(joint, flow) | (state_accumulated(joint, flow) - _read_too(joint))
    mixed = mixed_beside_loss(joint, flow)
    wrong = {state for state, new in joint.mutations.items() if new in mixed} | {*_depending(joint, flow)} - right
    return tuple(sorted(wrong))


def _read_too(joint: JointGraph) -> set[str]:
    """Name the state from which what is trained, or other state, is computed, besides its own new content."""
    trained = leading_to([joint.loss, *(name for name, _ in joint.gradients)], joint)
    places = {state: place for place, state in {**joint.parameters, **joint.buffers}.items()}
    reads = _states_read(joint, {state: places[state] for state in joint.mutations})
    return {
        state
        for state, new in joint.mutations.items()
        if {places[state], new} & trained or any(state in reads[other] for other in joint.mutations if other != state)
    }


def _depending(joint: JointGraph, flow: Flow) -> tuple[str, ...]:
    """Name the buffers whose new content depends on samples, but for batch statistics."""
    written = ((state, new) for state, new in joint.mutations.items() if flow.roles.get(new) != "same")
    return tuple(state for state, new in written if not is_statistics(joint, flow, new))


def _apart(joint: JointGraph, flow: Flow, *, roles: tuple[Role, ...]) -> frozenset[str]:
    """Name the state whose new content has such a role, and is computed apart from all other state that is written."""
    places = {state: p for p, state in {**joint.parameters, **joint.buffers}.items() if state in joint.mutations}
    reads = _states_read(joint, places)
    once = {
        state
        for state, new in joint.mutations.items()
        if flow.roles.get(new) in roles
        and not state.endswith(_COUNTS_STATISTICS)
        and not is_statistics(joint, flow, new)
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
