"""The graph of a micro-batch, cut out of that of the whole batch (`slicing`): what stages are made of.

Every operator that micro-batches run is copied, with its operands held as its cut wants them:

    rows      its own; of a value of all samples a slice
    a term    its own; of a value of all samples its share `n / N`, so that terms add up to it
    a whole   what no sample enters; else a value of the batch, given to stages like one more tensor of the batch

Sizes that an operator needs of its rows are those of the micro-batch; sizes that are numbers are those of the batch.
So a mean over samples stays the operator that it was, and its share of the batch is what counts.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import fx

from lightning_pipe.capture import torch_private as private
from lightning_pipe.capture.graphs.value_sizes import is_size
from lightning_pipe.capture.operators import is_random, takes_output
from lightning_pipe.capture.slicing.microbatch_sizes import MicrobatchSizes
from lightning_pipe.capture.slicing.operation import SampleCut
from lightning_pipe.capture.slicing.placement import LOCAL, TERMS, WHOLE, Kind, Placement, Placements, Rows
from lightning_pipe.capture.slicing.slicing import CONSTANTS, Slicing
from lightning_pipe.capture.stages.operations import tensors_of
from lightning_pipe.capture.torch_private import is_backward, operator_name

_aten = torch.ops.aten


class WaitsForAllError(Exception):
    """A value needs more than the forwards of all micro-batches: their backwards, or random numbers of the batch."""

    def __init__(self, node: fx.Node) -> None:
        super().__init__(f"{node} waits for all micro-batches")
        self.node = node


_KNOWN = ("custom", "partitioner_tag", "stack_trace", "seq_nr")


@dataclass(frozen=True)
class InputValue:
    """A value of the whole batch that the graph of a micro-batch is given.

    Attributes:
        name: in the graph of a micro-batch.
        source: in the graph of the whole batch.
        rows: how it is cut into samples; None if it is given whole.
    """

    name: str
    source: str
    rows: Rows | None


class MicrobatchGraph:
    """Build the graph of a micro-batch.

    Args:
        slicing: how the graph of the whole batch is cut.
        samples: of a micro-batch, by which the graph is priced.
        batch_dim: dimension of the samples in tensors of the batch.

    Attributes:
        graph: the graph.
        placements: of its values by name, for those that micro-batches make or that are slices.
        batch_values: what is to be computed where the batch is loaded.
        head_outputs: what is to be computed once all micro-batches have run forward.
        nodes: of the whole batch, by name.
        symbol, total: the numbers of samples of a micro-batch and of the batch, as they stand in sizes.
    """

    def __init__(self, slicing: Slicing, *, samples: int, batch_dim: int) -> None:
        self._slicing, self._batch_dim = slicing, batch_dim
        self._whole = slicing.joint
        self.graph = fx.Graph()
        self.placements: dict[str, Placement] = {}
        self.batch_values: list[InputValue] = []
        self.head_outputs: list[InputValue] = []
        self._copies: dict[fx.Node, fx.Node] = {}
        self._locals: dict[fx.Node, fx.Node] = {}
        self._converted: dict[tuple[fx.Node, Any], fx.Node] = {}
        self._sizes: dict[sympy.Basic, fx.Node] = {}
        self._numbers: dict[Rows, fx.Node] = {}
        self.nodes = {node.name: node for node in self._whole.module.graph.nodes}
        leaves = [node for node in self.nodes.values() if node.name in self._whole.leaves]
        self._a_leaf = next(leaf for leaf in leaves if slicing.makes(leaf))
        self._mode = self._a_leaf.meta["val"].fake_mode
        leaf_value, total = self._a_leaf.meta["val"], slicing.samples
        self._forms = MicrobatchSizes(leaf_value, self._whole.symbol, samples=samples, batch_samples=total)
        self.symbol, self.total = self._forms.symbol, self._forms.total
        self._here: fx.Node = self._a_leaf  # whose place an inserted operation takes
        self._varying = self._find_varying()
        for node in filter(is_random, slicing.operations):
            if not slicing.makes(node) or node in slicing.of_batch:
                node.meta["of_batch"] = True  # all micro-batches draw the same
        self._copy_inputs()
        self._copy_operations()

    def _find_varying(self) -> frozenset[fx.Node]:
        """Return what is of the batch alone and differs between batches."""
        varying = set[fx.Node]()
        for node in self.nodes.values():
            if node in self._slicing.of_batch:
                is_made_of = not varying.isdisjoint(node.all_input_nodes)
                if node.name in self._whole.leaves or is_made_of or self._has_symbol(node) or is_random(node):
                    varying.add(node)
        return frozenset(varying)

    def _has_symbol(self, node: fx.Node) -> bool:
        if self._whole.symbol is None or node.op != "call_function":
            return False
        values = [node.meta.get("val"), *(source.meta.get("val") for source in node.all_input_nodes)]
        tensors = [item for value in values for item in (value if isinstance(value, tuple | list) else [value])]
        sizes = [size for item in tensors for size in (item.shape if isinstance(item, torch.Tensor) else [item])]
        return any(isinstance(size, torch.SymInt | torch.SymFloat) for size in sizes)

    # Sizes

    def _size(self, expression: Any) -> Any:
        """Return a size as an argument: a number, or a node that computes it of the numbers of samples."""
        expression = sympy.sympify(expression)
        if expression.is_Integer:
            return int(expression)
        if not expression.free_symbols:
            return float(expression)
        if expression not in self._sizes:
            leaf = self._copies[self._a_leaf]
            with self.graph.inserting_after(self._inputs_end):
                node = self.graph.call_function(_aten.sym_size.int, (leaf, self._batch_dim))
            node.meta["val"] = self._forms.number_of(expression)
            self._sizes[expression] = node
        return self._sizes[expression]

    @property
    def _share(self) -> Any:
        """Return which part of the batch a micro-batch is."""
        return self._size(self.symbol / self.total)

    # What a node computes, in this graph

    def _copy_inputs(self) -> None:
        for node in self.nodes.values():
            if node.op in ("placeholder", "get_attr"):
                copy = self._copies[node] = self.graph.node_copy(node)
                self._inputs_end = copy
                placement = self._slicing.placements[node]
                copy.meta["val"] = self._forms.described(node.meta.get("val"), placement)
                self._note(copy, placement)

    def _copy_operations(self) -> None:
        slicing = self._slicing
        for node in self.nodes.values():
            is_copied = node.op == "call_function" and (node in slicing.operations or takes_output(node))
            is_given = node in self._varying and (not slicing.makes(node) or is_random(node))
            if is_copied and not is_given and (slicing.makes(node) or not slicing.levels[node]):
                self._here = node
                self._copies[node] = self._copied(node)

    def _copied(self, node: fx.Node) -> fx.Node:
        placements = self._slicing.placements[node]
        if takes_output(node):
            source, place = node.args
            assert isinstance(source, fx.Node)
            return self._copy(node, (self._copies[source], place), {}, placements)
        operation, cut = self._slicing.operations[node], self._slicing.cuts[node]
        changed = self._changed(node, cut)
        names = private.argument_names(node)
        args = tuple(
            changed[name] if name in changed else self._argument(arg, cut)
            for name, arg in zip([*names, *[""] * len(node.args)], node.args, strict=False)
        )
        kwargs = {name: self._argument(arg, cut) for name, arg in node.kwargs.items()}
        kwargs |= {name: value for name, value in changed.items() if name in kwargs or name not in names[: len(args)]}
        copy = self._copy(node, args, kwargs, placements)
        if cut.divisor is None:
            return copy
        assert not operation.has_several, "a mean is one tensor"
        return self._shared(copy, like=node)

    def _copy(self, node: fx.Node, args: Any, kwargs: Any, placement: Placements) -> fx.Node:
        copy = self.graph.create_node("call_function", node.target, args, kwargs, name=node.name)
        copy.meta = {**node.meta, "val": self._forms.described(node.meta.get("val"), placement)}
        self._note(copy, placement)
        return copy

    def _insert(self, target: Any, args: Any, *, like: fx.Node) -> fx.Node:
        """Insert an operation in the place of another; its value is still to be described."""
        node = self.graph.create_node("call_function", target, args, name=f"cut_{target._opname}")
        known = _KNOWN if is_backward(like) else _KNOWN[:-1]
        node.meta = {key: like.meta[key] for key in known if key in like.meta}
        return node

    def _note(self, node: fx.Node, placement: Placements) -> None:
        if not isinstance(placement, tuple):
            self.placements[node.name] = placement

    def _argument(self, argument: Any, cut: SampleCut) -> Any:
        def converted(source: fx.Node) -> Any:
            if is_size(source):
                return self._size(self._forms.of_batch(source.meta["val"]))
            wanted = cut.operands[source]
            return self._in_microbatch(source, wanted) if source in cut.places else self.value(source, wanted)

        return fx.map_arg(argument, converted)

    def _changed(self, node: fx.Node, cut: SampleCut) -> dict[str, Any]:
        """Return the arguments that are others for a micro-batch."""
        operation = self._slicing.operations[node]
        changed: dict[str, Any] = {}
        if cut.arguments is not None and cut.divisor is None:
            shape = next((tensor.shape for tensor in tensors_of(node)), ())
            for name, argument in cut.arguments(self.symbol).items():  # it only computes
                changed[name] = self._size_list(argument, shape)
        for name in cut.after_first:
            changed[name] = self._size(operation.argument(name) * self.symbol / self.total)
        return changed

    def _size_list(self, argument: Any, shape: Sequence[Any]) -> Any:
        """Return an argument of sizes; those of the result's shape, but for its rows, are the batch's."""
        if not isinstance(argument, list | tuple):
            return self._size(argument)
        is_shape = len(argument) == len(shape)
        return [
            self._size(self._forms.of_batch(shape[at]) if is_shape and isinstance(size, int) else size)
            for at, size in enumerate(argument)
        ]

    # How a value is held

    def value(self, source: fx.Node, wanted: Placements) -> fx.Node:
        """Return a value of the whole batch as a micro-batch holds it.

        Args:
            source: in the graph of the whole batch.
            wanted: how it is to be held.
        """
        placement = self._slicing.placements[source]
        is_right = placement == wanted or LOCAL in (placement, wanted) or isinstance(wanted, tuple)
        if is_right and source in self._copies:
            return self._copies[source]
        is_made = self._slicing.makes(source) and source not in self._varying
        if is_made and self._slicing.levels[source]:
            raise WaitsForAllError(source)
        if wanted is TERMS:
            return self._cached(source, TERMS, lambda: self._shared(self.value(source, WHOLE), like=self._here))
        rows = wanted if isinstance(wanted, Rows) else None
        if rows is not None and operator_name(source) in CONSTANTS:
            return self._cached(source, rows, lambda: self._constant(source, rows))
        if source in self._varying or (is_made and source in self._slicing.of_batch):
            return self._cached(source, rows, lambda: self._given(source, rows))
        if is_made or self._slicing.levels[source]:
            if not is_backward(self._here):
                raise WaitsForAllError(self._here)  # forwards run before the head
            return self._cached(source, rows, lambda: self._from_head(source, rows))
        assert rows is not None, f"{source} is there as a whole"
        return self._cached(source, rows, lambda: self._rows_of(source, rows))

    def _cached(self, source: fx.Node, wanted: Any, make: Any) -> fx.Node:
        is_back = self._here.meta.get("partitioner_tag") if wanted is TERMS else None
        key = source, (wanted, is_back)
        if key not in self._converted:
            self._converted[key] = make()
        return self._converted[key]

    def _shared(self, copy: fx.Node, *, like: fx.Node) -> fx.Node:
        """Return the share of a micro-batch in a value."""
        node = self._insert(_aten.mul.Tensor, (copy, self._share), like=like)
        node.meta["val"] = copy.meta["val"]
        self._note(node, TERMS if not isinstance(self.placements.get(copy.name), Rows) else self.placements[copy.name])
        return node

    def _given(self, source: fx.Node, rows: Rows | None) -> fx.Node:
        """Return a value that is computed where the batch is loaded."""
        with self.graph.inserting_after(self._inputs_end):
            node = self.graph.placeholder(f"batch_{source.name}")
        node.target = node.name
        self._inputs_end = node
        node.meta = {key: source.meta[key] for key in _KNOWN if key in source.meta}
        self.batch_values.append(InputValue(node.name, source.name, rows))
        if rows is None:
            node.meta["val"] = self._forms.described(source.meta["val"], WHOLE)
            self._note(node, WHOLE)
            return node
        shape = [*map(self._forms.of_batch, source.meta["val"].shape)]
        blocks = [self.symbol, *shape[: rows.dim], rows.outer, rows.per_sample, *shape[rows.dim + 1 :]]
        blocks = [*[1] * self._batch_dim, *blocks]
        node.meta["val"] = self._forms.new(source.meta["val"], blocks)
        self._note(node, Rows(self._batch_dim))
        return self._laid_out(node, source, rows)

    def _from_head(self, source: fx.Node, rows: Rows | None) -> fx.Node:
        """Return a value that is computed when all micro-batches have run forward."""
        with self.graph.inserting_after(self._inputs_end):
            node = self.graph.placeholder(f"head_{source.name}")
        node.target = node.name
        self._inputs_end = node
        node.meta = {key: source.meta[key] for key in _KNOWN if key in source.meta}
        self.head_outputs.append(InputValue(node.name, source.name, rows))
        placement: Placement = WHOLE if rows is None else rows
        node.meta["val"] = self._forms.described(source.meta["val"], placement)
        self._note(node, placement)
        return node

    def _laid_out(self, node: fx.Node, source: fx.Node, rows: Rows) -> fx.Node:
        """Put rows that lie in the first dimension where an operator wants them."""
        shape = [*map(self._forms.of_batch, source.meta["val"].shape)]
        lead, dim = self._batch_dim, rows.dim
        order = [*range(lead + 1, lead + dim + 2), lead, *range(lead + dim + 2, lead + len(shape) + 2)]
        sizes = [*shape[:dim], rows.outer * self.symbol * rows.per_sample, *shape[dim + 1 :]]
        permuted = self._insert(_aten.permute.default, (node, [*range(lead), *order]), like=self._here)
        with self._mode:
            permuted.meta["val"] = node.meta["val"].permute([*range(lead), *order])
        placed = self._insert(_aten.reshape.default, (permuted, [*map(self._size, sizes)]), like=self._here)
        placed.meta["val"] = self._forms.new(source.meta["val"], sizes)
        self._note(placed, rows)
        return placed

    def _constant(self, source: fx.Node, rows: Rows) -> fx.Node:
        """Return as many rows of a constant as a micro-batch has."""
        shape = [*map(self._forms.of_batch, source.meta["val"].shape)]
        shape[rows.dim] = rows.outer * self.symbol * rows.per_sample
        made = self._insert(source.target, ([*map(self._size, shape)], *source.args[1:]), like=self._here)
        made.kwargs = source.kwargs
        made.meta["val"] = self._forms.new(source.meta["val"], shape)
        self._note(made, rows)
        return made

    def _rows_of(self, source: fx.Node, rows: Rows) -> fx.Node:
        """Return the rows of a value that is there as a whole, such as a weight for every sample of a batch."""
        places = self._places(rows)
        args = (self._copies[source], rows.dim, places)
        picked = self._insert(_aten.index_select.default, args, like=self._here)
        shape = [*map(self._forms.of_batch, source.meta["val"].shape)]
        shape[rows.dim] = rows.outer * self.symbol * rows.per_sample
        picked.meta["val"] = self._forms.new(source.meta["val"], shape)
        self._note(picked, rows)
        return picked

    def _places(self, rows: Rows) -> fx.Node:
        """Return where the rows of a micro-batch lie in a dimension of the batch."""
        rows = replace(rows, dim=0)
        if rows not in self._numbers:
            graph = self._whole.module.graph
            leaf, samples = self._a_leaf, self._a_leaf.meta["val"].shape[self._batch_dim]
            with graph.inserting_before(next(node for node in graph.nodes if node.op == "call_function")):
                count = graph.call_function(_aten.sym_size.int, (leaf, self._batch_dim))
                numbers = graph.call_function(_aten.arange.default, (count,), {"device": leaf.meta["val"].device})
            count.meta["val"] = size = rows.outer * samples * rows.per_sample
            with self._mode:
                numbers.meta["val"] = torch.empty([size], dtype=torch.int64, device=leaf.meta["val"].device)
            self._numbers[rows] = numbers
        numbers = self._numbers[rows]
        return self._cached(numbers, rows, lambda: self._given(numbers, rows))

    def _in_microbatch(self, source: fx.Node, wanted: Placements) -> fx.Node:
        """Return places in the batch as places in the micro-batch: counted from its first sample."""
        first = self._insert(_aten.select.int, (self._places(Rows(0)), 0, 0), like=self._here)
        with self._mode:
            first.meta["val"] = torch.empty([], dtype=torch.int64, device=self._a_leaf.meta["val"].device)
        places = self.value(source, wanted)
        counted = self._insert(_aten.sub.Tensor, (places, first), like=self._here)
        counted.meta["val"] = places.meta["val"]
        self._note(counted, wanted)
        return counted

    # What leaves the graph

    def term(self, name: str) -> fx.Node:
        """Return the term of a value of the whole batch, such as a loss or a gradient."""
        node = self.nodes[name]
        self._here = node
        placement = self._slicing.placements[node]
        return self._among_zeros(node, placement) if isinstance(placement, Rows) else self.value(node, TERMS)

    def _among_zeros(self, node: fx.Node, rows: Rows) -> fx.Node:
        """Return rows in their places among zeros, so that those of micro-batches add up to the value."""
        copy, value = self._copies[node], node.meta["val"]
        shape = [*map(self._forms.of_batch, value.shape)]
        zeros = self._insert(_aten.full.default, ([*map(self._size, shape)], 0), like=node)
        zeros.kwargs = {"dtype": value.dtype, "device": value.device}
        placed = self._insert(_aten.index_add.default, (zeros, rows.dim, self._places(rows), copy), like=node)
        zeros.meta["val"] = placed.meta["val"] = self._forms.new(value, shape)
        self._note(zeros, WHOLE)
        self._note(placed, TERMS)
        return placed

    def mean(self, name: str) -> fx.Node:
        """Return the term of a value as one of a mean over samples: multiplied by `N / n`."""
        term, ratio = self.term(name), self._size(self.total / self.symbol)
        with self.graph.inserting_after(term):  # where it is made, so that no cut lies between it and its state
            mean = self._insert(_aten.mul.Tensor, (term, ratio), like=self._here)
        mean.meta["val"] = term.meta["val"]
        self._note(mean, TERMS)
        return mean

    def once(self, name: str) -> fx.Node | None:
        """Return a value that every micro-batch has as the batch has it; None if it is none of these."""
        node = self.nodes[name]
        self._here = node
        if self._slicing.makes(node) or (node not in self._varying and node not in self._copies):
            return None
        value = self.value(node, WHOLE)
        return value if value.op == "call_function" else self._cloned(value)

    def _cloned(self, value: fx.Node) -> fx.Node:
        return self._cached(value, "clone", lambda: self._clone(value))

    def _clone(self, value: fx.Node) -> fx.Node:
        first = next((node for node in self.graph.nodes if value in node.all_input_nodes), None)
        beside = self.graph.inserting_after(self._inputs_end) if first is None else self.graph.inserting_before(first)
        with beside:  # where it is, so that it need not travel
            copy = self._insert(_aten.clone.default, (value,), like=self._here)
        copy.meta["val"] = value.meta["val"]
        self._note(copy, self.placements[value.name])
        return copy

    def part(self, name: str) -> fx.Node | None:
        """Return what a micro-batch has of a value that it makes; None if micro-batches do not."""
        node = self.nodes[name]
        self._here = node
        copy = self._copies.get(node)
        if copy is None or not self._slicing.makes(node):
            return None
        return copy if copy.op == "call_function" else self._cloned(copy)

    def for_head(self, source: fx.Node, repeated: Set[str]) -> fx.Node | None:
        """Return a value that is there when all micro-batches have run forward; None if the head has to make it.

        Args:
            source: in the graph of the whole batch.
            repeated: names of values that no stage makes, but each function that reads them.
        """
        if source in self._slicing.of_sizes:
            return None
        if source in self._varying and not self._slicing.makes(source):
            self._here = source
            return self.value(source, WHOLE)
        is_forward = source.op == "placeholder" or not is_backward(source)
        is_there = source in self._copies and not self._slicing.levels[source] and is_forward
        return self._copies[source] if is_there and source.name not in repeated else None

    def varies(self, source: fx.Node) -> bool:
        """Return whether a value is of the batch alone, and differs between batches."""
        return source in self._varying

    def local(self, node: fx.Node) -> fx.Node:
        """Return what a micro-batch makes of its own samples where the batch makes something of all."""
        is_same = not isinstance(self._slicing.placements[node], Kind) or self._slicing.placements[node] is not TERMS
        if node in self._copies and is_same and not (node in self._varying and node.op == "call_function"):
            return self._copies[node]
        if node not in self._locals:
            self._locals[node] = self._local(node)
        return self._locals[node]

    def _local(self, node: fx.Node) -> fx.Node:
        if takes_output(node):
            args: tuple[Any, ...] = (self.local(node.args[0]), node.args[1])  # type: ignore[arg-type]
            kwargs: dict[str, Any] = {}
        else:

            def argument(source: fx.Node) -> Any:
                value: Any = source.meta.get("val")
                if is_size(source):
                    return self._size(value if isinstance(value, int | float) else value.node.expr)
                return self.local(source)

            args, kwargs = fx.map_arg(node.args, argument), fx.map_arg(node.kwargs, argument)
        copy = self.graph.create_node("call_function", node.target, args, kwargs, name=f"{node.name}_of_part")
        copy.meta = dict(node.meta)
        self._note(copy, LOCAL)
        return copy
