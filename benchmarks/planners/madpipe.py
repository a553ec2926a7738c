"""MadPipe against cuts that ignore memory: the periods of pipelines on published profiles.

    python -m benchmarks.planners madpipe

For every model, number of processors and memory: the period of the partition with the least largest load (stages and
links), stretched until 1F1B* fits, divided by the period of MadPipe's contiguous dynamic program. Links of 12 GB/s; two
versions of the weights; layers keep what they make; 1 GB is 10^9 bytes. A model is a chain of units between positions
that one tensor alone crosses; profiles of the PipeDream repository, times and bytes in proportion to the samples.

MadPipe's own figures could not be read; `EXPECTED` was computed by an independent script before this one was written.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_pipe.core.cluster import Cluster, Device, Host, Link
from lightning_pipe.planner.problem import Problem
from lightning_pipe.planner.systems.madpipe.madpipe_chain import Chain, published_chain
from lightning_pipe.planner.systems.madpipe.madpipe_contiguous import best_pipeline, stretched
from lightning_pipe.profiles.published import load_published

PROFILES = Path(__file__).parents[3] / "shared" / "profiles" / "pipedream_msr_fiddle"
LINK = Link(latency_s=0.0, bytes_per_s=12e9)
GIGABYTES = (3, 4, 6, 8, 12)
PRECISION = 1e-4


@dataclass(frozen=True)
class Model:
    """A profile, the samples that it was measured with, and those of one micro-batch."""

    name: str
    measured: int
    samples: int


MODELS = (
    Model("resnet50", 128, 16),
    Model("resnet101", 64, 16),
    Model("densenet121", 64, 16),
    Model("inception_v3", 128, 32),
)
EXPECTED = {
    ("resnet50", 4): (1.63, 1.29, 1.00, 1.00, 1.00),
    ("resnet50", 8): (1.55, 1.62, 1.10, 1.00, 1.00),
    ("resnet101", 4): (2.81, 1.80, 1.06, 1.01, 1.00),
    ("resnet101", 8): (2.02, 1.84, 1.63, 1.18, 1.00),
    ("densenet121", 4): (1.82, 1.79, 1.09, 1.00, 1.00),
    ("densenet121", 8): (1.49, 1.52, 1.05, 1.00, 1.00),
    ("inception_v3", 4): (2.55, 1.80, 1.30, 1.00, 1.00),
    ("inception_v3", 8): (1.84, 1.48, 1.05, 1.01, 1.00),
}


def chain(model: Model, processors: int) -> Chain:
    """Return the chain of a model; its memory is to be set by `ratio`."""
    graph, profile = load_published(PROFILES / model.name / "graph.txt", batch=model.measured)
    host = Host("row", (Device("profiled", 0),) * processors, inside=LINK, network=LINK)
    return published_chain(Problem(graph, profile, Cluster((host,)), model.samples))


def ratio(whole: Chain, gigabytes: float) -> float:
    """Return the period of the blind partition over that of MadPipe; infinite if only MadPipe's fits."""
    tight = whole.with_memory(gigabytes * 1e9)
    aware = best_pipeline(tight, precision=PRECISION)
    blind = stretched(tight, blind_cuts(tight), precision=PRECISION)
    if aware is None:
        raise ValueError(f"found no partition within {gigabytes} GB; expected one for every entry of the table")
    return blind.period / aware.period if blind else float("inf")


def blind_cuts(chain: Chain) -> tuple[int, ...]:
    """Return the cuts with the least largest load of a stage or a link, whatever they need of memory."""
    bounds, count = chain.bounds, len(chain.processors)
    best: list[list[tuple[float, int]]] = [[(0.0, 0)] + [(float("inf"), 0)] * (bounds - 1)]
    for s in range(count):
        load, link = chain.processors[s].load_s, chain.links[s - 1] if s else [0.0] * bounds
        before = best[-1]
        best.append(
            [(float("inf"), 0)]
            + [min((max(before[a][0], load[a, b], link[a]), a) for a in range(b)) for b in range(1, bounds)]
        )
    cuts = [bounds - 1]
    for row in reversed(best[2:]):
        cuts.append(row[cuts[-1]][1])
    return tuple(reversed(cuts[1:]))


def rows() -> list[tuple[Model, int, int, list[float]]]:
    """Return (model, units, processors, ratios) for the whole table."""
    found = []
    for model, processors in itertools.product(MODELS, (4, 8)):
        whole = chain(model, processors)
        found.append((model, whole.bounds - 1, processors, [ratio(whole, gigabytes) for gigabytes in GIGABYTES]))
    return found


def main(arguments: Sequence[str] = ()) -> None:
    """Print the table beside what was expected."""
    if arguments:
        raise SystemExit(f"madpipe: found {' '.join(arguments)}; expected no arguments.")
    print("period of the memory-blind partition / period of MadPipe's (expected in parentheses)\n")
    print(f"{'model (units)':22}{'P':>3}" + "".join(f"{f'{gigabytes} GB':>16}" for gigabytes in GIGABYTES))
    worst = 0.0
    for model, units, processors, ratios in rows():
        expected = EXPECTED[model.name, processors]
        worst = max(worst, *(abs(r / e - 1) for r, e in zip(ratios, expected, strict=True)))
        cells = (f"{f'{r:.2f} ({e:.2f})':>16}" for r, e in zip(ratios, expected, strict=True))
        print(f"{f'{model.name} ({units})':22}{processors:>3}" + "".join(cells))
    print(f"\nlargest deviation: {100 * worst:.1f} %")
