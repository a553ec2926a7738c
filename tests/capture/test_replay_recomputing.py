"""Units that a plan has run again in the backward: the numbers of keeping all, and only where that is sure to be so."""

from __future__ import annotations

import random
from collections.abc import Callable

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from capture.test_replay_checkpoints import Block, Net, kept_and_numbers
from zoo.replaying import run_plainly, run_replayed, traced

WIDTH = 4
DRAWN: list[float] = []


class Steady(nn.Module):
    """A unit that can run again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return nn.functional.dropout(torch.tanh(x + self.weight), 0.5)


class Counts(Steady):
    """Returns something else every time."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls


class CountsElsewhere(Steady):
    """The same, where nobody looks."""

    def forward(self, x):
        DRAWN.append(0.0)
        return super().forward(x) * len(DRAWN)


class DrawsInPython(Steady):
    """Returns the same most times."""

    def forward(self, x):
        return super().forward(x) * (random.random() < 0.999)


class DrawsFromItsOwn(Steady):
    """Has a generator that nobody puts back."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = (torch.Generator().manual_seed(0),)

    def forward(self, x):
        return super().forward(x) + torch.rand(WIDTH, generator=self.draws[0])


class WritesToItsInput(Steady):
    def forward(self, x):
        return super().forward(x.mul_(0.5))


class Normed(Steady):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return super().forward(self.norm(x))


class ReadsItsParent(Steady):
    """Multiplies by what the step has told its parent."""

    def __init__(self) -> None:
        super().__init__()
        self.parents: list[Step] = []

    def forward(self, x):
        return super().forward(x) * self.parents[0].current


Tell = tuple[Callable[[float], float], Callable[[float], float]]


class Step(pl.LightningModule):
    """A unit of this kind between two layers.

    Args:
        kind: of the unit.
        tells: what the step makes of a number on the module, before and after the unit.
        writes: whether it writes to what the unit was given.
        reads: whether it reads that.
        hooked: whether the unit has a hook.
    """

    def __init__(
        self, kind: type[Steady], *, tells: Tell = (float, float), writes=False, reads=True, hooked=False
    ) -> None:
        super().__init__()
        self.first, self.unit, self.last = nn.Linear(WIDTH, WIDTH), kind(), nn.Linear(WIDTH, 1)
        self.writes, self.tells, self.reads, self.current = writes, tells, reads, 1.0
        if isinstance(self.unit, ReadsItsParent):
            self.unit.parents.append(self)
        if hooked:
            self.unit.register_forward_hook(lambda module, given, output: output * 2)

    def training_step(self, batch, batch_idx):
        x = self.first(batch[0])
        before, after = self.tells
        self.current = before(self.current)
        given = x.clone()
        y = self.unit(given)
        self.current = after(self.current)
        if self.writes:
            given.add_(1.0)
        return nn.functional.mse_loss(self.last(y + given.detach() if self.reads else y), batch[1])


def three(_: float) -> float:
    return 3.0


def one(_: float) -> float:
    return 1.0


def one_more(number: float) -> float:
    return number + 1.0


CASES = {
    "steady": (Steady, {}, True),
    "counts": (Counts, {}, False),
    "counts elsewhere": (CountsElsewhere, {}, False),
    "dice of Python": (DrawsInPython, {}, False),
    "a generator of its own": (DrawsFromItsOwn, {}, False),
    "writes to its input": (WritesToItsInput, {"reads": False}, False),
    "changes buffers": (Normed, {}, False),
    "reads its parent": (ReadsItsParent, {}, True),
    "is told for a moment": (ReadsItsParent, {"tells": (three, one)}, False),
    "is told afterwards": (ReadsItsParent, {"tells": (float, one_more)}, False),
    "is told before": (ReadsItsParent, {"tells": (one_more, float)}, False),
    "does not listen": (Steady, {"tells": (one_more, float)}, True),
    "its input is written to": (Steady, {"writes": True}, False),
    "has a hook": (Steady, {"hooked": True}, False),
}


@pytest.mark.parametrize("name", CASES)
def test_a_unit_runs_again_only_if_it_returns_the_same(name):
    kind, options, is_repeatable = CASES[name]
    torch.manual_seed(0)
    random.seed(0)
    found = traced(Step(kind, **options).train(), (torch.randn(6, WIDTH), torch.randn(6, 1)), (2, 2, 2), parts=1)
    units = {unit.path: unit for unit in found.trace.units}
    assert units["unit"].is_repeatable is is_repeatable
    if found.trace.is_random_in_python:
        return
    counts = kind in (Counts, CountsElsewhere, DrawsFromItsOwn) or one_more in options.get("tells", ())
    for cuts in ((), (1,), (2,)):
        kept, again = (
            run_replayed(found, ranks=len(cuts) + 1, schedule="gpipe", cuts=cuts, recompute=recompute)
            for recompute in (False, True)
        )
        torch.testing.assert_close(again, kept, rtol=0, atol=0)
        if not counts:  # micro-batches of a batch begin with the same state, and not in a plain run
            torch.testing.assert_close(kept, run_plainly(found), msg=lambda text, cuts=cuts: f"{cuts}: {text}")


def test_what_a_unit_writes_to_reaches_all_stages():
    """Glue on another stage read what had not been written to there, silently."""
    torch.manual_seed(0)
    found = traced(Step(WritesToItsInput).train(), (torch.randn(6, WIDTH), torch.randn(6, 1)), (2, 2, 2), parts=1)
    wanted = run_plainly(found)
    for cuts in ((), *((cut,) for cut in range(1, len(found.trace.units)))):
        got = run_replayed(found, ranks=len(cuts) + 1, schedule="gpipe", cuts=cuts)
        torch.testing.assert_close(got, wanted, msg=lambda text, cuts=cuts: f"{cuts}: {text}")


def test_units_that_run_again_keep_their_inputs(monkeypatch):
    most, numbers, _ = kept_and_numbers(None, monkeypatch)
    least, same, plain = kept_and_numbers(None, monkeypatch, recompute=True)
    assert least < 0.4 * most
    torch.testing.assert_close(same, numbers, rtol=0, atol=0)
    torch.testing.assert_close(plain, same)


def test_a_unit_with_dropout_draws_what_it_drew():
    torch.manual_seed(0)
    found = traced(Net(None).train(), (torch.randn(6, 64), torch.randn(6, 64)), (2, 2, 2), parts=4)
    assert any(isinstance(found.module.get_submodule(unit.path), Block) for unit in found.trace.units)
    assert all(unit.is_repeatable for unit in found.trace.units)
