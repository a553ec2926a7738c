"""Plans for captured GPTs, whatever was measured of them.

    python -m benchmarks.planners captured --depths 12,24 --devices 2,4 --times 20

Narrow GPTs of 12 to 96 layers, whose counted times are changed at random as measured ones differ (a factor of
lognormal spread 0.3 for every operation), planned by `auto` for equal devices. A row for each depth and number of
devices: plans asked for and found, and the seconds of processor time that one takes.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from benchmarks.models import GPT
from lightning_pipe.capture import Request, capture_step, flatten
from lightning_pipe.core.graph import Graph
from lightning_pipe.cost.counted import counted
from lightning_pipe.planner.problem import Problem, nominal_cluster
from lightning_pipe.planner.registry import propose

DEPTHS, DEVICES, TIMES = (12, 24, 48, 96), (2, 3, 4, 8), 200
SAMPLES = 16
_SPREAD = 0.3
_OF_COUNTED = 20.0  # so that computes weigh as much as their start, in modules as narrow as these


def captured(depth: int) -> Graph:
    """Capture a narrow GPT, some 23 positions a layer."""
    torch.manual_seed(0)
    _, structure = flatten([torch.randint(16, (SAMPLES, 9))])
    module = GPT(vocabulary=16, context=8, width=8, depth=depth)
    return capture_step(Request(module, "training_step", structure, samples=2)).graph


def perturbed(graph: Graph, devices: int, seed: int) -> Problem:
    """Return a problem whose times differ from seed to seed as measured ones do."""
    draw, profile = random.Random(seed), counted(graph)
    seconds = tuple(
        tuple(s * _OF_COUNTED * factor for s in row)
        for row, factor in ((row, draw.lognormvariate(0.0, _SPREAD)) for row in profile.seconds)
    )
    return Problem(graph, replace(profile, seconds=seconds), nominal_cluster(devices), SAMPLES)


def main(arguments: Sequence[str] = ()) -> None:
    """Print a line for every depth and number of devices."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planners captured")
    parser.add_argument("--depths", type=_numbers, default=DEPTHS, help="separated by commas")
    parser.add_argument("--devices", type=_numbers, default=DEVICES, help="separated by commas")
    parser.add_argument("--times", type=int, default=TIMES)
    parser.add_argument("--first", type=int, default=0, help="the first seed, to go on from a run of fewer times")
    asked = parser.parse_args(arguments)
    for depth in asked.depths:
        graph = captured(depth)
        for devices in asked.devices:
            took, found = [], 0
            for seed in range(asked.first, asked.first + asked.times):
                start = time.process_time()
                found += bool(propose(perturbed(graph, devices, seed), "auto")[0].step_s > 0)
                took.append(time.process_time() - start)
            print(
                f"{depth:3} layers, {len(graph.nodes):4} positions, {devices} devices: {found} of {asked.times} plans, "
                f"{statistics.median(took):.2f} s (median), {max(took):.2f} s (longest)",
                flush=True,
            )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))
