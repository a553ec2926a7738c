"""Sizes of the graph of a micro-batch, and its values without their content (`microbatch_graph`)."""

from __future__ import annotations

from typing import Any

import sympy
import torch

from lightning_pipe.capture import torch_private as private
from lightning_pipe.capture.slicing.placement import LOCAL, Placements, Rows
from lightning_pipe.capture.steps.stage_program import memory_order


class MicrobatchSizes:
    """Know the two numbers of samples of which sizes are made.

    Args:
        leaf: fake tensor of the batch, of which others are made.
        symbol: the number of samples in the graph of the whole batch; None if it is a constant there.
        samples, batch_samples: of a micro-batch and of the batch, as captured.

    Attributes:
        symbol, total: the numbers of samples of a micro-batch and of the batch, as they stand in sizes.
    """

    def __init__(self, leaf: Any, symbol: sympy.Symbol | None, *, samples: int, batch_samples: int) -> None:
        self._mode, self._samples, self._batch_samples = leaf.fake_mode, samples, batch_samples
        self._known_sizes: dict[sympy.Basic, Any] = {}
        self._tensors: dict[Any, torch.Tensor] = {}  # by form
        self.total = self._new_symbol("samples_of_batch")
        self.symbol: sympy.Symbol = symbol or self._new_symbol("samples_of_microbatch")

    def _new_symbol(self, name: str) -> sympy.Symbol:
        dynamic: Any = private.StatelessSymbolicContext(dynamic_sizes=[private.DimDynamic.DYNAMIC])
        known = torch.empty([max(2, self._batch_samples)], device="meta")
        source = private.ConstantSource(name)
        size: Any = self._mode.from_tensor(known, source=source, symbolic_context=dynamic).shape[0]
        symbol: sympy.Symbol = private.own_symbol(size)
        return symbol

    def at_capture(self, expression: Any) -> Any:
        """Return a size as it is in the captured batch."""
        return expression.xreplace(
            {self.symbol: sympy.Integer(self._samples), self.total: sympy.Integer(self._batch_samples)}
        )

    def of_batch(self, value: Any) -> Any:
        """Return a size of the traced graph as an expression in which samples are those of the batch."""
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return value.node.expr.xreplace({self.symbol: self.total})
        return value

    def number_of(self, expression: sympy.Basic) -> Any:
        """Return a symbolic number: an integer, or a float."""
        hint, env = self.at_capture(expression), self._mode.shape_env
        if expression.is_integer:
            return self.symbolic(expression)
        return env.create_symfloatnode(expression, hint=float(hint))

    def described(self, value: Any, placement: Placements) -> Any:
        """Return a value without its content, for the samples of a micro-batch where it has their rows."""
        if isinstance(value, tuple | list):
            several = placement if isinstance(placement, tuple) else (placement,) * len(value)
            return type(value)(self.described(item, held) for item, held in zip(value, several, strict=True))
        if not isinstance(value, torch.Tensor):
            return value
        rows = placement if isinstance(placement, Rows) else None
        others = [size for dim, size in enumerate(value.shape) if rows is None or dim != rows.dim]
        has_batch = any(isinstance(size, torch.SymInt) for size in others) and placement is not LOCAL
        if not has_batch and (rows is None or isinstance(value.shape[rows.dim], torch.SymInt)):
            return value
        shape = [self.of_batch(size) for size in value.shape]
        if rows is not None:
            shape[rows.dim] = rows.outer * self.symbol * rows.per_sample
        return self.new(value, shape)

    def new(self, like: torch.Tensor, shape: list[Any]) -> torch.Tensor:
        """Return a fake tensor of this shape, whose dimensions lie in memory in the order of another one's.

        Tensors of one form are one, as nothing else is known of them.
        """
        order: Any = [*range(len(shape))]
        if len(shape) == like.dim():
            order = memory_order([self._at_capture_of(stride) for stride in like.stride()]) or order
        form = tuple(shape), tuple(order), like.dtype, like.device
        if form not in self._tensors:
            strides: list[Any] = [0] * len(shape)
            step: Any = sympy.Integer(1)
            for dim in reversed(order):
                strides[dim], step = step, step * shape[dim]
            with self._mode:
                sizes = [[*map(self.symbolic, numbers)] for numbers in (shape, strides)]
                self._tensors[form] = torch.empty_strided(*sizes, dtype=like.dtype, device=like.device)
        return self._tensors[form]

    def _at_capture_of(self, stride: Any) -> int:
        return stride if isinstance(stride, int) else int(self.at_capture(self.of_batch(stride)))

    def symbolic(self, expression: Any) -> Any:
        """Return a size of a fake tensor: a number, or a symbolic integer."""
        expression = sympy.sympify(expression)
        if expression.is_Integer:
            return int(expression)
        if expression not in self._known_sizes:
            hint = int(self.at_capture(expression))
            self._known_sizes[expression] = self._mode.shape_env.create_symintnode(expression, hint=hint)
        return self._known_sizes[expression]
