"""The loss scale is read and changed where nobody waits for a device."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

from lightning_pipe.runtime.guard.watch import Unwatched
from lightning_pipe.strategy.gradients import loss_scale
from lightning_pipe.strategy.gradients.loss_scale import LossScale
from lightning_pipe.strategy.ranks.control_plane import ControlPlane

OVERFLOWS = (False, False, True, False, False, False, True, True, False)
ALONE = ControlPlane(None, rank=0, ranks=1, wait=Unwatched().wait)


def plugin_of() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3))


def plain_scales(scaler: torch.amp.GradScaler, steps: Sequence[bool]) -> list[float]:
    """Return the scale behind each step of torch's scaler alone, by whether gradients overflow in it."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer, scales = torch.optim.SGD([parameter], lr=0.0), list[float]()
    for overflows in steps:
        scaler.scale(torch.ones(()))
        parameter.grad = torch.full((2,), float("inf") if overflows else 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def test_a_step_reads_nothing_of_a_device_but_whether_gradients_are_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be read of the device "meta", so that whatever else were read would raise an error."""
    plugin, parameter = plugin_of(), nn.Parameter(torch.ones(2, device="meta"))
    optimizer, scaler, reads = torch.optim.SGD([parameter], lr=1.0), plugin.scaler, iter(OVERFLOWS)
    monkeypatch.setattr(loss_scale, "whether_overflowed", lambda scaler, optimizer: next(reads))
    scale = LossScale(plugin, ALONE)
    scale.install()
    scales = list[float]()
    for _ in OVERFLOWS:
        scaler.scale(torch.ones((), device="meta"))
        parameter.grad = torch.ones(2, device="meta")
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scale.factor)
    assert scales == plain_scales(plugin_of().scaler, OVERFLOWS) and next(reads, None) is None


def test_a_scaler_keeps_its_scale_and_its_count_when_a_fit_begins_and_ends() -> None:
    plugin = plugin_of()
    plain_scales(plugin.scaler, (True, False, False))
    state, scale = plugin.state_dict(), LossScale(plugin, ALONE)
    scale.install()
    assert plugin.state_dict() == state and scale.factor == 512.0 and state["_growth_tracker"] == 2
    plugin.load_state_dict({**state, "scale": 256.0, "_growth_tracker": 1})
    assert scale.factor == 256.0, "a checkpoint is loaded when a fit has begun"
    state = plugin.state_dict()
    scale.remove()
    assert plugin.state_dict() == state and "unscale_" not in vars(plugin.scaler)
    assert plugin.scaler.scale(torch.ones((), device="meta")).device.type == "meta"
    assert plugin.scaler._scale.device.type == "meta", "on the device of its losses again"
