"""Overhead of a stage function beyond its operations, measured on windows of the graph that run both ways (`windows`).

    glue of a phase = median(seconds of the function - seconds of its operations) / number of its operations

with seconds and operations summed over the windows. On the CPU this is Python between the operations and what their
longer company does to caches and memory, less what setting marks costs; it may be slightly negative. On CUDA it is also
how long the device waits for the program. Without any window glue counts as nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_pipe.capture import Capture
from lightning_pipe.core.graph import Graph, Phase
from lightning_pipe.profiler.cache import Timing, Timings, digest
from lightning_pipe.profiler.timing.op_sequence import Course
from lightning_pipe.profiler.timing.timed_run import Tools
from lightning_pipe.profiler.timing.windows import Windows

_LONGEST_S = 0.5  # of a window: in a longer time glue is lost


@dataclass(frozen=True)
class Glue:
    """Seconds per operation beyond its own, by phase."""

    forward_s: float
    backward_s: float

    def of(self, phase: Phase) -> float:
        """Return what is added to an operation; repeated ones run in both phases."""
        if phase == "repeated":
            return (self.forward_s + self.backward_s) / 2
        return self.forward_s if phase == "forward" else self.backward_s


def glue_names(graph: Graph, samples: int) -> tuple[str, str]:
    """Return the names under which the glue of a graph on so many samples is kept: forward, backward."""
    which = f"{graph.fingerprint} {samples}"
    return f"glue of forward {which}", f"glue of backward {which}"


def known_glue(graph: Graph, samples: int, timings: Timings) -> Glue:
    """Return the glue of a graph that was measured."""
    forward, backward = (timings[digest(name)].seconds for name in glue_names(graph, samples))
    return Glue(forward, backward)


def measure_glue(capture: Capture, courses: Mapping[int, Course], tools: Tools) -> dict[str, Timing]:
    """Return the glue of a graph at some numbers of samples, by name.

    Args:
        capture: the step.
        courses: number of samples -> its calls.
        tools: maker, clock, memory.
    """
    windows = Windows(capture)
    stages = capture.split(windows.bounds).stages
    found = {}
    for samples, course in courses.items():
        excess = [0.0, 0.0]
        operations = [0, 0]
        for window in range(len(windows.ranges)):
            runs = windows.run(stages, window, course, samples, tools, longest_s=_LONGEST_S)
            phases = (windows.forward(window), windows.backward(window))
            for k, ran in enumerate(phases if runs else ()):
                wholes = [(run.forward_s, run.backward_s)[k] - sum(run.own_s.get(o, 0.0) for o in ran) for run in runs]
                excess[k] += statistics.median(wholes)
                operations[k] += len(ran)
        for k, name in enumerate(glue_names(capture.graph, samples)):
            found[name] = Timing(excess[k] / operations[k] if operations[k] else 0.0, 0.0)
    return found
