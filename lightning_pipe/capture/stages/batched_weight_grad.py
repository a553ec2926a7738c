"""Batched weight gradients: which weight halves can run once on the samples of several micro-batches.

The weight half of a stage is part of the joint graph, and gradients of slices add up to the gradient of the whole. So W
of several micro-batches is one W of all their samples if the values that it reads are those that the graph would have
for all of them, and if none of its operations needs to know where a micro-batch ends:

    read     a value that is the same for every micro-batch: state that F does not overwrite, constants; or one with
             samples in rows of their own, which are put one behind the other, unless it counts samples (indices into a
             micro-batch); or a tangent of a loss that is a sum or mean over samples
    run      operations that give every sample its own value, or sum over the samples, or are linear in such sums; none
             that mixes samples, draws random numbers or scales by the number of samples what has been scaled already

Anything else (a scalar that I made of a micro-batch, an unknown reduction) keeps W of its stage apart.

Legend: what a value depends on, each including those before it: `SAME` nothing that differs between micro-batches,
`SIZE` the number of samples, `TANGENT` the tangent, `DATA` samples, random numbers or state that F overwrites.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import fx

from lightning_pipe.capture.graphs.joint_graph import JointGraph
from lightning_pipe.capture.graphs.sample_flow import Flow, dims_with_samples
from lightning_pipe.capture.operators import Trait, differentiates, is_random, reads_size, takes_output, traits
from lightning_pipe.capture.stages.assign import Kinds, positions
from lightning_pipe.capture.torch_private import operator_name


class _Depends(IntEnum):
    SAME = 0
    SIZE = 1
    TANGENT = 2
    DATA = 3


@dataclass(frozen=True)
class Joining:
    """What of a joint graph a joined W can read and run.

    Attributes:
        values: names of the values that it can read.
        along: the dimension along which those of them that differ between micro-batches are put together.
        operations: names of the nodes that it can run.
    """

    values: frozenset[str]
    along: dict[str, int]
    operations: frozenset[str]


NOTHING = Joining(frozenset(), {}, frozenset())


def joining(joint: JointGraph, kinds: Kinds, flow: Flow) -> Joining:
    """Look at every node of a graph; a graph of constant size allows nothing."""
    return NOTHING if joint.symbol is None else _Search(joint, kinds, flow).found()


class _Search:
    def __init__(self, joint: JointGraph, kinds: Kinds, flow: Flow) -> None:
        self._joint, self._flow = joint, flow
        places = positions(joint, kinds)
        coupled = {places[name] for name in flow.coupled if name in places}
        self._mixing = {name for name, place in places.items() if place in coupled}
        state = {**joint.parameters, **joint.buffers}
        self._overwritten = {name for name, own in state.items() if own in joint.mutations}
        self._depends: dict[str, _Depends] = {}
        self._counts: set[str] = set()

    def found(self) -> Joining:
        values, along, operations = set(), {}, set()
        for node in self._joint.module.graph.nodes:
            if node.op == "output":
                continue
            self._depends[node.name] = self._dependence(node)
            if self._is_counting(node):
                self._counts.add(node.name)
            if self._can_run(node):
                operations.add(node.name)
            if self._depends[node.name] is _Depends.SAME or node.name in self._joint.tangents:
                values.add(node.name)
            elif (where := self._flow.samples.get(node.name)) and where.outer == 1 and not self._is_index(node):
                values.add(node.name)
                along[node.name] = where.dim
        return Joining(frozenset(values), along, frozenset(operations))

    def _dependence(self, node: fx.Node) -> _Depends:
        meta = node.meta.get("val")
        if node.name in self._joint.tangents:
            return _Depends.TANGENT
        if node.name in self._overwritten or is_random(node):
            return _Depends.DATA
        if reads_size(node):
            return _Depends.SIZE if isinstance(meta, torch.SymInt) else _Depends.SAME
        if node.op != "call_function":
            return _Depends.DATA if self._has_samples(node) else _Depends.SAME
        return max((self._depends[n.name] for n in node.all_input_nodes), default=_Depends.SAME)

    def _is_counting(self, node: fx.Node) -> bool:
        """Return whether a value may say which sample of a micro-batch it belongs to."""
        if not self._has_samples(node):
            return False
        inputs = node.all_input_nodes
        made_here = Trait.COUNTS in traits(node) or node.name in self._mixing
        return made_here or any(n.name in self._counts for n in inputs)

    def _is_index(self, node: fx.Node) -> bool:
        return node.name in self._counts and not node.meta["val"].dtype.is_floating_point

    def _can_run(self, node: fx.Node) -> bool:
        known, inputs = traits(node), node.all_input_nodes
        if takes_output(node):
            return True  # as what it is taken out of
        if is_random(node) or node.name in self._mixing or any(n.name in self._overwritten for n in inputs):
            return False
        if self._flow.loss not in ("mean", "sum") and any(n.name in self._joint.tangents for n in inputs):
            return False
        outputs = self._tensors(node)
        if any(len(dims_with_samples(output, self._joint)) > 1 for output in outputs):
            return False
        if self._depends[node.name] is not _Depends.DATA:
            return True
        sizes = [n for n in inputs if self._depends[n.name] is _Depends.SIZE and not self._has_samples(n)]
        if sizes and Trait.SIZED not in known:
            return False
        sums = [n for n in inputs if self._depends[n.name] is _Depends.DATA and not self._has_samples(n)]
        if sums:
            return not self._has_samples(node) and self._is_linear(node)
        return all(dims_with_samples(output, self._joint) for output in outputs) or Trait.SUMS in known

    def _is_linear(self, node: fx.Node) -> bool:
        """Return whether an operation on sums over samples gives of their sum the sum of its results."""
        name, known = operator_name(node), traits(node)
        varying = [n for n in node.all_input_nodes if self._depends[n.name] is not _Depends.SAME]
        if any(self._has_samples(n) for n in varying) or (len(varying) > 1 and Trait.ADDS not in known):
            return False
        if Trait.ADDS in known:
            return len(varying) == len(node.all_input_nodes) and not any(isinstance(a, float) for a in node.args)
        if name in ("div", "index_put", "_unsafe_index_put") and not self._is_homogeneous(node, name, varying):
            return False
        return Trait.LINEAR in known or differentiates(node)

    def _is_homogeneous(self, node: fx.Node, name: str, varying: list[fx.Node]) -> bool:
        """Return whether sums are divided, not divided by, and put among zeros, not among other numbers."""
        first = node.args[0]
        return first in varying if name == "div" else isinstance(first, fx.Node) and Trait.ZEROS in traits(first)

    def _has_samples(self, node: fx.Node) -> bool:
        return any(dims_with_samples(tensor, self._joint) for tensor in self._tensors(node))

    @staticmethod
    def _tensors(node: fx.Node) -> list[torch.Tensor]:
        meta = node.meta.get("val")
        return [m for m in (meta if isinstance(meta, (tuple, list)) else [meta]) if isinstance(m, torch.Tensor)]
