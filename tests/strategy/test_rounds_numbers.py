"""Batches ahead read the numbers of their own turn: as delayed gradients on one device, or as without versions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ranks.world import World
from strategy.reading_steps import CHANGING, LEFT, RANDOM, SELDOM, Reads, any_reads, delayed, fit

OWN = [
    Reads((("batch_idx", "data"),)),
    Reads((("global_step", "between"), ("epoch", "loss"))),
    Reads((("counter", "data"), ("state", "data")), microbatches=1),
    Reads((("seldom_buffer", "data"), ("counter", "data"))),
    Reads((("global_step", "data"),), "2bw"),
    Reads((("left", "data"), ("seen", "between"))),
    Reads((("end", "data"),)),
    Reads((("global_step", "data"),), trainer=(("accumulate_grad_batches", 3),)),
    Reads((("dropout", "data"), ("batch_idx", "data")), rate=0.0),
    Reads((("start", "data"),), "2bw"),
    Reads((("buffer", "data"), ("counter", "between"))),
    Reads((("flag", "data"),)),
    Reads((("rate", "data"), ("global_step", "data"))),
    Reads((("drawn", "loss"), ("drawn", "data")), rate=0.0),
    Reads((("always", "data"), ("batch_idx", "loss")), trainer=(("val_check_interval", 3),)),
    Reads((("reset", "data"),)),
    Reads((("seldom", "data"), ("epoch", "between")), "2bw", 1, (("val_check_interval", 3),)),
]
FEW = OWN[:6]


@pytest.mark.parametrize(
    "steps",
    [FEW, pytest.param([*OWN[6:], *map(any_reads, range(15))], marks=pytest.mark.slow)],
    ids=["few", "many"],
)
def test_every_batch_has_the_numbers_of_its_turn(steps: list[Reads], tmp_path: Path) -> None:
    """Where nothing was random, delayed gradients on one device; at a rate of zero, what a flushed pipeline gives."""
    policies = [reads.policy for reads in steps]
    synchronous = ["sync" if not reads.rate else reads.policy for reads in steps]
    by_rounds = World(2).run(fit, steps, policies, tmp_path, deadline_s=300)
    flushed = World(2).run(fit, [r for r in steps if not r.rate], ["sync"] * synchronous.count("sync"), tmp_path)
    others = iter(zip(*flushed, strict=True))
    for reads, *ranks in zip(steps, *by_rounds, strict=True):
        wanted = delayed(reads, ranks[0].ahead) if reads.rate else next(others)[0]
        for found in ranks:
            assert found.losses == pytest.approx(wanted.losses, abs=1e-9), reads
            for name, parameter in found.parameters.items():
                torch.testing.assert_close(parameter, wanted.parameters[name], atol=1e-9, rtol=1e-9)
        told, ahead = ranks[0].warnings, ranks[0].ahead
        if reads.names & {*CHANGING, "always"} or (
            reads.policy == "2bw" and dict(reads.trainer).get("accumulate_grad_batches")
        ):
            assert len(told) == 1 and not any(ahead[4:]), reads
        elif not reads.names & {*SELDOM}:
            assert not told and sum(ahead) >= (10 if reads.names & {*LEFT} else 12), reads
        assert reads.names & {*RANDOM} == set() or not reads.rate
