"""A tracked number computes what Python computes; whatever reads its plain value becomes a guard."""

from __future__ import annotations

import copy
import fractions
import json
import math
import operator
import pickle
import random
from collections.abc import Callable
from functools import partial
from math import cos, isfinite
from typing import Any

import numpy as np
import pytest
import torch

from lightning_pipe.capture.tracked.number_expressions import NumberGuards, Situation, Source, evaluate
from lightning_pipe.capture.tracked.number_inputs import has_tracked, with_inputs
from lightning_pipe.capture.tracked.tracked_number import is_tracked, tracked, tracking_mathematics

Number = int | float


def situation(*numbers: Number) -> Situation:
    return Situation(numbers=numbers)


class Tracing:
    """Tracked numbers with these values, and what their guards find out."""

    def __init__(self, *values: Number) -> None:
        self.guards = NumberGuards()
        self.numbers = [
            tracked(value, Source(f"n{i}", lambda now, i=i: now.numbers[i]), self.guards, lambda: "here")
            for i, value in enumerate(values)
        ]

    def broken(self, *values: Number) -> str:
        return self.guards.broken(situation(*values))


_TWO = [
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow),
    *(min, max, math.pow, math.fmod, math.copysign, math.hypot, math.atan2),
    *(np.add, np.multiply, np.minimum, np.maximum, np.true_divide, np.hypot),
    *(divmod, round, operator.and_, operator.xor, operator.lshift),
    *(operator.lt, operator.ge, operator.eq, operator.ne),
    lambda a, b: a if a > b else a * b,
    lambda a, b: max(0.0, min(1.0, a / b)),
    lambda a, b: a if a and not b else b,
    lambda a, b: sum([a, b]),
    lambda a, b: sum(range(int(a) % 7)) + b,
    lambda a, b: [1.0, 2.5, -3][int(a) % 3] * b,
    lambda a, b: np.float64(2.5) * a - np.int64(3) + b,
    lambda a, b: b + float(np.array([a, 1.0]).sum()),
    lambda a, b: len(f"{a}") + b,
    lambda a, b: cos(a) + b,
]
_ONE = [
    *(operator.neg, operator.pos, abs, round, math.floor, math.ceil, math.trunc, int, float, bool, operator.not_),
    *(math.sin, math.cos, math.tanh, math.exp, math.sqrt, math.log, math.log2, math.log1p, math.fabs, math.erf),
    *(np.exp, np.sin, np.sqrt, np.square, np.abs, np.sign, np.floor, np.isfinite),
    *(operator.invert, lambda a: a.real, lambda a: a.conjugate(), lambda a: a.is_integer(), lambda a: a.bit_length()),
]


def _program(draw: random.Random, arity: int) -> Callable[[list[Any]], Any]:
    """Return a random function of numbers: a dozen operations on what there is so far."""
    lines = []
    for size in range(arity, arity + draw.randint(1, 6)):
        if draw.random() < 0.6:
            lines.append((draw.choice(_TWO), [draw.randrange(size), draw.randrange(size)], draw.choice([None, 2, 0.5])))
        else:
            lines.append((draw.choice(_ONE), [draw.randrange(size)], None))

    def run(numbers: list[Any]) -> list[Any]:
        values = list(numbers)
        for operation, places, constant in lines:
            operands = [values[place] for place in places]
            if constant is not None:
                operands[draw_side(places)] = constant
            values.append(_flat(operation(*operands)))
        return values

    return run


def draw_side(places: list[int]) -> int:
    return sum(places) % 2


def _flat(value: Any) -> Any:
    """Return a single number of Python's: tuples (of `divmod`) lose their end."""
    value = value[0] if isinstance(value, tuple) else value
    return value.item() if isinstance(value, np.generic) else value


def _evaluated(values: Any, numbers: list[Any]) -> list[Any]:
    return [_flat(evaluate(v.expression, situation(*numbers))) if is_tracked(v) else v for v in values]


def _outcome(run: Callable[[list[Any]], Any], numbers: list[Any]) -> Any:
    try:
        return run(numbers)
    except Exception as error:
        return type(error)


def _number(draw: random.Random) -> Number:
    return draw.choice([draw.randint(-3, 9), draw.randint(-3, 9), round(draw.uniform(-3, 5), 2), 0, 1, 1.0])


def _same(one: Any, two: Any) -> bool:
    return type(one) is type(two) and (one == two or (one != one and two != two))


