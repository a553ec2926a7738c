"""Stage times of a chain, in seconds and bytes, for schedules that look at times.

All of one micro-batch, or of the part of it that one replica of a stage computes. Values that skip stages are left out:
they are sent along with the chain's and arrive no later than it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_pipe.core.program import Compute, Layout


@dataclass(frozen=True)
class ChainTimes:
    """Seconds and bytes of the parts of a chain.

    Attributes:
        forward_s: seconds of F, by stage.
        input_s: seconds of I, by stage.
        weight_s: seconds of W, by stage.
        ahead_s: seconds of the message from stage s to s + 1; 0 where both are on one rank.
        back_s: seconds of the message from stage s + 1 to s.
        saved_bytes: what F leaves for I, by stage.
        kept_bytes: what I leaves for W, by stage.
        room_bytes: what a rank has for both, by rank; infinite where memory does not matter.
        copied_bytes: what of `saved_bytes` can be on the host between F and I, by stage; () if nothing can.
        copy_s: seconds of copying that there, and of copying it back, by stage.
    """

    forward_s: tuple[float, ...]
    input_s: tuple[float, ...]
    weight_s: tuple[float, ...]
    ahead_s: tuple[float, ...]
    back_s: tuple[float, ...]
    saved_bytes: tuple[float, ...]
    kept_bytes: tuple[float, ...]
    room_bytes: tuple[float, ...]
    copied_bytes: tuple[float, ...] = ()
    copy_s: tuple[float, ...] = ()

    def compute_s(self, compute: Compute) -> float:
        """Return the seconds of a compute."""
        match compute.kind:
            case "F":
                return self.forward_s[compute.stage]
            case "I":
                return self.input_s[compute.stage]
            case "W":
                return self.weight_s[compute.stage]
            case "B":
                return self.input_s[compute.stage] + self.weight_s[compute.stage]

    def message_s(self, source: int, target: int) -> float:
        """Return the seconds of a message between neighbouring stages."""
        return self.ahead_s[source] if source < target else self.back_s[target]


def unit_times(layout: Layout, *, room: float = math.inf) -> ChainTimes:
    """Return one second for each of F, I and W, free messages, and one byte for every micro-batch that a stage keeps.

    Args:
        layout: ranks of each stage.
        room: micro-batches of all its stages that a rank may keep at once.
    """
    stages = len(layout.stages)
    ones, links = (1.0,) * stages, (0.0,) * (stages - 1)
    return ChainTimes(ones, ones, ones, links, links, ones, ones, (room,) * layout.ranks)
