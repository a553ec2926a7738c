"""By which route does a step become stages? As one graph where that is right, else by replaying its Python.

joint     one graph of forward and backward (`capture.capture`); refuses what a graph would freeze
replay    the Python of the step runs on every rank (`capture.replay`)
auto      joint; replay where joint refuses
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from lightning_pipe.capture import Capture, Request, capture_step
from lightning_pipe.capture.replay import Replay
from lightning_pipe.capture.units import UnitTrace
from lightning_pipe.errors import CaptureError

log = logging.getLogger(__name__)


def captured_by(route: str, request: Request, *, traced: Callable[[Request], UnitTrace]) -> Capture | Replay:
    """Capture a step.

    Args:
        route: "auto", "joint" or "replay".
        request: the step.
        traced: finds the units of the step by a run on real tensors; called on all ranks together.

    Raises:
        CaptureError: if no route that is allowed can hold the step.
    """
    if route == "replay":
        return Replay(request, traced(request), reason="capture='replay' asks for it")
    try:
        return capture_step(request)
    except CaptureError as refused:
        if route == "joint":
            raise
        reason = refused
    try:
        replay = Replay(request, traced(request), reason=str(reason))
    except CaptureError as error:
        if str(error) == str(reason):
            raise reason from None
        raise CaptureError(f"{reason} Replaying its Python is no way out either: {error}") from reason
    log.info("%s: %s", request.method, told(replay))
    return replay


def told(capture: Capture | Replay) -> str:
    """Say in a line by which route a step was captured, and why."""
    if isinstance(capture, Replay):
        return f"The Python of the step runs on every rank (replay). {capture.reason}"
    return "The step is one graph (joint): nothing was found that a graph would freeze."
