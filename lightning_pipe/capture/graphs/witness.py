"""A witness of what guards cannot see: the step's Python runs again, and its operations are compared with the graph.

Guards know what the Python of a step reads from modules, globals, helpers and the trainer. They do not know files,
clocks, environment variables, or state inside extensions. So now and then the step runs on fake tensors, which compute
nothing, and its torch calls and what it logs must be those that the graph was made from.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_pipe.capture.graphs.joint_graph import JointGraph
from lightning_pipe.capture.graphs.request import Request
from lightning_pipe.capture.graphs.trace import compare_recordings, run_on_fakes
from lightning_pipe.capture.steps.hazards import Question, compare_calls
from lightning_pipe.errors import CaptureError


def is_due(batch: int) -> bool:
    """Return whether a witness runs before a batch: the first (hooks have run since it was captured), and then rarely.

    Args:
        batch: number of batches before it; due are 0, 1, 4, 16, 64, ...
    """
    is_power_of_two = batch & (batch - 1) == 0
    return not batch or (is_power_of_two and batch.bit_length() % 2 == 1)


def testimony(request: Request, joint: JointGraph) -> str:
    """Run a step again without computing; return what it does otherwise than the graph, "" if nothing.

    It runs with the sizes that the trace was made with as numbers first, which takes a quarter of the time that symbols
    take; only if it seems to differ then, symbols decide.

    Args:
        request: the step with its present arguments and batch.
        joint: its graph, whose guards hold now.
    """
    if request.symbolic and not _differs(replace(request, symbolic=False, lengths=frozenset()), joint):
        return ""
    return _differs(request, joint)


def _differs(request: Request, joint: JointGraph) -> str:
    try:
        step = run_on_fakes(request, tuple(bool(guard.expected) for guard in joint.record.guards))
        compare_calls(joint.calls, step.observers[-1].calls)
        compare_recordings(joint.recording, step.recordings[-1])
    except Question as question:
        return f"it asks other questions of its tensors than when it was captured, at {question.line}"
    except CaptureError as error:
        return str(error)
    return ""
