"""Assignment of the nodes of a joint graph to stages.

Forward nodes are cut by position. Three kinds of nodes have no stage, they are repeated wherever they are used: sizes,
constants, and cheap values that depend on nothing but parameters or buffers (views and casts of parameters; masks,
positions and rotary tables made of buffers and constants). The outputs of a node with several outputs stay with it.

A backward node follows the forward operation that it differentiates (autograd's sequence number), is never in a later
stage than a gradient it reads, and a sum of gradients sits where its earliest input is.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import fx

from lightning_pipe.capture.graphs.joint_graph import JointGraph
from lightning_pipe.capture.graphs.sample_flow import Flow
from lightning_pipe.capture.graphs.value_sizes import is_size
from lightning_pipe.capture.operators import Trait, is_random, takes_output, traits
from lightning_pipe.capture.torch_private import OpOverload, is_backward


@dataclass(frozen=True)
class Kinds:
    """The nodes of a graph by kind, by name.

    Attributes:
        placed: forward operations in order; a cut position is an index into them.
        repeated: nodes that are repeated where they are used.
        parents: outputs of a node with several outputs -> that node.
    """

    placed: tuple[str, ...]
    repeated: frozenset[str]
    parents: dict[str, str]


def classify(joint: JointGraph) -> Kinds:
    """Find out which nodes have a place."""
    mutated = {name for name in (*joint.parameters, *joint.buffers) if _state_name(name, joint) in joint.mutations}
    from_parameters: set[str] = set()
    repeated: set[str] = set()
    placed: list[str] = []
    parents: dict[str, str] = {}
    state = (set(joint.parameters) | set(joint.buffers)) - mutated
    for node in joint.module.graph.nodes:
        if node.op == "get_attr":
            repeated.add(node.name)
        if node.op != "call_function":
            continue
        inputs = [n.name for n in node.all_input_nodes]
        if is_size(node) or (
            all(n in repeated or n in state for n in inputs) and _is_cheap(node, joint, from_parameters)
        ):
            repeated.add(node.name)
            if any(n in joint.parameters or n in from_parameters for n in inputs):
                from_parameters.add(node.name)
        elif is_backward(node):
            continue
        elif takes_output(node):
            parents[node.name] = parents.get(inputs[0], inputs[0])
        else:
            placed.append(node.name)
    return Kinds(tuple(placed), frozenset(repeated), parents)


def _state_name(placeholder: str, joint: JointGraph) -> str:
    return joint.parameters.get(placeholder) or joint.buffers[placeholder]


def made_of_parameters(joint: JointGraph, kinds: Kinds, stages: dict[str, int]) -> frozenset[str]:
    """Name what a stage alone reads and makes of parameters alone, such as casts, or gates behind a sigmoid.

    Args:
        joint: the graph.
        kinds: its nodes by kind.
        stages: of every node that has one.
    """
    outputs = {joint.loss, *joint.results, *joint.mutations.values()}
    of_parameters = {name for name, state in joint.parameters.items() if state not in joint.mutations}
    found: set[str] = set()
    for node in joint.module.graph.nodes:
        reads = {n.name for n in node.all_input_nodes}
        if reads.isdisjoint(of_parameters) or not reads <= of_parameters | kinds.repeated:
            continue
        if node.name in kinds.repeated:
            of_parameters.add(node.name)
        elif (stage := stages.get(node.name)) is not None and not (is_backward(node) or node.name in outputs):
            is_local = all(stages.get(user.name, stage) == stage for user in node.users)
            if is_local and not is_random(node):
                of_parameters.add(node.name)
                found.add(node.name)
    return frozenset(found)


def _is_cheap(node: fx.Node, joint: JointGraph, from_parameters: set[str]) -> bool:
    """Return whether a node on parameters, buffers and constants is worth repeating."""
    if is_random(node):
        return False
    inputs = [n.name for n in node.all_input_nodes]
    if any(n in joint.parameters or n in from_parameters for n in inputs):
        return Trait.VIEW in traits(node)
    if not isinstance(node.target, OpOverload):
        return takes_output(node)
    return Trait.HEAVY not in traits(node) and not (is_backward(node) and not inputs)


def uncuttable(joint: JointGraph, kinds: Kinds) -> dict[int, str]:
    """Return the cut positions that would separate a read of state from the operation that overwrites it, and why."""
    position = {name: k for k, name in enumerate(kinds.placed)}
    nodes = {node.name: node for node in joint.module.graph.nodes}
    found: dict[int, str] = {}
    for placeholder, state in {**joint.parameters, **joint.buffers}.items():
        if state not in joint.mutations:
            continue
        touching = [*(u.name for u in nodes[placeholder].users), joint.mutations[state]]
        places = [position[at] for n in touching if (at := kinds.parents.get(n, n)) in position]
        if places:
            first, last = (_place(nodes[kinds.placed[at]]) for at in (min(places), max(places)))
            why = f"{state}, which {first} uses and {last} uses last, is overwritten in between"
            found = dict.fromkeys(range(min(places) + 1, max(places) + 1), why) | found
    return found


def _place(node: fx.Node) -> str:
    """Name an operation as the user knows it."""
    custom: dict[str, str] = node.meta.get("custom") or {}
    line = custom.get("line", "")
    return f"{custom.get('module') or node.name}{f' at {line}' if line else ''}"


def moved(cuts: tuple[int, ...], *, count: int, forbidden: Collection[int]) -> tuple[int, ...]:
    """Move the cuts of `count` things to places that are not forbidden: the next one, or the last; stages may be empty.

    So can a step without a backward be cut, which may read parameters in stages that do not hold them.
    """
    allowed = [position for position in range(count + 1) if position not in forbidden]
    return tuple(next((p for p in allowed if p >= cut), allowed[-1]) for cut in cuts)


def unsliceable(joint: JointGraph, kinds: Kinds, flow: Flow) -> frozenset[int]:
    """Return the cut positions that a value crosses which has samples, but not in rows of their own."""
    position = {name: k for k, name in enumerate(kinds.placed)} | dict.fromkeys(joint.leaves, 0)
    found: set[int] = set()
    for node in joint.module.graph.nodes:
        begin = position.get(kinds.parents.get(node.name, node.name))
        located = node.name in flow.samples or flow.combine.get(node.name, "same") == "same"
        if begin is None or located or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        uses = [position.get(kinds.parents.get(user.name, user.name), begin) for user in node.users]
        found |= set(range(begin + 1, max(uses, default=begin) + 1))
    return frozenset(found)


def assign(joint: JointGraph, kinds: Kinds, cuts: tuple[int, ...]) -> dict[str, int]:
    """Return the stage of every node that has one; stage s holds placed nodes cuts[s-1]..cuts[s]-1.

    Args:
        cuts: positions at which stages 1, 2, ... begin, ascending.
    """
    stages = {name: bisect.bisect_right(cuts, position) for name, position in positions(joint, kinds).items()}
    return stages | dict.fromkeys(() if joint.head is None else joint.head.outputs, len(cuts))


def positions(joint: JointGraph, kinds: Kinds) -> dict[str, int]:
    """Return the position that decides the stage of a node, for every node that has one; -1 is always in stage 0."""
    places = {name: position for position, name in enumerate(kinds.placed)}
    places |= {name: places[parent] for name, parent in kinds.parents.items() if parent in places}
    by_sequence: dict[int, int] = {}
    for node in joint.module.graph.nodes:
        if node.name in places and "seq_nr" in node.meta:
            by_sequence.setdefault(node.meta["seq_nr"], places[node.name])
    forward = set(places)
    if joint.head is not None:  # whose outputs are gradients that the last stage has
        places |= dict.fromkeys(joint.head.outputs, len(kinds.placed) - 1)
    for node in joint.module.graph.nodes:
        if node.op != "call_function" or not is_backward(node) or node.name in kinds.repeated:
            continue
        gradients = [places[n.name] for n in node.all_input_nodes if n.name in places and n.name not in forward]
        activations = [places[n.name] for n in node.all_input_nodes if n.name in forward]
        sequence = node.meta.get("seq_nr", -1)
        if sums_gradients(node) or (sequence not in by_sequence and gradients):
            places[node.name] = min(gradients)
        else:
            places[node.name] = min([max([*activations, by_sequence.get(sequence, -1)]), *gradients])
    return places


def sums_gradients(node: fx.Node) -> bool:
    """Recognise the additions that autograd makes where a tensor is used several times."""
    inputs = node.all_input_nodes
    return (
        node.target is torch.ops.aten.add.Tensor
        and len(inputs) == 2
        and all(is_backward(n) for n in inputs)
        and "Gradient addition" in (node.meta.get("stack_trace") or "")
    )


def partial_sums(node: fx.Node, stages: dict[str, int]) -> tuple[fx.Node, ...]:
    """Return the terms of a parameter's gradient that lie in different stages.

    A parameter that is used in several stages has one gradient per stage; they are added once per step instead of
    travelling for every micro-batch.
    """
    if not sums_gradients(node) or len(node.users) != 1:
        return (node,)
    terms = [term for n in node.all_input_nodes for term in partial_sums(n, stages)]
    if len({stages[term.name] for term in terms if term.name in stages}) == 1 and len(terms) == 2:
        return (node,)
    return tuple(terms)
