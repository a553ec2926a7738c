"""Numbers that a step logs, gives to metrics and loggers, and returns, by the place where it does so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lightning_pipe.capture.steps.record import Computed, LogCall, ObjectCall, Read, Ref, Sized
from lightning_pipe.capture.steps.trees import found_in


def reported_numbers(
    calls: Sequence[LogCall | ObjectCall], returned: Any, value_of: Callable[[str], Any], samples: int
) -> dict[str, torch.Tensor]:
    """Return the numbers by place, but for those that are computed from counters and such.

    Args:
        calls: that the step makes.
        returned: what it returns.
        value_of: returns the value of a reference by its name; None if that is not known.
        samples: of the batch.
    """
    places: list[tuple[str, Any]] = [("the returned value", returned)]
    for call in calls:
        if isinstance(call, LogCall):
            places.append((f"the logged {call.name!r}", call.value))
        else:
            places.append((f"{call.name}()", (call.args, call.kwargs)))
    numbers: dict[str, torch.Tensor] = {}
    for count, (place, tree) in enumerate(places):
        for at, leaf in enumerate(found_in(tree, (Ref, Read, Sized, Computed, int, float))):
            value = leaf.of(samples) if isinstance(leaf, Sized) else leaf
            value = value_of(leaf.name) if isinstance(leaf, Ref | Read) else value
            if value is not None and not isinstance(value, Computed):
                numbers[f"{place} ({count}.{at})"] = torch.as_tensor(value)
    return numbers
