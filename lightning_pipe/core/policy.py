"""The activation policy of a stage as the names of one captured graph: what its backward runs again, what is offloaded.

A plan names places (`core.plan`); `planner.memory.policies` turns them into this, and `capture` into functions.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RecomputingBackward:
    """The backward of a stage that recomputes, as names of operations in the order in which they run.

    Attributes:
        input_grad: what I runs: its own operations, and each recomputed one just before its first reader.
        weight_grad: what W runs.
        made: names of the tensors that I makes again; another result of the same operation may have been kept.
    """

    input_grad: tuple[str, ...]
    weight_grad: tuple[str, ...]
    made: frozenset[str]


@dataclass(frozen=True)
class ActivationPolicy:
    """What becomes of what one stage saves.

    Attributes:
        backward: its backward if it recomputes; None if it does not.
        offloaded: names of all tensors that lie in the memories which are on the host between F and the backward.
    """

    backward: RecomputingBackward | None = None
    offloaded: tuple[str, ...] = ()


KEEP_ALL = ActivationPolicy()
