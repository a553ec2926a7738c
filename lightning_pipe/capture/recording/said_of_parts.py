"""What a step says of parts of a batch that is not what it says of the whole: names, texts and lists made of sizes.

    [f"{n}_{k}" for k in range(len(x))]
    self.log(f"loss_{len(x)}", loss)

A replayed step that does so takes whole batches, unless it has a head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lightning_pipe.capture.steps.call_recording import StepRecording
from lightning_pipe.capture.steps.hazards import at
from lightning_pipe.capture.steps.record import STAND_INS, LogCall, ObjectCall
from lightning_pipe.capture.steps.trees import branches

_CLOSE = 1e-3  # as kernels round otherwise for other numbers of samples
_WORDS = (bool, str, bytes, type(None))  # which no sum or mean is made of


def parts_say_otherwise(parts: Sequence[StepRecording], whole: StepRecording, *, has_lists: bool) -> str:
    """Return what a step says of some samples that is not what it says of parts of them, in words after "since".

    Tensors and numbers are left to `said_roles`, but for those in lists with an item per sample, which are joined.

    Args:
        parts: what it said of the parts, in their order.
        whole: what it said of all.
        has_lists: whether the batch has lists with an item per sample, from which numbers in such lists may come.
    """
    if _differ([part.returned for part in parts], whole.returned, has_lists):
        return "what it returns goes by the number of samples"
    for number, call in enumerate(whole.calls):
        others = [part.calls[number] for part in parts if number < len(part.calls)]
        if len(others) < len(parts) or any((one.name, type(one)) != (call.name, type(call)) for one in others):
            return f"what it logs goes by the number of samples{at(call.line)}"
        if _differ([*map(_said_by, others)], _said_by(call), has_lists):
            return f"what it gives to {call.name!r} goes by the number of samples{at(call.line)}"
    return ""


def _said_by(call: LogCall | ObjectCall) -> Any:
    return {"value": call.value if isinstance(call, LogCall) else call.args, "kwargs": call.kwargs}


def _differ(parts: Sequence[Any], whole: Any, has_lists: bool) -> bool:
    """Return whether what was said of parts does not make what was said of all: the first counts, lists are joined."""
    said = [*parts, whole]
    if any(isinstance(one, STAND_INS) for one in said):
        return False
    if all(isinstance(one, list | tuple) for one in said) and len(whole) > len(parts[0]):
        joined = [item for part in parts for item in part]
        pairs = zip(joined, whole, strict=False)
        return len(joined) != len(whole) or any(_is_other_item(*pair, has_lists) for pair in pairs)
    inside = [branches(one) for one in said]
    if any(one is not None for one in inside):
        first = inside[-1] or {}
        if any(one is None or one.keys() != first.keys() for one in inside):
            return True
        return any(_differ([(one or {})[key] for one in inside[:-1]], first[key], has_lists) for key in first)
    return isinstance(whole, _WORDS) and _are_other_words(parts[0], whole)


def _is_other_item(one: Any, two: Any, has_lists: bool) -> bool:
    """Return whether two items are not what is said of the same sample."""
    if isinstance(one, STAND_INS) or isinstance(two, STAND_INS):
        return False
    inside, others = branches(one), branches(two)
    if inside is not None and others is not None:
        return inside.keys() != others.keys() or any(_is_other_item(v, others[k], has_lists) for k, v in inside.items())
    if isinstance(one, _WORDS) or isinstance(two, _WORDS):
        return _are_other_words(one, two)
    are_numbers = isinstance(one, int | float) and isinstance(two, int | float)
    return are_numbers and not has_lists and not math.isclose(one, two, rel_tol=_CLOSE, abs_tol=_CLOSE)


def _are_other_words(one: Any, two: Any) -> bool:
    return type(one) is not type(two) or bool(one != two)
