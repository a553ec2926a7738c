"""Capture route of a step: one graph where that is right, else replay of its Python.

joint     one graph of forward and backward (`capture.capture`); refuses what a graph would freeze
replay    the Python of the step runs on every rank (`capture.replayed.replay`)
auto      joint; where it fails for a fault of this package, joint for batches that are not cut; replay where joint
          refuses
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from lightning_pipe.capture import Capture, Request, Route, capture_step
from lightning_pipe.capture.recording.unit_state import uncut_object
from lightning_pipe.capture.recording.units import UnitTrace
from lightning_pipe.capture.replayed.replay import Replay
from lightning_pipe.errors import (
    BrokenRouteError,
    CaptureError,
    ChangedStateError,
    FewSamplesError,
    PipeError,
    UncapturedError,
    faults_reported,
)

log = logging.getLogger(__name__)

Refusals = Callable[[bool], tuple[int, int]]


class Settled(Protocol):
    """State that settles in the first call of a step, and may be left on the module."""

    def keep(self, name: str) -> bool:
        """Leave what settles of a state on the module of this rank; return whether there is anything."""

    def undo(self) -> None:
        """Undo what was left."""


def captured_by(
    route: str,
    request: Request,
    *,
    traced: Callable[[Request], UnitTrace],
    refusals: Refusals,
    settled: Callable[[Request], Settled],
) -> Route:
    """Capture a step.

    Args:
        route: "auto", "joint" or "replay".
        request: the step.
        traced: finds the units of the step by a run on real tensors; called on all ranks together.
        refusals: tells the other ranks whether this one refuses a graph; returns how many do and how many there are.
        settled: finds what a first call of the step leaves for good; called on all ranks together.

    Raises:
        UncapturedError: if no route can hold the step.
        CaptureError: if the only route that is allowed cannot; or where it cannot be one graph on some ranks only,
            on these: their Python does something else, as by an error of its own.
    """
    if route == "replay":
        return replayed(request, traced, reason="capture='replay' asks for it")
    if route == "auto" and (name := uncut_object(request.structure.template)):
        with contextlib.suppress(CaptureError):  # else it is captured again for every batch
            return replayed(request, traced, reason=f"Its batch holds a {name}, whose tensors a graph would freeze.")
    captured, reason = _joint(request)
    uncut, _ = refusals(captured is not None and bool(captured.whole))
    if uncut and captured is not None and not captured.whole:
        captured, reason = _joint(replace(request, uncut="another rank cannot cut it"))
    if refusals(isinstance(reason, BrokenRouteError))[0]:
        captured, reason = None, reason or BrokenRouteError("its graph cannot be made on another rank")
    refusing, ranks = refusals(reason is not None)
    if captured is not None:
        return captured  # if another rank refuses, its error comes to this one too
    if refusing == ranks and refusals(isinstance(reason, ChangedStateError)) == (ranks, ranks):
        captured = _captured_settled(request, reason, settled(request), refusals=refusals, ranks=ranks)
        if captured is not None:
            return captured
    assert reason is not None, "a step is captured or refused"
    if route == "joint" or refusing < ranks:
        raise reason
    try:
        return replayed(request, traced, reason=str(reason))
    except CaptureError as error:
        if str(error) == str(reason):
            raise UncapturedError(str(reason)) from reason
        raise UncapturedError(f"{reason} Replaying its Python is no way out either: {error}") from reason


def _captured_settled(
    request: Request, reason: PipeError | None, settled: Settled, *, refusals: Refusals, ranks: int
) -> Capture | None:
    """Return a step as one graph of the state that settles in its first call; None if it is none on any rank.

    State is left on the module piece by piece, as the trace refuses to read it before the step changes it. What the
    step only writes is not read, although it may settle: it is of each batch.
    """
    names: list[str] = []
    while refusals(isinstance(reason, ChangedStateError) and settled.keep(reason.state)) == (ranks, ranks):
        assert isinstance(reason, ChangedStateError), "asked before"
        names.append(reason.state)
        captured, reason = _joint(request)
        if refusals(captured is None) == (0, ranks):
            log.info("%s is captured as its first call leaves %s.", request.method, ", ".join(names))
            return captured
    settled.undo()
    return None


def _joint(request: Request) -> tuple[Capture, None] | tuple[None, CaptureError | BrokenRouteError]:
    """Return a step as one graph, or why it is none."""
    try:
        with faults_reported("its graph"):
            return capture_step(request), None
    except (CaptureError, BrokenRouteError) as refused:
        return None, refused


def replayed(request: Request, traced: Callable[[Request], UnitTrace], *, reason: str) -> Replay:
    """Return a step that is replayed, for whole batches where it does not run with some of their samples."""
    of_all = replace(request, samples=request.total)
    if request.samples is not None and uncut_object(request.structure.template):
        return Replay(of_all, traced(of_all), reason=reason)
    try:
        return Replay(request, traced(request), reason=reason)
    except FewSamplesError as error:
        return Replay(of_all, traced(of_all), reason=reason).left_whole(str(error))
