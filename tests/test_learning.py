"""Laws of the learning benchmark: its optimizers are their formulas, and a finished run is not run again."""

from __future__ import annotations

import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import learning
from benchmarks.demo import example
from benchmarks.learning import OPTIMIZERS, Run, delays, do_runs, finished, table

ROOT = Path(__file__).parent.parent
BasisRotation = example("10_basis_rotation").BasisRotation
STEPS, LR, DECAY, EPS = 25, 0.1, 0.01, 1e-8


def gradients(*shape: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(STEPS)]


def stepped(optimizer: torch.optim.Optimizer, grads: list[torch.Tensor]) -> torch.Tensor:
    """Return the optimizer's only parameter after a step by each gradient."""
    (parameter,) = optimizer.param_groups[0]["params"]
    for grad in grads:
        parameter.grad = grad.clone()
        optimizer.step()
    return parameter.detach().clone()


def parameter(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(shape, dtype=torch.float64))


def test_nadam_is_nesterovs_answer_to_delay() -> None:
    """The late gradient counts by 1 - mu, the step ahead along the momentum by the next mu."""
    w, m, v, product = parameter(3).detach(), torch.zeros(3).double(), torch.zeros(3).double(), 1.0
    for t, g in enumerate(gradients(3), start=1):
        mu, following = (0.99 * (1 - 0.5 * 0.96 ** (0.004 * k)) for k in (t, t + 1))
        product *= mu
        m, v = 0.99 * m + 0.01 * g, 0.999 * v + 0.001 * g**2
        root = (v / (1 - 0.999**t)).sqrt() + EPS
        w = (1 - LR * DECAY) * w
        w = w - LR * (1 - mu) / (1 - product) * g / root - LR * following / (1 - product * following) * m / root
    found = stepped(OPTIMIZERS["nesterov"][0]([parameter(3)], lr=LR), gradients(3))
    assert torch.allclose(found, w, rtol=1e-5, atol=0)  # torch keeps the product of mu in float32


@pytest.mark.parametrize(("shape", "options"), [((4, 6), {"largest_side": 0}), ((6,), {}), ((2, 3, 4), {})])
def test_basis_rotation_without_bases_is_adamw(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    grads = gradients(*shape)
    adamw = torch.optim.AdamW([parameter(*shape)], lr=LR, weight_decay=DECAY, eps=EPS)
    rotation = BasisRotation([parameter(*shape)], lr=LR, weight_decay=DECAY, eps=EPS, **options)
    assert torch.allclose(stepped(rotation, grads), stepped(adamw, grads), rtol=1e-12, atol=0)


def by_falling_spread(covariance: torch.Tensor, basis: torch.Tensor) -> list[int]:
    spread = [float(column @ covariance @ column) for column in basis.T]
    return sorted(range(len(spread)), key=lambda k: -spread[k])


@pytest.mark.parametrize(("shape", "largest_side"), [((5, 5), 1024), ((4, 6), 4)])
def test_basis_rotation_is_its_formula(shape: tuple[int, int], largest_side: int) -> None:
    """Adam between U and V, which turn every tenth step; v goes with the order of their columns."""
    b1, b2, w = 0.9, 0.999, parameter(*shape).detach()
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    covariances, bases = ([torch.zeros(side, side).double() for side in shape] for _ in range(2))
    for t, g in enumerate(gradients(*shape), start=1):
        for side, rows in enumerate((g, g.T)):
            covariances[side] = b2 * covariances[side] + (1 - b2) * rows @ rows.T
            if len(rows) > largest_side:
                bases[side] = torch.eye(len(rows)).double()
            elif t == 1:
                bases[side] = torch.linalg.svd(covariances[side]).U
            elif t in (11, 21):
                order = by_falling_spread(covariances[side], bases[side])
                v = v[:, order] if side else v[order]
                bases[side] = torch.linalg.qr(covariances[side] @ bases[side][:, order]).Q
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * (bases[0].T @ g @ bases[1]) ** 2
        rotated = (bases[0].T @ m @ bases[1]) / ((v / (1 - b2**t)).sqrt() + EPS)
        w = (1 - LR * DECAY) * w - LR / (1 - b1**t) * bases[0] @ rotated @ bases[1].T
    rotation = BasisRotation([parameter(*shape)], lr=LR, weight_decay=DECAY, eps=EPS, largest_side=largest_side)
    rounding = 1e-7  # the first rotated gradient is diagonal: what rounding leaves beside it is divided by eps
    assert torch.allclose(stepped(rotation, gradients(*shape)), w, rtol=0, atol=rounding)


def test_the_state_of_basis_rotation_goes_on_where_it_was_saved() -> None:
    grads = gradients(4, 6)
    first = BasisRotation([parameter(4, 6)], lr=LR)
    resumed = BasisRotation([torch.nn.Parameter(stepped(first, grads[:15]))], lr=1.0)
    resumed.load_state_dict(deepcopy(first.state_dict()))
    assert torch.equal(stepped(resumed, grads[15:]), stepped(first, grads[15:]))


def test_delays_are_updates_by_stage() -> None:
    assert delays("pipedream+nesterov", 1) == (3, 2, 1, 0)
    assert delays("pipedream", 4) == (1, 1, 1, 0)
    assert delays("2bw", 4) == (1, 1, 1, 1)
    assert delays("sync", 1) == (0, 0, 0, 0)


def test_an_interrupt_loses_the_run_at_hand_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that fails is told and tried again by the next call; those of other options are others."""
    file, started = tmp_path / "runs.jsonl", list[Run]()
    runs = [Run(policy, seed, 2, 4, 0.1) for seed in range(2) for policy in ("sync", "2bw")]

    def run_ranks(ranks: int, train: Any, run: Run, *, deadline_s: float) -> list[tuple[float, float]]:
        started.append(run)
        if len(started) == 2:
            raise RuntimeError("rank 0 failed:\nTraceback\nPlanError: refused")
        if len(started) == 3:
            raise KeyboardInterrupt
        return [(float(len(started)), 1.0)] * ranks

    monkeypatch.setattr(learning, "run_ranks", run_ranks)
    with pytest.raises(KeyboardInterrupt):
        do_runs(runs, file)
    assert do_runs(runs, file) == [] and started == [*runs[:3], *runs[1:]]
    assert [finished(file)[run].val_loss for run in runs] == [1.0, 4.0, 5.0, 6.0]
    assert Run("sync", 0, 3, 4, 0.1) not in finished(file)
    rows = table([finished(file)[run] for run in runs]).splitlines()
    assert [row.split(" | ")[3:5] for row in sorted(rows[2:])] == [
        ["5.000 (4.000 to 6.000, 2 seeds)", "+2.000"],
        ["3.000 (1.000 to 5.000, 2 seeds)", ""],
    ]


@pytest.mark.slow
def test_rows_train_and_are_not_trained_again(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.learning", "--policies", "sync", "pipedream+rotation", "--seeds", "1"]
    command += ["--steps", "2", "--results", str(tmp_path / "runs.jsonl")]
    first, second = (
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
        for _ in range(2)
    )
    assert len(first) == 6 and second == first[2:]
