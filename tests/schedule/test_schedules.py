"""Laws of schedules: the drawing in the docstring is what they do; bad options are named."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from benchmarks.closed_forms import Row, chain, program_of, run
from lightning_pipe.core.program import Compute, Layout, Order
from lightning_pipe.errors import ConfigError
from lightning_pipe.report.trace import draw
from lightning_pipe.schedule import SCHEDULES, order_of
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.orders.forward_only import forward_only
from lightning_pipe.schedule.orders.one_f_one_b import star_depths
from lightning_pipe.schedule.verification.verify import verify
from lightning_pipe.simulator import UnitPrices, simulate

FOUR = Layout(((0,), (1,), (2,), (3,)))
MERGED = ("gpipe", "1f1b")  # which take any layout


def drawing_of(function) -> list[str]:
    return re.findall(r"^ *(\d \|.*)$", function.__doc__, flags=re.MULTILINE)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_drawing_in_the_docstring_is_the_schedule(name):
    """One line per device; as many micro-batches as it shows."""
    drawing = drawing_of(SCHEDULES[name].order)
    shown = {int(m) for m in re.findall(r"\bF(\d+)|\d+F(\d+)", "\n".join(drawing)) for m in m if m}
    row = Row(name, len(drawing), 1 + max(shown))
    assert drawing == draw(run(row)).splitlines()


def test_the_drawing_in_the_docstring_is_forward_only():
    program = lower(forward_only(FOUR, 4), layout=FOUR, sizes=(1,) * 4, traffic=chain(4), training=False)
    assert drawing_of(forward_only) == draw(simulate(verify(program), UnitPrices())).splitlines()


@pytest.mark.parametrize("name", MERGED)
def test_every_stage_runs_every_microbatch_once_forward_and_once_backward(name):
    for layout in (FOUR, Layout(((0, 1), (2,))), Layout(((0,), (1,), (0,)))):
        for rank, computes in enumerate(order_of(name, layout=layout, microbatches=5)):
            stages = [s for s, ranks in enumerate(layout.stages) if rank in ranks]
            expected = {Compute(s, kind, m) for s in stages for kind in "FB" for m in range(5)}
            assert len(computes) == len(expected)
            assert set(computes) == expected


@pytest.mark.parametrize("m", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_number_of_microbatches_makes_a_program_that_is_proved(name, m):
    """Also fewer than stages, and numbers that do not divide; `verify` demands every pass once."""
    for p in (2, 4):
        for chunks in SCHEDULES[name].stages_per_device:
            program_of(Row(name, p, m, chunks))


def ascending(order: Order) -> bool:
    """Return whether every rank runs each kind of each stage in the order of the micro-batches."""
    last: dict[tuple[int, int, str], int] = {}
    for rank, line in enumerate(order):
        for compute in line:
            for kind in "IW" if compute.kind == "B" else compute.kind:
                if last.get((rank, compute.stage, kind), -1) >= compute.microbatch:
                    return False
                last[rank, compute.stage, kind] = compute.microbatch
    return True


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_kind_runs_in_the_order_of_the_microbatches(name):
    """So sums of gradients keep the order of one device, and running averages see the micro-batches in turn."""
    for p, m in ((2, 3), (4, 4), (4, 11)):
        assert ascending(Row(name, p, m).order), (p, m)


@pytest.mark.parametrize(
    ("warmup", "depths"),
    [
        ("pa", (4, 3, 2, 1)),
        ("pb", (7, 5, 3, 1)),
        ("1f1b*", (4, 3, 2, 1)),
        ("5,3,3,2", (5, 3, 3, 2)),
        (3, (3, 3, 3, 3)),
        ("3", (3, 3, 3, 3)),
    ],
)
def test_warmup_is_the_number_of_forwards_before_the_first_backward(warmup, depths):
    order = order_of("1f1b", layout=FOUR, microbatches=9, options={"warmup": warmup})
    assert tuple([c.kind for c in line].index("B") for line in order) == depths


def test_unit_star_depths_are_smaller_where_a_rank_holds_several_stages():
    """Ranks that hold two stages need two units per micro-batch, so two stages fit into one period."""
    order = order_of("1f1b", layout=Layout(((0,), (1,), (0,), (1,))), microbatches=6, options={"warmup": "1f1b*"})
    kinds = {s: [c.kind for c in order[s % 2] if c.stage == s] for s in range(4)}
    assert [kinds[s].index("B") for s in range(4)] == [2, 2, 1, 1]


@pytest.mark.parametrize(
    ("loads", "links", "period", "depths"),
    [
        ((12, 12), (3,), 12, (3, 1)),  # walked from the end: 12 | 3 | 12
        ((2, 2, 2), (0, 0), 2, (3, 2, 1)),
        ((3, 3, 3, 3), (4, 3, 3), 4, (7, 5, 3, 1)),
        ((18, 3, 6, 9), (0, 0, 0), 18, (2, 1, 1, 1)),
        ((0.1,) * 10, (0,) * 9, 1.0, (1,) * 10),
    ],
)
def test_star_depths_group_stages_and_links_that_fit_into_a_period(loads, links, period, depths):
    assert star_depths(loads, links=links, period=period) == depths


@pytest.mark.parametrize(
    ("schedule", "options", "message"),
    [
        ("1f1", {}, "found schedule='1f1'; did you mean '1f1b'. Expected one of gpipe, 1f1b"),
        ("gpipe", {"warmup": 1}, "no option 'warmup'; it has none"),
        (
            "1f1b",
            {"warm_up": 1},
            r"no option 'warm_up'; did you mean 'warmup'. Expected one of warmup \(defaults: warmup=pa\)",
        ),
        ("1f1b", {"warmup": "much"}, "found warmup 'much'; expected \"pa\""),
        ("1f1b", {"warmup": "3,2"}, "has 2 depths; the layout has 4 stages"),
        ("1f1b", {"warmup": [4, 3, 2, 1]}, r"found warmup \[4, 3, 2, 1\]; expected"),
        ("1f1b", {"warmup": 0}, "depth below 1"),
        ("1f1b", {"warmup": "2,3,1,1"}, "stage 1 wants 3 forwards first, stage 0 gives 2"),
    ],
)
def test_an_option_that_cannot_be_meant_is_named(schedule, options, message):
    with pytest.raises(ConfigError, match=message):
        order_of(schedule, layout=FOUR, microbatches=4, options=options)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_microbatches_are_refused(schedule):
    with pytest.raises(ConfigError, match="0 micro-batches"):
        Row(schedule, 4, 0).order  # noqa: B018 - it raises


def test_no_microbatches_are_refused_forward_only():
    with pytest.raises(ConfigError, match="0 micro-batches"):
        forward_only(FOUR, 0)


@pytest.mark.parametrize("stages", [((0,), (1,), (0,), (1,)), ((0,), (0,), (1,), (1,)), ((0, 1), (0, 2), (1,))])
def test_gpipe_runs_all_forwards_first_on_ranks_with_several_stages(stages):
    for line in order_of("gpipe", layout=Layout(stages), microbatches=5):
        kinds = [compute.kind for compute in line]
        assert kinds == sorted(kinds, reverse=True)


@pytest.mark.parametrize("schedule", MERGED)
def test_neighbouring_stages_on_a_rank_cost_one_weight_gradient_more_than_one_stage_of_both(schedule):
    """Four stages on two ranks, two each: W of the later stage delays the input gradient of the earlier one, once."""
    makespans = []
    for layout, weight in ((Layout(((0,), (0,), (1,), (1,))), 1.0), (Layout(((0,), (1,))), 2.0)):
        order = order_of(schedule, layout=layout, microbatches=12)
        program = lower(order, layout=layout, sizes=(1,) * 12, traffic=chain(len(layout.stages)))
        makespans.append(simulate(verify(program), UnitPrices(weight, weight, weight)).makespan)
    assert makespans[0] == makespans[1] + 1.0


@pytest.mark.parametrize("warmup", ["pa", "pb", "1f1b*"])
def test_looped_stages_on_two_ranks_keep_the_bubble_of_interleaving(warmup):
    """Idle with flush (p - 1)(tF + tI), with p = 2 ranks of two stages each."""
    layout = Layout(((0,), (1,), (0,), (1,)))
    order = order_of("1f1b", layout=layout, microbatches=12, options={"warmup": warmup})
    timeline = simulate(verify(lower(order, layout=layout, sizes=(1,) * 12, traffic=chain(4))), UnitPrices())
    assert timeline.idle_with_flush(0) == timeline.idle_with_flush(1) == 2.0


def test_orders_do_not_depend_on_the_number_of_replicas():
    sliced = replace(FOUR, stages=((0, 4), (1,), (2, 5, 6), (3,)))
    for name in MERGED:
        orders = order_of(name, layout=sliced, microbatches=6)
        plain = order_of(name, layout=FOUR, microbatches=6)
        assert all(orders[r] == plain[s] for s, ranks in enumerate(sliced.stages) for r in ranks)
