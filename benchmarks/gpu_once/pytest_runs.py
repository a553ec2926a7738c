"""Sections `laws`, `graphs` and `rest`: the project's tests on ranks that share the GPU, as far as the time goes.

A test that fails is printed at once; its reason follows in the finding at the end. Further options for pytest are taken
from `PYTEST_ADDOPTS`.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from pathlib import Path

from benchmarks.gpu_once.bounded_process import GRACE_S, BoundedProcess
from benchmarks.gpu_once.findings import Assignment

ROOT = Path(__file__).parents[2]
LAWS, GRAPHS = ["tests/gpu/test_shared_gpu.py"], ["tests/gpu/test_cuda_graphs.py"]
REST = ["tests/runtime", "tests/profiler", "tests/strategy", "--maxfail", "40"]
CLOSING_S, IMPORTS_S = GRACE_S + 4.0, 15.0
WORKERS = max(1, min(6, (os.cpu_count() or 1) // 2))  # every test has two ranks and more
OUTCOME = re.compile(r"^\[gw\d+\] \[ *\d+%\] (?P<outcome>[A-Z]+) (?P<test>\S.*?) *$")
REASON = re.compile(r"^(FAILED|ERROR) \S")


def laws(assignment: Assignment) -> None:
    """Run the laws that CUDA alone can break, except those of CUDA graphs."""
    run_tests(assignment, LAWS)


def graphs(assignment: Assignment) -> None:
    """Run the laws of CUDA graphs."""
    run_tests(assignment, GRAPHS)


def rest(assignment: Assignment) -> None:
    """Run the tests of runtime, profiler and strategy."""
    run_tests(assignment, REST)


def run_tests(assignment: Assignment, arguments: list[str]) -> None:
    """Run tests and report what failed.

    Raises:
        SystemExit: if a test failed, or the time was over before all had run.
    """
    limit_s = assignment.remaining_s() - CLOSING_S
    workers = ["-n", str(WORKERS), "--dist", "load", "--timeout", f"{max(60, limit_s - IMPORTS_S):.0f}"]
    words = ["-v", "-rfE", "--tb=short", "-m", "not slow", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
    paths = [str(ROOT / word) if word.startswith("tests/") else word for word in arguments]
    process = BoundedProcess(
        [sys.executable, "-m", "pytest", *words, *workers, *paths],
        limit_s=limit_s,
        log=assignment.folder / f"{assignment.section}_tests.log",
        environment={"LIGHTNING_PIPE_TESTS_ON": assignment.device, "COLUMNS": "300"},
    )
    counts, closing = Counter[str](), ""
    failures = dict[str, str]()
    for line in process.lines():
        if outcome := OUTCOME.match(line):
            counts[outcome["outcome"].lower()] += 1
            if outcome["outcome"] in ("FAILED", "ERROR"):
                failures[outcome["test"]] = f"{outcome['outcome']} {outcome['test']}"
                print(failures[outcome["test"]], flush=True)
        elif REASON.match(line):
            failures[line.split(" - ")[0].split(" ", 1)[1]] = line
        closing = line.strip("= ") or closing
    for line in failures.values():
        assignment.report(line[:260])
    ended = "CUT OFF" if process.is_cut_off else "ended"
    numbers = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())) or "no test has run"
    assignment.report(f"{ended}: {numbers}; {closing[:200]}")
    if process.is_cut_off or process.code():
        raise SystemExit(1)
