"""Corrections of late gradients: weights are those of definitions, whatever optimizer steps, and rates come back."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_pipe.capture import Capture
from lightning_pipe.capture.steps.stage_program import Split
from lightning_pipe.errors import UnsupportedError
from lightning_pipe.runtime.weights.corrections import DISCREPANCY, Correction, annealed, spike_factors
from lightning_pipe.schedule.rounds import delays_of
from lightning_pipe.schedule.weights import POLICIES, VersionOptions
from models.number_chain import LATE, MOMENTUM, Numbers, late_recursion
from runtime.test_versions import captured, chain_fit

__all__ = ["captured"]  # the fixture
Captured = Callable[[int], tuple[Capture, Split]]


@pytest.mark.parametrize(("decay", "anneal"), [(0.0, 0), (0.0, 7), (0.3, 7)])
def test_pipemare_trains_by_its_recursion_with_and_without_its_techniques(
    decay: float, anneal: int, captured: Captured
) -> None:
    """T1 reduces rates until K steps are over, T2 corrects what backwards read."""
    for stages, count in ((2, 1), (3, 2), (4, 1), (4, 4)):
        modules = [Numbers(stages) for _ in range(stages)]
        options = VersionOptions(anneal=anneal, decay=decay)
        losses = chain_fit(captured(stages), modules, "pipemare", count, options=options).run(12, {5: True})
        late = replace(LATE["pipemare"], anneal=anneal, decay=decay)
        wanted, last = late_recursion(late, stages, count, 12, {5: True})
        assert losses == pytest.approx(wanted, abs=1e-12)
        assert [float(module.w[r].detach()) for r, module in enumerate(modules)] == pytest.approx(last, abs=1e-12)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "fused SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "fused Adam": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "foreach AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "Adam with a tensor as rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), foreach=False),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
}


def _stepped(
    name: str, correction: Callable[[torch.optim.Optimizer], Correction] | None, factor: float = 1.0
) -> tuple[list[torch.Tensor], torch.optim.Optimizer, Any]:
    """Take five steps, and return the weights after each; a learning rate is multiplied by a factor."""
    torch.manual_seed(0)
    w = torch.nn.Parameter(torch.randn(3, dtype=torch.float64))
    optimizer = OPTIMIZERS[name]([w])
    made, seen = None if correction is None else correction(optimizer), [w.detach().clone()]
    before = optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] * factor
    for _ in range(5):
        w.grad = torch.randn(3, dtype=torch.float64)
        if made is not None:
            made.begin()
        optimizer.step()
        if made is not None:
            made.end()
            assert optimizer.param_groups[0]["lr"] is before
        seen.append(w.detach().clone())
    return seen, optimizer, w


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_stage_steps_with_its_rate_and_keeps_the_mean_of_its_differences(name: str) -> None:
    """Whatever optimizer of torch steps, in one pass or in many; its state begins empty, and the rate comes back."""
    seen, optimizer, w = _stepped(
        name, lambda o: Correction(o, "discrepancy", anneal=10**9, decay=0.2, delay=3.0, is_ahead=True)
    )
    wanted, _, _ = _stepped(name, None, factor=1 / 3)
    torch.testing.assert_close(torch.stack(seen), torch.stack(wanted), rtol=0, atol=1e-8)
    delta, gamma = torch.zeros(3, dtype=torch.float64), 0.2 ** (1 / 3)
    for old, new in itertools.pairwise(seen):
        delta = gamma * delta + (1 - gamma) * (new - old)
    torch.testing.assert_close(optimizer.state[w][DISCREPANCY], delta, rtol=0, atol=1e-12)


def test_compensated_steps_are_those_of_the_paper() -> None:
    """With weight decay too; without delay it is plain SGD."""
    for late in (0.0, 1.5, 4.0):
        torch.manual_seed(0)
        w = torch.nn.Parameter(torch.randn(4, dtype=torch.float64))
        optimizer = torch.optim.SGD([w], lr=0.1, momentum=0.9, weight_decay=0.01)
        correction = Correction(optimizer, "spike", delay=late, is_ahead=True)
        old, v = w.detach().clone(), torch.zeros(4, dtype=torch.float64)
        for _ in range(4):
            w.grad = torch.randn(4, dtype=torch.float64)
            g = w.grad + 0.01 * old
            v = 0.9 * v + g
            old = old - 0.1 * (0.9**late * v + (1 - 0.9**late) / (1 - 0.9) * g)
            correction.begin()
            optimizer.step()
            correction.end()
            torch.testing.assert_close(w.detach(), old, rtol=0, atol=1e-12)


def test_a_step_that_is_not_taken_changes_nothing() -> None:
    """A gradient scaler passes over steps whose gradients are not finite: rates come back, no spike is compensated."""
    w = torch.nn.Parameter(torch.ones(2))
    for optimizer in (torch.optim.Adam([w], lr=0.1), torch.optim.SGD([w], lr=0.1, momentum=0.9)):
        kind = "spike" if isinstance(optimizer, torch.optim.SGD) else "discrepancy"
        correction = Correction(optimizer, kind, anneal=9, decay=0.5, delay=2.0, is_ahead=True)
        w.grad = torch.full((2,), torch.inf)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        scaler.scale(torch.zeros(()))
        scaler.unscale_(optimizer)
        correction.begin()
        scaler.step(optimizer)
        correction.end()
        assert w.tolist() == [1.0, 1.0] and correction.updates == 0
        assert optimizer.param_groups[0]["lr"] == 0.1 and not optimizer.state[w]


def test_rates_are_those_of_the_user_after_annealing_and_never_above_them() -> None:
    for late in (0.25, 1.0, 7.0):
        factors = [annealed(late, k, 8) for k in range(12)]
        assert factors[0] == 1 / max(1.0, late) and factors == sorted(factors) and factors[8:] == [1.0] * 4
    assert annealed(7.0, 0, 0) == 1.0 and spike_factors(MOMENTUM, 0.0) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("stale", lambda p, t: [-(-(p - 1 - s) // t) for s in range(p)]),
        ("pb", lambda p, t: [-(-2 * (p - 1 - s) // t) for s in range(p)]),
        ("pipedream", lambda p, t: [-(-(p - 1 - s) // t) for s in range(p)]),
        ("2bw", lambda p, t: [1] * p),
        ("pipedream_vertical", lambda p, t: [-(-(p - 1) // t)] * p),
        ("pipemare", lambda p, t: [-(-(2 * (p - 1 - s) + 1) // t) for s in range(p)]),
    ],
)
def test_delays_are_counted_from_programs(name: str, wanted: Callable[[int, int], list[int]]) -> None:
    for stages in (2, 3, 4):
        for batch in (1, 2, 4):
            if name != "2bw" or batch >= stages - 1:
                assert delays_of(POLICIES[name], stages, batch) == tuple(wanted(stages, batch))


def test_weights_are_copied_where_somebody_will_read_them_and_nowhere_else(captured: Captured) -> None:
    """With vertical sync a stage keeps what micro-batches will read that have entered, and what backwards read."""
    cases = [("pipedream_vertical", 4, 1, [0, 3, 3, 3]), ("pipedream_vertical", 3, 4, [0, 1, 1])]
    cases += [(name, 3, 2, [0, 0, 0]) for name in ("pb_sc", "timeprest")]
    cases.append(("pipemare", 3, 2, [0, 1, 1]))  # what is corrected; the first reads no weight in its backward
    for name, stages, count, wanted in cases:
        fit = chain_fit(captured(stages), [Numbers(stages) for _ in range(stages)], name, count)
        fit.run(20, {})
        buffers = [e.versions._buffers.values() for e in fit.executors]
        assert [sum(len(x) for names in of_rank for x in names.values()) for of_rank in buffers] == wanted


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.Adam([torch.zeros(1)]),
        torch.optim.SGD([torch.zeros(1)], lr=1.0),
        torch.optim.SGD([torch.zeros(1)], lr=1.0, momentum=0.9, nesterov=True),
        torch.optim.SGD([torch.zeros(1)], lr=1.0, momentum=0.9, maximize=True),
        torch.optim.SGD([{"params": [torch.zeros(1)]}, {"params": [torch.zeros(1)], "momentum": 0.0}], 1.0, 0.9),
    ],
)
def test_spikes_of_another_momentum_are_not_compensated(optimizer: torch.optim.Optimizer) -> None:
    with pytest.raises(UnsupportedError, match=f"found {type(optimizer).__name__}; spike compensation"):
        Correction(optimizer, "spike")