@pytest.mark.parametrize("block", range(8))
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_where_no_guard_is_broken_a_tracked_expression_is_what_python_computes(block: int) -> None:
    held = 0
    for seed in range(block * 250, (block + 1) * 250):
        draw = random.Random(seed)
        run = _program(draw, arity=2)
        values = [_number(draw), _number(draw)]
        tracing = Tracing(*values)
        with tracking_mathematics():
            traced = _outcome(run, list(tracing.numbers))
        expected = _outcome(run, values)
        if isinstance(expected, type):
            assert traced is expected, f"seed {seed}: {traced} instead of {expected}"
            continue
        assert isinstance(traced, list), f"seed {seed}: raises {traced}"
        assert not tracing.broken(*values), f"seed {seed}: broken where it was traced"
        for _ in range(6):
            others = [_number(draw), _number(draw)]
            if tuple(map(type, others)) != tuple(map(type, values)) or tracing.broken(*others):
                continue  # sources keep their types
            held += 1
            plain, now = _outcome(run, others), _outcome(partial(_evaluated, traced), others)
            if isinstance(plain, type):
                assert now is plain, f"seed {seed}: {now} instead of {plain} for {others} after {values}"
                continue
            assert isinstance(now, list) and all(map(_same, now, plain)), (
                f"seed {seed}: {now} instead of {plain} for {others} after {values}"
            )
    assert held > 50


READERS: dict[str, Callable[[Any], Any]] = {
    "index": lambda n: [1, 2, 3, 4][n],
    "slice": lambda n: [1, 2, 3, 4][:n],
    "range": lambda n: list(range(n)),
    "float": float,
    "int": lambda n: int(n + 0.5),
    "complex": complex,
    "dict key": lambda n: {1: "a", 2: "b"}.get(n),
    "set": lambda n: {n, 7},
    "f-string": lambda n: f"{n}",
    "format": lambda n: f"{n / 2:.2f}",
    "percent": lambda n: "%d and %s" % (n, n),  # noqa: UP031
    "str": str,
    "repr": repr,
    "mathematics imported by name": lambda n: cos(n),
    "finite": lambda n: isfinite(n),
    "gcd": lambda n: math.gcd(n, 4),
    "comparison": lambda n: n > 1,
    "chained comparison": lambda n: 0 < n < 2,
    "truth": lambda n: "yes" if n - 1 else "no",
    "membership": lambda n: n in (1, 5),
    "array": lambda n: np.array([n, 2.0]),
    "array of zeros": lambda n: np.zeros(n),
    "times an array": lambda n: n * np.ones(3),
    "array times": lambda n: np.ones(3) * n,
    "numpy function": lambda n: np.linspace(0, 1, 5)[n],
    "numpy interpolation": lambda n: np.interp(n, [0, 3], [0.0, 1.0]),
    "numpy scalar": lambda n: np.float32(n),
    "torch size": lambda n: torch.Size([n, 2]),
    "torch shape": lambda n: torch.Tensor.new_ones(torch.ones(1), _plainly(n)),
    "repetition": lambda n: [0] * n,
    "text repetition": lambda n: "ab" * n,
    "divmod": lambda n: divmod(7, n),
    "divmod of it": lambda n: divmod(n, 2),
    "modular power": lambda n: pow(n, 2, 3),
    "shift": lambda n: 1 << n,
    "and": lambda n: n & 1,
    "inversion": lambda n: ~n,
    "ratio": lambda n: (n / 3).as_integer_ratio(),
    "bits": lambda n: n.bit_length(),
    "hexadecimal": lambda n: (n / 3).hex(),
    "fraction": lambda n: fractions.Fraction(n, 3),
    "seed": lambda n: random.Random(n).random(),
    "deep copy": lambda n: copy.deepcopy(n),
    "pickle": lambda n: pickle.loads(pickle.dumps(n)),
    "hash": hash,
    "sorted": lambda n: sorted([n, 1.5]),
}


def _plainly(number: Any) -> int:
    return operator.index(number)


@pytest.mark.parametrize("name", READERS)
def test_what_reads_the_plain_value_pins_it(name: str) -> None:
    read = READERS[name]
    tracing = Tracing(1)
    with tracking_mathematics():
        found = read(tracing.numbers[0])
    assert not is_tracked(found)
    assert np.array_equal(found, read(1)), f"{found} instead of {read(1)}"
    assert tracing.broken(1) == ""
    assert tracing.broken(2) == f"{_PREFIX} n0 was {_pin(tracing, 1)} and is {_pin(tracing, 2)} now (at here)"


_PREFIX = "what depends on"


