"""Python numbers that remember how they were computed, so that a graph need not freeze them.

While a step is traced, numbers that change from batch to batch (`global_step`, learning rates, numbers of the batch)
are `TrackedInt` and `TrackedFloat`. Arithmetic on them builds an `Expression` over their sources, and

    multiplied with a tensor, added, ...     the tensor operation reads the expression as an input of the graph
    logged, printed, returned, kept          the expression is evaluated for every batch
    compared, or asked for its truth         the answer is a guard of the graph, unless nothing but output depends on it
    anything else (an index, `float()`, a key of a dict, text)   its value is a guard of the graph

Guards and inputs are evaluated before every batch, by the same Python operations that the step ran.

They are torch's symbolic numbers by type, which torch's argument parsers let through to the observer of the trace, and
claim to be `int` and `float` when the step asks.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch

from lightning_pipe.capture.tracked.number_expressions import Expression, NumberGuards


class TrackedNumber:
    """What tracked integers and floating numbers share. Their C++ base is never initialised: nobody reads its node."""

    value: Any
    expression: Any
    guards: NumberGuards
    line: Callable[[], str]

    def __init__(self, value: Any, expression: Any, guards: NumberGuards, line: Callable[[], str]) -> None:
        vars(self).update(value=value, expression=expression, guards=guards, line=line)

    @property
    def node(self) -> Any:
        """Refuse: torch asks symbolic numbers for it."""
        raise TypeError(f"{type(self).__name__} reached an operation of torch that the trace does not observe")

    def pinned(self) -> Any:
        """Return the plain number, and require that it stays."""
        if self.guards.output is not None:
            self.guards.output.check(self.expression)
        self.guards.pin(self.expression, self.value, self.line())
        return self.value

    def compute(self, operation: Callable[..., Any], *operands: Any) -> Any:
        """Return the result of an operation with this number among its operands, tracked if it is a number."""
        plain = [o.value if isinstance(o, TrackedNumber) else o for o in operands]
        expression = Expression(operation, tuple(o.expression if isinstance(o, TrackedNumber) else o for o in operands))
        return tracked(operation(*plain), expression, self.guards, self.line)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if method == "__call__" and not kwargs and all(isinstance(i, (TrackedNumber, *_PLAIN)) for i in inputs):
            return self.compute(ufunc, *inputs)
        return getattr(ufunc, method)(*(i.pinned() if isinstance(i, TrackedNumber) else i for i in inputs), **kwargs)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return np.asarray(self.pinned(), *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        getattr(self.value, name)  # torch asks for what no number has: nothing is read then
        return getattr(self.pinned(), name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self.value), (self.pinned(),)


class TrackedFloat(TrackedNumber, torch.SymFloat):
    """A floating number that remembers how it was computed."""

    __class__ = property(lambda self: float)


class TrackedInt(TrackedNumber, torch.SymInt):
    """An integer that remembers how it was computed."""

    __class__ = property(lambda self: int)


_PLAIN = (bool, int, float, np.number)


def is_tracked(value: Any) -> bool:
    """Return whether a value is a tracked number."""
    return isinstance(value, TrackedNumber)


def tracked(value: Any, expression: Any, guards: NumberGuards, line: Callable[[], str]) -> Any:
    """Return a number that remembers its expression; of a truth value, the value itself, which becomes a guard."""
    if isinstance(value, (np.floating, np.integer)):
        plain: Any = float if isinstance(value, np.floating) else int
        value, expression = plain(value), Expression(plain, (expression,))
    if type(value) is int:
        return TrackedInt(value, expression, guards, line)
    if type(value) is float:
        return TrackedFloat(value, expression, guards, line)
    answer = None if guards.output is None else guards.output.answer(expression)
    if answer is not None:
        return answer
    guards.pin(expression, value, line())
    return value


def _binary(operation: Callable[[Any, Any], Any], reflected: bool) -> Any:
    def method(self: TrackedNumber, other: Any, *modulus: Any) -> Any:
        if modulus:  # pow(a, b, modulus)
            return operation(
                self.pinned(), *(o.pinned() if isinstance(o, TrackedNumber) else o for o in (other, *modulus))
            )
        if isinstance(other, (TrackedNumber, *_PLAIN)):
            return self.compute(operation, *((other, self) if reflected else (self, other)))
        if isinstance(other, torch.Tensor):
            return NotImplemented  # the tensor's own operation, which the observer sees
        plain = self.pinned()
        return operation(other, plain) if reflected else operation(plain, other)

    return method


def _unary(operation: Callable[..., Any]) -> Any:
    def method(self: TrackedNumber, *arguments: Any) -> Any:
        return self.compute(operation, self, *arguments)

    return method


def _pinning(operation: Callable[..., Any]) -> Any:
    def method(self: TrackedNumber, *arguments: Any) -> Any:
        return operation(self.pinned(), *arguments)

    return method


def _text(form: Callable[..., str]) -> Any:
    def method(self: TrackedNumber, *arguments: str) -> str:
        late = None if self.guards.output is None else self.guards.output.text(self, form, *arguments)
        return form(self.pinned(), *arguments) if late is None else late

    return method


def _pinned_attribute(name: str) -> property:
    return property(lambda self: getattr(self.pinned(), name))


def _give_methods(cls: type) -> None:
    operation: Callable[..., Any]
    for name in "add sub mul truediv floordiv mod pow".split():
        operation = pow if name == "pow" else getattr(operator, name)
        setattr(cls, f"__{name}__", _binary(operation, reflected=False))
        setattr(cls, f"__r{name}__", _binary(operation, reflected=True))
    for name in "lt le gt ge eq ne".split():
        setattr(cls, f"__{name}__", _binary(getattr(operator, name), reflected=False))
    for name in "neg pos abs".split():
        setattr(cls, f"__{name}__", _unary(getattr(operator, name)))
    rounding: dict[str, Callable[..., Any]] = {
        "round": round, "floor": math.floor, "ceil": math.ceil, "trunc": math.trunc,
    }  # fmt: skip
    for name, operation in rounding.items():
        setattr(cls, f"__{name}__", _unary(operation))
    plain: dict[str, Callable[..., Any]] = {
        "float": float, "int": int, "index": operator.index, "complex": complex, "hash": hash,
        "divmod": divmod,
    }  # fmt: skip
    for name, operation in plain.items():
        setattr(cls, f"__{name}__", _pinning(operation))
    setattr(cls, "__invert__", _pinning(operator.invert))  # noqa: B010
    setattr(cls, "__rdivmod__", _pinning(lambda own, other: divmod(other, own)))  # noqa: B010
    for name in "as_integer_ratio bit_length conjugate hex is_integer".split():  # torch's base classes have their own
        setattr(cls, name, _pinned_attribute(name))
    for name in "and or xor lshift rshift".split():
        operation = getattr(operator, f"{name}_" if name in ("and", "or") else name)
        setattr(cls, f"__{name}__", _pinning(operation))
        setattr(cls, f"__r{name}__", _pinning(lambda own, other, operation=operation: operation(other, own)))

    for form in (str, repr, format):
        setattr(cls, f"__{form.__name__}__", _text(form))

    def truth(self: TrackedNumber) -> bool:
        truth = Expression(bool, (self.expression,))
        answer = None if self.guards.output is None else self.guards.output.answer(truth)
        if answer is not None:
            return answer
        self.guards.pin(truth, bool(self.value), self.line())
        return bool(self.value)

    cls.__bool__ = truth  # type: ignore[attr-defined]


for _class in (TrackedFloat, TrackedInt):
    _give_methods(_class)

_MATHS = (
    "exp expm1 log log2 log10 log1p sqrt sin cos tan tanh sinh cosh asin acos atan pow fabs floor ceil trunc fmod "
    "copysign hypot atan2 erf"
).split()


@contextlib.contextmanager
def tracking_mathematics() -> Iterator[None]:
    """Let the functions of `math` track numbers that they are given."""

    def followed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            first = next((a for a in arguments if isinstance(a, TrackedNumber)), None)
            return function(*arguments) if first is None else first.compute(function, *arguments)

        return call

    with contextlib.ExitStack() as stack:
        for name in _MATHS:
            stack.enter_context(mock.patch.object(math, name, followed(getattr(math, name))))
        yield
