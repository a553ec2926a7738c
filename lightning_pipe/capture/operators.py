"""Operator registry: what capture knows of the operators of a graph, a row for each, by name without overload.

A row states properties of the operator itself; what follows from them for micro-batches and stages is decided where it
is asked. An operator without a row is treated with care: weight halves in which it scales values of all samples run one
by one.

What torch declares is not repeated here: random operators carry a tag, views are marked in their schema.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Flag, auto
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from lightning_pipe.capture.torch_private import (
    OpOverload,
    aliased_input,
    argument_place,
    operator_name,
)

_RATES = ("dropout_p", "dropout")  # of attention, and between recurrent layers


class Trait(Flag):
    """A property of an operator.

    Attributes:
        VIEW: looks at the same elements, or casts them: cheap enough to be repeated in every stage that reads it.
        HEAVY: computes so much that no stage should repeat it.
        ADDS: adds, subtracts or lines up its operands, which may be several terms.
        LINEAR: of a sum of operands it makes the sum of the results, as long as only one operand varies.
        SUMS: as part of a weight half, sums over the samples or gives every sample its own value.
        LIKE: makes a constant with the shape, type or device of what it is given.
        ZEROS: makes zeros.
        FILLS: makes a tensor of one number, its argument `Operator.filled_with`.
        SIZED: may take a number of samples as a shape, or as a place.
        COUNTS: numbers its elements, so that its result says where in a micro-batch a sample is.
    """

    VIEW = auto()
    HEAVY = auto()
    ADDS = auto()
    LINEAR = auto()
    SUMS = auto()
    LIKE = auto()
    ZEROS = auto()
    FILLS = auto()
    SIZED = auto()
    COUNTS = auto()


_NOTHING = Trait(0)


@dataclass(frozen=True)
class Operator:
    """A row of the registry.

    Attributes:
        traits: its properties.
        filled_with: position of the number that a `FILLS` operator fills with.
    """

    traits: Trait = _NOTHING
    filled_with: int = 0


_ROWS: dict[str, Operator] = {
    # the same numbers, elsewhere
    "view": Operator(Trait.VIEW | Trait.LINEAR | Trait.SIZED),
    "_unsafe_view": Operator(Trait.VIEW | Trait.LINEAR | Trait.SIZED),
    "reshape": Operator(Trait.VIEW | Trait.LINEAR | Trait.SIZED),
    "expand": Operator(Trait.VIEW | Trait.LINEAR | Trait.SIZED),
    "slice": Operator(Trait.VIEW | Trait.LINEAR | Trait.SIZED),
    "squeeze": Operator(Trait.VIEW | Trait.LINEAR),
    "unsqueeze": Operator(Trait.VIEW | Trait.LINEAR),
    "t": Operator(Trait.VIEW | Trait.LINEAR),
    "transpose": Operator(Trait.VIEW | Trait.LINEAR),
    "permute": Operator(Trait.VIEW | Trait.LINEAR),
    "select": Operator(Trait.VIEW | Trait.LINEAR),
    "_to_copy": Operator(Trait.VIEW | Trait.LINEAR),
    "split": Operator(Trait.VIEW),
    "split_with_sizes": Operator(Trait.VIEW),
    "unbind": Operator(Trait.VIEW),
    "getitem": Operator(Trait.VIEW),
    "clone": Operator(Trait.LINEAR),
    "alias": Operator(Trait.LINEAR),
    "detach": Operator(Trait.LINEAR),
    "contiguous": Operator(Trait.LINEAR),
    "neg": Operator(Trait.LINEAR),
    "as_strided": Operator(Trait.SIZED),
    "repeat": Operator(Trait.SIZED),
    # arithmetic
    "add": Operator(Trait.ADDS | Trait.LINEAR),
    "sub": Operator(Trait.ADDS | Trait.LINEAR),
    "stack": Operator(Trait.ADDS | Trait.LINEAR),
    "cat": Operator(Trait.ADDS | Trait.LINEAR),
    "mul": Operator(Trait.LINEAR),
    "div": Operator(Trait.LINEAR),
    "tril": Operator(Trait.LINEAR),
    "triu": Operator(Trait.LINEAR),
    "index_put": Operator(Trait.LINEAR),
    "_unsafe_index_put": Operator(Trait.LINEAR),
    # reductions
    "sum": Operator(Trait.LINEAR | Trait.SUMS),
    "mean": Operator(Trait.LINEAR),
    # products, and what else computes much
    "mm": Operator(Trait.HEAVY | Trait.LINEAR | Trait.SUMS),
    "bmm": Operator(Trait.HEAVY | Trait.LINEAR | Trait.SUMS),
    "dot": Operator(Trait.SUMS),
    "addmm": Operator(Trait.HEAVY),
    "baddbmm": Operator(Trait.HEAVY),
    "matmul": Operator(Trait.HEAVY),
    "linear": Operator(Trait.HEAVY),
    "einsum": Operator(Trait.HEAVY),
    "convolution": Operator(Trait.HEAVY),
    "embedding": Operator(Trait.HEAVY),
    "native_layer_norm": Operator(Trait.HEAVY),
    "svd": Operator(Trait.HEAVY),
    "qr": Operator(Trait.HEAVY),
    "convolution_backward": Operator(Trait.SUMS),
    "embedding_dense_backward": Operator(Trait.SUMS),
    "native_layer_norm_backward": Operator(Trait.SUMS),
    "native_group_norm_backward": Operator(Trait.SUMS | Trait.SIZED),
    "native_batch_norm_backward": Operator(Trait.SUMS),
    "_fused_rms_norm_backward": Operator(Trait.SUMS),
    "slice_backward": Operator(Trait.SIZED),
    "select_backward": Operator(Trait.SIZED),
    # made of nothing but numbers
    "zeros": Operator(Trait.ZEROS | Trait.SIZED),
    "zeros_like": Operator(Trait.LIKE | Trait.ZEROS),
    "new_zeros": Operator(Trait.LIKE | Trait.ZEROS | Trait.SIZED),
    "ones": Operator(Trait.SIZED),
    "ones_like": Operator(Trait.LIKE),
    "new_ones": Operator(Trait.LIKE | Trait.SIZED),
    "empty": Operator(Trait.SIZED),
    "empty_like": Operator(Trait.LIKE),
    "new_empty": Operator(Trait.LIKE | Trait.SIZED),
    "new_empty_strided": Operator(Trait.LIKE),
    "full": Operator(Trait.FILLS | Trait.SIZED, filled_with=1),
    "full_like": Operator(Trait.LIKE | Trait.FILLS, filled_with=1),
    "new_full": Operator(Trait.LIKE | Trait.FILLS | Trait.SIZED, filled_with=2),
    "scalar_tensor": Operator(Trait.FILLS),
    "arange": Operator(Trait.SIZED | Trait.COUNTS),
    "linspace": Operator(Trait.COUNTS),
    "eye": Operator(Trait.COUNTS),
    "tril_indices": Operator(Trait.COUNTS),
    "triu_indices": Operator(Trait.COUNTS),
    "_embedding_bag": Operator(Trait.COUNTS),
}
_UNKNOWN = Operator()

# The tracer predicts strides that a kernel does not always keep (CPU batch norm of a transposed input); a reshape is a
# view wherever a view is possible.
RUN_AS: MappingProxyType[Any, Callable[..., Any]] = MappingProxyType(
    {
        torch.ops.aten.view.default: torch.ops.aten.reshape.default,
        torch.ops.aten._unsafe_view.default: torch.ops.aten.reshape.default,
    }
)

# Means over targets that divide by the weight of these inside, with the operator that differentiates each.
WEIGHED_MEANS: MappingProxyType[Any, Any] = MappingProxyType(
    {
        torch.ops.aten.nll_loss_forward.default: torch.ops.aten.nll_loss_backward.default,
        torch.ops.aten.nll_loss2d_forward.default: torch.ops.aten.nll_loss2d_backward.default,
    }
)

_OF_VALUES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_OF_VALUES_WITHOUT_TAG = frozenset({torch.ops.aten._pack_padded_sequence.default})  # its shape depends on the lengths


def row_of(node: fx.Node) -> Operator:
    """Return what is known of a node's operator; a row that states nothing if it is not in the registry."""
    return _ROWS.get(operator_name(node), _UNKNOWN)


