"""Optimizer steps in parts: parameters whose gradients are summed step beside the sums of the others.

All sums are waited for first where something needs all gradients at once (a norm, a loss scale, a hook of the user), or
would see parameters of which some have stepped and some have not (hooks on the optimizer's step).
"""

from __future__ import annotations

from torch.optim import Optimizer

from lightning_pipe.capture.torch_private import is_step_watched
from lightning_pipe.lightning_names import Precision, is_overridden, pl
from lightning_pipe.lightning_package import name_in_use
from lightning_pipe.strategy.parameters.inner_optimizers import is_torchs


def can_step_in_parts(module: pl.LightningModule, plugin: Precision, optimizer: Optimizer) -> bool:
    """Return whether nothing of a fit keeps an optimizer from stepping some parameters before others, now.

    Args:
        module: the module that is trained; its hooks on gradients are looked at elsewhere.
        plugin: of the trainer.
        optimizer: the optimizer.
    """
    is_plain = type(plugin).__module__.startswith(name_in_use("pytorch") + ".")
    return (
        is_torchs(optimizer)
        and is_plain
        and getattr(plugin, "scaler", None) is None
        and not module.trainer.gradient_clip_val
        and not is_overridden("optimizer_step", module, pl.LightningModule)
        and not is_step_watched(optimizer)
    )
