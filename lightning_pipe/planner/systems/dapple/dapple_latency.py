"""Latency of a hybrid pipeline by DAPPLE's formula (eq. 1 to 3).

After Fan et al., DAPPLE (PPoPP 2021), section 4.1. Stages and the links between them are elements of one row, links
with AR = 0:

    Tw = sum of F_s for s <= Q                                                                 until the pivot is full
    Ts = (M-1) (F_Q + B_Q)                                                                     the pivot without bubbles
    Te = max over s of AR_s + (sum of B_a for s <= a <= Q if s <= Q, else -sum of B_a for Q <= a <= s)         the tail
    L  = Tw + Ts + Te                                                                          (eq. 1 and 2)

    pivot Q (eq. 3, Algorithm 1): the last element; going back, s takes its place if
    (M-1) (F_s + B_s) > (M-1) (F_Q + B_Q) + sum of F_t + B_t for s < t < Q

Data parallel training is one stage with gradient accumulation; its sums of gradients overlap with the last backward:
whatever is ready is summed as soon as the sum before it has ended.

Left out: bubbles of the pivot (L is 3 to 8 % too small for few micro-batches, at worst a third); that both directions
of a link work at once (a link that is the pivot makes L too large); that with deep warm-up the pivot ends with many
backwards in a row, so that stages behind it end earlier than Te says. The optimizer is added by the callers.

Legend: F, B seconds of forward and backward of one micro-batch, AR of the sum of gradients; M micro-batches; Q pivot.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_pipe.planner.estimates.recurrence import PipelineTimes

Values: TypeAlias = NDArray[np.float64]
_NEVER = -1e30  # below all times, and a number even when taken zero times


@dataclass(frozen=True)
class Element:
    """A stage or a link.

    Attributes:
        forward, backward: seconds of one micro-batch.
        reduce: seconds of the sum of gradients; 0 of a link.
    """

    forward: float
    backward: float
    reduce: float = 0.0


def elements_of(row: PipelineTimes) -> list[Element]:
    """Return stages and links of a pipeline in turn."""
    stages = [Element(*times) for times in zip(row.forward, row.backward, row.finish, strict=True)]
    links = [Element(*times) for times in zip(row.ahead, row.back, strict=True)]
    pairs = itertools.zip_longest(stages, links)
    return [element for pair in pairs for element in pair if element is not None]


def pivot(elements: Sequence[Element], microbatches: int) -> int:
    """Return the index of the element with the fewest bubbles (eq. 3)."""
    loads = [element.forward + element.backward for element in elements]
    found, between = len(loads) - 1, 0.0
    for s in reversed(range(len(loads) - 1)):
        if (microbatches - 1) * loads[s] > (microbatches - 1) * loads[found] + between:
            found, between = s, 0.0
        else:
            between += loads[s]
    return found


def latency_s(elements: Sequence[Element], microbatches: int) -> float:
    """Return the seconds of a batch (eq. 1 and 2)."""
    q = pivot(elements, microbatches)
    warmup = sum(element.forward for element in elements[: q + 1])
    steady = (microbatches - 1) * (elements[q].forward + elements[q].backward)
    backward = list(itertools.accumulate((element.backward for element in elements), initial=0.0))
    tails = (
        element.reduce + (backward[q + 1] - backward[s] if s <= q else backward[q] - backward[s + 1])
        for s, element in enumerate(elements)
    )
    return warmup + steady + max(tails)


def data_parallel_s(
    forward: float, backward: Sequence[float], sizes: Sequence[float], reduce_s: Callable[[float], float], *, count: int
) -> float:
    """Return the seconds of a batch without stages, sums of gradients overlapped with the last backward.

    Args:
        forward: seconds of the forward of a micro-batch.
        backward: seconds of the backward of each part of the model, in forward order.
        sizes: bytes of gradients that each part makes.
        reduce_s: seconds of the sum of so many bytes.
        count: micro-batches.
    """
    clock, free, ready = 0.0, 0.0, 0.0
    for seconds, size in zip(reversed(backward), reversed(sizes), strict=True):
        if ready and free <= clock:
            free, ready = clock + reduce_s(ready), 0.0
        clock, ready = clock + seconds, ready + size
    end = max(free, clock) + (reduce_s(ready) if ready else 0.0)
    return count * forward + (count - 1) * sum(backward) + end


@dataclass(frozen=True)
class ElementTimes:
    """An element of many pipelines at once, as arrays.

    Attributes:
        forward, backward, reduce: as of `Element`.
        excess: by what share of its memory a stage exceeds it; 0 if it fits.
    """

    forward: Values
    backward: Values
    reduce: Values
    excess: Values

    def take(self, choose: Callable[[Values], Values]) -> ElementTimes:
        """Return the element of which every array is what `choose` makes of the one here."""
        return ElementTimes(*(choose(getattr(self, field.name)) for field in fields(self)))


@dataclass(frozen=True)
class Prefix:
    """First elements of many pipelines at once: all that eq. 1 to 3 need to know of them, as arrays of one shape.

    The pivot goes on from the pivot of the elements before ("only Q_j stands for all stages before j"), which now and
    then is not the one that Algorithm 1 finds; so what is found is computed again (`latency_s`).

    Attributes:
        forward, backward: sums of F and B.
        first: max over s of AR_s - sum of B before s, as if all were before the pivot.
        load: F + B of the pivot.
        filled, emptied: sums of F and of B up to the pivot, itself included.
        ahead: sum of B before the pivot.
        before: the largest AR_s - sum of B before s, of s up to the pivot.
        behind: the largest AR_s - sum of B up to s, of s behind the pivot.
        excess: sum of the excesses of the elements.
    """

    forward: Values
    backward: Values
    first: Values
    load: Values
    filled: Values
    emptied: Values
    ahead: Values
    before: Values
    behind: Values
    excess: Values

    def take(self, choose: Callable[[Values], Values]) -> Prefix:
        """Return the prefix of which every array is what `choose` makes of the one here."""
        return Prefix(*(choose(getattr(self, field.name)) for field in fields(self)))

    def where(self, condition: NDArray[np.bool_], other: Prefix) -> Prefix:
        """Return this prefix where the condition holds, the other one elsewhere."""
        pairs = ((getattr(self, field.name), getattr(other, field.name)) for field in fields(self))
        return Prefix(*(np.where(condition, mine, its) for mine, its in pairs))

    def append(self, element: ElementTimes, *, microbatches: int) -> Prefix:
        """Return the prefixes with one more element; arrays are broadcast."""
        load = element.forward + element.backward
        f, b = self.forward + element.forward, self.backward + element.backward
        first = np.maximum(self.first, element.reduce - self.backward)
        # with u = (M-1) load + all loads up to here, Q stays if u_Q > u - load of the new element
        stays = (microbatches - 1) * self.load + self.filled + self.emptied > (microbatches - 2) * load + f + b
        return Prefix(
            forward=f,
            backward=b,
            first=first,
            load=np.where(stays, self.load, load),
            filled=np.where(stays, self.filled, f),
            emptied=np.where(stays, self.emptied, b),
            ahead=np.where(stays, self.ahead, self.backward),
            before=np.where(stays, self.before, first),
            behind=np.where(stays, np.maximum(self.behind, element.reduce - b), _NEVER),
            excess=self.excess + element.excess,
        )

    def latency_s(self, microbatches: int) -> Values:
        """Return the seconds of a batch (eq. 1 and 2), as if this were all."""
        tail = np.maximum(self.emptied + self.before, self.ahead + self.behind)
        found: Values = self.filled + (microbatches - 1) * self.load + tail
        return found


def empty_prefix(size: int) -> Prefix:
    """Return prefixes without elements."""
    zero, never = np.zeros(size), np.full(size, _NEVER)
    return Prefix(zero, zero, never, never, zero, zero, zero, never, never, zero)
