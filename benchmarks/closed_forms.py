"""Closed forms of published schedules: makespan and kept micro-batches in unit time, to compare with.

Times are those of one chunk: F, I and W of a stage. Makespans include the flush.

    fused    F 1, B 2; the input gradient leaves at the end of B
    split    F 1, I 1, W 1; it leaves after I
    equal    F 1, B 1; it leaves at the end of B

Legend: p devices, m micro-batches, v chunks per device (in each of its pipes), d device from 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from lightning_pipe.core.program import Layout, Options, Order, VerifiedProgram
from lightning_pipe.core.timeline import Timeline
from lightning_pipe.schedule import SCHEDULES, order_of
from lightning_pipe.schedule.construct.chain import chain
from lightning_pipe.schedule.construct.stage_times import ChainTimes
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.registry import join_of
from lightning_pipe.schedule.verification.verify import verify
from lightning_pipe.simulator import UnitPrices, simulate

FUSED, SPLIT, EQUAL = "fused", "split", "equal"
Makespan = Callable[[int, int], float]  # of p and m
Peak = Callable[[int, int, int], int]  # of p, m and d


@dataclass(frozen=True)
class Row:
    """A schedule on p devices of one rank each, with m micro-batches of one sample, in its own shape."""

    schedule: str
    p: int
    m: int
    stages_per_device: int | None = None
    options: Options = field(default_factory=dict)
    times: ChainTimes | None = None

    @property
    def layout(self) -> Layout:
        """Return the layout of the schedule's shape."""
        return SCHEDULES[self.schedule].layout([(device,) for device in range(self.p)], self.stages_per_device)

    @property
    def order(self) -> Order:
        """Return what the schedule decides."""
        return order_of(self.schedule, layout=self.layout, microbatches=self.m, options=self.options, times=self.times)


def program_of(row: Row, *, split: bool = True) -> VerifiedProgram:
    """Return the proved program of a row; its B are one compute if they are not split."""
    layout = row.layout
    traffic = chain(len(layout.stages))
    join = join_of(row.schedule, row.options)
    return verify(lower(row.order, layout=layout, sizes=(1,) * row.m, traffic=traffic, split=split, join=join))


def run(row: Row, model: str = SPLIT, *, latency: float = 0.0) -> Timeline:
    """Return the timeline of a row under a model; only in `split` does the input gradient of B leave before its W."""
    half = 0.5 if model == EQUAL else 1.0
    return simulate(program_of(row, split=model == SPLIT), UnitPrices(1.0, half, half, latency=latency))


def peaks(order: Order, *, until: str) -> list[int]:
    """Return for every rank the most forwards whose W (or I) has not run yet; B counts as both."""
    found = []
    for line in order:
        changes = ((c.kind == "F") - (c.kind in (until, "B")) for c in line)
        found.append(max(itertools.accumulate(changes), default=0))
    return found


@dataclass(frozen=True)
class Form:
    """The closed form of one schedule.

    Attributes:
        schedule: its name.
        makespan: by model, what p devices take for m micro-batches.
        peak: most micro-batches of all chunks that device d keeps until W.
        peak_until_input: the same until I, where W comes later.
        stages_per_device: stages per device; None for the schedule's default.
        options: its options.
        holds: for which p and m the forms are stated.
    """

    schedule: str
    makespan: Mapping[str, Makespan]
    peak: Peak
    peak_until_input: Peak | None = None
    stages_per_device: int | None = None
    options: Options = field(default_factory=dict)
    holds: Callable[[int, int], bool] = lambda p, m: True

    def __str__(self) -> str:
        told = [f"{key}={value}" for key, value in self.options.items()]
        return "/".join([self.schedule, *([f"v={self.stages_per_device}"] if self.stages_per_device else []), *told])

    def row(self, p: int, m: int) -> Row:
        """Return the schedule on p devices with m micro-batches."""
        return Row(self.schedule, p, m, self.stages_per_device, self.options)


