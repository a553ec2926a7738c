"""Denominators of the whole batch: what a step counts of its batch alone is counted before the batch is cut.

A loss over valid tokens is `sum of losses / number of valid tokens`. The number depends on the batch alone: on its
tensors, on buffers and on constants, on no parameter and no random number. One micro-batch has its own number, so a
mean of the means of micro-batches is another loss. Therefore, whatever the step reduces over the samples of the batch
alone becomes a *total*: a small function of the batch's tensors gives all totals of the whole batch where the batch is
loaded, as one vector of double precision, which travels to the stages as one more tensor of the batch that is not cut.
Its first number is that of the samples.

    a reduced value `v(batch)` that the loss or a result needs
        is read from the totals: `sum of losses / v` is then a sum, and no micro-batch divides by zero
    a kernel that divides inside, `nll_loss(log_probabilities, targets, weight)` reduced to its mean
        stays a mean over samples: result and incoming gradient are multiplied by share / share of the whole batch,
        where share = weight of the valid targets / samples; that is 1.0 exactly where no target is ignored, and the
        result is 0 for a micro-batch without a valid target

Legend: batch-only: computed from the batch's tensors, buffers that the step does not change, and constants.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import fx

from lightning_pipe.capture.graphs.joint_graph import JointGraph, Totals
from lightning_pipe.capture.graphs.sample_flow import Flow, follow, leading_to
from lightning_pipe.capture.graphs.value_roles import Role
from lightning_pipe.capture.graphs.variants import Variants
from lightning_pipe.capture.operators import WEIGHED_MEANS, Trait, is_random, reads_size, takes_output, traits
from lightning_pipe.capture.slicing.insert import insert
from lightning_pipe.capture.stages.emit import Emitter
from lightning_pipe.capture.steps.stage_program import Half
from lightning_pipe.capture.torch_private import is_backward, named_arguments
from lightning_pipe.capture.weighing.batch_numbers import divide_by_batch, dividing_rows
from lightning_pipe.errors import CaptureError

_aten = torch.ops.aten
_MOST_NUMBERS = 4096  # of one total: more is no count but data
_ADDITIVE = ("sum", "mean", "max", "min")


def with_totals(joint: JointGraph, device: torch.device) -> JointGraph:
    """Return the graph reading what it counts of the batch alone from totals of the whole batch.

    The graph is changed in place, once, when it is fresh; nothing is changed if there is nothing to count.
    """
    leaves = [node for node in joint.module.graph.nodes if node.name in joint.leaves]
    if not leaves:
        return joint
    flow = follow(joint)
    batch_only = _batch_only(joint)
    kernels = [_Kernel(node, batch_only) for node in joint.module.graph.nodes if _is_kernel(node, batch_only, flow)]
    shares = [kernel.insert_share(joint) for kernel in kernels]
    counted = [kernel.counted(share) for kernel, share in zip(kernels, shares, strict=True)]
    reduced = _reduced(joint, flow, batch_only)
    wanted = _wanted(joint, flow, reduced)
    divided = dividing_rows(joint, flow, but={node.name for node in wanted})
    has_terms = any(flow.roles.get(name) == "linear" for name in leading_to((joint.loss, *joint.results), joint))
    if not shares and not wanted and not divided and not has_terms:
        return joint
    nodes = [*wanted, *counted]
    kinds: list[Role] = ["mean" if kernel.is_weight_known else "sum" for kernel in kernels]
    roles: list[Role] = ["sum", *(flow.roles[node.name] for node in wanted), *kinds]
    totals = Totals(_function(joint, nodes, device), tuple(roles), max(joint.leaves.values()) + 1, _precision(device))
    vector = _placeholder(joint, leaves[0], totals, 1 + sum(_numbers(node) for node in nodes))
    first = 1
    for node in wanted:
        _read(node, vector, first)
        first += _numbers(node)
    for kernel, share, own in zip(kernels, shares, counted, strict=True):
        kernel.weigh(share, vector, first)
        first += _numbers(own)
    if any(not kernel.is_weight_known for kernel in kernels):
        made = follow(joint).roles
        for kernel in kernels:
            kernel.say_role(made)
    for node, power in divided.items():
        divide_by_batch(node, power, samples_before(node, joint), insert(node, _aten.select.int, vector, 0, 0))
    _erase_unused(joint, batch_only)
    return replace(joint, leaves={**joint.leaves, vector.name: totals.leaf}, totals=totals)


def totals_of_batch(
    joint: JointGraph,
    variants: Variants | None,
    leaves: Sequence[Any],
    *,
    cut: Sequence[bool],
    sizes: Sequence[int],
    buffers: Mapping[str, torch.Tensor],
    batch_dim: int,
) -> torch.Tensor:
    """Return the totals of a batch, by its micro-batches where the graph does not hold for all of it.

    Args:
        joint: the graph.
        variants: graphs for other numbers of samples; None if this one holds for them.
        leaves: tensors of the batch.
        cut: which are cut into samples.
        sizes: samples of the micro-batches.
        buffers: by name; those of the totals must be among them.
        batch_dim: dimension of the samples.
    """
    totals, samples = joint.totals, sum(sizes)
    assert totals is not None, "asked only where there are totals"
    if variants is None and not joint.fits(samples):
        return totals_of(totals, joint, leaves=leaves, buffers=buffers, samples=samples)
    pieces = []
    for first, size in zip(itertools.accumulate(sizes, initial=0), sizes, strict=False):
        graph = joint if variants is None else variants.graph(size)
        part = [t.narrow(batch_dim, first, size) if c else t for t, c in zip(leaves, cut, strict=True)]
        assert graph.totals is not None, "graphs for other sizes are the same operations"
        pieces.append((size, totals_of(graph.totals, graph, leaves=part, buffers=buffers, samples=size)))
    return combined_totals(totals, pieces)


def totals_of(
    totals: Totals,
    joint: JointGraph,
    *,
    leaves: Sequence[Any],
    buffers: Mapping[str, torch.Tensor],
    samples: int,
) -> torch.Tensor:
    """Return the totals of some samples.

    Args:
        totals: what is counted.
        joint: the graph that it belongs to.
        leaves: tensors of the batch.
        buffers: by name; those of `totals` must be among them.
        samples: number of samples.
    """
    half = totals.count
    given = [leaves[joint.leaves[n]] if n in joint.leaves else buffers[joint.buffers[n]] for n in half.inputs]
    with torch.no_grad():
        found = cast("tuple[torch.Tensor, ...]", half.run(samples, None, *given))  # it counts; sizes it has none
        number = torch.full((1,), samples, dtype=totals.dtype, device=leaves[0].device)  # no copy from the host
        return torch.cat([number, *(value.reshape(-1).to(number) for value in found)])


def combined_totals(totals: Totals, pieces: Sequence[tuple[int, torch.Tensor]]) -> torch.Tensor:
    """Return the totals of a batch from (samples, totals) of its pieces, for a graph of constant size.

    Raises:
        CaptureError: if a total is no sum, mean or extreme of those of pieces.
    """
    if wrong := [role for role in totals.roles if role not in _ADDITIVE]:
        raise CaptureError(
            f"What the step counts of the batch ({len(wrong)} of {len(totals.roles)} numbers) cannot be put together "
            "from micro-batches. Set microbatches=1, or let the collate function count it."
        )
    count = sum(samples for samples, _ in pieces)
    columns = torch.stack([vector for _, vector in pieces])
    shares = torch.tensor([samples / count for samples, _ in pieces], dtype=columns.dtype, device=columns.device)
    found = []
    for role, column in zip(totals.roles, columns.unbind(1), strict=True):
        match role:
            case "mean":
                found.append((column * shares).sum())
            case "max":
                found.append(column.max())
            case "min":
                found.append(column.min())
            case _:
                found.append(column.sum())
    return torch.stack(found)


def samples_before(node: fx.Node, joint: JointGraph) -> fx.Node | int:
    """Return the number of samples as an argument of what is inserted before a node."""
    if joint.symbol is None:
        return joint.samples
    for leaf in joint.module.graph.nodes:
        value = leaf.meta.get("val")
        for dim, size in enumerate(value.shape) if leaf.name in joint.leaves else ():
            if isinstance(size, torch.SymInt) and size.node.expr == joint.symbol:
                return insert(node, _aten.sym_size.int, leaf, dim)
    raise AssertionError("a graph with a symbol has a leaf of that many samples")


def _precision(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _batch_only(joint: JointGraph) -> dict[str, bool]:
    """Return the nodes that depend on the batch, unchanged buffers and constants alone, and whether on the batch."""
    found: dict[str, bool] = {}
    for node in joint.module.graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "get_attr":
            found[node.name] = False
        elif node.name in joint.leaves:
            found[node.name] = True
        elif node.op == "placeholder":
            if node.name in joint.buffers and joint.buffers[node.name] not in joint.mutations:
                found[node.name] = False
        elif reads_size(node):  # of whatever tensor it is read: it depends on the number of samples, not on values
            found[node.name] = True
        elif _is_pure(node) and all(n.name in found for n in inputs):
            found[node.name] = any(found[n.name] for n in inputs)
    return found


def _is_pure(node: fx.Node) -> bool:
    return node.op == "call_function" and not is_backward(node) and not is_random(node)


def _reduced(joint: JointGraph, flow: Flow, batch_only: Mapping[str, bool]) -> set[str]:
    """Name the batch-only values that are reduced over the samples and small, and no places in micro-batches."""
    found, own = set[str](), {name for name, is_of_batch in batch_only.items() if is_of_batch} - _places(joint)
    for node in joint.module.graph.nodes:
        value, role = node.meta.get("val"), flow.roles.get(node.name, "same")
        if node.name not in own or role in ("same", "cat") or not isinstance(value, torch.Tensor):
            continue
        if any(not isinstance(size, int) for size in value.shape) or value.is_complex():
            continue
        known = role in _ADDITIVE and value.ndim == 0 if joint.symbol is None else value.numel() <= _MOST_NUMBERS
        if known and node.op == "call_function":
            found.add(node.name)
    return found


def _places(joint: JointGraph) -> set[str]:
    """Name the values from which places are computed: the last sample of a micro-batch is not that of the batch."""
    nodes = (node for node in joint.module.graph.nodes if Trait.INDEXED in traits(node) and not is_backward(node))
    return leading_to(
        [index.name for node in nodes for index in node.all_input_nodes if index is not node.args[0]], joint
    )


def _wanted(joint: JointGraph, flow: Flow, reduced: set[str]) -> list[fx.Node]:
    """List the reduced values from which loss, gradients, results and answers to questions are computed, in order.

    A result that is reduced itself and combined rightly from its slices is left as it is.
    """
    results, asked = set(joint.results), len(joint.record.guards)
    said = joint.results[: len(joint.results) - asked]  # a question is asked of the whole batch, as on one device
    trained = {name for name, _ in joint.gradients}
    nodes = {node.name: node for node in joint.module.graph.nodes}
    plain = {name for name in said if name in reduced and flow.roles[name] in _ADDITIVE}
    pending = [nodes[name] for name in ({joint.loss} | trained | results) - plain if name is not None]
    seen, found = set[fx.Node](), set[str]()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name in reduced:
            found.add(node.name)
        else:
            pending.extend(node.all_input_nodes)
    return [node for node in nodes.values() if node.name in found]


def _function(joint: JointGraph, outputs: Sequence[fx.Node], device: torch.device) -> Half:
    """Make the function that computes these nodes from leaves and buffers."""
    names, pending = set[str](), list(outputs)
    inputs: dict[str, None] = {}
    while pending:
        node = pending.pop()
        if node.op == "placeholder":
            inputs[node.name] = None
        elif node.name not in names:
            names.add(node.name)
            if not reads_size(node):  # computed from the number of samples
                pending.extend(node.all_input_nodes)
    emitter = Emitter(joint, repeated=frozenset(), device=device)
    return emitter.make(emitter.in_order(names), inputs=sorted(inputs), outputs=[node.name for node in outputs])


def _placeholder(joint: JointGraph, like: fx.Node, totals: Totals, count: int) -> fx.Node:
    """Add the vector of totals to the inputs of the graph."""
    graph = joint.module.graph
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        node = graph.placeholder("totals")
    value = like.meta["val"]
    with value.fake_mode:
        node.meta["val"] = torch.empty((count,), dtype=totals.dtype, device=value.device)
    node.meta["partitioner_tag"] = "is_forward"
    return node


def _numbers(node: fx.Node) -> int:
    return int(node.meta["val"].numel())


def _read(node: fx.Node, vector: fx.Node, first: int) -> None:
    """Turn a node into one that reads its value from the totals; its name stays."""
    value = node.meta["val"]
    count, shape = _numbers(node), list(value.shape)
    if shape:
        part = insert(node, _aten.slice.Tensor, vector, 0, first, first + count)
        part = insert(node, _aten.view.default, part, shape)
    else:
        part = insert(node, _aten.select.int, vector, 0, first)
    node.target, node.args, node.kwargs = _aten._to_copy.default, (part,), {"dtype": value.dtype}


def _erase_unused(joint: JointGraph, batch_only: Mapping[str, bool]) -> None:
    graph = joint.module.graph
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and node.name in batch_only:
            graph.erase_node(node)


def _is_kernel(node: fx.Node, batch_only: Mapping[str, bool], flow: Flow) -> bool:
    """Return whether a node is a mean over targets that divides by their weight, which depends on the batch alone."""
    if node.target not in WEIGHED_MEANS or is_backward(node) or flow.roles[node.name] != "mean":
        return False
    kernel = _Kernel(node, batch_only)
    weight = kernel.weight
    return batch_only.get(kernel.target.name, False) and (weight is None or flow.roles[weight.name] != "cat")


class _Kernel:
    """A mean of negative log likelihoods, with its backward.

    Where the weights of classes are made in the step, the targets of every class are counted of the whole batch, and
    weighed in the step.
    """

    def __init__(self, node: fx.Node, batch_only: Mapping[str, bool]) -> None:
        given = named_arguments(node)
        self._node = node
        self.target: fx.Node = given["target"]
        self.weight: fx.Node | None = given.get("weight")
        self._ignored: int = given.get("ignore_index", -100)
        self.is_weight_known = self.weight is None or self.weight.name in batch_only

    def insert_share(self, joint: JointGraph) -> fx.Node:
        """Compute the weight of the valid targets per sample before the kernel."""
        here, dtype = self._node, _precision(self.target.meta["val"].device)
        valid = self._valid()
        if self.weight is None:
            weight = insert(here, _aten.sum.default, valid, dtype=dtype)
        else:
            weights = insert(here, _aten.take.default, self.weight, self._classes(valid))
            weight = insert(here, _aten.sum.default, insert(here, _aten.mul.Tensor, weights, valid), dtype=dtype)
        return insert(here, _aten.div.Tensor, weight, samples_before(here, joint))

    def _valid(self) -> fx.Node:
        """Compute which targets are valid."""
        return insert(self._node, _aten.ne.Scalar, self.target, self._ignored)

    def _classes(self, valid: fx.Node) -> fx.Node:
        """Compute the targets, class 0 where there is none."""
        return insert(self._node, _aten.mul.Tensor, self.target, valid)

    def counted(self, share: fx.Node) -> fx.Node:
        """Return what is to be counted of the whole batch: the share, or the valid targets of every class."""
        if self.is_weight_known:
            return share
        assert self.weight is not None, "it is made in the step"
        here, form = self._node, self.weight.meta["val"]
        dtype = _precision(form.device)
        valid = self._valid()
        known = insert(here, _aten.reshape.default, self._classes(valid), [-1])
        ones = insert(here, _aten._to_copy.default, insert(here, _aten.reshape.default, valid, [-1]), dtype=dtype)
        zeros = insert(here, _aten.zeros.default, [*form.shape], dtype=dtype, device=form.device)
        return insert(here, _aten.index_add.default, zeros, 0, known, ones)

    def _whole(self, here: fx.Node, vector: fx.Node, number: int) -> fx.Node:
        """Return the weight of the valid targets of the whole batch per sample."""
        if self.is_weight_known:
            return insert(here, _aten.select.int, vector, 0, number)
        assert self.weight is not None, "it is made in the step"
        counts = insert(here, _aten.slice.Tensor, vector, 0, number, number + _numbers(self.weight))
        weight = insert(here, _aten.sum.default, insert(here, _aten.mul.Tensor, counts, self.weight))
        return insert(here, _aten.div.Tensor, weight, insert(here, _aten.select.int, vector, 0, 0))

    def say_role(self, roles: Mapping[str, Role]) -> None:
        """Say of a mean whose weights are made in the step, and of samples, that numbers must tell what it is."""
        if (
            self._node.users
            and not self.is_weight_known
            and self.weight is not None
            and roles.get(self.weight.name, "same") != "same"
        ):
            self._result().meta["role"] = "mixed"

    def _result(self) -> fx.Node:
        """Return the mean; a step that takes its gradient alone does not read it."""
        takers = [user for user in self._node.users if takes_output(user)]
        found = next((user for user in takers if user.args[1] == 0), None)
        return insert(takers[0], operator.getitem, self._node, 0) if found is None else found

    def weigh(self, share: fx.Node, vector: fx.Node, number: int) -> None:
        """Multiply the result and the gradient that comes in by the share relative to that of the whole batch."""
        if not self._node.users:
            return
        result = self._result()
        results = {user.args[1]: user for user in self._node.users if takes_output(user)}
        ratio = insert(result, _aten.div.Tensor, share, self._whole(result, vector, number))
        ratio = insert(result, _aten._to_copy.default, ratio, dtype=result.meta["val"].dtype)
        mean = insert(result, operator.getitem, self._node, 0)
        weighed = insert(result, _aten.mul.Tensor, mean, ratio)
        empty = insert(result, _aten.eq.Scalar, ratio, 0)
        result.target, result.args = _aten.masked_fill.Scalar, (weighed, empty, 0.0)
        result.meta["role"] = "mean"
        for backward in self._backwards(results):
            backward.update_arg(0, insert(backward, _aten.mul.Tensor, backward.args[0], ratio))

    def _backwards(self, results: Mapping[Any, fx.Node]) -> Iterator[fx.Node]:
        kind = WEIGHED_MEANS[self._node.target]
        if 1 in results:
            yield from [user for user in results[1].users if user.target is kind]
