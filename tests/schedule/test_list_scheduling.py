"""Laws of SPP's pipeline execution: its bound, and the warm-up that it amounts to."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from lightning_pipe.core.program import Layout
from lightning_pipe.errors import ConfigError
from lightning_pipe.schedule import order_of
from lightning_pipe.schedule.construct.chain_run import chain_makespan
from lightning_pipe.schedule.construct.layout_shapes import looping
from lightning_pipe.schedule.construct.stage_times import ChainTimes
from lightning_pipe.schedule.search.list_scheduling import steps


def random_times(draw: random.Random, layout: Layout, *, longest_message: float) -> ChainTimes:
    stages = len(layout.stages)
    some = [tuple(draw.uniform(0.2, 3.0) for _ in range(stages)) for _ in range(3)]
    links = [
        tuple(
            draw.uniform(0.01, longest_message) if layout.stages[s] != layout.stages[s + 1] else 0.0
            for s in range(stages - 1)
        )
        for _ in range(2)
    ]
    ones = (1.0,) * stages
    return ChainTimes(*some, *links, ones, ones, (1e9,) * layout.ranks)


def slowest(layout: Layout, times: ChainTimes) -> float:
    """Return the most that a device or a link, in both directions together, has to do for one micro-batch."""
    loads: dict[object, float] = defaultdict(float)
    for s, (forward, i, w) in enumerate(zip(times.forward_s, times.input_s, times.weight_s, strict=True)):
        loads[layout.stages[s]] += forward + i + w
    for s, (ahead, back) in enumerate(zip(times.ahead_s, times.back_s, strict=True)):
        loads[frozenset(layout.stages[s : s + 2])] += ahead + back
    return max(loads.values())


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_the_bound_of_pe_holds(chunks):
    """T <= (M + 4 S - 4) C, whatever the times; also where devices hold several stages."""
    for seed in range(60):
        draw = random.Random(seed)
        p, m = draw.randint(2, 5), draw.randint(1, 10)
        layout = looping([(d,) for d in range(p)], chunks)
        times = random_times(draw, layout, longest_message=draw.choice((0.5, 3.0, 8.0)))
        taken = chain_makespan(order_of("pe", layout=layout, microbatches=m, times=times), layout, times)
        bound = (m + 4 * len(layout.stages) - 4) * slowest(layout, times)
        assert taken <= bound * (1 + 1e-9), (seed, p, m, taken, bound)


def test_the_bound_is_met_by_a_balanced_pipeline_whose_messages_take_as_long():
    """One micro-batch through four stages, each step C: no order is quicker."""
    layout = looping([(d,) for d in range(4)], 1)
    times = ChainTimes((1.0,) * 4, (0.5,) * 4, (0.5,) * 4, (1.0,) * 3, (1.0,) * 3, (1.0,) * 4, (1.0,) * 4, (9.0,) * 4)
    assert steps(times) == ((0, 2, 4, 6), (12, 10, 8, 6))
    taken = chain_makespan(order_of("pe", layout=layout, microbatches=1, times=times), layout, times)
    assert taken == 4 * (1 + 1) + 6 - 3 * 0.5  # of W only the first stage's is on the way


@pytest.mark.parametrize(("message", "step"), [(0.5, 4), (0.0, 2)])
def test_pe_on_a_line_is_1f1b_with_a_forward_per_step_between_f_and_b(message, step):
    layout = looping([(d,) for d in range(4)], 1)
    ones, links = (1.0,) * 4, (message,) * 3
    times = ChainTimes(ones, ones, ones, links, links, ones, ones, ones)
    for m in (1, 5, 20):
        warmup = ",".join(str(step * (3 - s) + 1) for s in range(4))
        expected = order_of("1f1b", layout=layout, microbatches=m, options={"warmup": warmup})
        assert order_of("pe", layout=layout, microbatches=m, times=times) == expected


def test_replicas_run_the_line_of_their_device():
    order = order_of("pe", layout=Layout(((0, 3), (1,), (0, 3))), microbatches=3)
    assert order[0] == order[3] and len(order[0]) == 12 and order[2] == ()


@pytest.mark.parametrize(
    "layout", [Layout(((0, 1), (1,))), Layout(((0, 1), (2,)), frozenset({0}))], ids=["overlap", "whole"]
)
def test_devices_that_share_a_rank_or_take_turns_are_refused(layout):
    with pytest.raises(ConfigError, match="schedule 'pe' needs stages whose ranks are the same or have none in common"):
        order_of("pe", layout=layout, microbatches=2)
