"""Fingerprints of programs, prices and plans, to compare before and after a change.

    python -m benchmarks.same before.txt                 writes a line for every case
    python -m benchmarks.same after.txt --against before.txt
    python -m benchmarks.same table.txt --only dapple,madpipe

Programs of every schedule on a grid of devices and micro-batches, of stages with replicas, offload and joined W: the
text of the proved program, the times of all its instructions under uneven prices, and the bytes of every rank over
time. Plans of random small problems (`benchmarks.planners.exhaustive`), their seconds and peaks. Of DAPPLE's Table 4
(`benchmarks.planners.dapple`) all plans that its planner ranks, with their latencies, and the one that is proposed; of
MadPipe's table (`benchmarks.planners.madpipe`) the partition, the period, and the memory-blind partition beside it;
both read published profiles, which lie beside the checkout. A change that should not change behaviour leaves every line
as it is; one that makes plans faster changes the lines of plans only.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import sys
from collections.abc import Collection, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.closed_forms import FORMS
from benchmarks.planners import dapple, madpipe
from benchmarks.planners.exhaustive import random_problem
from lightning_pipe.core.program import AnyCompute, Bucket, Edge, Layout, Message, Program, Traffic
from lightning_pipe.errors import PlanError
from lightning_pipe.planner.registry import propose
from lightning_pipe.planner.systems.dapple.dapple_planner import ranked
from lightning_pipe.planner.systems.madpipe.madpipe_contiguous import best_pipeline
from lightning_pipe.schedule import order_of
from lightning_pipe.schedule.construct.chain import chain
from lightning_pipe.schedule.formats.text import format_program
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.registry import join_of
from lightning_pipe.schedule.verification.verify import verify
from lightning_pipe.simulator import UnitPrices, memory_curves, simulate

DEVICES, MICROBATCHES = (2, 3, 4, 8), (1, 2, 4, 5, 8, 16)
LAYOUTS = (((0,), (1,)), ((0, 1), (2,)), ((0,), (1, 2)), ((0, 1), (2, 3)), ((0,), (1,), (0,)), ((0, 1), (0, 2), (1,)))
SIZES = ((4, 4, 4, 4), (3, 3, 2), (2, 5, 1))
PROBLEMS = 100
PARTS = ("programs", "plans", "dapple", "madpipe")


@dataclass(frozen=True)
class UnevenPrices(UnitPrices):
    """Prices that depend on stage, samples and kind, so that a change of any of them is seen."""

    def compute_s(self, compute: AnyCompute, rank: int, samples: int) -> float:
        """Return more for later stages and more samples."""
        return super().compute_s(compute, rank, samples) * (1 + 0.1 * compute.stage + 0.01 * samples)

    def transfer_s(self, message: Message, sender: int, receiver: int) -> float:
        """Return more for more samples and further ways."""
        return self.latency + 0.01 * len(message.samples) + 0.001 * abs(sender - receiver)

    def message_bytes(self, message: Message) -> int:
        """Return some bytes per sample."""
        return 3 * len(message.samples)


PRICES = UnevenPrices(1.0, 0.9, 1.1, latency=0.05, reduction=0.3, step=0.2, saved=7, offloaded=4, swap=0.25)


def main() -> int:
    """Write the fingerprints; with `--against`, return how many lines differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--problems", type=int, default=PROBLEMS, help="number of random problems")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, by comma")
    options = parser.parse_args()
    parts = options.only.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--only: found {', '.join(sorted(unknown))}; expected some of {', '.join(PARTS)}")
    profiles = {"dapple": dapple.PROFILES, "madpipe": madpipe.PROFILES}
    if missing := [name for name in parts if name in profiles and not profiles[name].is_dir()]:
        parser.error(
            f"found no profiles in {profiles[missing[0]]}; put them there, or leave {missing[0]} out of --only"
        )
    lines = list(_lines(parts, options.problems))
    options.file.write_text("\n".join(lines) + "\n")
    print(f"{len(lines)} fingerprints")
    if options.against is None:
        return 0
    before = dict(line.rsplit(" ", 1) for line in options.against.read_text().splitlines())
    now = dict(line.rsplit(" ", 1) for line in lines)
    names = before.keys() | now.keys() if set(parts) == set(PARTS) else now.keys()
    changed = [name for name in names if before.get(name) != now.get(name)]
    print("\n".join(sorted(changed)) or "all are the same")
    return int(bool(changed))