def _pin(tracing: Tracing, value: int) -> Any:
    """Return the value of the first expression that is pinned and differs between 1 and 2."""
    for expression, _ in tracing.guards.values:
        one, two = (evaluate(expression, situation(n)) for n in (1, 2))
        if one != two:
            return one if value == 1 else two
    raise AssertionError("nothing was pinned")


def test_what_cannot_be_read_is_no_silent_constant() -> None:
    with pytest.raises(TypeError):
        json.dumps(Tracing(1).numbers[0])
    with pytest.raises(TypeError):
        np.random.default_rng(Tracing(1).numbers[0])


def test_a_tracked_number_claims_to_be_a_number() -> None:
    integer, real = Tracing(3, 2.5).numbers
    assert isinstance(integer, int) and not isinstance(integer, float)
    assert isinstance(real, float) and not isinstance(real, bool)
    assert not isinstance(integer, torch.Tensor)


def test_arithmetic_and_looking_for_what_numbers_lack_pins_nothing() -> None:
    tracing = Tracing(3, 2.5)
    integer, real = tracing.numbers
    with tracking_mathematics():
        result = math.cos(abs(-integer) * real / 7 + 2**real - np.exp(real)) // 1
    assert is_tracked(result)
    assert not hasattr(integer, "__torch_function__")
    assert not hasattr(real, "shape")
    assert not tracing.guards.values


def test_a_guard_holds_for_the_type_of_a_number_too() -> None:
    tracing = Tracing(1)
    assert tracing.numbers[0] == 1
    int(tracing.numbers[0])
    assert tracing.broken(1.0) == "what depends on n0 was 1 and is 1.0 now (at here)"


def test_an_operation_that_raises_for_other_numbers_breaks_its_guard() -> None:
    tracing = Tracing(1)
    assert not 1 / tracing.numbers[0] > 3
    assert "ZeroDivisionError" in tracing.broken(0)


def test_not_a_number_stays_what_it_was() -> None:
    tracing = Tracing(float("nan"))
    float(tracing.numbers[0])
    assert tracing.broken(float("nan")) == ""
    assert tracing.broken(1.0) == "what depends on n0 was nan and is 1.0 now (at here)"


def test_a_number_that_becomes_not_a_number_breaks_its_guard() -> None:
    tracing = Tracing(1.0)
    float(tracing.numbers[0])
    assert tracing.broken(float("nan")) == "what depends on n0 was 1.0 and is nan now (at here)"


CALLS: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "mul": lambda x, n: x * n,
    "rmul": lambda x, n: n * x,
    "add": lambda x, n: x + n,
    "sub": lambda x, n: n - x,
    "div": lambda x, n: n / x,
    "lerp": lambda x, n: torch.lerp(x, x * 2, n),
    "compare": lambda x, n: (x > n).double(),
    "reflected comparison": lambda x, n: (n < x).double(),
    "in place": lambda x, n: x.clone().mul_(n),
    "augmented": lambda x, n: operator.iadd(x.clone(), n),
    "tensor": lambda x, n: x * torch.tensor(n, dtype=x.dtype),
    "full": lambda x, n: x + torch.full((2,), n, dtype=x.dtype),
    "power": lambda x, n: x**n,
    "clamp": lambda x, n: x.clamp(-n, n),
    "alpha": lambda x, n: torch.add(x, x, alpha=n),
    "two numbers": lambda x, n: torch.clamp(x, min=n / 2, max=n),
    "roll": lambda x, n: x.roll(int(n)),
}
_READ_BY_THE_GRAPH = "mul rmul add sub div lerp compare in_place augmented tensor full".split()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_of_torch_reads_the_number_from_the_graph_or_pins_it(name: str, dtype: torch.dtype) -> None:
    call, x = CALLS[name], torch.tensor([0.3, 1.7], dtype=dtype)
    tracing = Tracing(1.25)
    vector = torch.zeros(8, dtype=torch.float64)

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if has_tracked(args, kwargs):
                return with_inputs(func, args, kwargs, vector)
            return func(*args, **kwargs)

    def run(value: float) -> torch.Tensor:
        numbers = tracing.guards.vector(situation(value))
        vector[: len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
        with Watch():
            return call(x, tracing.numbers[0])

    run(1.25)  # finds its inputs
    assert torch.equal(run(1.25), call(x, 1.25))
    if not tracing.broken(2.5):
        assert torch.equal(run(2.5), call(x, 2.5))
        assert not tracing.guards.values
    is_read = name.replace(" ", "_") in _READ_BY_THE_GRAPH
    if is_read and (dtype != torch.bfloat16 or name not in ("in place", "augmented")):
        assert not tracing.broken(2.5)
