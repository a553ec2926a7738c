"""A pipeline trains as one device does, whatever its layout and schedule."""

from __future__ import annotations

import pytest

from ranks.world import World
from slow import slow_but
from strategy.fits import Case, assert_same, fit, fit_as_pipeline

ROUNDING = 1e-9  # float64: sums in another order, over some tens of steps

CASES = [  # the first three in every run
    Case("gpt_tied", {"layout": "1-1", "microbatches": 4}),
    Case("unet_skips", {"layout": "1-1-1", "microbatches": 4}),
    Case("dict_batch", {"layout": "2-1", "microbatches": 3}),
    Case("frozen", {"layout": "1-1", "microbatches": 4, "schedule": "gpipe"}),
    Case("gpt_tied", {"layout": "2-2", "microbatches": 2}),
    Case("seq2seq", {"layout": "1-2", "microbatches": 2, "schedule": "gpipe"}),
    Case("lstm", {"layout": "1-1", "microbatches": 2}),
    Case("custom_function", {"layout": "2-1", "microbatches": 2}),
    Case("parameter_groups", {"layout": "1-1-1", "microbatches": 8}, shuffle=True),
]


@pytest.mark.parametrize(
    "case",
    slow_but(CASES[:3], CASES),
    ids=lambda c: "-".join([c.name, *map(str, c.options.values())]),
)
def test_a_pipeline_trains_as_one_device_does(case: Case) -> None:
    ranks = sum(int(n) for n in case.options["layout"].split("-"))
    expected = fit(case)
    for found in World(ranks).run(fit_as_pipeline, case):
        assert_same(found, expected, rtol=ROUNDING)


PLAN = """\
stages:
- {at: '', ranks: [0, 1], weights: [3, 1]}
- {at: AT, ranks: [2]}
microbatches: 3
"""


def test_a_plan_with_replicas_in_unequal_parts_trains_as_one_device_does(tmp_path) -> None:
    """The last batch has 6 samples: micro-batches of 2, of which each replica takes one."""
    (tmp_path / "plan.yaml").write_text(PLAN.replace("AT", "head"))
    case = Case("dict_batch", {"plan": str(tmp_path / "plan.yaml")})
    expected = fit(case)
    for found in World(3).run(fit_as_pipeline, case):
        assert_same(found, expected, rtol=ROUNDING)
