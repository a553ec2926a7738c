"""Laws of the simulator: who waits for what."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest

from lightning_pipe.core.program import (
    Bucket,
    Compute,
    Edge,
    Evict,
    Fetch,
    Free,
    Layout,
    Recv,
    Reduce,
    Send,
    Step,
    Traffic,
)
from lightning_pipe.core.timeline import Timeline
from lightning_pipe.schedule import order_of
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.orders.forward_only import forward_only
from lightning_pipe.schedule.verification.verify import verify
from lightning_pipe.simulator import UnitPrices, memory_curves, simulate

LAYOUTS = [((0, 1), (2,)), ((0,), (1,), (0,)), ((0,), (1, 2), (3,)), ((0, 1, 2), (3, 4)), ((0,), (0,))]


def program_of(stages, *, m=4, schedule="1f1b", training=True, sizes=None, offloads=()):
    layout = Layout(stages)
    edges = [e for s in range(len(stages) - 1) for e in (Edge("F", s, s + 1, 1.0), Edge("B", s + 1, s, 1.0))]
    buckets = tuple(Bucket((s,), 1) for s in range(len(stages)))
    traffic = Traffic(tuple(edges), buckets, offloads=offloads)
    order = order_of(schedule, layout=layout, microbatches=m) if training else forward_only(layout, m)
    return verify(lower(order, layout=layout, sizes=sizes or (6,) * m, traffic=traffic, training=training))


def events_of(timeline: Timeline, kind: type) -> list:
    return [event for event in timeline.events if isinstance(event.instruction, kind)]


@pytest.mark.parametrize("stages", LAYOUTS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("offloads", [(), (0, 1)])
def test_every_instruction_of_every_rank_has_one_event(stages, training, offloads):
    program = program_of(stages, training=training, offloads=offloads)
    timeline = simulate(program, UnitPrices(latency=0.5, swap=0.3))
    happened = [[] for _ in program.ranks]
    for event in timeline.events:
        happened[event.rank].append(str(event.instruction))
    # Load is free of cost and still there
    assert [sorted(line) for line in happened] == [sorted(map(str, line)) for line in program.ranks]


@pytest.mark.parametrize("stages", LAYOUTS)
def test_a_rank_computes_one_thing_at_a_time_in_the_order_of_its_list(stages):
    program = program_of(stages)
    timeline = simulate(program, UnitPrices(1.0, 0.7, 0.4, latency=0.3))
    for rank, line in enumerate(program.ranks):
        events = timeline.computes(rank)
        assert [event.instruction for event in events] == [x for x in line if isinstance(x, Compute)]
        assert all(a.end <= b.start for a, b in pairwise(events))


@pytest.mark.parametrize("stages", LAYOUTS)
def test_a_channel_moves_one_message_at_a_time_between_its_compute_and_its_use(stages):
    program = program_of(stages)
    timeline = simulate(program, UnitPrices(1.0, 0.7, 0.4, latency=1.5))
    computes = {(event.rank, event.instruction): event for event in events_of(timeline, Compute)}
    last_end = {}
    for event in sorted(events_of(timeline, Send), key=lambda event: event.start):
        message, channel = event.instruction.message, (event.rank, event.instruction.peer)
        kinds = ("F", "F") if message.direction == "F" else ("I", "I")
        made = computes[event.rank, Compute(message.source, kinds[0], message.microbatch)]
        used = computes[event.instruction.peer, Compute(message.target, kinds[1], message.microbatch)]
        assert made.end <= event.start
        assert event.end <= used.start
        assert last_end.get(channel, 0.0) <= event.start
        last_end[channel] = event.end
    assert len(events_of(timeline, Send)) == len(events_of(timeline, Recv))


def test_a_message_moves_no_sooner_than_its_receive_is_posted():
    """Every receive is moved right before its use, behind the compute that it could have overlapped with."""
    program = program_of(((0,), (1,)), m=3)
    lines = []
    for line in program.ranks:
        receives = [x for x in line if isinstance(x, Recv)]
        late = []
        for x in line:
            if isinstance(x, Compute) and x.kind in ("F", "I"):
                direction = "F" if x.kind == "F" else "B"
                late += [
                    r for r in receives if r.message.direction == direction and r.message.microbatch == x.microbatch
                ]
            late += [] if isinstance(x, Recv) else [x]
        lines.append(tuple(late))
    late_program = verify(replace(program, ranks=tuple(lines)))
    timeline = simulate(late_program, UnitPrices(latency=1.0))
    for rank in (0, 1):
        computes = timeline.computes(rank)
        for event in events_of(timeline, Recv):
            position = late_program.ranks[rank].index(event.instruction) if event.rank == rank else 0
            before = [x for x in late_program.ranks[rank][:position] if isinstance(x, Compute)]
            assert not before or computes[len(before) - 1].end <= event.start
    assert timeline.makespan > simulate(program, UnitPrices(latency=1.0)).makespan


def test_reductions_of_a_rank_run_one_after_the_other():
    layout = Layout(((0, 1),))
    traffic = Traffic((), (Bucket((0,), 1), Bucket((0,), 1)))
    program = verify(
        lower(order_of("gpipe", layout=layout, microbatches=1), layout=layout, sizes=(2,), traffic=traffic)
    )
    timeline = simulate(program, UnitPrices(reduction=5.0))
    times = [(e.start, e.end) for e in events_of(timeline, Reduce) if e.rank == 1]
    assert times == [(3.0, 8.0), (8.0, 13.0)]


def test_reductions_run_beside_computes_and_step_waits_for_them():
    """The last stage ends its last W first; its reduction hides behind the others, those of stage 0 cannot."""
    timeline = simulate(program_of(((0, 1), (2, 3)), m=2), UnitPrices(reduction=10.0, step=2.0))
    reductions = {(e.rank, e.instruction): e for e in events_of(timeline, Reduce)}
    steps = {e.rank: e for e in events_of(timeline, Step)}
    last_w = {rank: timeline.computes(rank)[-1] for rank in range(4)}
    for rank in range(4):
        reduction = reductions[rank, Reduce(rank // 2, along=True)]
        assert reduction.start == last_w[rank].end
        assert steps[rank].start == max(r.end for r in reductions.values()), "results of all ranks are exchanged before"
    assert last_w[2].end < last_w[0].end
    assert timeline.makespan == last_w[0].end + 10.0 + 2.0


@pytest.mark.parametrize(
    ("reduction", "start", "end"),
    [
        (4.0, 0.25, 4.25),  # one piece after another, from the first that is made
        (0.4, 0.25, 1.1),  # each as soon as it is made
    ],
)
def test_pieces_of_a_sum_run_beside_the_rest_of_the_weight_half(reduction, start, end):
    timeline = simulate(program_of(((0, 1),), m=2), UnitPrices(reduction=reduction, pieces=4))
    begins = timeline.computes(0)[-1].start
    for event in events_of(timeline, Reduce):
        assert (event.start - begins, event.end - begins) == pytest.approx((start, end))


def test_a_reduction_waits_for_the_slowest_of_its_ranks():
    """Replica 1 takes twice as long; both start to reduce when it is done."""

    @dataclass(frozen=True)
    class Uneven(UnitPrices):
        def compute_s(self, compute, rank, samples):
            return 1.0 + rank

    timeline = simulate(program_of(((0, 1),), m=2), Uneven(reduction=1.0))
    assert {event.start for event in events_of(timeline, Reduce)} == {2 * 3 * 2.0}


def test_samples_of_a_replica_are_what_is_priced():
    seen = set()

    @dataclass(frozen=True)
    class Watching(UnitPrices):
        def compute_s(self, compute, rank, samples):
            seen.add((rank, compute.microbatch, samples))
            return 1.0

    simulate(program_of(((0, 1), (2,)), m=2, sizes=(5, 2)), Watching())
    assert seen == {(0, 0, 2), (1, 0, 3), (2, 0, 5), (0, 1, 1), (1, 1, 1), (2, 1, 2)}


def test_memory_is_held_from_forward_to_free():
    program = program_of(((0,), (1,)), m=2)
    timeline = simulate(program, UnitPrices())
    curve = memory_curves(timeline, program=program, prices=UnitPrices(saved=5))[1]
    frees = [event.start for event in events_of(timeline, Free) if event.rank == 1]
    assert curve.times == (1.0, frees[0], frees[0], frees[1])
    assert curve.held_bytes == (5, 0, 5, 0)
    assert curve.in_flight == (1, 0, 1, 0)


@pytest.mark.parametrize("stages", LAYOUTS)
@pytest.mark.parametrize("swap", [0.0, 0.4, 5.0])
def test_a_rank_moves_one_copy_at_a_time_each_way_in_the_order_of_its_list(stages, swap):
    program = program_of(stages, offloads=(0, 1))
    timeline = simulate(program, UnitPrices(1.0, 0.7, 0.4, latency=0.3, swap=swap))
    for rank, line in enumerate(program.ranks):
        for kind in (Evict, Fetch):
            events = [event for event in events_of(timeline, kind) if event.rank == rank]
            assert [event.instruction for event in events] == [x for x in line if isinstance(x, kind)]
            assert all(event.end == pytest.approx(event.start + swap) for event in events)
            assert all(a.end <= b.start for a, b in pairwise(events))


@pytest.mark.parametrize("stages", LAYOUTS)
@pytest.mark.parametrize("swap", [0.0, 0.4, 5.0])
def test_a_copy_comes_back_after_it_has_left_and_before_it_is_used(stages, swap):
    timeline = simulate(program_of(stages, offloads=(0, 1)), UnitPrices(1.0, 0.7, 0.4, latency=0.3, swap=swap))
    at = {(event.rank, event.instruction): event for event in timeline.events}
    for event in events_of(timeline, Fetch):
        rank, stage, microbatch = event.rank, event.instruction.stage, event.instruction.microbatch
        evict = at[rank, Evict(stage, microbatch)]
        assert at[rank, Compute(stage, "F", microbatch)].end <= evict.start
        assert evict.end <= event.start
        assert event.end <= at[rank, Compute(stage, "I", microbatch)].start


@pytest.mark.parametrize(("busy", "weight_s", "end"), [(1.0, 4.0, 5.0), (0.5, 2.5, 3.5), (0.0, 1.0, 4.25)])
def test_a_sum_that_keeps_its_rank_makes_the_weight_half_longer_but_for_its_last_piece(busy, weight_s, end):
    timeline = simulate(program_of(((0, 1),), m=2), UnitPrices(reduction=4.0, pieces=4, busy=busy))
    weight = timeline.computes(0)[-1]
    assert weight.end - weight.start == pytest.approx(weight_s)
    for event in events_of(timeline, Reduce):
        assert event.end - weight.start == pytest.approx(end)
