"""Cases that every schedule and rewrite must survive, and a builder of programs for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from lightning_pipe.core.program import Bucket, Edge, Layout, Options, Program, Traffic
from lightning_pipe.schedule import order_of
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.orders.forward_only import forward_only


@dataclass(frozen=True)
class Case:
    """One program to build."""

    stages: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...] = (4, 4, 4, 4)
    whole: frozenset[int] = frozenset()
    weights: tuple[tuple[int, ...], ...] = ()
    offloads: tuple[int, ...] = ()
    schedule: str = "1f1b"
    options: Options = field(default_factory=dict)
    skips: tuple[tuple[int, int], ...] = ()
    tied: bool = False
    training: bool = True
    synchronise: bool = True
    early_release: bool = True
    split: bool = True
    join: int = 1  # of all stages but the second

    def __str__(self) -> str:
        layout = "-".join("".join(map(str, ranks)) for ranks in self.stages)
        choices = [f"{key}={value}" for key, value in self.options.items()]
        flags = [name for name in ("tied", "training", "synchronise", "early_release", "split") if getattr(self, name)]
        more = [name for name in ("whole", "weights", "offloads") if getattr(self, name)]
        more += [f"join={self.join}"] if self.join > 1 else []
        return "/".join([layout, "".join(map(str, self.sizes)), self.schedule, *choices, *flags, *more])


def traffic_of(case: Case) -> Traffic:
    """Return a chain with skip edges (without gradient) and one bucket per stage, or one for the first and last."""
    count = len(case.stages)
    forward = [Edge("F", s, s + 1, 8.0) for s in range(count - 1)]
    backward = [Edge("B", s + 1, s, 8.0) for s in range(count - 1)]
    skips = [Edge("F", source, target, 1.0) for source, target in case.skips]
    tied = [(0, count - 1)] if case.tied else []
    buckets = [Bucket(stages, 100) for stages in [*tied, *((s,) for s in range(count))]]
    loads = (0, count - 1) if count > 2 else (0,)
    joinable = tuple(s for s in range(count) if s != 1)
    return Traffic((*forward, *backward, *skips), tuple(buckets), loads, case.offloads, joinable)


@pytest.fixture
def build() -> Callable[[Case], Program]:
    """Return a function that orders and lowers a case."""

    def build_case(case: Case) -> Program:
        layout = Layout(case.stages, case.whole, case.weights)
        count = len(case.sizes)
        order = (
            order_of(case.schedule, layout=layout, microbatches=count, options=case.options)
            if case.training
            else forward_only(layout, count)
        )
        return lower(
            order,
            layout=layout,
            sizes=case.sizes,
            traffic=traffic_of(case),
            training=case.training,
            synchronise=case.synchronise,
            early_release=case.early_release,
            split=case.split,
            join=case.join,
        )

    return build_case


LAYOUTS = [
    ((0,),),
    ((0,), (1,)),
    ((0, 1), (2,)),
    ((0,), (1, 2)),
    ((0,), (1,), (2,)),
    ((0, 1), (2, 3)),
    ((0, 1, 2), (3, 4)),
    ((0,), (1,), (0,)),
    ((0,), (1,), (0,), (1,)),
    ((0, 1), (0, 2), (1,)),
    ((2, 0), (1,), (0, 2)),
]
SIZES = [(4, 4, 4, 4), (3, 3, 2), (1, 1, 1, 1, 1), (2, 5, 1)]
SCHEDULE_OPTIONS: list[tuple[str, Options]] = [
    ("gpipe", {}),
    ("1f1b", {}),
    ("1f1b", {"warmup": "pb"}),
    ("1f1b", {"warmup": "1f1b*"}),
    ("1f1b", {"warmup": 2}),
]


def every_case() -> list[Case]:
    """List the grid: layouts, sizes, schedules, and each with one more difficulty in turn."""
    plain = [
        Case(stages, sizes, schedule=schedule, options=options)
        for stages in LAYOUTS
        for sizes in SIZES
        for schedule, options in SCHEDULE_OPTIONS
    ]
    whole = [Case(stages, (3, 3, 2), frozenset({0, len(stages) - 1})) for stages in LAYOUTS]
    skips = [Case(stages, (3, 3, 2), skips=((0, 2),), tied=True) for stages in LAYOUTS if len(stages) > 2]
    late = [Case(stages, (3, 3, 2), early_release=False) for stages in LAYOUTS]
    unsplit = [Case(stages, (3, 3, 2), split=False) for stages in LAYOUTS]
    accumulating = [Case(stages, (3, 3, 2), synchronise=False) for stages in LAYOUTS]
    evaluation = [Case(stages, sizes, schedule="forward", training=False) for stages in LAYOUTS for sizes in SIZES]
    offloading = [
        Case(stages, (3, 3, 2), schedule=schedule, offloads=(0, len(stages) - 1), split=split)
        for stages in LAYOUTS
        for schedule in ("gpipe", "1f1b")
        for split in (True, False)
    ]
    weighted = [
        Case(stages, (3, 3, 2, 1), weights=tuple(tuple(range(len(ranks), 0, -1)) for ranks in stages))
        for stages in LAYOUTS
    ]
    joining = [
        Case(stages, (3, 3, 2), whole, schedule="2bp", options={"delay": delay}, join=join)
        for stages in LAYOUTS
        for whole in (frozenset[int](), frozenset({0}))
        for delay, join in (("end", 2), ("end", 9), ("idle", 9))
    ]
    return [*plain, *whole, *skips, *late, *unsplit, *accumulating, *evaluation, *offloading, *weighted, *joining]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give the grid to every test that asks for a `case`, and a short list to those that ask for a `small_case`."""
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", every_case(), ids=str)
    if "small_case" in metafunc.fixturenames:
        metafunc.parametrize("small_case", SMALL, ids=str)


SMALL = [
    Case(((0,), (1,)), (2, 2, 1)),
    Case(((0, 1), (2,)), (3, 1, 2), tied=True),
    Case(((0, 1), (2,)), (2, 2, 2), frozenset({0}), schedule="gpipe"),
    Case(((0,), (1,), (2, 3)), (2, 1), skips=((0, 2),), tied=True),
    Case(((0,), (1,), (0,)), (1, 1, 1), skips=((0, 2),), tied=True),
    Case(((0, 1), (0, 2), (1,)), (2, 3, 1), skips=((0, 2),)),
    Case(((0, 1, 2), (3, 4)), (3, 2), early_release=False),
    Case(((0,), (1, 2)), (2, 2), synchronise=False, split=False),
    Case(((0, 1), (2,)), (3, 1, 2), offloads=(0, 1)),
    Case(((0,), (1,), (0,)), (1, 1, 1), offloads=(0,), split=False),
    Case(((0, 1), (2, 3)), (4, 1), weights=((3, 1), (1, 2))),
    Case(((0, 1), (2,), (0,)), (2, 2), skips=((0, 2),), schedule="forward", training=False),
    Case(((0, 1), (2,)), (3, 1, 2), tied=True, schedule="2bp", join=3),
    Case(((0,), (1,), (0,)), (1, 1, 1), offloads=(0,), schedule="2bp", options={"base": "gpipe"}, join=2),
]
