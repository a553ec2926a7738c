"""Compilation: the operations of a stage function run as kernels of Inductor, for a fixed number of samples.

    F, I or W   ->   piece, draw, piece, give, piece ...

What draws random numbers, and what gives gradients away, stays as it is and stands between the pieces; all else of the
function is compiled, a piece as one graph. Dropout is no such seam: its mask is drawn before the piece, with the
numbers of the key, and applied in it. Gradients are given away at the end of a piece, which ends when there are 25 MiB.

A piece may also, or only, be recorded as one launch (`recorded_pieces`). What waits for the device is a seam then, too.

The same function is returned, up to rounding. A compiled function is compared with the plain one when it first runs
(`compiled_stages`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from lightning_pipe.capture.graphs.value_sizes import TensorSpec
from lightning_pipe.capture.operators import Trait, takes_output, traits
from lightning_pipe.capture.stages.emit import SizeOfBatch, gives, undisturbed_run
from lightning_pipe.capture.stages.recorded_pieces import Slots
from lightning_pipe.capture.steps.keyed_random import drawn_operation
from lightning_pipe.capture.steps.stage_program import Code, RandomKey
from lightning_pipe.capture.torch_private import OpOverload, inductor

_GIVEN_TOGETHER = 25 << 20  # bytes of gradients that are made before they are given away
_aten = torch.ops.aten


@dataclass(frozen=True)
class RecordedHalf:
    """What is known of a stage whose pieces are recorded.

    Attributes:
        name: of the function, for the log.
        slots: of the stage.
        fixed: names of its parameters and buffers.
        leaving: names of the values that are not only read by its own functions.
    """

    name: str
    slots: Slots
    fixed: AbstractSet[str]
    leaving: AbstractSet[str]


def compile_code(
    code: Code, samples: int, device: torch.device, *, kernels: bool = True, recording: RecordedHalf | None = None
) -> Callable[..., Any]:
    """Return the function of a half for this number of samples, compiled.

    Args:
        code: the function.
        samples: their number.
        device: where it runs.
        kernels: whether its pieces are compiled.
        recording: how they are recorded; None if they are not.

    Returns:
        A function of the same arguments and results.
    """
    return _Compilation(code, samples, device, kernels=kernels, recording=recording).run()


class _Compilation:
    def __init__(
        self, code: Code, samples: int, device: torch.device, *, kernels: bool, recording: RecordedHalf | None
    ) -> None:
        self._code, self._samples, self._device = code, samples, device
        self._kernels, self._recording = kernels, recording
        self._outer = fx.Graph()
        self._made: dict[fx.Node, Any] = {}  # node of the plain function -> node of the compiled one, or an integer
        self._piece: dict[fx.Node, None] = {}
        self._gifts: list[fx.Node] = []
        self._gift_bytes = 0
        self._pieces = 0

    def run(self) -> Callable[..., Any]:
        samples, *nodes = self._code.module.graph.nodes
        self._outer.placeholder(samples.name)
        self._made[samples] = self._samples
        for node in nodes:
            self._take(node)
        run = fx.GraphModule(self._code.module, self._outer, class_name="Compiled").forward
        return partial(undisturbed_run, run, self._device) if any(map(_draws, nodes)) else run

    def _take(self, node: fx.Node) -> None:
        if node in self._made or node in self._piece:
            return
        if node.op == "placeholder":
            self._made[node] = self._outer.placeholder(node.name)
        elif node.op == "output":
            self._end_piece()
            self._outer.output(self._mapped(node.args[0]))
        elif (size := self._size(node)) is not None:
            self._made[node] = size
        elif _is_copy_of_input(node):
            self._copy(node)
        elif gives(node):
            self._gifts.append(node)
            self._gift_bytes += sum(_bytes(self._form(term)) for term in node.all_input_nodes[1:])
            if self._gift_bytes >= _GIVEN_TOGETHER:
                self._end_piece()
        elif (_draws(node) and not _is_dropout(node)) or (self._recording is not None and _waits(node)):
            self._end_piece()
            self._copy(node)
        elif takes_output(node) and node.all_input_nodes[0] in self._made:
            self._copy(node)
        else:
            self._piece[node] = None
            self._piece |= dict.fromkeys(user for user in node.users if takes_output(user))

    def _size(self, node: fx.Node) -> int | float | None:
        """Return the number that a node computes of numbers of samples, None if it computes none."""
        target: Any = node.target
        if node.op != "call_function" or isinstance(target, OpOverload) or not node.all_input_nodes:
            return None
        if isinstance(target, SizeOfBatch):
            return target.at(self._samples)
        if not all(isinstance(self._made.get(read), int) for read in node.all_input_nodes):
            return None
        return int(target(*self._mapped(node.args)))

    def _copy(self, node: fx.Node) -> None:
        """Let a node run as it is, between the pieces."""
        args, kwargs = self._mapped(node.args), self._mapped(node.kwargs)
        self._made[node] = self._outer.create_node(node.op, node.target, args, kwargs, name=node.name)

    def _mapped(self, value: Any) -> Any:
        return fx.map_arg(value, lambda node: self._made[node])

    def _end_piece(self) -> None:
        """Compile the piece that has been gathered, and give away what it made."""
        piece, self._piece = self._piece, {}
        if any(_computes(node) for node in piece):
            self._compile(piece)
        else:
            for node in piece:
                self._copy(node)
        for gift in self._gifts:
            self._copy(gift)
        self._gifts, self._gift_bytes = [], 0

    def _compile(self, piece: dict[fx.Node, None]) -> None:
        inner = fx.Graph()
        inputs: dict[fx.Node, fx.Node] = {}  # value before the piece -> placeholder
        forms: list[TensorSpec] = []
        made: dict[fx.Node, Any] = {}

        def given(outside: fx.Node, form: TensorSpec) -> fx.Node:
            forms.append(form)
            inputs[outside] = inner.placeholder(outside.name)
            return inputs[outside]

        def read(node: fx.Node) -> Any:
            outside, form = self._made[node], self._form(node)
            return given(outside, form) if isinstance(form, TensorSpec) else form

        for node in piece:  # placeholders come first in a graph
            outside = node.all_input_nodes
            if _is_dropout(node):
                mask, form = self._mask(node)
                made[node] = given(mask, form)
                outside = outside[1:]  # without the key
            made |= {before: read(before) for before in outside if before not in piece and before not in made}
        for node in piece:
            made[node] = self._inner(node, inner, made)
        outputs = [
            node
            for node in piece
            if isinstance(made[node], fx.Node) and not set(node.users) <= piece.keys() and not _is_tuple(node)
        ]
        inner.output(tuple(made[node] for node in outputs))
        kernel = self._kernel(fx.GraphModule(self._code.module, inner), forms, [*inputs], outputs)
        results = self._outer.call_function(kernel, tuple(inputs))
        for index, node in enumerate(outputs):
            self._made[node] = self._outer.call_function(_item, (results, index))

    def _kernel(
        self,
        module: fx.GraphModule,
        forms: Sequence[TensorSpec],
        inputs: Sequence[fx.Node],
        outputs: Sequence[fx.Node],
    ) -> Callable[..., Any]:
        """Return what runs the graph of a piece, given its inputs as they are in the outer graph, and its outputs."""
        number, self._pieces = self._pieces, self._pieces + 1
        run: Callable[..., Any] = module.forward
        if self._kernels:
            run = inductor(module, [(form.shape, form.stride, form.dtype) for form in forms], self._device)
        if (recording := self._recording) is not None:
            fixed = [given.op == "placeholder" and given.name in recording.fixed for given in inputs]
            stays = [output.name not in recording.leaving for output in outputs]
            name = f"piece {number} of {recording.name} for {self._samples} samples"
            run = recording.slots.piece(run, fixed=fixed, stays=stays, name=name)
        return _fitted(run, forms, number)

    def _inner(self, node: fx.Node, inner: fx.Graph, made: dict[fx.Node, Any]) -> Any:
        """Return what stands for a node in the graph of a piece; for one with several results perhaps a tuple."""
        if node.op == "get_attr":
            return inner.get_attr(str(node.target))
        if _is_dropout(node):
            x, rate = _dropped(node)
            kept = inner.call_function(_aten.mul.Tensor, (made[x], made[node]))
            return inner.call_function(_aten.mul.Scalar, (kept, 0.0 if rate == 1 else 1 / (1 - rate))), made[node]
        args: Any = fx.map_arg(node.args, lambda read: made[read])
        if takes_output(node) and isinstance(args[0], tuple):
            return args[0][args[1]]
        kwargs = fx.map_arg(node.kwargs, lambda read: made[read])
        return inner.create_node(node.op, node.target, args, kwargs, name=node.name)

    def _mask(self, dropout: fx.Node) -> tuple[fx.Node, TensorSpec]:
        """Draw the mask of a dropout before the piece."""
        x, rate = _dropped(dropout)
        form = self._form(x)
        draw = _masks(dropout.target, form, rate, self._device)
        mask = self._outer.call_function(draw, (self._mapped(dropout.args[0]),), name=f"{dropout.name}_mask")
        return mask, TensorSpec(torch.bool, form.shape, form.stride)

    def _form(self, node: fx.Node) -> Any:
        return self._code.form(node, self._samples)


def _fitted(run: Callable[..., Any], forms: Sequence[TensorSpec], number: int) -> Callable[..., Any]:
    """Return a piece whose inputs, if they lie in memory in another way than was foreseen, are brought into it."""

    def piece(*tensors: torch.Tensor) -> Any:
        fitting = zip(tensors, forms, strict=True)
        return run(*[t if t.stride() == form.stride else _laid_out(t, form) for t, form in fitting])

    piece.__name__ = f"piece_{number}"
    return piece


def _laid_out(tensor: torch.Tensor, form: TensorSpec) -> torch.Tensor:
    strides = zip(tensor.shape, tensor.stride(), form.stride, strict=True)
    if all(size <= 1 or have == want for size, have, want in strides):
        return tensor.as_strided(form.shape, form.stride)
    return tensor.new_empty_strided(form.shape, form.stride).copy_(tensor)


def _masks(draw: Any, form: TensorSpec, rate: Any, device: torch.device) -> Callable[[RandomKey], torch.Tensor]:
    """Return what draws the mask of a dropout of a tensor of this form."""

    def mask(key: RandomKey) -> torch.Tensor:
        ones = torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device=device).fill_(1)
        drawn: torch.Tensor = draw(key, ones, rate, True)[1]
        return drawn

    mask.__name__ = f"mask_of_{draw.__name__}"
    return mask


def _item(results: Sequence[torch.Tensor], index: int) -> torch.Tensor:
    return results[index]


def _is_copy_of_input(node: fx.Node) -> bool:
    """Return whether a node copies state that is overwritten later: no compiler may take that for nothing."""
    return node.target is _aten.clone.default and node.all_input_nodes[0].op == "placeholder"


def _draws(node: fx.Node) -> bool:
    return drawn_operation(node.target) is not None


def _waits(node: fx.Node) -> bool:
    """Return whether the host waits for the device in an operation, to read a value, or the size of a result, there."""
    if not isinstance(node.target, OpOverload):
        return False
    tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    if node.target.overloadpacket in (_aten.index, _aten.index_put, _aten.index_put_, _aten._unsafe_index_put):
        indices: Any = node.args[1]
        return any(one.meta["val"].dtype in (torch.bool, torch.uint8) for one in indices if one is not None)
    return bool(tags.intersection(node.target.tags))


def _is_dropout(node: fx.Node) -> bool:
    """Return whether a node draws a mask and applies it."""
    return drawn_operation(node.target) is _aten.native_dropout.default and node.args[3] is not False


def _dropped(dropout: fx.Node) -> tuple[fx.Node, float]:
    """Return the tensor that a dropout is applied to, and its rate."""
    _, x, rate, *_ = dropout.args
    assert isinstance(x, fx.Node), "a value of the graph"
    assert isinstance(rate, (int, float)), "a number"
    return x, rate


def _is_tuple(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (tuple, list))


def _computes(node: fx.Node) -> bool:
    return node.op == "call_function" and not takes_output(node) and Trait.VIEW not in traits(node)


def _bytes(form: Any) -> int:
    return form.dtype.itemsize * torch.Size(form.shape).numel() if isinstance(form, TensorSpec) else 0
