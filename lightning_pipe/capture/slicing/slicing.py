"""How micro-batches hold every value of a graph, and what has to wait for all of them.

Every operator is cut in the way that waits least (`rules`). Its level is the number of barriers before it. What depends
on the batch, buffers, constants and random numbers of no tensor alone is *of the batch*: it is evaluated where the
batch is loaded, so its barriers are free. Law: if nothing that micro-batches make on the way to a gradient has a level,
a micro-batch runs forward and backward before the next one begins. Else the *head* runs once: after all forwards,
before the backwards that read it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import fx

from lightning_pipe.capture.graphs.joint_graph import JointGraph
from lightning_pipe.capture.graphs.value_sizes import Sizes, is_size
from lightning_pipe.capture.operators import is_random, takes_output
from lightning_pipe.capture.slicing import index_rules, layout_rules, product_rules  # noqa: F401  register rules
from lightning_pipe.capture.slicing.loss_rules import cut_terms
from lightning_pipe.capture.slicing.operation import BatchOperation, SampleCut
from lightning_pipe.capture.slicing.placement import LOCAL, TERMS, WHOLE, Placements, Rows, is_of_microbatch
from lightning_pipe.capture.slicing.rules import resized, rule_of
from lightning_pipe.capture.torch_private import is_backward, operator_name

CONSTANTS = ("full", "zeros", "ones", "empty")
_PRODUCTS = frozenset(["mm", "bmm", "addmm", "convolution", "convolution_backward"])


class Slicing:
    """The placements of a graph of the whole batch (`whole_batch.of_whole_batch`).

    Args:
        joint: the graph.
        samples: number of samples of the batch.
        batch_dim: dimension of the samples in the tensors of the batch.
        without_rules: names of operators whose rules are not used; for tests.
        once: names of operations that are not cut.

    Attributes:
        joint, samples: as given.
        operations: calls of operators.
        placements: of every value.
        levels: barriers before every value.
        cuts: of the operators that micro-batches run.
        of_batch: values that depend on the batch, buffers and constants alone.
        head: what needs all samples and is needed by a backward, in order.
        after: what needs all samples and is a result only.
        early: what is computed once before any barrier, though it depends on samples.
        barrier: the first operation of the head, or that waits for what is only added there; None if nothing waits.
    """

    def __init__(
        self,
        joint: JointGraph,
        samples: int,
        *,
        batch_dim: int = 0,
        without_rules: Iterable[str] = (),
        once: Collection[str] = (),
    ) -> None:
        self.joint, self.samples, self._batch_dim = joint, samples, batch_dim
        self._without = frozenset(without_rules)
        self._nodes = [node for node in joint.module.graph.nodes if node.op != "output"]
        self._sizes = Sizes(joint)
        self.operations = {
            node: BatchOperation(node, samples, self.number)
            for node in self._nodes
            if node.op == "call_function" and not takes_output(node) and not is_size(node)
        }
        self._multiples = range(samples, 1 << 62, samples)
        self._weights = self._made_of_parameters()
        self.of_batch = self._find_of_batch()
        whole = frozenset(node for node in self.operations if node.name in once)
        while True:  # ends: every round makes more operators whole
            self._whole = whole
            self._propagate()
            if not (late := self._late() - whole):
                break
            whole |= late
        self._find_head()

    def _made_of_parameters(self) -> frozenset[fx.Node]:
        weights = {node for node in self._nodes if node.name in self.joint.parameters}
        for node in self._nodes:
            if node.op == "call_function" and node.all_input_nodes and weights.issuperset(node.all_input_nodes):
                weights.add(node)
        return frozenset(weights)

    def _find_of_batch(self) -> frozenset[fx.Node]:
        joint, of_batch = self.joint, set[fx.Node]()
        for node in self._nodes:
            if node.op == "call_function":
                draws_for_rows = is_random(node) and not all(map(is_size, node.all_input_nodes))
                is_of_batch = not draws_for_rows and all(is_size(n) or n in of_batch for n in node.all_input_nodes)
            else:
                is_buffer = node.name in joint.buffers and joint.buffers[node.name] not in joint.mutations
                is_given = node.name in joint.leaves
                is_of_batch = is_buffer or is_given or node.op == "get_attr"
            if is_of_batch:
                of_batch.add(node)
        return frozenset(of_batch)

    @functools.cached_property
    def of_sizes(self) -> frozenset[fx.Node]:
        """Return what is made of the sizes of the batch alone, which costs less to make than to send."""
        constants = set[fx.Node]()
        for node in self._nodes:
            is_operation = node.op == "call_function" and not is_size(node) and not is_random(node)
            is_constant = is_operation and all(is_size(n) or n in constants for n in node.all_input_nodes)
            if is_constant or node.op == "get_attr":
                constants.add(node)
        return frozenset(constants)

    def _propagate(self) -> None:
        self.placements: dict[fx.Node, Placements] = {}
        self.levels: dict[fx.Node, int] = {}
        self.cuts: dict[fx.Node, SampleCut] = {}
        for node in self._nodes:
            if node.op != "call_function" or is_size(node):
                self.placements[node], self.levels[node] = self._of_input(node), 0
            elif takes_output(node):
                source, place = node.args
                several = self.placements[source]
                self.placements[node] = several[place] if isinstance(several, tuple) else several
                self.levels[node] = self.levels[source]
            else:
                self._place(self.operations[node])

    def _of_input(self, node: fx.Node) -> Placements:
        value = node.meta.get("val")
        dim = self._batch_dim
        if node.name not in self.joint.leaves or not isinstance(value, torch.Tensor) or value.dim() <= dim:
            return WHOLE
        is_cut = self.number(value.shape[dim]) == self.samples and self._is_proportional(value, Rows(dim))
        return Rows(dim) if is_cut else WHOLE

    def number(self, size: Any) -> int:
        """Return a size at the number of samples of the batch."""
        number: int = self._sizes.number(size, self.samples)
        return number

    def _place(self, operation: BatchOperation) -> None:
        """Choose of an operator's cuts the one that waits least; the earlier of equals."""
        node = operation.node
        cuts = [] if node in self._whole else self._cuts(operation)
        whole = SampleCut(_all_whole(operation), dict.fromkeys(operation.inputs, WHOLE))
        levels = [self._level(cut) for cut in (*cuts, whole)]
        level = min(levels)
        cut = (*cuts, whole)[levels.index(level)]
        if node in self.of_batch and cut.results is TERMS:
            level, cut = 0, whole  # added where the batch is loaded
        self.placements[node], self.levels[node], self.cuts[node] = cut.results, level, cut

    def _cuts(self, operation: BatchOperation) -> list[SampleCut]:
        """List the cuts of an operator, those first that are taken at equal levels."""
        placements = {node: self.placements[node] for node in operation.inputs}
        free = placements | {node: WHOLE for node in placements if placements[node] is TERMS and node in self.of_batch}
        cuts = [self._gradient_rows(operation, placements)]
        if TERMS in free.values():
            cuts.append(cut_terms(operation, free))
        added = {node: WHOLE if placement is TERMS else placement for node, placement in free.items()}
        cuts.append(self._by_rule(operation, added))
        if cuts[-1] is None:  # leaves of the batch are there as a whole, too
            whole_leaves = {node: WHOLE if node in self.of_batch else placement for node, placement in added.items()}
            cuts.append(self._by_rule(operation, whole_leaves))
        cuts.append(self._made_by_rows(operation))
        if cuts == [None] * len(cuts) and operation.node not in self.of_batch:
            cuts += [self._by_rule(operation, {**added, node: rows}) for node, rows in self._free_rows(operation)]
        return [cut for cut in cuts if cut is not None and self._holds_for_any_samples(operation, cut)]

    def _holds_for_any_samples(self, operation: BatchOperation, cut: SampleCut) -> bool:
        """Return whether rows of a cut are rows at every number of samples, not by chance at that of the trace."""
        if self.joint.symbol is None:
            return True  # the graph is run for this number alone
        operands = (self._is_proportional(node.meta["val"], held) for node, held in cut.operands.items())
        return self._is_proportional(operation.node.meta["val"], cut.results) and all(operands)

    def _is_proportional(self, value: Any, placement: Placements) -> bool:
        """Return whether the dimension of rows has `outer * samples * per_sample` elements, as an expression."""
        if isinstance(placement, tuple):
            return all(map(self._is_proportional, value, placement))
        if self.joint.symbol is None or not isinstance(placement, Rows) or not isinstance(value, torch.Tensor):
            return True
        size: Any = value.shape[placement.dim]
        expression = size.node.expr if isinstance(size, torch.SymInt) else size
        return bool(expression == placement.size(1) * self.joint.symbol)

    def _by_rule(self, operation: BatchOperation, offered: Mapping[fx.Node, Placements]) -> SampleCut | None:
        rule = None if operation.name in self._without else rule_of(operation)
        if rule is None or not any(isinstance(placement, Rows) for placement in offered.values()):
            return None
        return rule(operation, offered)

    def _gradient_rows(self, operation: BatchOperation, placements: Mapping[fx.Node, Placements]) -> SampleCut | None:
        """Cut gradients that the head has made before they meet weights: products with weights are not its work."""
        if not is_backward(operation.node) or operation.name not in _PRODUCTS or {*placements.values()} != {WHOLE}:
            return None
        if not self._weights.intersection(placements):
            return None
        for node in placements:
            if not self.levels[node] or node in self._weights:
                continue
            for dim, size in enumerate(operation.shape_of(node)):
                rows = Rows(dim, 1, size // self.samples)
                cut = None if size % self.samples else self._by_rule(operation, {**placements, node: rows})
                if cut is not None and cut.results is not TERMS:
                    return cut
        return None

    def _free_rows(self, operation: BatchOperation) -> Iterable[tuple[fx.Node, Rows]]:
        """List the rows that can be cut out of what is there as a whole, is of the batch, and has some."""
        for node in operation.inputs:
            if node in self.of_batch and self.placements[node] is WHOLE:
                for dim, size in enumerate(node.meta["val"].shape):
                    if self._has_samples(size):
                        yield node, Rows(dim, 1, self.number(size) // self.samples)

    def _has_samples(self, size: Any) -> bool:
        """Return whether a size is in proportion to the samples; by chance it may be that of something else."""
        is_fixed = self.joint.symbol is None
        return (is_fixed or isinstance(size, torch.SymInt)) and self.number(size) in self._multiples

    def _made_by_rows(self, operation: BatchOperation) -> SampleCut | None:
        """Let every micro-batch make constants, draw random numbers, or repeat a value, for its own samples."""
        is_made = operation.name in CONSTANTS or (is_random(operation.node) and not operation.inputs)
        name = next((name for name in ("size", "sizes") if operation.has(name)), "")
        if not (is_made or operation.name == "expand") or not name:
            return None
        if any(self.placements[node] is not WHOLE for node in operation.inputs):
            return None
        given = [operation.shape_of(node) for node in operation.inputs]
        lead = len(operation.shape) - (len(given[0]) if given else 0)
        dims = [
            dim
            for dim, size in enumerate(operation.node.meta["val"].shape)
            if self._has_samples(size) and (dim < lead or not given or given[0][dim - lead] == 1)
        ]
        if not dims:
            return None
        rows = Rows(dims[0], 1, operation.shape[dims[0]] // self.samples)
        return SampleCut(rows, dict.fromkeys(operation.inputs, WHOLE), resized(operation, name)(rows))

    def _level(self, cut: SampleCut) -> int:
        """Return the barriers before an operator that is cut like this."""
        levels = [self.levels[node] + self._waits(node, required) for node, required in cut.operands.items()]
        return max(levels, default=0)

    def _waits(self, node: fx.Node, required: Placements) -> bool:
        """Return whether to hold a value otherwise is to wait for all micro-batches."""
        placement = self.placements[node]
        return node not in self.of_batch and placement is not WHOLE and placement != required

    def _late(self) -> set[fx.Node]:
        """Return what the head has to make as a whole: what micro-batches would make of it in a forward."""
        late = set[fx.Node]()
        for node in self.operations:
            if self.levels[node] and not is_backward(node) and is_of_microbatch(self.placements[node]):
                late.add(node)
            for source, required in self.cuts[node].operands.items():
                is_made = source.op == "call_function" and self._waits(source, required)
                if is_made and (self.levels[source] or self.placements[source] is LOCAL):
                    late.add(source.all_input_nodes[0] if takes_output(source) else source)
        return late

    def is_layer(self, node: fx.Node) -> bool:
        """Return whether a forward operation is a product with weights."""
        is_product = operator_name(node) in _PRODUCTS and not is_backward(node)
        return is_product and not self._weights.isdisjoint(node.all_input_nodes)

    def makes(self, node: fx.Node) -> bool:
        """Return whether every micro-batch makes a value."""
        return is_of_microbatch(self.placements[node])

    def _find_head(self) -> None:
        joint = self.joint
        by_name = {node.name: node for node in self._nodes}
        training = _ancestors(by_name[name] for name, _ in joint.gradients)
        late = _ancestors(node for node in training if self.makes(node) and self.levels[node])
        sampled = set[fx.Node]()
        for node in self._nodes:
            if node.name in joint.leaves or sampled.intersection(node.all_input_nodes):
                sampled.add(node)
        computed_once = [
            node for node in self.operations if node in sampled and node not in self.of_batch and not self.makes(node)
        ]
        self.head = tuple(node for node in computed_once if self.levels[node] and node in late)
        self.after = tuple(node for node in computed_once if self.levels[node] and node not in late)
        self.early = tuple(node for node in computed_once if not self.levels[node])
        waiting = (node for node in self._nodes if node in training and self.makes(node) and self.levels[node])
        self.barrier = next(iter(self.head), None) or next(waiting, None)

    @property
    def has_barrier(self) -> bool:
        """Return whether what micro-batches make for gradients waits for all of them."""
        return self.barrier is not None

    @property
    def gathered(self) -> tuple[fx.Node, ...]:
        """Return the values whose rows are put together for the head."""
        return self._head_inputs(lambda placement: isinstance(placement, Rows))

    @property
    def added(self) -> tuple[fx.Node, ...]:
        """Return the values whose terms are added for the head."""
        return self._head_inputs(lambda placement: placement is TERMS)

    def _head_inputs(self, is_right: Any) -> tuple[fx.Node, ...]:
        inside = {*self.head}
        sources = dict.fromkeys(source for node in self.head for source in self.cuts[node].operands)
        outside = (node for node in sources if node not in inside and node not in self.of_batch)
        return tuple(node for node in outside if is_right(self.placements[node]))

    def numbers_per_sample(self) -> float:
        """Return how many numbers of every sample the head is given."""
        shapes = (node.meta["val"].shape for node in self.gathered)
        return sum(math.prod(map(self.number, shape)) for shape in shapes) / self.samples


def _all_whole(operation: BatchOperation) -> Placements:
    return (WHOLE,) * len(operation.shapes) if operation.has_several else WHOLE


def _ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return nodes, and all that they are computed from."""
    pending, ancestors = [*nodes], set[fx.Node]()
    while pending:
        node = pending.pop()
        if node not in ancestors:
            ancestors.add(node)
            pending += node.all_input_nodes
    return ancestors
