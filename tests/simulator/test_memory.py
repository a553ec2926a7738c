"""What a rank uses over time: held values, buffers, workspace and state, each in its own series."""

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
    Send,
    Step,
    Traffic,
    Vacate,
)
from lightning_pipe.core.timeline import Timeline
from lightning_pipe.schedule import order_of
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.orders.forward_only import forward_only
from lightning_pipe.schedule.verification.verify import verify
from lightning_pipe.simulator import MemoryCurve, UnitPrices, memory_curves, simulate


@dataclass(frozen=True)
class Bytes(UnitPrices):
    """Prices with bytes of everything."""

    saved: int = 0
    kept: int = 0
    result: int = 0
    workspace: tuple[tuple[str, int], ...] = ()
    gradient: int = 0
    message: int = 0
    state: int = 0
    both: int = 1 << 40  # most that one compute sends

    def kept_bytes(self, stage, samples):
        return self.kept

    def result_bytes(self, stage, samples):
        return self.result

    def workspace_bytes(self, compute, samples):
        return dict(self.workspace).get(compute.kind, 0)

    def gradient_bytes(self, compute, samples):
        return self.gradient if compute.kind == "W" else 0

    def message_bytes(self, message):
        return self.message * len(message.samples)

    def sent_bytes(self, stage, direction, samples):
        return min(self.message * samples * 9, self.both)

    def state_bytes(self, rank):
        return self.state


def program_of(stages, *, m=2, schedule="gpipe", training=True, split=True, size=1, offloads=(), beside=()):
    layout = Layout(stages)
    edges = [e for s in range(len(stages) - 1) for e in (Edge("F", s, s + 1, 1.0), Edge("B", s + 1, s, 1.0))]
    traffic = Traffic(tuple(edges), tuple(Bucket((s,), 100) for s in range(len(stages))), offloads=offloads)
    order = order_of(schedule, layout=layout, microbatches=m) if training else forward_only(layout, m)
    sizes = (size,) * m
    return verify(
        lower(order, layout=layout, sizes=sizes, traffic=traffic, training=training, split=split, beside=beside)
    )


def curves_of(program, prices) -> tuple[Timeline, tuple[MemoryCurve, ...]]:
    timeline = simulate(program, prices)
    return timeline, memory_curves(timeline, program=program, prices=prices)


def at(curve: MemoryCurve, series: str, time: float) -> int:
    """Return what a series says right after a time."""
    before = [value for moment, value in zip(curve.times, getattr(curve, series), strict=True) if moment <= time]
    return before[-1] if before else 0


def when(timeline: Timeline, rank: int, instruction):
    (event,) = (e for e in timeline.events if e.rank == rank and e.instruction == instruction)
    return event


@pytest.mark.parametrize(("saved", "kept"), [(10, 4), (4, 10), (7, 7), (7, 0)])
def test_saved_is_held_until_the_input_half_ends_and_kept_until_free(saved, kept):
    program = program_of(((0,),), m=1)
    timeline, (curve,) = curves_of(program, Bytes(1.0, 1.0, 1.0, saved=saved, kept=kept))
    assert when(timeline, 0, Free(0, 0)).start == 3.0
    assert [at(curve, "held_bytes", t) for t in (0.0, 1.5, 2.0, 2.5, 3.0)] == [saved, saved, kept, kept, 0]


def before(program, instruction, timeline) -> float:
    """Return when a rank's list posts an instruction: at the end of the compute or the wait before it."""
    line = program.ranks[0]
    return max(when(timeline, 0, x).end for x in line[: line.index(instruction)] if isinstance(x, (Compute, Vacate)))


