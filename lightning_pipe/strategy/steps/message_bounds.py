"""Bounds on messages: how many a rank may have under way beside a compute where a device carries them."""

from __future__ import annotations

from lightning_pipe.core.program import VerifiedProgram
from lightning_pipe.schedule.verification.deadlock import ends_within
from lightning_pipe.simulator.in_flight import messages_under_way


def message_bounds(program: VerifiedProgram) -> tuple[int, ...]:
    """Return by rank the number that the simulated timeline has, or as many more as a host needs that is never ahead.

    The timeline starts to move a message when its buffer is there. A host that waits for its stream, because a step
    reads a value or memory runs out, launches the receive only when a compute needs it.

    Args:
        program: proved for launches "late".
    """
    bounds = messages_under_way(program)
    while not ends_within(program, bounds):
        bounds = tuple(bound + 1 for bound in bounds)
    return bounds
