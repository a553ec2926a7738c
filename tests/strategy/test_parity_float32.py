"""Twenty steps in float32 under the trainer: losses and parameters of a pipeline are those of `Trainer(devices=1)`.

One layout per module, two of them in the suite; tests/parity has the whole matrix on one process, and test_parity the
same modules in float64. Batch norm is compared there, with
accumulation.
"""

from __future__ import annotations

import pytest
import torch

from ranks.world import World
from slow import slow_but
from strategy.fits import Case, assert_same, fit, fit_as_pipeline

TOLERANCE = 1e-5
CASES = [
    Case(
        name,
        {"layout": layout, "schedule": schedule, "microbatches": microbatches},
        {"max_steps": 20, "limit_val_batches": 0},
        7,
        dtype=torch.float32,
    )
    for name, layout, schedule, microbatches in [
        ("gpt_tied", "2-1", "1f1b", 2),
        ("unet_skips", "1-2", "gpipe", 2),
        ("seq2seq", "1-1", "1f1b", 4),
        ("dict_batch", "1-1-1", "gpipe", 4),
        ("frozen", "2-2", "1f1b", 2),
        ("lstm", "1-1-1", "1f1b", 3),
        ("custom_function", "1-2", "1f1b", 4),
        ("parameter_groups", "2-1", "gpipe", 3),
    ]
]


IN_THE_SUITE = ("unet_skips", "dict_batch")


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    "case",
    slow_but([case for case in CASES if case.name in IN_THE_SUITE], CASES),
    ids=lambda c: "-".join([c.name, *map(str, c.options.values())]),
)
def test_twenty_steps_in_float32_are_those_of_one_device(case: Case) -> None:
    ranks = sum(int(n) for n in case.options["layout"].split("-"))
    expected = fit(case)
    assert len(expected.losses) == 20
    for found in World(ranks).run(fit_as_pipeline, case):
        assert_same(found, expected, rtol=TOLERANCE)
