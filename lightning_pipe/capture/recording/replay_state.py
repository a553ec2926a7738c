"""Python state of a replayed step: put back before every play, and left behind once per batch.

Every stage plays the step for every micro-batch, as far as its units go, so a counter that the step advances would
advance differently on every rank. Therefore each play begins with what was there before the batch. What it has changed
is noted by the stage that knows (`speaks`): by the last one, which alone plays the step to its end, and for what
happens inside of a unit by the stage of that unit. After the batch every rank leaves behind the same (`KeptState`).

That is what one device does if all micro-batches leave the same behind. Where they do not, the batch must not be cut
(`UnitTrace.whole`); found out while units are traced, and after every batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from lightning_pipe.capture.steps.metric_result import is_result
from lightning_pipe.capture.steps.record import Applied, KeptState


def is_inside(left: KeptState, path: str) -> bool:
    """Return whether a place is an attribute of a sub-module, or of one inside of it."""
    kind, root = left.path[0] if left.path else ("", "")
    return kind == "self" and (root == path or root.startswith(f"{path}."))


def speaks(left: KeptState, *, own: Sequence[str], others: Sequence[str], is_last: bool) -> bool:
    """Return whether a stage knows what is left in a place.

    Args:
        left: what its play has left there.
        own: paths of its units.
        others: paths of the units of other stages.
        is_last: whether it plays the step to its end.
    """
    if any(is_inside(left, path) for path in own):
        return True
    return is_last and not any(is_inside(left, path) for path in others)


def same_left(one: KeptState, two: KeptState) -> bool:
    """Return whether the same was left in the same place."""
    return (one.path, one.how) == (two.path, two.how) and same_content(one.value, two.value)


def same_content(one: Any, two: Any) -> bool:
    """Return whether two values have the same content; not-a-number equals itself."""
    if is_result(one) or is_result(two):
        return is_result(one) and is_result(two) and same_content(one.said, two.said)
    if isinstance(one, Applied) and isinstance(two, Applied):
        return same_content((one.function, one.args, one.kwargs), (two.function, two.args, two.kwargs))
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        same = one.shape == two.shape and one.dtype == two.dtype
        return same and bool(torch.equal(one, two) or torch.allclose(one, two, rtol=0, atol=0, equal_nan=True))
    if isinstance(one, np.ndarray) and isinstance(two, np.ndarray):
        return bool(np.array_equal(one, two, equal_nan=one.dtype.kind in "fc" and two.dtype.kind in "fc"))
    if type(one) is not type(two):
        return False
    if isinstance(one, Mapping):
        return one.keys() == two.keys() and all(same_content(one[key], two[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(same_content, one, two))
    try:
        return one is two or bool(one == two) or bool(one != one and two != two)
    except Exception:  # whatever an object's own `==` raises
        return False
