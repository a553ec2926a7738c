"""Run sections as processes of their own, in order, until the time is over.

Findings are printed at once, kept in `results.json` after every section, and printed again at the end.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu_once.bounded_process import GRACE_S, BoundedProcess
from benchmarks.gpu_once.findings import MARK
from benchmarks.gpu_once.sections import BUDGET_S, SECTIONS

LEAST_S = 15.0  # a section needs this to import torch and say something
CLOSING_S = GRACE_S + 2.0  # to interrupt the last section, and to print everything again
TAIL_LINES, TAIL_CHARACTERS = 12, 700


@dataclass(frozen=True)
class Outcome:
    """The findings of a section, and whether it has ended well."""

    findings: list[str]
    ended_well: bool


def run_sections(names: Sequence[str], *, device: str, budget_s: float, folder: Path, packages: Path | None) -> bool:
    """Run the sections and return whether all have ended well.

    Args:
        names: sections, in order.
        device: "cuda" or "cpu".
        budget_s: seconds for all of them.
        folder: where results and logs go.
        packages: folder of Python packages that the interpreter lacks.
    """
    end_s, outcomes = time.monotonic() + budget_s - CLOSING_S, dict[str, Outcome]()
    with tempfile.TemporaryDirectory(prefix="gpu_once") as cache:
        environment = _environment(Path(cache), packages)
        for name in names:
            limit_s = min(end_s - time.monotonic(), SECTIONS[name].limit_s * max(1.0, budget_s / BUDGET_S))
            if limit_s < LEAST_S:
                outcomes[name] = Outcome([f"{MARK}{name:8} not begun: no time left"], ended_well=False)
                continue
            words = ["section", name, "--device", device, "--seconds", f"{limit_s:.0f}", "--out", str(folder)]
            command = [sys.executable, "-m", "benchmarks.gpu_once", *words]
            outcomes[name] = run_section(name, command, limit_s=limit_s, folder=folder, environment=environment)
            results = {name: outcome.findings for name, outcome in outcomes.items()}
            (folder / "results.json").write_text(json.dumps(results, indent=1))
    print("\n=== all results, most important last ===")
    print("\n".join(line for name in reversed(outcomes) for line in outcomes[name].findings), flush=True)
    return all(outcome.ended_well for outcome in outcomes.values())


def run_section(
    name: str, command: Sequence[str], *, limit_s: float, folder: Path, environment: Mapping[str, str]
) -> Outcome:
    """Run the command of a section, print what it prints, and return its findings."""
    begin_s, lines = time.monotonic(), list[str]()
    process = BoundedProcess(command, limit_s=limit_s, log=folder / f"{name}.log", environment=environment)
    for line in process.lines():
        print(line, flush=True)
        lines.append(line)
    code, took_s = process.code(), time.monotonic() - begin_s
    findings = [line for line in lines if line.startswith(MARK)]
    if code:
        reason = "was cut off" if process.is_cut_off else f"ended with {code}"
        tail = [line for line in lines if line and not line.startswith(MARK)][-TAIL_LINES:]
        text = " | ".join(tail)[-TAIL_CHARACTERS:]
        findings.append(f"{MARK}{name:8} {reason} after {took_s:.0f} s{': ' if text else ''}{text}")
        print(findings[-1], flush=True)
    return Outcome([*findings, f"{MARK}{name:8} took {took_s:.0f} s"], ended_well=code == 0)


def _environment(cache: Path, packages: Path | None) -> dict[str, str]:
    """Return the variables of a section: the checkout on its path, one thread, no file in the user's cache."""
    root = Path(__file__).parents[2]
    path = [str(root), *([str(packages)] if packages else []), os.environ.get("PYTHONPATH", "")]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {
        **threads,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "XDG_CACHE_HOME": str(cache),
    }
