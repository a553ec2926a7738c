"""Laws of the greedy schedule: it fits, it ends, and it is never worse than what is published."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from lightning_pipe.core.program import Compute, Layout
from lightning_pipe.errors import ConfigError
from lightning_pipe.schedule import order_of
from lightning_pipe.schedule.construct.chain import chain
from lightning_pipe.schedule.construct.chain_run import chain_makespan
from lightning_pipe.schedule.construct.devices import fits, peak_bytes
from lightning_pipe.schedule.construct.layout_shapes import looping, zigzag
from lightning_pipe.schedule.construct.stage_times import ChainTimes, unit_times
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.search.greedy import most_open, published_orders
from lightning_pipe.schedule.verification.verify import verify

LAYOUTS = {
    "one device": looping([(0,)], 2),
    "line": looping([(d,) for d in range(4)], 1),
    "looping": looping([(d,) for d in range(3)], 2),
    "V": zigzag([(d,) for d in range(3)], 2),
    "one special device": Layout(((0,), (1,), (0,), (2,), (0,))),
    "replicas": looping([(0, 2), (1,)], 2),
}


def random_times(seed: int, layout: Layout) -> ChainTimes:
    """Return times of all sizes; room for one micro-batch on every device, or for several."""
    draw, stages = random.Random(seed), len(layout.stages)
    some = [tuple(draw.choice((0.0, 0.5, 1.0, 2.0)) + draw.random() for _ in range(stages)) for _ in range(3)]
    apart = [layout.stages[s] != layout.stages[s + 1] for s in range(stages - 1)]
    links = [tuple(draw.choice((0.0, 0.3, 2.0)) if away else 0.0 for away in apart) for _ in range(2)]
    saved, kept = [tuple(draw.choice((1.0, 2.0, 3.0)) for _ in range(stages)) for _ in range(2)]
    alone = [alone_bytes(rank, layout, ChainTimes(*some, *links, saved, kept, ())) for rank in range(layout.ranks)]
    return ChainTimes(*some, *links, saved, kept, tuple(need * draw.choice((1.0, 1.5, 2.5)) for need in alone))


def alone_bytes(rank: int, layout: Layout, times: ChainTimes) -> float:
    """Return what one micro-batch keeps at most: all F, then I and W from the last stage to the first."""
    held = [s for s, ranks in enumerate(layout.stages) if rank in ranks]
    backward = [Compute(s, kind, 0) for s in reversed(held) for kind in "IW"]
    return peak_bytes([*(Compute(s, "F", 0) for s in held), *backward], times)


def test_stages_with_room_for_one_microbatch_run_1f1b_with_one_forward_first():
    layout = LAYOUTS["line"]
    order = order_of("greedy", layout=layout, microbatches=4, times=unit_times(layout, room=0.5))
    for s, line in enumerate(order):
        assert line == tuple(Compute(s, kind, m) for m in range(4) for kind in "FIW")


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_order_fits_is_proved_and_no_worse_than_what_is_published(layout):
    compared = 0
    for seed in range(8):
        times, m = random_times(seed, layout), random.Random(seed).randint(1, 7)
        order = order_of("greedy", layout=layout, microbatches=m, times=times)
        traffic = chain(len(layout.stages))
        verify(lower(order, layout=layout, sizes=(2,) * m, traffic=traffic))
        assert fits(order, times), (seed, m)
        seconds = chain_makespan(order, layout, times)
        for other in published_orders(layout, m, times):
            if fits(other, times):
                compared += 1
                assert seconds <= chain_makespan(other, layout, times) * (1 + 1e-9), (seed, m, other)
    assert compared


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_devices_with_less_room_than_one_microbatch_needs_keep_just_one(layout):
    times = replace(random_times(1, layout), room_bytes=(0.0,) * layout.ranks)
    order = order_of("greedy", layout=layout, microbatches=4, times=times)
    assert [peak_bytes(line, times) for line in order] == [alone_bytes(r, layout, times) for r in range(layout.ranks)]


def test_keep_limits_the_open_microbatches():
    """Also those that keep nothing."""
    for layout in LAYOUTS.values():
        times = unit_times(layout)
        nothing = replace(times, saved_bytes=(0.0,) * len(layout.stages))
        for keep, given in ((1, times), (2, nothing), ("3", times)):
            order = order_of("greedy", layout=layout, microbatches=6, options={"keep": keep}, times=given)
            assert most_open(order) <= int(keep)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 8), (4, 8)])
def test_a_v_takes_as_long_as_zb_v_in_the_memory_of_1f1b(p, m):
    """In unit time: makespan 6 m + p - 1 while 2 p chunks are kept."""
    layout = zigzag([(d,) for d in range(p)], 2)
    times = unit_times(layout, room=2 * p)
    order = order_of("greedy", layout=layout, microbatches=m, times=times)
    assert chain_makespan(order, layout, times) == 6 * m + p - 1


def test_less_room_costs_time():
    """Four devices, eight micro-batches; the least are 27, 27, 31 and 41, by the integer program."""
    layout = LAYOUTS["line"]
    taken = []
    for room in (math.inf, 4, 3, 2):
        times = unit_times(layout, room=room)
        taken.append(chain_makespan(order_of("greedy", layout=layout, microbatches=8, times=times), layout, times))
    assert taken == [27, 27, 32, 41]


@pytest.mark.parametrize("keep", [0, "much", "-1"])
def test_a_limit_that_cannot_be_meant_is_named(keep):
    with pytest.raises(ConfigError, match=f'found keep {keep!r}; expected "room" or a number of micro-batches'):
        order_of("greedy", layout=LAYOUTS["line"], microbatches=2, options={"keep": keep})
