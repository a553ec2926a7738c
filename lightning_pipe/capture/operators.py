"""Operator registry: what capture knows of the operators of a graph, a row for each, by name without overload.

A row states properties of the operator itself; what follows from them for micro-batches and stages is decided where it
is asked. An operator without a row, or with one that states nothing, is treated with care: it is cut like any other,
its result from values of all samples is `mixed`, and the weight halves in which it scales such values run one by one.

What torch declares is not repeated here: random operators carry a tag, views are marked in their schema.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Flag, auto
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import fx

from lightning_pipe.capture.torch_private import (
    OpOverload,
    aliased_input,
    argument_names,
    argument_place,
    operator_name,
)

_RATES = ("dropout_p", "dropout")  # of attention, and between recurrent layers
Reduction = Literal["mean", "sum", "max", "min"]


class Trait(Flag):
    """A property of an operator.

    Attributes:
        VIEW: looks at the same elements, or casts them: cheap enough to be repeated in every stage that reads it.
        RESHAPES: keeps the elements and their order, in other dimensions.
        HEAVY: computes so much that no stage should repeat it.
        KEEPS: gives the same numbers in another layout or type, or negated: of a mean it makes a mean.
        ADDS: adds, subtracts or lines up its operands, which may be several terms.
        LINES_UP: one that puts its operands side by side.
        PASSES_GRADIENT: autograd hands the incoming gradient to its operands as it is.
        SCALES: multiplies or divides.
        LINEAR: of a sum of operands it makes the sum of the results, as long as only one operand varies.
        BOUNDS: only keeps a value finite or within limits, and is taken to change nothing.
        SUMS: as part of a weight half, sums over the samples or gives every sample its own value.
        ALONG: runs along dimensions that it is given, so that elements along them meet.
        SELECTS: picks rows by an index.
        INDEXED: takes places, as operands behind its first.
        LIKE: makes a constant with the shape, type or device of what it is given.
        ZEROS: makes zeros.
        FILLS: makes a tensor of one number, its argument `Operator.filled_with`.
        SIZED: may take a number of samples as a shape, or as a place.
        COUNTS: numbers its elements, so that its result says where in a micro-batch a sample is.
    """

    VIEW = auto()
    RESHAPES = auto()
    HEAVY = auto()
    KEEPS = auto()
    ADDS = auto()
    LINES_UP = auto()
    PASSES_GRADIENT = auto()
    SCALES = auto()
    LINEAR = auto()
    BOUNDS = auto()
    SUMS = auto()
    ALONG = auto()
    SELECTS = auto()
    INDEXED = auto()
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
        reduces: how its results from slices of the samples make that of all samples, if it is given values with
            samples and gives one without; None if they do not.
        filled_with: position of the number that a `FILLS` operator fills with.
        meets_in: how many of the last dimensions of its operands are those in which elements meet, or the argument
            that lists as many; None where only the shapes of results tell.
    """

    traits: Trait = _NOTHING
    reduces: Reduction | None = None
    filled_with: int = 0
    meets_in: int | str | None = None


_MOVES = Trait.KEEPS | Trait.LINEAR
_LOOKS = _MOVES | Trait.VIEW
_JOINS = Trait.ADDS | Trait.LINEAR

