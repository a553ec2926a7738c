"""Gradients of other ranks can be changed one by one, and are never mixed with real values in silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_pipe.errors import AbsentError
from lightning_pipe.strategy.parameters.gradient_stand_ins import GradientStandIn, show_gradient
from lightning_pipe.strategy.parameters.stand_ins import vacate

FACTOR = torch.tensor(0.5)
TOTAL = torch.zeros(())
EDITS: dict[str, Callable[[Any], Any]] = {
    "scaled": lambda p: p.grad.mul_(0.5),
    "halved": lambda p: p.grad.div_(2).mul_(FACTOR),
    "without data": lambda p: p.grad.data.mul_(2.0),
    "clamped": lambda p: p.grad.clamp_(-1, 1),
    "no numbers": lambda p: torch.nan_to_num(p.grad, out=None),
    "masked": lambda p: p.grad.mul_(torch.ones(3, 2)),
    "centred": lambda p: p.grad.sub_(p.grad.mean(dim=1, keepdim=True)),
    "by its own norm": lambda p: p.grad.div_(p.grad.abs().sum() + 1),
    "replaced": lambda p: setattr(p, "grad", p.grad.clamp(-1, 1) * 2 + p.grad.sign()),
    "where": lambda p: p.grad.copy_(torch.where(p.grad > 0, p.grad, 0 * p.grad)),
    "removed": lambda p: setattr(p, "grad", None),
    "clipped by value": lambda p: nn.utils.clip_grad_value_([p], 1.0),
    "all at once": lambda p: torch._foreach_mul_([p.grad], 0.5),
}
MIXES: dict[str, Callable[[Any], Any]] = {
    "sum": lambda p: TOTAL.add_(p.grad.sum()),
    "in place": lambda p: TOTAL.__iadd__(p.grad.pow(2).sum()),
    "real by absent": lambda p: torch._foreach_mul_([torch.ones(3)], p.grad.abs().max()),
    "number": lambda p: float(p.grad.abs().max()),
    "item": lambda p: p.grad.pow(2).sum().item(),
    "decision": lambda p: bool(torch.isfinite(p.grad).all()),
    "if": lambda p: 1 if p.grad.sum() > 0 else 0,
    "tensor of them": lambda p: torch.tensor([p.grad.sum()]),
    "other norm": lambda p: float(p.grad.norm(1)),
    "norm of rows": lambda p: float(p.grad.norm(dim=1).sum()),
    "after a change": lambda p: (p.grad.clamp_(-1, 1), float(p.grad.norm())),
    "a real gradient": lambda p: setattr(p, "grad", torch.ones(3, 2)),
    "list": lambda p: p.grad.tolist(),
    "numpy": lambda p: p.grad.cpu().numpy(),
    "out": lambda p: torch.add(p.grad, 1, out=torch.ones(3, 2)),
    "index": lambda p: torch.ones(3, 2).__setitem__(0, p.grad[0]),
}


def made(norm: float | None = 3.0) -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(3, 2))
    vacate(parameter, "weight", ranks=(1,), rank=0, device=torch.device("cpu"))
    show_gradient(parameter, None if norm is None else torch.tensor(norm))
    return parameter


@pytest.mark.parametrize("name", EDITS)
def test_a_gradient_may_be_changed_by_itself(name: str) -> None:
    parameter = made()
    EDITS[name](parameter)
    assert parameter.grad is None if name == "removed" else isinstance(parameter.grad, GradientStandIn)


@pytest.mark.parametrize("name", MIXES)
def test_a_gradient_is_not_mixed_with_what_is_real(name: str) -> None:
    with pytest.raises(AbsentError, match=r"gradient of the parameter weight|setting \.grad"):
        MIXES[name](made())
    assert TOTAL == 0


def test_a_norm_that_is_known_follows_factors() -> None:
    parameter = made()
    assert parameter.grad.shape == (3, 2) and parameter.grad.device.type == "cpu"
    assert float(parameter.grad.norm()) == float(parameter.grad.data.norm(2.0)) == 3.0
    parameter.grad.mul_(0.5)
    assert float(torch.linalg.vector_norm(parameter.grad)) == 1.5
    real = nn.Parameter(torch.ones(2))
    real.grad = torch.tensor([0.0, 2.0])
    assert float(nn.utils.clip_grad_norm_([real, parameter], 1.25)) == pytest.approx(2.5)
    assert float(real.grad.norm()) == pytest.approx(1.0)
    with pytest.raises(AbsentError, match="gradient of the parameter weight"):
        float(parameter.grad.norm())  # torch clips it by a factor without a value


def test_who_reads_later_what_was_computed_from_it_is_told_the_line_that_did() -> None:
    """Lightning reads what was logged, and no line of the user's was named."""
    computed = torch.cat([made().grad.flatten(), torch.zeros(2)]).std()
    with pytest.raises(AbsentError, match=r"\(computed at .*test_gradient_stand_ins.py:\d+ in test_who_reads_later"):
        float(computed)


def test_optimizers_pass_over_it() -> None:
    parameter = made()
    optimizer = torch.optim.AdamW([parameter])
    optimizer.step()
    optimizer.zero_grad()
    assert not optimizer.state
