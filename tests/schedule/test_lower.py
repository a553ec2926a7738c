"""Laws of the rewrites: what each adds, and where."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest

from lightning_pipe.core.program import (
    AnyCompute,
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
    Vacate,
)
from lightning_pipe.schedule import order_of
from lightning_pipe.schedule.formats.text import parse_order
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.lower.offload import AHEAD
from lightning_pipe.schedule.rules import Dataflow, halves
from lightning_pipe.schedule.verification.verify import verify


def test_replicas_receive_exactly_the_samples_they_compute(case, build):
    program = build(case)
    flow = Dataflow.of(program)
    layout, sizes = program.layout, program.sizes
    for rank, line in enumerate(program.ranks):
        received = defaultdict(list)
        for x in line:
            if isinstance(x, Recv):
                received[x.message.direction, x.message.source, x.message.target, x.message.microbatch].append(x)
        for edge in (
            program.traffic.edges if program.training else [e for e in program.traffic.edges if e.direction == "F"]
        ):
            for m in range(len(sizes)):
                wanted = flow.samples(edge.target, rank=rank, microbatch=m)
                messages = received[edge.direction, edge.source, edge.target, m]
                local = flow.samples(edge.source, rank=rank, microbatch=m) & wanted
                got = [i for x in messages for i in range(x.message.samples.start, x.message.samples.stop)]
                got += range(local.start, local.stop)
                assert sorted(got) == list(range(wanted.start, wanted.stop)), f"rank {rank}, {edge}, micro-batch {m}"
                assert all(x.peer in layout.stages[edge.source] and x.peer != rank for x in messages)


def test_the_input_gradient_leaves_before_the_weight_gradient_is_computed(small_case, build):
    program = build(small_case)
    for line in program.ranks:
        sent = {(x.message.source, x.message.microbatch): i for i, x in enumerate(line) if is_gradient(x)}
        for i, x in enumerate(line):
            if isinstance(x, Compute) and x.kind == "W" and (x.stage, x.microbatch) in sent:
                early = sent[x.stage, x.microbatch] < i
                assert early == small_case.early_release


def is_gradient(instruction: object) -> bool:
    return isinstance(instruction, Send) and instruction.message.direction == "B"


def test_receives_are_posted_at_least_three_computes_ahead(small_case, build):
    for line in build(small_case).ranks:
        computes = [i for i, x in enumerate(line) if isinstance(x, Compute)]
        for i, x in enumerate(line):
            if not isinstance(x, Recv):
                continue
            m = x.message
            kinds = ("F",) if m.direction == "F" else ("I", "B")
            users = [c for c in computes if line[c] in [Compute(m.target, k, m.microbatch) for k in kinds]]
            before = [c for c in computes if c < users[0]]
            assert sum(c > i for c in before) >= min(3, len(before))


def test_order_of_computes_is_kept(small_case, build):
    program = build(small_case)
    if not small_case.training:
        return
    order = order_of(
        small_case.schedule, layout=program.layout, microbatches=len(small_case.sizes), options=small_case.options
    )
    flow = Dataflow.of(program)
    for rank, computes in enumerate(order):
        kept = [c for c in computes if flow.samples(c.stage, rank=rank, microbatch=c.microbatch)]
        halved = [half for c in kept for half in (halves(c) if small_case.split else [c])]
        lowered = [half for x in program.ranks[rank] if isinstance(x, AnyCompute) for half in _each(x)]
        assert lowered == halved


def _each(compute: AnyCompute) -> list[Compute]:
    return [compute] if isinstance(compute, Compute) else list(halves(compute))


def test_reductions_go_along_with_the_last_weight_gradient_of_their_stage():
    layout = Layout(((0, 1), (2, 3)))
    traffic = Traffic((Edge("F", 0, 1, 1.0), Edge("B", 1, 0, 1.0)), buckets_of(layout))
    program = lower(order_of("1f1b", layout=layout, microbatches=3), layout=layout, sizes=(2,) * 3, traffic=traffic)
    for rank, line in enumerate(program.ranks):
        assert line[-1] == Step()
        stage = rank // 2
        assert line[-4:-1] == (Reduce(stage, along=True), Compute(stage, "W", 2), Free(stage, 2))


def buckets_of(layout):
    return tuple(Bucket((s,), 1) for s in range(len(layout.stages)))


def test_a_replica_without_samples_still_reduces():
    """Two replicas, micro-batches of one sample: the first replica never computes, but its parameters must move."""
    layout = Layout(((0, 1),))
    program = lower(
        order_of("gpipe", layout=layout, microbatches=2),
        layout=layout,
        sizes=(1, 1),
        traffic=Traffic((), buckets_of(layout)),
    )
    assert program.ranks[0] == (Reduce(0), Step())
    assert [x for x in program.ranks[1] if isinstance(x, Reduce)] == [Reduce(0, along=True)]


def test_a_stage_without_samples_is_reduced_after_the_other_work_of_its_rank():
    """Rank 0 has no samples in stage 0 but all of stage 1: its empty bucket must not hold a stream from the start."""
    layout = Layout(((0, 1), (0,)))
    program = lower(
        order_of("gpipe", layout=layout, microbatches=1),
        layout=layout,
        sizes=(1,),
        traffic=Traffic((Edge("F", 0, 1, 1.0), Edge("B", 1, 0, 1.0)), buckets_of(layout)),
    )
    assert [str(x) for x in program.ranks[0][-4:]] == ["1W0", "1FREE0", "REDUCE0", "STEP"]


def test_a_bucket_of_one_rank_is_not_reduced():
    """Tied parameters of two stages on the same rank are summed where they are."""
    layout = Layout(((0,), (1,), (0,)))
    edges = (Edge("F", 0, 1, 1.0), Edge("F", 1, 2, 1.0), Edge("B", 2, 1, 1.0), Edge("B", 1, 0, 1.0))
    traffic = Traffic(edges, (Bucket((0, 2), 1), Bucket((1,), 1)))
    program = lower(order_of("gpipe", layout=layout, microbatches=2), layout=layout, sizes=(1, 1), traffic=traffic)
    assert not [x for line in program.ranks for x in line if isinstance(x, Reduce)]


def test_stages_on_one_rank_send_no_messages():
    layout = Layout(((0,), (0,), (0,)))
    edges = (Edge("F", 0, 1, 1.0), Edge("F", 1, 2, 1.0), Edge("B", 2, 1, 1.0), Edge("B", 1, 0, 1.0))
    program = lower(
        order_of("1f1b", layout=layout, microbatches=3), layout=layout, sizes=(1,) * 3, traffic=Traffic(edges, ())
    )
    assert not [x for x in program.ranks[0] if isinstance(x, (Send, Recv))]


def test_evict_follows_its_forward_and_fetch_comes_three_computes_ahead_or_right_after_evict(case, build):
    program = build(case)
    flow = Dataflow.of(program)
    for rank, line in enumerate(program.ranks):
        computes = [x for x in line if isinstance(x, Compute)]
        works = {(x.stage, x.microbatch) for x in computes if x.stage in case.offloads and case.training}
        assert {(x.stage, x.microbatch) for x in line if isinstance(x, Evict)} == works
        assert {(x.stage, x.microbatch) for x in line if isinstance(x, Fetch)} == works
        for work in works:
            forward = Compute(work[0], "F", work[1])
            evict, fetch = line.index(Evict(*work)), line.index(Fetch(*work))
            sends = [line.index(send) for send in flow.gives(forward, rank=rank)]
            assert max([line.index(forward), *sends]) < evict
            assert [x for x in line[line.index(forward) + 1 : evict] if isinstance(x, Compute)] == []
            backward = next(line.index(x) for x in computes if (x.stage, x.microbatch) == work and x.direction == "B")
            between = [x for x in line[fetch:backward] if isinstance(x, Compute)]
            at_once = [x for x in line[evict:fetch] if isinstance(x, Compute)] == []
            assert len(between) == 3 or (len(between) < 3 and at_once), (rank, work)


@pytest.mark.parametrize("beside", [(), (None, None), (0, 3), (2,), (50, 1)])
def test_memory_is_given_up_some_computes_after_f_or_kept_where_it_would_be_back_by_then(beside):
    layout, m = Layout(((0,), (1,))), 6
    traffic = Traffic((Edge("F", 0, 1, 1.0), Edge("B", 1, 0, 1.0)), buckets_of(layout), offloads=(0, 1))
    order = order_of("1f1b", layout=layout, microbatches=m, options={"warmup": "4,1"})
    program = verify(lower(order, layout=layout, sizes=(1,) * m, traffic=traffic, beside=beside))
    assert any(isinstance(x, Vacate) for x in program.ranks[0]) == (beside != (50, 1))
    for s, line in enumerate(program.ranks):
        count = beside[s] if s < len(beside) else None
        for x in range(m):
            forward, backward = map(line.index, (Compute(s, "F", x), Compute(s, "I", x)))
            between = sum(isinstance(y, Compute) for y in line[forward + 1 : backward])
            if count is not None and min(count, between) >= between - AHEAD:
                assert not {Evict(s, x), Vacate(s, x), Fetch(s, x)} & {*line}
                continue
            vacate = line.index(Vacate(s, x))
            assert line.index(Evict(s, x)) < vacate < backward
            found = sum(isinstance(y, Compute) for y in line[forward + 1 : vacate])
            assert found == (between if count is None else min(count, between)), (s, x)


def test_an_order_says_which_micro_batches_are_offloaded_and_when():
    """Its copies stand right before the next compute; what it does not name is kept, but for stages without any."""
    order = parse_order(["0F0 0F1 0VACATE1 0F2 0B0 0FETCH1 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"])
    traffic = Traffic((Edge("F", 0, 1, 1.0), Edge("B", 1, 0, 1.0)), (), offloads=(0, 1))
    program = verify(lower(order, layout=Layout(((0,), (1,))), sizes=(1,) * 3, traffic=traffic))
    kinds = (Compute, Evict, Vacate, Fetch)
    first, second = ([str(x) for x in line if isinstance(x, kinds)] for line in program.ranks)
    assert " ".join(first) == "0F0 0F1 0EVICT1 0VACATE1 0F2 0I0 0W0 0FETCH1 0I1 0W1 0I2 0W2"
    assert sum("EVICT" in x for x in second) == 3
    assert not isinstance(program.ranks[0][program.ranks[0].index(Vacate(0, 1)) + 1], Recv)
    keeping = lower(order, layout=Layout(((0,), (1,))), sizes=(1,) * 3, traffic=replace(traffic, offloads=()))
    assert not any(isinstance(x, (Evict, Vacate, Fetch)) for line in verify(keeping).ranks for x in line)


def test_programs_that_do_not_offload_are_lowered_as_before(small_case, build):
    kept = build(replace(small_case, offloads=()))
    swapped = build(small_case)
    without = [tuple(x for x in line if not isinstance(x, (Evict, Vacate, Fetch))) for line in swapped.ranks]
    assert tuple(without) == kept.ranks
