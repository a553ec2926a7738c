"""Python numbers that remember how they were computed, so that a graph need not freeze them.

While a step is traced, numbers that change from batch to batch (`global_step`, learning rates, numbers of the batch)
are `TrackedInt` and `TrackedFloat`. Arithmetic on them builds an `Expression` over their sources, and

    multiplied with a tensor, added, ...     the tensor operation reads the expression as an input of the graph
    logged, returned, kept on the module     the expression is evaluated for every batch
    compared, or asked for its truth         the answer is a guard of the graph
    anything else (an index, `float()`, a key of a dict, text)   its value is a guard of the graph

Guards and inputs are evaluated before every batch, by the same Python operations that the step ran.

They are torch's symbolic numbers by type, which torch's argument parsers let through to the observer of the trace, and
claim to be `int` and `float` when the step asks.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from unittest import mock

import numpy as np
import torch

Number: TypeAlias = "int | float"
MOST_INPUTS = 64  # numbers that one graph reads; those beyond are guards


@dataclass(frozen=True)
class Situation:
    """What sources of numbers are read from, besides live Python state.

    Attributes:
        arguments: positional arguments of the step after the batch.
        numbers: Python numbers in the batch, in the order of its structure.
    """

    arguments: tuple[int, ...] = ()
    numbers: tuple[Number, ...] = ()


@dataclass(frozen=True)
class Source:
    """Where a number comes from; sources of one name are the same.

    Attributes:
        name: as the user would write it, such as `self.global_step`.
        read: returns its present value.
    """

    name: str
    read: Callable[[Situation], Number] = field(compare=False)


@dataclass(frozen=True)
class Expression:
    """A Python operation on numbers, expressions and sources."""

    operation: Callable[..., Any]
    operands: tuple[Any, ...]
    _hash: int = field(init=False, repr=False, compare=False)

    def __hash__(self) -> int:
        return self._hash

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.operation, self.operands)))


def evaluate(expression: Any, situation: Situation) -> Any:
    """Return the value of an expression, a source or a plain number."""
    if isinstance(expression, Source):
        return expression.read(situation)
    if isinstance(expression, Expression):
        return expression.operation(*(evaluate(operand, situation) for operand in expression.operands))
    return expression


def sources_in(expression: Any) -> Iterator[Source]:
    """Yield the sources of an expression."""
    if isinstance(expression, Source):
        yield expression
    elif isinstance(expression, Expression):
        for operand in expression.operands:
            yield from sources_in(operand)


@dataclass
class NumberGuards:
    """What a trace has found out about the numbers that it tracked.

    Attributes:
        values: expressions whose value, type included, must stay as it was; with the user's line.
        inputs: expressions that the graph reads, in the order of its vector of numbers.
    """

    values: dict[tuple[Any, Any], str] = field(default_factory=dict)
    inputs: dict[Any, int] = field(default_factory=dict)

    def pin(self, expression: Any, value: Any, line: str) -> None:
        """Require that an expression keeps its value."""
        self.values.setdefault((expression, _Exact(value)), line)

    def broken(self, situation: Situation) -> str:
        """Return what no longer has the value that it had, with its line; "" if everything has."""
        for (expression, exact), line in self.values.items():
            if (now := self._value(expression, situation)) != exact:
                names = ", ".join(dict.fromkeys(source.name for source in sources_in(expression)))
                return f"what depends on {names} was {exact.value!r} and is {now.value!r} now" + _at(line)
        return ""

    @staticmethod
    def _value(expression: Any, situation: Situation) -> _Exact:
        try:
            return _Exact(evaluate(expression, situation))
        except Exception as error:  # whatever the operation raises for these numbers, the step would raise too
            return _Exact(error)

    def vector(self, situation: Situation) -> list[float]:
        """Return what the graph reads."""
        return [float(evaluate(expression, situation)) for expression in self.inputs]


class _Exact:
    """A value that equals only itself and equal ones of the same type; not-a-number equals itself."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Exact) or type(self.value) is not type(other.value):
            return False
        one, two = self.value, other.value
        return one is two or bool(one == two) or (one != one and two != two)

    def __hash__(self) -> int:
        return hash((type(self.value), self.value))


