"""Sections `one`, `pair` and `fast`: fits of `benchmarks.gpu` beside plain Lightning, a line each.

Figures stay in the folder of the results, so that later sections have plain Lightning's, and the peak of the pipeline
without a memory limit. On a CPU a tiny module is trained for a few steps.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu import CONTESTANTS, DDP, HALF, PLAIN, PREDICTED, WHOLE, Contestant, Figure, Workload, limited, row
from benchmarks.gpu_once.findings import Assignment
from benchmarks.gpu_once.sections import CPU, CUDA

TINY = Workload(32, 1, 4, precision="32-true", device=CPU, vocabulary=64, length=16, warm_up=4, steps=3)
LARGE, SMALL = Workload(), Workload(width=256, batch=4)
LEAST_S = 12.0  # what a fit needs to begin
QUICK = {"costs": "counted", "planner": "uniform", "check": False, "witness": False}
NAMES = {
    ("one", CUDA): [PLAIN, "one rank", "one rank, 4 micro-batches", "one rank, replay"],
    ("one", CPU): [PLAIN, "one rank"],
    ("pair", CUDA): [WHOLE, HALF, "2 replicas", DDP, "1-1, 4, zb_h1"],
    ("pair", CPU): [WHOLE],
    ("fast", CUDA): [PLAIN, "one rank", "graphs", "compiled", "both", "1-1, 4, CUDA graphs"],
}
MORE = {
    "1-1, 4, zb_h1": Contestant(2, {"layout": "1-1", "microbatches": 4, "schedule": "zb_h1"}),
    "graphs": Contestant(1, {"microbatches": 1, "cuda_graphs": True}),
    "compiled": Contestant(1, {"microbatches": 1, "compile": True}),
    "both": Contestant(1, {"microbatches": 1, "compile": True, "cuda_graphs": True}),
}


def one(assignment: Assignment) -> None:
    """Report one rank beside plain Lightning: step and peak, measured and predicted."""
    _compare(assignment, LARGE)


def pair(assignment: Assignment) -> None:
    """Report two ranks that take turns on the GPU: losses and memory."""
    _compare(assignment, LARGE)


def fast(assignment: Assignment) -> None:
    """Report CUDA graphs and compiled stages of small operations; their steps are not predicted, which spares time."""
    _compare(assignment, SMALL)


def contestants(section: str, device: str) -> Mapping[str, Contestant]:
    """Return the contestants of a section by name."""
    everybody = {**CONTESTANTS, **MORE}
    return {name: on_device(everybody[name], device) for name in NAMES[section, device]}


def on_device(contestant: Contestant, device: str) -> Contestant:
    """Return the contestant as it is on a GPU; on a CPU it measures and checks nothing that its figures do not need."""
    options = contestant.options
    if device == CUDA or options is None or options.keys() & PREDICTED.keys():
        return contestant
    return replace(contestant, options={**options, **QUICK})


def _compare(assignment: Assignment, workload: Workload) -> None:
    """Fit the contestants of a section, one after the other; report each.

    Raises:
        SystemExit: if one has failed.
    """
    workload = workload if assignment.device == CUDA else TINY
    path = assignment.folder / f"figures_{workload.width}.json"
    figures, failed = _read(path), list[str]()
    for name, contestant in contestants(assignment.section, assignment.device).items():
        if assignment.remaining_s() < LEAST_S:
            assignment.report(f"{name}: no time left")
            continue
        try:
            fitted = limited(name, contestant, figures)
            figures[name] = fitted.run(workload, deadline_s=assignment.remaining_s() - LEAST_S / 2)
        except RuntimeError as error:
            failed.append(name)
            assignment.report(f"{name}: FAILED: {_last_lines(str(error).splitlines())}")
            continue
        assignment.report(row(name, figures))
        path.write_text(json.dumps({name: asdict(figure) for name, figure in figures.items()}))
    if failed:
        raise SystemExit(1)


def _read(path: Path) -> dict[str, Figure]:
    """Return the figures of earlier sections."""
    texts: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    return {name: Figure(**values) for name, values in texts.items()}


def _last_lines(lines: Sequence[str]) -> str:
    return " | ".join(lines[-6:])[-600:]
