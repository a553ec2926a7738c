"""The execution of a chain in time is the simulator's, to the last bit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from benchmarks.closed_forms import chain
from lightning_pipe.core.program import Compute, CopyingOrder, Evict, Fetch, Layout, Message, Order, Vacate
from lightning_pipe.errors import ProgramError
from lightning_pipe.schedule.construct.chain_run import chain_makespan, chain_starts
from lightning_pipe.schedule.construct.layout_shapes import both_ways, looping, zigzag
from lightning_pipe.schedule.construct.stage_times import ChainTimes, unit_times
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.verification.verify import verify
from lightning_pipe.simulator import UnitPrices, simulate

ROW = [(0,), (1,), (2,), (3,)]
LAYOUTS = [
    looping(ROW, 1),
    looping(ROW[:3], 2),
    zigzag(ROW, 2),
    zigzag(ROW[:1], 2),
    zigzag([(0, 3), (1, 2)], 2),
    both_ways(ROW, 1),
    both_ways(ROW, 2),
    Layout(((0, 1), (2,), (0, 1, 3))),
    Layout(((0, 1), (2, 3)), weights=((3, 1), (1, 1))),
    Layout(((0, 1), (2,), (3,)), whole=frozenset({0})),
]


@dataclass(frozen=True)
class TimesPrices(UnitPrices):
    """Prices of a chain with given times."""

    times: ChainTimes | None = None

    def compute_s(self, compute: Compute, rank: int, samples: int) -> float:
        assert self.times is not None
        return self.times.compute_s(compute)

    def transfer_s(self, message: Message, sender: int, receiver: int) -> float:
        assert self.times is not None
        return self.times.message_s(message.source, message.target)


def random_times(layout: Layout, draw: random.Random, *, messages: float) -> ChainTimes:
    stages, links = len(layout.stages), len(layout.stages) - 1
    computes = [tuple(draw.uniform(0.5, 2.0) for _ in range(stages)) for _ in range(3)]
    moves = [tuple(draw.uniform(0.0, messages) for _ in range(links)) for _ in range(2)]
    same = [(1.0,) * stages, (1.0,) * stages, (float("inf"),) * layout.ranks]
    return ChainTimes(*computes, *moves, *same)


def random_order(layout: Layout, microbatches: int, draw: random.Random, *, split: bool) -> Order:
    """Return the order in which a random walk over the ready computes runs them; so it cannot deadlock."""
    kinds = "FIW" if split else "FB"
    lines: list[list[Compute]] = [[] for _ in range(layout.ranks)]
    left = {(s, m): 0 for s in range(len(layout.stages)) for m in range(microbatches)}
    while left:
        ready = [(s, m) for (s, m), k in left.items() if is_ready(left, s, m, kinds[k])]
        s, m = draw.choice(ready)
        for rank in layout.stages[s]:
            lines[rank].append(Compute(s, kinds[left[s, m]], m))
        left[s, m] += 1
        if left[s, m] == len(kinds):
            del left[s, m]
    return tuple(map(tuple, lines))


def is_ready(left: dict[tuple[int, int], int], stage: int, microbatch: int, kind: str) -> bool:
    """Return whether the neighbor stage has run the same pass; stages that are through are not in `left`."""
    if kind == "W":
        return True
    source = (stage - 1 if kind == "F" else stage + 1, microbatch)
    return source not in left or left[source] > (0 if kind == "F" else 1)


def simulated(order: Order, layout: Layout, times: ChainTimes) -> tuple[float, dict[tuple[int, str], float]]:
    """Return the makespan of an order, and the start of its computes by rank and name."""
    microbatches = 1 + max(c.microbatch for line in order for c in line)
    size = 24  # all replicas of all layouts get samples
    program = lower(order, layout=layout, sizes=(size,) * microbatches, traffic=chain(len(layout.stages)))
    timeline = simulate(verify(program), TimesPrices(times=times))
    events = [(rank, event) for rank in range(layout.ranks) for event in timeline.computes(rank)]
    return timeline.makespan, {(rank, str(event.instruction)): event.start for rank, event in events}


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(map(str, layout.stages)))
@pytest.mark.parametrize("split", [True, False])
def test_a_chain_runs_as_the_simulator_says(layout, split):
    draw = random.Random(len(layout.stages))
    for messages in (0.0, 0.5, 6.0):
        times = random_times(layout, draw, messages=messages)
        order = random_order(layout, 6, draw, split=split)
        makespan, expected = simulated(order, layout, times)
        for rank, (line, starts) in enumerate(zip(order, chain_starts(order, layout, times), strict=True)):
            for compute, start in zip(line, starts, strict=True):
                name = str(compute).replace("B", "I")
                if (rank, name) in expected:  # of whole micro-batches a replica leaves out those of the others
                    assert start == expected[rank, name], f"{compute} on rank {rank}"
        assert chain_makespan(order, layout, times) == makespan


def with_copies(order: Order, draw: random.Random) -> CopyingOrder:
    """Return an order in which some micro-batches are offloaded, with the ends and returns of copies anywhere."""
    works = sorted({(c.stage, c.microbatch) for line in order for c in line})
    chosen = draw.sample(works, len(works) // 2)
    return tuple(tuple(placed(line, chosen, draw)) for line in order)


def placed(
    line: Sequence[Compute], works: Sequence[tuple[int, int]], draw: random.Random
) -> list[Compute | Vacate | Fetch]:
    found: list[Compute | Vacate | Fetch] = [*line]
    for s, m in works:
        if Compute(s, "F", m) in found:
            kind = "I" if Compute(s, "I", m) in found else "B"
            vacate = draw.randint(found.index(Compute(s, "F", m)) + 1, found.index(Compute(s, kind, m)))
            found.insert(vacate, Vacate(s, m))
            found.insert(draw.randint(vacate + 1, found.index(Compute(s, kind, m))), Fetch(s, m))
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(map(str, layout.stages)))
@pytest.mark.parametrize("split", [True, False])
def test_copies_to_the_host_run_as_the_simulator_says(layout, split):
    draw = random.Random(len(layout.stages))
    count = len(layout.stages)
    for copy_s in (0.2, 3.0):
        times = replace(random_times(layout, draw, messages=0.5), copied_bytes=(1.0,) * count, copy_s=(copy_s,) * count)
        order = with_copies(random_order(layout, 6, draw, split=split), draw)
        traffic = replace(chain(count), offloads=tuple(range(count)))
        program = verify(lower(order, layout=layout, sizes=(24,) * 6, traffic=traffic))
        timeline = simulate(program, TimesPrices(times=times, swap=copy_s))
        ends = [event.end for rank in range(layout.ranks) for event in timeline.computes(rank)]
        assert chain_makespan(order, layout, times) == max(ends)
        copies = {(x.stage, x.microbatch) for line in order for x in line if isinstance(x, Vacate)}
        assert {(x.stage, x.microbatch) for line in program.ranks for x in line if isinstance(x, Evict)} == copies


def test_messages_of_a_channel_wait_for_each_other():
    """Two forwards on rank 0, used in the other order on rank 1: the second message waits for the first."""
    layout = looping(ROW[:2], 1)
    times = unit_times(layout)
    slow = ChainTimes(
        times.forward_s, times.input_s, times.weight_s, (5.0,), (0.0,), (1.0,) * 2, (1.0,) * 2, (9.0,) * 2
    )
    order = ((Compute(0, "F", 0), Compute(0, "F", 1)), (Compute(1, "F", 1), Compute(1, "F", 0)))
    assert chain_starts(order, layout, slow) == [[0.0, 1.0], [11.0, 12.0]]


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("0F0 0B0 0F1 0B1 | 1F1 1F0 1B0 1B1", "next are 0I0 on rank 0, 1F1 on rank 1"),
        ("0F0 0B0 | 1F0", "rank 0: 0I0 waits for a message from stage 1, which is never sent"),
        ("0B0 0F0 | 1F0 1B0", "rank 0: 0I0 waits for 0F0"),
    ],
)
def test_an_order_that_waits_for_itself_is_named(order, message):
    lines = (line.split() for line in order.split("|"))
    computes = tuple(tuple(Compute(int(c[0]), c[1], int(c[2])) for c in line) for line in lines)
    layout = looping(ROW[:2], 1)
    with pytest.raises(ProgramError, match=message):
        chain_makespan(computes, layout, unit_times(layout))
