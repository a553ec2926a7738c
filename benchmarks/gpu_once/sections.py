"""The sections, most important first: each answers one question within a number of seconds.

The limits fit a budget of `BUDGET_S` seconds; a larger budget stretches them. A section is a function of its name in
the file that its entry names, so no section imports what another needs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from benchmarks.gpu_once.findings import Assignment

BUDGET_S = 560.0
CUDA, CPU = "cuda", "cpu"


@dataclass(frozen=True)
class Section:
    """A question to a GPU.

    Attributes:
        file: module beside this one that has a function of the section's name.
        limit_s: most seconds that it takes.
        devices: where it runs.
    """

    file: str
    limit_s: float
    devices: tuple[str, ...] = (CUDA,)

    def function(self, name: str) -> Callable[[Assignment], None]:
        """Return the section's function."""
        module = importlib.import_module(f"benchmarks.gpu_once.{self.file}")
        return cast(Callable[[Assignment], None], getattr(module, name))


SECTIONS = {
    "env": Section("machine", 40),  # card, versions, memory
    "waits": Section("host_waits", 75),  # calls that let the host wait for other streams; streams that share a queue
    "nccl": Section("communicators", 45),  # what a communicator costs; whether its abort works
    "laws": Section("pytest_runs", 190),  # tests/gpu, except CUDA graphs
    "one": Section("fits", 110, (CUDA, CPU)),  # one rank beside plain Lightning: step, peak, their predictions
    "calls": Section("step_calls", 90, (CUDA, CPU)),  # waits and calls of CUDA per step
    "offload": Section("pinned_copies", 30),  # how much of the copies to the host hides behind computing
    "pair": Section("fits", 130, (CUDA, CPU)),  # two ranks that share the GPU: losses and memory
    "fast": Section("fits", 150),  # CUDA graphs and compiled stages
    "graphs": Section("pytest_runs", 120),  # tests of CUDA graphs
    "rest": Section("pytest_runs", 400),  # the other tests, with ranks that share the GPU
}
