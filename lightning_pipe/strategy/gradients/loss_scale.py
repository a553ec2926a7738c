"""Loss scale of 16-bit training: one for all stages, and one answer to whether gradients are finite.

`precision="16-mixed"` multiplies the loss before the backward, so that small gradients do not vanish in float16. The
backward of a pipeline is part of its program, so the program's loss is weighted by the scale (`factor`). A rank divides
the gradients that it has and looks whether they are finite; all ranks hear whether any has found one that is not, so
that all skip the optimizer's step, and all change the scale, alike. After Micikevicius et al., ICLR 2018, section 3.2;
the scale and when it changes are those of torch's `GradScaler`.

The answer is the one thing that the host waits for in a step: the scaler keeps its scale on the host meanwhile, where
each rank reads it and changes it by that answer.
"""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from lightning_pipe.capture.torch_private import (
    keep_scale_beside_loss,
    keep_scale_on_host,
    set_whether_overflowed,
    whether_overflowed,
)
from lightning_pipe.lightning_names import MixedPrecision, Precision
from lightning_pipe.strategy.ranks.control_plane import ControlPlane


class LossScale:
    """The loss scale of a precision plug-in, if it has one.

    Args:
        plugin: of the trainer.
        control: to the other ranks.
    """

    def __init__(self, plugin: Precision, control: ControlPlane) -> None:
        scaler = plugin.scaler if isinstance(plugin, MixedPrecision) else None
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._control = control

    @property
    def factor(self) -> float:
        """Return the scale of the loss now, 1 without one."""
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())

    def install(self) -> None:
        """Let the gradients of an optimizer be finite on all ranks or on none, until `remove`."""
        if self._scaler is not None:
            keep_scale_on_host(self._scaler)
            vars(self._scaler)["unscale_"] = self._unscale

    def remove(self) -> None:
        """Give the scaler its own method back, and its scale to the device of its losses."""
        if self._scaler is not None:
            keep_scale_beside_loss(self._scaler)
            vars(self._scaler).pop("unscale_", None)

    def _unscale(self, optimizer: Optimizer) -> None:
        assert self._scaler is not None, "installed"
        type(self._scaler).unscale_(self._scaler, optimizer)
        overflowed = torch.tensor(float(whether_overflowed(self._scaler, optimizer)))
        ranks = self._control.sum(overflowed, what="whether all gradients are finite")
        set_whether_overflowed(self._scaler, optimizer, bool(ranks > 0))
