"""Long chains: whether they get a plan, and what time and memory of planning grow with.

    python -m benchmarks.planners long
    python -m benchmarks.planners long --nodes 300,1000 --devices 2,8

The chains of `benchmarks.planners.speed` on hosts of up to eight devices, planned by `auto`, each in a process of its
own: seconds of processor time, and the most memory that the process has had beyond what it had before planning.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from collections.abc import Sequence

from benchmarks.planners.speed import MEMORY, PARAMETERS, problem
from lightning_pipe.planner.registry import propose
from lightning_pipe.units import format_bytes, format_seconds

_FULL = 0.1  # of all memory, by parameters at most; with gradients and Adam's state they are four times as large
NODES, DEVICES = (300, 1_000, 3_000, 10_000), (2, 8, 64)


def planned(nodes: int, devices: int) -> tuple[str, str, str, str]:
    """Return, in words: the best plan, its step, the seconds and the memory that it took to find it."""
    asked = problem(nodes, devices, parameters=min(PARAMETERS, int(_FULL * MEMORY * devices / nodes)))
    before, start = _peak_bytes(), time.process_time()
    best = propose(asked, "auto")[0]
    took, more = time.process_time() - start, _peak_bytes() - before
    replicas = [len(stage.ranks) for stage in best.plan.stages]
    shape = f"{len(replicas)} x {replicas[0]}" if len({*replicas}) == 1 else "-".join(map(str, replicas))
    plan = f"{shape}, {best.plan.microbatches} micro-batches, {best.plan.schedule}"
    return plan, format_seconds(best.step_s), format_seconds(took), format_bytes(more)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(arguments: Sequence[str] = ()) -> None:
    """Print a row for every size."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planners long")
    for name, default in (("nodes", NODES), ("devices", DEVICES)):
        parser.add_argument(f"--{name}", type=_numbers, default=default, help="separated by commas")
    asked = parser.parse_args(arguments)
    _print_row("nodes", "devices", "plan", "step", "planning", "memory")
    for nodes in asked.nodes:
        for devices in asked.devices:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                _print_row(str(nodes), str(devices), *pool.apply(planned, (nodes, devices)))


def _print_row(nodes: str, devices: str, plan: str, *figures: str) -> None:
    """Print a row at once: the next one may take a while."""
    print(f"{nodes:>6} {devices:>7}  {plan:<48}", *(f"{figure:>10}" for figure in figures), flush=True)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))
