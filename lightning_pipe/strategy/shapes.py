"""Count the shapes of batches that steps are captured for, and say once that each takes time."""

from __future__ import annotations

from collections import defaultdict

from lightning_pipe.lightning_names import rank_zero_warn
from lightning_pipe.strategy.calls import Call

_MANY = 8  # shapes of batches of one step


class ShapesCaptured:
    """Shapes of batches that steps were captured for while they were run, with the seconds that it took."""

    def __init__(self) -> None:
        self._seconds: dict[str, dict[object, float]] = defaultdict(dict)

    def note(self, call: Call, seconds: float) -> None:
        """Note a capture, and warn where there have been many."""
        known = self._seconds[call.method]
        if call.structure.leaves in known:
            return
        known[call.structure.leaves] = seconds
        if len(known) == _MANY:
            rank_zero_warn(
                f"{call.method} was captured for {_MANY} more shapes of batches, {sum(known.values()) / _MANY:.1f} s "
                "each, and every other shape takes as long. Only the number of samples may change for free: pad "
                "sequences to a few lengths (to the next multiple of 64, say), and sort samples by length."
            )