def _lines(parts: Collection[str], problems: int) -> Iterator[str]:
    """Yield the lines of these parts."""
    if "programs" in parts:
        yield from _programs()
    with ProcessPoolExecutor() as pool:
        if "plans" in parts:
            yield from pool.map(_plan, range(problems))
        if "dapple" in parts:
            yield from pool.map(_dapple_plans, itertools.product(dapple.MODELS, dapple.CONFIGURATIONS))
        if "madpipe" in parts:
            yield from itertools.chain(*pool.map(_madpipe_plans, itertools.product(madpipe.MODELS, (4, 8))))


def _programs() -> Iterator[str]:
    """Yield a line for every program of the grid."""
    for form in FORMS:
        for p in DEVICES:
            for m in (m for m in MICROBATCHES if form.holds(p, m)):
                row = form.row(p, m)
                join = join_of(row.schedule, row.options)
                for split in (True, False) if join == 1 else (True,):
                    program = lower(
                        row.order,
                        layout=row.layout,
                        sizes=(1,) * m,
                        traffic=chain(len(row.layout.stages)),
                        split=split,
                        join=join,
                    )
                    yield f"{form} p={p} m={m} split={split} {_fingerprint(program)}"
    for stages in LAYOUTS:
        for sizes in SIZES:
            for schedule, offloads, join in (("1f1b", (0,), 1), ("gpipe", (0, 1), 1), ("2bp", (), 3)):
                layout = Layout(stages)
                order = order_of(schedule, layout=layout, microbatches=len(sizes), options={})
                program = lower(order, layout=layout, sizes=sizes, traffic=_traffic(len(stages), offloads), join=join)
                yield f"{stages} {sizes} {schedule} offloads={offloads} {_fingerprint(program)}"


def _traffic(count: int, offloads: tuple[int, ...]) -> Traffic:
    forward = [Edge("F", s, s + 1, 8.0) for s in range(count - 1)]
    backward = [Edge("B", s + 1, s, 8.0) for s in range(count - 1)]
    buckets = tuple(Bucket((s,), 100 + s) for s in range(count))
    return Traffic((*forward, *backward), buckets, (0,), offloads, tuple(range(count)))


def _fingerprint(program: Program) -> str:
    """Return a digest of a program's text, of its timeline and of its memory."""
    proved = verify(program)
    timeline = simulate(proved, PRICES)
    events = [f"{event.rank} {event.instruction} {event.start!r} {event.end!r}" for event in timeline.events]
    curves = [repr(curve) for curve in memory_curves(timeline, program=proved, prices=PRICES)]
    return _digest("\n".join([format_program(proved), *events, *curves]))


def _plan(seed: int) -> str:
    """Return the line of the plan of a random problem."""
    try:
        found = propose(random_problem(seed), "auto")[0]
    except PlanError as error:
        return f"problem {seed} {_digest(str(error))}"
    return f"problem {seed} {_digest(repr((found.plan, found.step_s, found.peak_bytes)))}"


def _dapple_plans(entry: tuple[dapple.Model, str]) -> str:
    """Return the line of an entry of DAPPLE's table."""
    model, configuration = entry
    asked = dapple.problem(model, configuration)
    best = propose(asked, "dapple")[0]
    return (
        f"dapple {model.name} {configuration} {_digest(repr((ranked(asked), best.plan, best.step_s, best.peak_bytes)))}"
    )


def _madpipe_plans(entry: tuple[madpipe.Model, int]) -> list[str]:
    """Return the lines of a model of MadPipe's table on some processors, one for each memory."""
    model, processors = entry
    whole = madpipe.chain(model, processors)
    lines = []
    for gigabytes in madpipe.GIGABYTES:
        tight = whole.with_memory(gigabytes * 1e9)
        plans = repr(
            (
                best_pipeline(tight, precision=madpipe.PRECISION),
                madpipe.blind_cuts(tight),
                madpipe.ratio(whole, gigabytes),
            )
        )
        lines.append(f"madpipe {model.name} P={processors} {gigabytes} GB {_digest(plans)}")
    return lines


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