def _at(line: str) -> str:
    return f" (at {line})" if line else ""


class _Tracked:
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
        self.guards.pin(self.expression, self.value, self.line())
        return self.value

    def compute(self, operation: Callable[..., Any], *operands: Any) -> Any:
        """Return the result of an operation with this number among its operands, tracked if it is a number."""
        plain = [o.value if isinstance(o, _Tracked) else o for o in operands]
        expression = Expression(operation, tuple(o.expression if isinstance(o, _Tracked) else o for o in operands))
        return tracked(operation(*plain), expression, self.guards, self.line)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if method == "__call__" and not kwargs and all(isinstance(i, (_Tracked, *_PLAIN)) for i in inputs):
            return self.compute(ufunc, *inputs)
        return getattr(ufunc, method)(*(i.pinned() if isinstance(i, _Tracked) else i for i in inputs), **kwargs)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return np.asarray(self.pinned(), *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        getattr(self.value, name)  # torch asks for what no number has: nothing is read then
        return getattr(self.pinned(), name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self.value), (self.pinned(),)


class TrackedFloat(_Tracked, torch.SymFloat):
    """A floating number that remembers how it was computed."""

    __class__ = property(lambda self: float)


class TrackedInt(_Tracked, torch.SymInt):
    """An integer that remembers how it was computed."""

    __class__ = property(lambda self: int)


_PLAIN = (bool, int, float, np.number)


def is_tracked(value: Any) -> bool:
    """Return whether a value is a tracked number."""
    return isinstance(value, _Tracked)


def tracked(value: Any, expression: Any, guards: NumberGuards, line: Callable[[], str]) -> Any:
    """Return a number that remembers its expression; of a truth value, the value itself, which becomes a guard."""
    if isinstance(value, (np.floating, np.integer)):
        plain: Any = float if isinstance(value, np.floating) else int
        value, expression = plain(value), Expression(plain, (expression,))
    if type(value) is int:
        return TrackedInt(value, expression, guards, line)
    if type(value) is float:
        return TrackedFloat(value, expression, guards, line)
    guards.pin(expression, value, line())
    return value


def _binary(operation: Callable[[Any, Any], Any], reflected: bool) -> Any:
    def method(self: _Tracked, other: Any, *modulus: Any) -> Any:
        if modulus:  # pow(a, b, modulus)
            return operation(self.pinned(), *(o.pinned() if isinstance(o, _Tracked) else o for o in (other, *modulus)))
        if isinstance(other, (_Tracked, *_PLAIN)):
            return self.compute(operation, *((other, self) if reflected else (self, other)))
        if isinstance(other, torch.Tensor):
            return NotImplemented  # the tensor's own operation, which the observer sees
        plain = self.pinned()
        return operation(other, plain) if reflected else operation(plain, other)

    return method


def _unary(operation: Callable[..., Any]) -> Any:
    def method(self: _Tracked, *arguments: Any) -> Any:
        return self.compute(operation, self, *arguments)

    return method


def _pinning(operation: Callable[..., Any]) -> Any:
    def method(self: _Tracked, *arguments: Any) -> Any:
        return operation(self.pinned(), *arguments)

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
        "float": float, "int": int, "index": operator.index, "complex": complex, "hash": hash, "str": str,
        "repr": repr, "format": format, "divmod": divmod,
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

    def truth(self: _Tracked) -> bool:
        self.guards.pin(Expression(bool, (self.expression,)), bool(self.value), self.line())
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
            first = next((a for a in arguments if isinstance(a, _Tracked)), None)
            return function(*arguments) if first is None else first.compute(function, *arguments)

        return call

    with contextlib.ExitStack() as stack:
        for name in _MATHS:
            stack.enter_context(mock.patch.object(math, name, followed(getattr(math, name))))
        yield


_ARITHMETIC = frozenset(
    "mul __mul__ __rmul__ multiply add __add__ __radd__ sub __sub__ __rsub__ rsub subtract div __div__ __rdiv__ "
    "__truediv__ __rtruediv__ true_divide divide gt __gt__ lt __lt__ ge __ge__ le __le__ lerp".split()
)
_IN_PLACE = frozenset("mul_ __imul__ add_ __iadd__ sub_ __isub__ div_ __itruediv__ lerp_".split())
_FACTORIES = frozenset({"tensor", "as_tensor", "scalar_tensor", "full"})
_COARSE = (torch.float16, torch.bfloat16)


def with_inputs(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], vector: torch.Tensor) -> Any:
    """Run a call of torch that has tracked numbers among its arguments.

    A number that the call only scales, adds, compares or makes a tensor of is read from the graph's vector of numbers;
    any other is pinned.

    Args:
        func: what is called.
        args, kwargs: its arguments.
        vector: the graph's numbers, double precision.
    """
    name = getattr(func, "__name__", "")
    places = [i for i, argument in enumerate(args) if isinstance(argument, _Tracked)]
    if len(places) == 1 and not any(map(_holds_tracked, (*args[: places[0]], *args[places[0] + 1 :], kwargs))):
        number = args[places[0]]
        slot = _input_slot(number)
        if slot is not None and name in _ARITHMETIC | _IN_PLACE and not kwargs:
            result = _arithmetic(func, args, places[0], vector[slot], in_place=name in _IN_PLACE)
            if result is not NotImplemented:
                return result
        if slot is not None and name in _FACTORIES and not kwargs.get("requires_grad"):
            return _made(args, kwargs, places[0], number.value, vector[slot])
    return func(*_pinned(args), **_pinned(dict(kwargs)))


