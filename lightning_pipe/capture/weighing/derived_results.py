"""Results that a step makes of numbers which are reduced over its samples: `loss.exp()`, `(loss - b).abs() + b`.

The mean of `exp(loss)` over micro-batches is not `exp` of the mean loss. So such a result is not combined from those of
slices: what it is made of is combined, and the operations of the step make it of that once more, for the whole batch.

    sources     means, sums and extremes over samples that nothing bends, and values that no sample enters
    operations  what lies between them and the result, on numbers or small tensors: `exp`, `sqrt`, `clamp`, `abs`

Sizes among the operations are those of the whole batch. A result with samples on the way (a variance over the batch),
random numbers, or a parameter itself stays what its slices make of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from lightning_pipe.capture.graphs.joint_graph import JointGraph
from lightning_pipe.capture.graphs.sample_flow import Flow
from lightning_pipe.capture.operators import is_random, reads_size
from lightning_pipe.capture.stages.emit import Emitter
from lightning_pipe.capture.steps.stage_program import Half
from lightning_pipe.capture.torch_private import is_backward

_MOST_NUMBERS = 4096  # of a source: more is no result but data


@dataclass(frozen=True)
class Derived:
    """A result that is made of others.

    Attributes:
        name: its value name.
        half: makes it of its sources, which are the inputs, for so many samples.
        line: the user's line of the first of the operations that make it of them.
    """

    name: str
    half: Half
    line: str

    def of(self, values: Mapping[str, Any], samples: int) -> Any:
        """Return the result of a batch from the sources of that batch."""
        with torch.no_grad():
            (found,) = self.half.run(samples, None, *(values[name] for name in self.half.inputs))
        return found


def with_sources(joint: JointGraph, flow: Flow, device: torch.device) -> tuple[JointGraph, tuple[Derived, ...]]:
    """Return the graph with the sources of such results among its results, and how these are made."""
    nodes = {node.name: node for node in joint.module.graph.nodes}
    bent = _bent(nodes.values(), flow)
    emitter = Emitter(joint, repeated=frozenset(), device=device)
    found: list[Derived] = []
    for name in dict.fromkeys([joint.loss, *joint.results]):
        if name is None or name not in bent or (parts := _parts(nodes[name], flow, bent)) is None:
            continue
        first = next(node for node in nodes.values() if node in parts.operations)
        line = (first.meta.get("custom") or {}).get("line") or first.name
        found.append(Derived(name, emitter.make((), inputs=sorted(parts.sources), outputs=[name]), line))
    asked = len(joint.results) - len(joint.record.guards)  # questions are the last results
    new = [name for one in found for name in one.half.inputs if name not in joint.results]
    results = (*joint.results[:asked], *dict.fromkeys(new), *joint.results[asked:])
    return replace(joint, results=results), tuple(found)


def _bent(nodes: Iterable[fx.Node], flow: Flow) -> set[str]:
    """Name the values without samples that slices do not make as a mean, a sum or an extreme, or only if idle."""
    found = set[str]()
    for node in nodes:
        role = flow.roles.get(node.name, "same")
        if role in ("same", "cat") or is_backward(node) or "role" in node.meta:  # which says what slices make of it
            continue
        if (
            role in ("mixed", "linear")
            or node.name in flow.assumed
            or any(n.name in found for n in node.all_input_nodes)
        ):
            found.add(node.name)
    return found


@dataclass(frozen=True)
class _Parts:
    """What a bent result is made of: names of its sources, and the bent operations between them and it."""

    sources: set[str]
    operations: set[fx.Node]


def _parts(result: fx.Node, flow: Flow, bent: set[str]) -> _Parts | None:
    """Return what a bent result is made of; None if that cannot be combined from slices."""
    parts, pending, constant = _Parts(set(), {result}), [result], set[fx.Node]()
    while pending:
        node = pending.pop()
        if is_random(node):
            return None
        for source in node.all_input_nodes:
            if source.name in bent:
                if source not in parts.operations:
                    parts.operations.add(source)
                    pending.append(source)
            elif source in constant or _is_constant(source):
                constant.add(source)
            elif _is_source(source, flow):
                parts.sources.add(source.name)
            else:
                return None
    return parts


def _is_source(node: fx.Node, flow: Flow) -> bool:
    """Return whether slices of a batch have a small value that makes that of the batch."""
    value, role = node.meta.get("val"), flow.roles.get(node.name, "same")
    if node.op != "call_function" or role == "cat" or not isinstance(value, torch.Tensor) or value.is_complex():
        return False
    is_small = all(isinstance(size, int) for size in value.shape) and value.numel() <= _MOST_NUMBERS
    return is_small and (role != "same" or not _is_drawn(node))


def _is_constant(node: fx.Node) -> bool:
    """Return whether a value depends on nothing but sizes and constants of the graph."""
    return not any(one.op == "placeholder" or is_random(one) for one in _all_before(node))


def _is_drawn(node: fx.Node) -> bool:
    return any(map(is_random, _all_before(node)))


def _all_before(node: fx.Node) -> set[fx.Node]:
    """Return a node and all that it is computed from; sizes are computed from nothing."""
    found, pending = set[fx.Node](), [node]
    while pending:
        one = pending.pop()
        if one not in found:
            found.add(one)
            pending += [] if reads_size(one) else one.all_input_nodes
    return found
