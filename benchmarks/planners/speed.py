"""Planning time, and its growth with nodes and devices.

    python -m benchmarks.planners speed

A chain of layers of unequal seconds, each with 20 MB of parameters, on hosts of eight devices with 16 GiB. Seconds are
those of this process (one core): of all planners and of `auto`, which asks them all, searches on and judges.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from lightning_pipe.core.cluster import Cluster, Device, Host, Link
from lightning_pipe.errors import PlanError
from lightning_pipe.planner.portfolio.auto import Planner
from lightning_pipe.planner.problem import Problem
from lightning_pipe.planner.registry import PLANNERS, propose
from lightning_pipe.profiles.published_graph import graph_of, profile_of
from lightning_pipe.profiles.published_layers import Layer, LayerOutput, Layers
from lightning_pipe.units import format_seconds

SIZES = ((250, 64), (500, 64), (1000, 8), (1000, 64), (1000, 256), (1000, 1024))  # nodes, devices
SAMPLES_PER_DEVICE = 16
PARAMETERS = 20_000_000
MEMORY = 16 << 30


def problem(nodes: int, devices: int, *, parameters: int = PARAMETERS) -> Problem:
    """Return a chain on hosts of eight devices, or one of fewer; each layer has so many bytes of parameters."""
    draw = random.Random(0)
    layers = []
    for k in range(nodes):
        seconds = draw.uniform(1e-5, 1e-4)
        outputs = (LayerOutput(draw.choice((1e3, 1e4, 1e5)), (k + 1,)),) if k + 1 < nodes else ()
        layers.append(Layer(f"layer_{k}", "layer", (seconds,), (2 * seconds,), parameters, outputs, 1e5))
    known, name = Layers(tuple(layers), (1,)), "chain"
    graph = graph_of(known, fingerprint=name)
    profile = profile_of(known, fingerprint=name, device="x", optimizer_state=2.0)
    inside, network = Link(5e-6, 100e9), Link(20e-6, 12.5e9)
    each = min(8, devices)
    hosts = tuple(Host(f"h{i}", (Device("x", MEMORY),) * each, inside, network) for i in range(devices // each))
    return Problem(graph, profile, Cluster(hosts), SAMPLES_PER_DEVICE * devices)


def main(arguments: Sequence[str] = ()) -> None:
    """Print a row for every size."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planners speed")
    parser.add_argument("--most", type=int, default=1024, help="devices at most")
    most = parser.parse_args(arguments).most
    table = Table("nodes", "devices", *PLANNERS, "auto", "plan of auto", "step", box=box.SIMPLE)
    for nodes, devices in SIZES:
        if devices > most:
            continue
        asked = problem(nodes, devices)
        alone = [_timed(planner, asked) for planner in PLANNERS.values()]
        start = time.process_time()
        best = propose(asked, "auto")[0]
        took = time.process_time() - start
        replicas = [len(stage.ranks) for stage in best.plan.stages]
        shown = f"{len(replicas)} x {replicas[0]}" if len({*replicas}) == 1 else "-".join(map(str, replicas))
        plan = f"{shown}, {best.plan.microbatches} micro-batches"
        table.add_row(str(nodes), str(devices), *alone, format_seconds(took), plan, format_seconds(best.step_s))
    Console(width=200).print(table)


def _timed(planner: Planner, asked: Problem) -> str:
    start = time.process_time()
    try:
        planner(asked)
    except PlanError:
        return "none"
    return format_seconds(time.process_time() - start)
