"""Laws of fits that read stale or predicted weights: those of the recursion of every policy, whatever optimizes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from models.number_chain import MOMENTUM, RATE, Drains, recursion
from ranks.world import World
from strategy.test_versions import BATCHES, Chain, train

QUIET = {"limit_val_batches": 0}


class Cycling(Chain):
    """Adam at a rate that changes with every batch."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=RATE, weight_decay=0.0, fused=True)
        return [optimizer], [{"scheduler": one_cycle(optimizer), "interval": "step"}]


class Derived(torch.optim.SGD):
    """Another class, of which nobody knows what it does with its state."""


class Unknown(Chain):
    """An optimizer of the user's."""

    def configure_optimizers(self) -> Any:
        return Derived(self.parameters(), lr=RATE, momentum=MOMENTUM)


def one_cycle(optimizer: torch.optim.Optimizer) -> lr_scheduler.OneCycleLR:
    """Return the scheduler of a fit of one epoch."""
    return lr_scheduler.OneCycleLR(optimizer, max_lr=2 * RATE, total_steps=BATCHES, cycle_momentum=False)


def cycle() -> list[float]:
    """Return the rates of one epoch and some updates more, which are predicted but never made."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(()))], lr=RATE)
    scheduler, rates = one_cycle(optimizer), []
    for _ in range(BATCHES):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step() if len(rates) < BATCHES else None
    return rates


@pytest.mark.parametrize(
    ("policy", "count", "kind", "after", "options"),
    [
        ("spectrain", 1, Chain, (4, 7), QUIET),
        ("xpipe", 2, Unknown, (5,), QUIET),
        ("pb_lwpv", 1, Cycling, (), QUIET),
        ("pb_lwpd", 2, Chain, (), {"max_epochs": 2, "val_check_interval": 3}),
    ],
)
def test_losses_and_weights_are_those_of_the_recursion(
    policy: str, count: int, kind: type[Chain], after: tuple[int, ...], options: dict[str, Any], tmp_path: Path
) -> None:
    """At rates that are foreseen, with an optimizer that keeps no velocity, and where the pipeline is emptied."""
    rounds = options.get("max_epochs", 1) * BATCHES
    drains: Drains = dict.fromkeys(after, True) | dict.fromkeys(range(BATCHES - 1, rounds, BATCHES), False)
    rates = cycle()
    wanted, last = recursion(
        policy,
        2,
        count,
        rounds,
        drains,
        repeats=BATCHES * count,
        adam=kind is Cycling,
        rate=(lambda t: rates[t]) if kind is Cycling else lambda t: RATE,
        by_difference=kind is Unknown,
    )
    arguments = (policy, 2, count, tmp_path, after, options, False, kind(2))
    for losses, weights, steps in World(2).run(train, *arguments):
        assert losses == pytest.approx(wanted, abs=1e-9)
        assert weights == pytest.approx(last, abs=1e-9)
        assert steps == rounds


POLICIES = ["stale", "pipedream", "2bw", "spectrain", "xpipe", "pb", "pb_lwpv", "pb_lwpd"]
TABLE = [*itertools.product(POLICIES, ((), (3, 4, 8)))]


def train_all(stages: int, count: int, folder: Path) -> list[Any]:
    """Fit by all policies; a worker function."""
    return [train(policy, stages, count, folder, after, QUIET, False) for policy, after in TABLE]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_every_policy_trains_by_its_recursion(stages: int, count: int, tmp_path: Path) -> None:
    """With checkpoints, at which forwards in flight are given up, and without."""
    for fits in World(stages).run(train_all, stages, count, tmp_path, deadline_s=550.0):
        for (policy, after), (losses, weights, *_) in zip(TABLE, fits, strict=True):
            wanted, last = recursion(policy, stages, count, BATCHES, dict.fromkeys(after, True))
            assert losses == pytest.approx(wanted, abs=1e-9), (policy, after)
            assert weights == pytest.approx(last, abs=1e-9), (policy, after)