def traits(node: fx.Node) -> Trait:
    """Return the properties of a node's operator."""
    return row_of(node).traits


def takes_output(node: fx.Node) -> bool:
    """Return whether a node takes one output out of a node with several."""
    return node.target is operator.getitem


def reads_size(node: fx.Node) -> bool:
    """Return whether a node reads a size of a tensor."""
    return node.target is torch.ops.aten.sym_size.int


def is_random(node: fx.Node) -> bool:
    """Return whether a node draws random numbers."""
    return isinstance(node.target, OpOverload) and draws(node.target, node.args, node.kwargs)


def draws(operation: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call of an operator draws random numbers: attention and recurrent layers may drop nothing."""
    if torch.Tag.nondeterministic_seeded not in operation.tags:
        return False
    place = argument_place(operation, _RATES)
    if place is None:
        return True
    index, name, default = place
    rate = args[index] if index < len(args) else kwargs.get(name, default)
    return not (isinstance(rate, (int, float)) and rate == 0)


def drops(name: str) -> bool:
    """Return whether an operator of this name draws only to drop elements, as layers with a rate do."""
    return any(word in name for word in ("dropout", "attention", "lstm", "gru", "rnn"))


def differentiates(node: fx.Node) -> bool:
    """Return whether a node's operator is the derivative of another, which is linear in the incoming gradient."""
    return operator_name(node).endswith(("_backward", "_backward_data"))


def takes_batch_statistics(node: fx.Node) -> bool:
    """Return whether a node's operator is a batch norm that may take mean and variance of the samples."""
    name = operator_name(node)
    return "batch_norm" in name and "no_training" not in name and "backward" not in name


def depends_on_values(function: OpOverload) -> bool:
    """Return whether a Python number, or a shape, that an operator gives depends on the values of its operands."""
    return function in _OF_VALUES_WITHOUT_TAG or any(tag in function.tags for tag in _OF_VALUES)


def makes_constant(function: OpOverload) -> bool:
    """Return whether an operator takes no values from its operands, only shape, type or device."""
    return Trait.LIKE in _ROWS.get(function._opname, _UNKNOWN).traits


def shares_memory_with(node: fx.Node) -> fx.Node | None:
    """Return the input of which a node's result is a view (or a list of views), None if it has memory of its own."""
    return node.all_input_nodes[0] if node.target in RUN_AS else aliased_input(node)