def _input_slot(number: _Tracked) -> int | None:
    inputs = number.guards.inputs
    if number.expression not in inputs and len(inputs) == MOST_INPUTS:
        return None
    return inputs.setdefault(number.expression, len(inputs))


def _arithmetic(func: Any, args: tuple[Any, ...], place: int, entry: torch.Tensor, *, in_place: bool) -> Any:
    """Compute with a tensor in the place of a number, rounded as torch rounds numbers."""
    tensors = [argument for argument in args if isinstance(argument, torch.Tensor)]
    if not tensors or len(tensors) != len(args) - 1:
        return NotImplemented
    first = tensors[0]
    dtype = torch.result_type(first, args[place].value)
    if in_place and first.dtype != dtype:
        return NotImplemented
    if dtype in _COARSE:  # torch computes with the number in single precision
        if in_place:
            return NotImplemented
        wide = [a.to(torch.float32) if isinstance(a, torch.Tensor) else entry.to(torch.float32) for a in args]
        result = func(*wide)
        return result if result.dtype == torch.bool else result.to(dtype)
    return func(*args[:place], entry.to(dtype), *args[place + 1 :])


def _made(args: tuple[Any, ...], kwargs: Mapping[str, Any], place: int, value: Number, entry: torch.Tensor) -> Any:
    default = torch.get_default_dtype() if isinstance(value, float) else torch.int64
    dtype, device = kwargs.get("dtype") or default, kwargs.get("device")
    made = entry.to(dtype=dtype, device=device if device is not None else torch.get_default_device())
    return made.clone() if place == 0 else made.expand(args[0]).clone()


def _holds_tracked(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_holds_tracked, value))
    if isinstance(value, dict):
        return any(map(_holds_tracked, value.values()))
    if isinstance(value, slice):
        return any(map(_holds_tracked, (value.start, value.stop, value.step)))
    return isinstance(value, _Tracked)


def has_tracked(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether there are tracked numbers among the arguments of a call."""
    return any(map(_holds_tracked, args)) or any(map(_holds_tracked, kwargs.values()))


def _pinned(value: Any) -> Any:
    if isinstance(value, _Tracked):
        return value.pinned()
    if type(value) in (list, tuple):
        return type(value)(map(_pinned, value))
    if type(value) is dict:
        return {key: _pinned(item) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(_pinned(value.start), _pinned(value.stop), _pinned(value.step))
    return value
