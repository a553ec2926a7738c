"""Laws of 2BP that its closed form does not state."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from benchmarks.closed_forms import FUSED, Row, program_of, run
from lightning_pipe.core.program import Layout
from lightning_pipe.errors import ConfigError
from lightning_pipe.schedule import order_of
from lightning_pipe.schedule.construct.chain import chain
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.verification.verify import verify
from lightning_pipe.simulator import UnitPrices, simulate

BASES, DELAYS = ("gpipe", "1f1b"), ("end", "idle")
LAYOUTS = [
    Layout(((0,), (1,), (2,), (3,))),
    Layout(((0, 2), (1,))),
    Layout(((0,), (1,), (0,), (1,))),
    Layout(((0, 1), (2,)), whole=frozenset({0})),
    Layout(((0,), (0, 1), (1,)), weights=((1,), (3, 1), (1,))),
]


@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(map(str, layout.stages)))
def test_f_and_i_keep_the_order_of_the_base_and_the_program_is_proved(layout, base, delay):
    order = order_of("2bp", layout=layout, microbatches=5, options={"base": base, "delay": delay})
    for line, kept in zip(order, order_of(base, layout=layout, microbatches=5), strict=True):
        assert [c for c in line if c.kind != "W"] == [replace(c, kind="I") if c.kind == "B" else c for c in kept]
        assert [c.stage for c in line if c.kind == "W"] == [c.stage for c in line if c.kind == "I"]
    verify(lower(order, layout=layout, sizes=(4,) * 5, traffic=chain(len(layout.stages))))


@pytest.mark.parametrize("join", [1, 3, 16])
@pytest.mark.parametrize("base", BASES)
def test_all_w_at_the_end_save_a_weight_gradient_per_further_device(base, join):
    """Of a fused backward, in any times; for 1F1B with fewer micro-batches too, and for joined W that take as long."""
    draw = random.Random(0)
    for p, m in ((2, 2), (4, 3), (4, 4), (4, 8), (6, 12)):
        late, fused = (
            program_of(Row("2bp", p, m, options={"base": base, "join": join})),
            program_of(Row(base, p, m), split=False),
        )
        for _ in range(5):
            f, i, w = (draw.uniform(0.3, 3.0) for _ in range(3))
            times = [simulate(program, UnitPrices(f, i, w)).makespan for program in (fused, late)]
            assert times[0] - times[1] == pytest.approx((p - 1) * w), (p, m, f, i, w)


def test_it_takes_30_units_on_four_devices_as_early_release_does():
    assert run(Row("1f1b", 4, 8), FUSED).makespan == 33
    assert run(Row("1f1b", 4, 8)).makespan == run(Row("2bp", 4, 8)).makespan == 30


def test_filled_waits_reach_the_time_of_zb_h1_with_more_memory():
    for p, m in ((2, 3), (4, 8), (8, 16)):
        assert run(Row("2bp", p, m, options={"delay": "idle"})).makespan == run(Row("zb_h1", p, m)).makespan


@pytest.mark.parametrize("base", BASES)
def test_a_filled_wait_delays_nothing(base):
    for layout in LAYOUTS[:3]:
        makespans = []
        for delay in DELAYS:
            order = order_of("2bp", layout=layout, microbatches=7, options={"base": base, "delay": delay})
            program = lower(order, layout=layout, sizes=(4,) * 7, traffic=chain(len(layout.stages)))
            makespans.append(simulate(verify(program), UnitPrices()).makespan)
        assert makespans[1] <= makespans[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base": "zb_h1"}, "found base 'zb_h1'; expected \"gpipe\" or \"1f1b\""),
        ({"delay": 3}, "found delay 3; expected \"end\" or \"idle\""),
    ],
)  # fmt: skip
def test_an_option_that_cannot_be_meant_is_named(options, message):
    with pytest.raises(ConfigError, match=message):
        Row("2bp", 4, 4, options=options).order  # noqa: B018 - it raises