def deviations(form: Form, p: int, m: int) -> Iterator[str]:
    """Yield where the simulated schedule differs from its closed form; the program is proved on the way."""
    row = form.row(p, m)
    for model, makespan in form.makespan.items():
        found, expected = run(row, model).makespan, makespan(p, m)
        if abs(found - expected) > 1e-9 * expected:
            yield f"{form} p={p} m={m} {model}: makespan {found}, closed form {expected}"
    for until, peak in (("W", form.peak), ("I", form.peak_until_input)):
        if peak is not None:
            kept, stated = peaks(row.order, until=until), [peak(p, m, d) for d in range(p)]
            if kept != stated:
                yield f"{form} p={p} m={m}: keeps {kept} until {until}, closed form {stated}"


def whole_units(p: int, m: int) -> bool:
    """Return whether micro-batches fill units of p."""
    return m % p == 0


def even_units(p: int, m: int) -> bool:
    """Return whether they do in two pipes, which need an even number of devices."""
    return p % 2 == 0 and m % p == 0


def outer(p: int, d: int) -> int:
    """Return how many devices stand between a device and the nearer end of the row."""
    return min(d, p - 1 - d)


def equal_groups(p: int, m: int) -> bool:
    """Return whether micro-batches fill m // p groups of at least p."""
    return m >= p and m % (m // p) == 0


FORMS: list[Form] = [
    Form(
        "gpipe",
        {
            FUSED: lambda p, m: 3 * (m + p - 1),
            SPLIT: lambda p, m: 3 * m + 2 * (p - 1),
            EQUAL: lambda p, m: 2 * (m + p - 1),
        },
        peak=lambda p, m, d: m,
    ),
    *(
        Form(
            "1f1b",
            {
                FUSED: lambda p, m: 3 * (m + p - 1),
                SPLIT: lambda p, m: 3 * m + 2 * (p - 1),
                EQUAL: lambda p, m: 2 * (m + p - 1),
            },
            peak=peak,
            options={"warmup": warmup},
        )
        for warmup, peak in (
            ("pa", lambda p, m, d: min(m, p - d)),
            ("pb", lambda p, m, d: min(m, 2 * (p - d) - 1)),
        )
    ),
    Form(
        "pe",
        {
            FUSED: lambda p, m: 3 * (m + p - 1),
            SPLIT: lambda p, m: 3 * m + 2 * (p - 1),
            EQUAL: lambda p, m: 2 * (m + p - 1),
        },
        peak=lambda p, m, d: min(m, 2 * (p - d) - 1),
    ),
    *(
        Form(
            "interleaved",
            {
                FUSED: lambda p, m, v=v: 3 * (m * v + p - 1),
                SPLIT: lambda p, m, v=v: 3 * m * v + 2 * (p - 1),
                EQUAL: lambda p, m, v=v: 2 * (m * v + p - 1),
            },
            peak=lambda p, m, d, v=v: min(m * v, 2 * (p - 1 - d) + (v - 1) * (m // (m // p)) + 1),
            stages_per_device=v,
            holds=equal_groups,
        )
        for v in (2, 4)
    ),
    *(
        Form(
            "breadth_first",
            {
                FUSED: lambda p, m, v=v: 3 * ((v - 1) * max(m, p) + m + p - 1),
                SPLIT: lambda p, m, v=v: (v - 1) * (max(m, p) + max(2 * m, p)) + 3 * m + 2 * (p - 1),
                EQUAL: lambda p, m, v=v: 2 * ((v - 1) * max(m, p) + m + p - 1),
            },
            peak=lambda p, m, d, v=v: m * v,
            stages_per_device=v,
            options={"backward": backward},
        )
        for v, backward in ((2, "ascending"), (4, "ascending"), (2, "descending"))
    ),
    *(
        Form(
            "zb_h1",
            {SPLIT: lambda p, m, v=v: 3 * m * v + p - 1},
            peak=lambda p, m, d, v=v: min(m * v, p + (v - 1) * (m // (m // p))),
            peak_until_input=lambda p, m, d, v=v: min(m * v, p - d + (v - 1) * (m // (m // p))),
            stages_per_device=v,
            holds=holds,
        )
        for v, holds in ((1, lambda p, m: m >= p), (2, equal_groups))
    ),
    Form(
        "zb_h2",
        {SPLIT: lambda p, m: 3 * m + p - 1},
        peak=lambda p, m, d: 2 * p - 1,
        peak_until_input=lambda p, m, d: 2 * (p - d) - 1,
        holds=lambda p, m: m >= 2 * p - 1,
    ),
    *(
        Form(
            "2bp",
            {SPLIT: makespan},
            peak=lambda p, m, d: m,
            peak_until_input=kept,
            options={"base": base, "delay": delay},
        )
        for base, delay, makespan, kept in (
            ("1f1b", "end", lambda p, m: 3 * m + 2 * (p - 1), lambda p, m, d: min(m, p - d)),
            ("1f1b", "idle", lambda p, m: max(3 * m + p - 1, 2 * m + 2 * p - 1), lambda p, m, d: min(m, p - d)),
            ("gpipe", "end", lambda p, m: 3 * m + 2 * (p - 1), lambda p, m, d: m),
            ("gpipe", "idle", lambda p, m: 3 * m + 2 * (p - 1), lambda p, m, d: m),
        )
    ),
    Form(
        "zb_v",
        {SPLIT: lambda p, m: max(6 * m + p - 1, 4 * m + 4 * p - 2)},
        peak=lambda p, m, d: min(2 * p, 2 * m, m + 1 + d),
        peak_until_input=lambda p, m, d: min(2 * p, 2 * m, m + 1 + d),
    ),
    Form(
        "v_half",
        {SPLIT: lambda p, m: 6 * m + max(1, 3 * p - (4 if p % 2 else 7))},
        peak=lambda p, m, d: min(2 * m, (p + 2) // 2 * 2),
        holds=lambda p, m: m >= p,
    ),
    Form(
        "v_min",
        {SPLIT: lambda p, m: 6 * m + (4 * p - (7, 5, 6)[p % 3] if p > 2 else 1)},
        peak=lambda p, m, d: min(2 * m, (p + 4) // 3 * 2),
        holds=lambda p, m: m > p,
    ),
    Form(
        "chimera",
        {
            FUSED: lambda p, m: 3 * m + (m // p + 1) * (p - 2),
            SPLIT: lambda p, m: 3 * m + p - 2,
            EQUAL: lambda p, m: 2 * m + p - 2,
        },
        peak=lambda p, m, d: p // 2 + 1 + outer(p, d),
        holds=even_units,
    ),
    Form(
        "chimera",
        {
            FUSED: lambda p, m: 3 * m + 3 * (p - 2) / 2,
            SPLIT: lambda p, m: 3 * m + p - 2,
            EQUAL: lambda p, m: 2 * m + p - 2,
        },
        peak=lambda p, m, d: 3 * p // 2 + 1 + outer(p, d),
        options={"concatenation": "doubling"},
        holds=lambda p, m: even_units(p, m) and m % (2 * p) == 0,
    ),
    *(
        Form(
            "hanayo",
            {
                FUSED: lambda p, m, v=v: 3 * v * m + (m // p + 1) * 2 * (p - 1),
                SPLIT: lambda p, m, v=v: 3 * v * m + 2 * (p - 1),
                EQUAL: lambda p, m, v=v: 2 * v * m + 2 * (p - 1),
            },
            peak=lambda p, m, d, v=v: v * p - (p - 1 - d),
            stages_per_device=v,
            holds=whole_units,
        )
        for v in (2, 4)
    ),
    Form(
        "bitpipe",
        {
            FUSED: lambda p, m: 6 * m + (m // p + 1) * (p - 2),
            SPLIT: lambda p, m: 6 * m + p - 2,
            EQUAL: lambda p, m: 4 * m + p - 2,
        },
        peak=lambda p, m, d: 2 * p - (p // 2 - 1) + outer(p, d),
        holds=even_units,
    ),
    Form(
        "dualpipe",
        {FUSED: lambda p, m: 3 * m + p // 2 - 1, SPLIT: lambda p, m: 3 * m + p // 2 - 1},
        peak=lambda p, m, d: p + 1,
        holds=lambda p, m: p % 2 == 0 and m % 2 == 0 and m >= 2 * p,
    ),
    Form(
        "dualpipe_v",
        {FUSED: lambda p, m: 6 * m + p - 1, SPLIT: lambda p, m: 6 * m + p - 1},
        peak=lambda p, m, d: 2 * p + 1,
        holds=lambda p, m: m >= 2 * p,
    ),
]  # fmt: skip