@pytest.mark.sampled
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("beside", [(None,), (0,), (2,)])
@pytest.mark.parametrize(("saved", "kept", "offloaded"), [(10, 4, 6), (10, 4, 10), (10, 12, 3), (10, 0, 0)])
def test_what_is_offloaded_is_not_held_from_vacate_to_the_start_of_fetch(saved, kept, offloaded, split, beside):
    """Where fetch comes before vacate, both memories are there in between."""
    m, prices = 8, Bytes(saved=saved, kept=kept, offloaded=offloaded, swap=0.75)
    program = program_of(((0,),), m=m, split=split, offloads=(0,), beside=beside)
    timeline, (curve,) = curves_of(program, prices)

    def held(microbatch: int, time: float) -> int:
        backward = Compute(0, "I" if split else "B", microbatch)
        offload = (kind(0, microbatch) for kind in (Evict, Vacate, Fetch))
        steps = (Compute(0, "F", microbatch), *offload, backward, Free(0, microbatch))
        forward, evict, vacate, fetch, used, free = (when(timeline, 0, step) for step in steps)
        assert vacate.end >= evict.end
        if forward.start <= time < used.end:
            asked = before(program, fetch.instruction, timeline)
            return saved - offloaded * (time >= vacate.end) + offloaded * (time >= asked)
        return kept if used.end <= time < free.start else 0

    for number in range(8 * 24):
        time = number / 8 + 1 / 16
        assert at(curve, "held_bytes", time) == sum(held(microbatch, time) for microbatch in range(m)), time


def test_a_backward_in_one_piece_holds_saved_until_its_end():
    program = program_of(((0,),), m=1, split=False)
    _, (curve,) = curves_of(program, Bytes(1.0, 1.0, 1.0, saved=10, kept=4))
    assert [at(curve, "held_bytes", t) for t in (0.0, 2.9, 3.0)] == [10, 10, 0]


def test_results_stay_to_the_end_of_the_batch():
    program = program_of(((0,),), m=2)
    timeline, (curve,) = curves_of(program, Bytes(result=3, saved=10, kept=10))
    assert [at(curve, "buffer_bytes", t) for t in (0.0, 1.0, timeline.makespan - 0.1)] == [3, 6, 6]
    assert curve.peak_bytes == 20 and curve.buffer_bytes[-1] == 0


def test_a_forward_only_program_holds_results_and_what_is_under_way():
    program = program_of(((0,), (1,)), m=3, training=False)
    _, curves = curves_of(program, Bytes(result=3, latency=0.5))
    assert [curve.buffer_bytes[-2:] for curve in curves] == [(9, 0), (9, 0)]
    assert [curve.peak_in_flight for curve in curves] == [1, 1]


def test_workspace_is_there_while_its_compute_runs():
    program = program_of(((0,),), m=2)
    timeline, (curve,) = curves_of(program, Bytes(workspace=(("F", 5), ("I", 6), ("W", 7))))
    for event in timeline.computes(0):
        middle = (event.start + event.end) / 2
        assert at(curve, "workspace_bytes", middle) == {"F": 5, "I": 6, "W": 7}[event.instruction.kind]
    assert curve.workspace_bytes[-1] == 0


def test_first_gradients_become_those_of_the_parameters_and_later_ones_are_memory_beside_them():
    program = program_of(((0,),), m=2)
    timeline, (curve,) = curves_of(program, Bytes(workspace=(("W", 9),), gradient=8, state=100))
    first, second = (
        when(timeline, 0, Compute(0, "W", m))
        for m in sorted(range(2), key=lambda m: when(timeline, 0, Compute(0, "W", m)).start)
    )
    assert at(curve, "workspace_bytes", first.start) == 1
    assert at(curve, "workspace_bytes", second.start) == 9
    assert curve.peak_total_bytes == 109


def test_a_receive_has_its_buffer_from_posting_to_use_and_a_sent_value_lives_until_it_has_arrived():
    """Messages take five times as long as a forward; the second is posted with the first, before any compute."""
    program = program_of(((0,), (1,)), m=2, training=False)
    timeline, (first, second) = curves_of(program, Bytes(latency=5.0, message=10))
    arrivals = [event.end for event in timeline.events if isinstance(event.instruction, Recv)]
    sends = [event.end for event in timeline.events if isinstance(event.instruction, Send)]
    assert arrivals == sends == [6.0, 11.0]
    assert at(second, "buffer_bytes", 0.0) == 20, "both are posted at once"
    assert [at(second, "buffer_bytes", t) for t in (5.9, 6.0, 10.9, 11.0)] == [20, 10, 10, 0]
    assert [at(first, "buffer_bytes", t) for t in (0.5, 1.0, 2.0, 6.0, 11.0)] == [0, 10, 20, 10, 0]


