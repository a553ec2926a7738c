"""Linear expressions over the columns of an integer program."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class LinearSum:
    """A linear expression: weights of columns, and a constant."""

    weights: Mapping[int, float] = field(default_factory=dict)
    constant: float = 0.0


ONE = LinearSum(constant=1.0)
ZERO = LinearSum()


def sum_of(*terms: tuple[float, LinearSum]) -> LinearSum:
    """Add up expressions, each with a factor."""
    weights: dict[int, float] = defaultdict(float)
    for factor, term in terms:
        for column, weight in term.weights.items():
            weights[column] += factor * weight
    return LinearSum(weights, sum(factor * term.constant for factor, term in terms))