_ROWS: dict[str, Operator] = {
    # the same numbers, elsewhere
    "view": Operator(_LOOKS | Trait.RESHAPES | Trait.SIZED),
    "_unsafe_view": Operator(_LOOKS | Trait.RESHAPES | Trait.SIZED),
    "reshape": Operator(_LOOKS | Trait.RESHAPES | Trait.SIZED),
    "expand": Operator(_LOOKS | Trait.SIZED),
    "slice": Operator(_LOOKS | Trait.SIZED),
    "squeeze": Operator(_LOOKS),
    "unsqueeze": Operator(_LOOKS),
    "t": Operator(_LOOKS),
    "transpose": Operator(_LOOKS),
    "permute": Operator(_LOOKS),
    "select": Operator(_LOOKS),
    "_to_copy": Operator(_LOOKS),
    "split": Operator(Trait.VIEW),
    "split_with_sizes": Operator(Trait.VIEW),
    "unbind": Operator(Trait.VIEW),
    "getitem": Operator(Trait.VIEW),
    "clone": Operator(_MOVES | Trait.PASSES_GRADIENT),
    "alias": Operator(_MOVES | Trait.PASSES_GRADIENT),
    "detach": Operator(_MOVES),
    "contiguous": Operator(_MOVES),
    "neg": Operator(_MOVES),
    "lift_fresh_copy": Operator(Trait.KEEPS),
    "as_strided": Operator(Trait.SIZED),
    "repeat": Operator(Trait.SIZED),
    # arithmetic
    "add": Operator(_JOINS | Trait.PASSES_GRADIENT),
    "sub": Operator(_JOINS | Trait.PASSES_GRADIENT),
    "stack": Operator(_JOINS | Trait.LINES_UP),
    "cat": Operator(_JOINS | Trait.LINES_UP),
    "mul": Operator(Trait.SCALES | Trait.LINEAR),
    "div": Operator(Trait.SCALES | Trait.LINEAR),
    "tril": Operator(Trait.LINEAR),
    "triu": Operator(Trait.LINEAR),
    "index_put": Operator(Trait.LINEAR | Trait.INDEXED),
    "_unsafe_index_put": Operator(Trait.LINEAR | Trait.INDEXED),
    "clamp": Operator(Trait.BOUNDS),
    "clamp_min": Operator(Trait.BOUNDS),
    "clamp_max": Operator(Trait.BOUNDS),
    "maximum": Operator(Trait.BOUNDS),
    "minimum": Operator(Trait.BOUNDS),
    "nan_to_num": Operator(Trait.BOUNDS),
    "where": Operator(Trait.BOUNDS),
    # reductions
    "sum": Operator(Trait.LINEAR | Trait.SUMS, reduces="sum"),
    "mean": Operator(Trait.LINEAR, reduces="mean"),
    "amax": Operator(reduces="max"),
    "max": Operator(reduces="max"),
    "any": Operator(reduces="max"),
    "amin": Operator(reduces="min"),
    "min": Operator(reduces="min"),
    "all": Operator(reduces="min"),
    "_is_all_true": Operator(reduces="min"),
    # products, and what else computes much
    "mm": Operator(Trait.HEAVY | Trait.LINEAR | Trait.SUMS, reduces="sum"),
    "bmm": Operator(Trait.HEAVY | Trait.LINEAR | Trait.SUMS, reduces="sum"),
    "dot": Operator(Trait.SUMS, reduces="sum"),
    "vdot": Operator(reduces="sum"),
    "mv": Operator(reduces="sum"),
    "addmm": Operator(Trait.HEAVY),
    "baddbmm": Operator(Trait.HEAVY),
    "matmul": Operator(Trait.HEAVY),
    "linear": Operator(Trait.HEAVY),
    "einsum": Operator(Trait.HEAVY),
    "convolution": Operator(Trait.HEAVY),
    "embedding": Operator(Trait.HEAVY),
    "native_layer_norm": Operator(Trait.HEAVY, meets_in="normalized_shape"),
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
    # in the last dimensions; losses that are not reduced, in none but that of the classes
    "nll_loss_forward": Operator(meets_in=0),
    "nll_loss2d_forward": Operator(meets_in=0),
    "_scaled_dot_product_flash_attention_for_cpu": Operator(meets_in=2),
    "_scaled_dot_product_flash_attention": Operator(meets_in=2),
    "_scaled_dot_product_efficient_attention": Operator(meets_in=2),
    "_scaled_dot_product_cudnn_attention": Operator(meets_in=2),
    # along a dimension
    "cumsum": Operator(Trait.ALONG),
    "cumprod": Operator(Trait.ALONG),
    "logcumsumexp": Operator(Trait.ALONG),
    "cummax": Operator(Trait.ALONG),
    "cummin": Operator(Trait.ALONG),
    "sort": Operator(Trait.ALONG),
    "argsort": Operator(Trait.ALONG),
    "topk": Operator(Trait.ALONG),
    "median": Operator(Trait.ALONG),
    "roll": Operator(Trait.ALONG),
    "flip": Operator(Trait.ALONG),
    "_softmax": Operator(Trait.ALONG),
    "_safe_softmax": Operator(Trait.ALONG),
    "_fft_r2c": Operator(Trait.ALONG),
    "_fft_c2r": Operator(Trait.ALONG),
    "_fft_c2c": Operator(Trait.ALONG),
    "gather": Operator(Trait.ALONG | Trait.INDEXED),
    "scatter": Operator(Trait.ALONG | Trait.INDEXED),
    "scatter_add": Operator(Trait.ALONG | Trait.INDEXED),
    "index_add": Operator(Trait.ALONG | Trait.INDEXED),
    "_log_softmax": Operator(Trait.ALONG),
    "logsumexp": Operator(Trait.ALONG),
    "index": Operator(Trait.SELECTS | Trait.INDEXED),
    "index_select": Operator(Trait.SELECTS | Trait.INDEXED),
    # made of nothing but numbers
    "zeros": Operator(Trait.ZEROS | Trait.SIZED),
    "zeros_like": Operator(Trait.ZEROS | Trait.LIKE),
    "new_zeros": Operator(Trait.ZEROS | Trait.LIKE | Trait.SIZED),
    "ones": Operator(Trait.SIZED),
    "ones_like": Operator(Trait.LIKE),
    "new_ones": Operator(Trait.LIKE | Trait.SIZED),
    "empty": Operator(Trait.SIZED),
    "empty_like": Operator(Trait.LIKE),
    "new_empty": Operator(Trait.LIKE | Trait.SIZED),
    "new_empty_strided": Operator(Trait.LIKE),
    "full": Operator(Trait.FILLS | Trait.SIZED, filled_with=1),
    "full_like": Operator(Trait.FILLS | Trait.LIKE, filled_with=1),
    "new_full": Operator(Trait.FILLS | Trait.LIKE | Trait.SIZED, filled_with=2),
    "scalar_tensor": Operator(Trait.FILLS),
    "arange": Operator(Trait.SIZED | Trait.COUNTS),
    "linspace": Operator(Trait.COUNTS),
    "eye": Operator(Trait.COUNTS),
    "tril_indices": Operator(Trait.COUNTS),
    "triu_indices": Operator(Trait.COUNTS),
    "_embedding_bag": Operator(Trait.COUNTS),
    # whose shapes tell all that is asked here: where the samples are, and whether they meet
    **dict.fromkeys(
        "slice_scatter _unsafe_index unsafe_split unfold constant_pad_nd "
        "reflection_pad1d im2col max_pool2d_with_indices avg_pool2d native_group_norm log_sigmoid_forward "
        "_prelu_kernel _trilinear _cdist_forward "
        "_weight_norm_interface norm linalg_vector_norm argmax argmin copy lerp _assert_async".split(),
        Operator(),
    ),
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


def known_names() -> frozenset[str]:
    """Name the operators that have a row."""
    return frozenset(_ROWS)


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


def is_known(node: fx.Node) -> bool:
    """Return whether a row, a rule, or torch itself says how a node's operator treats the elements of its operands.

    Rules: derivatives, batch norms, losses. Torch says so of operators that work element by element and of those that
    draw random numbers; Python functions in a graph compute sizes.
    """
    target = node.target
    if not isinstance(target, OpOverload) or reads_size(node):
        return True
    by_rule = differentiates(node) or "batch_norm" in operator_name(node) or "reduction" in argument_names(node)
    by_torch = torch.Tag.pointwise in target.tags or is_random(node)
    return by_rule or by_torch or operator_name(node) in _ROWS