def test_what_one_stage_hands_to_another_on_its_rank_lives_between_their_computes():
    """0F0 1F0 1I0 1W0 0I0 0W0: the activation is taken at once, the gradient lives while 1W0 runs."""
    program = program_of(((0,), (0,)), m=1)
    timeline, (curve,) = curves_of(program, Bytes(message=10))
    assert not [event for event in timeline.events if isinstance(event.instruction, Send)]
    assert when(timeline, 0, Compute(1, "W", 0)).start == 3.0
    assert [at(curve, "buffer_bytes", t) for t in (1.5, 2.5, 3.0, 3.9, 4.0)] == [0, 0, 10, 10, 0]


def test_of_gradients_that_are_summed_a_piece_is_there_twice_while_they_are_made():
    program = program_of(((0, 1),), m=1, size=2)
    timeline, curves = curves_of(program, Bytes(reduction=10.0, pieces=4, step=1.0))
    last = timeline.computes(0)[-1]
    assert when(timeline, 0, Step()).start == last.start + 0.25 + 10.0
    for curve in curves:
        moments = (last.start - 0.1, last.start, last.end - 0.1, last.end, last.end + 5.0)
        assert [at(curve, "buffer_bytes", t) for t in moments] == [0, 25, 25, 0, 0]


def test_a_sum_that_begins_after_its_gradients_is_put_together_at_once():
    program = program_of(((0, 1),), m=1, size=2, split=False)
    _, curves = curves_of(program, Bytes(reduction=10.0, pieces=4, step=1.0))
    assert {max(curve.buffer_bytes) for curve in curves} == {25}


@pytest.mark.parametrize("stages", [((0,), (1,)), ((0, 1), (2,)), ((0,), (1,), (0,)), ((0,), (0,))])
def test_the_total_is_the_sum_of_the_series_and_the_state(stages):
    prices = Bytes(
        latency=0.3, saved=10, kept=4, result=2, workspace=(("F", 5), ("W", 7)), gradient=3, message=6, state=50
    )
    _, curves = curves_of(program_of(stages, m=3, schedule="1f1b", size=2), prices)
    for curve in curves:
        series = zip(curve.held_bytes, curve.buffer_bytes, curve.workspace_bytes, strict=True)
        assert curve.total_bytes == tuple(50 + sum(parts) for parts in series)
        assert curve.peak_total_bytes == max(curve.total_bytes) >= 50 + curve.peak_bytes
        assert all(a <= b for a, b in pairwise(curve.times))
        assert curve.total_bytes[-1] == 50


def test_what_goes_to_several_stages_is_there_once():
    """One value for two stages, and one for one of them: until the last has arrived, both; not three."""
    prices = Bytes(message=4, latency=2.0, both=8)
    edges = (
        Edge("F", 0, 1, 4.0),
        Edge("F", 0, 2, 4.0),
        Edge("F", 1, 2, 4.0),
        Edge("B", 1, 0, 4.0),
        Edge("B", 2, 1, 4.0),
    )
    layout = Layout(((0,), (1,), (2,)))
    order = order_of("gpipe", layout=layout, microbatches=1)
    traffic = Traffic(edges, tuple(Bucket((s,), 100) for s in range(3)))
    program = verify(lower(order, layout=layout, sizes=(1,), traffic=traffic))
    separate = curves_of(program, prices)[1][0]
    shared = curves_of(program, replace(prices, both=4))[1][0]
    assert max(separate.buffer_bytes) - max(shared.buffer_bytes) == 4
