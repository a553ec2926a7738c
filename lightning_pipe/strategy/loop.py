"""How does one batch become one optimizer step? As in Lightning, except that the program is forward and backward.

    1. on_before_zero_grad, optimizer_zero_grad     at the first batch of an accumulation
    2. training_step of the strategy                runs the program: loss and gradients
    3. on_before_backward, on_after_backward
    4. on_before_optimizer_step, clipping, step     by Lightning, unless gradients are accumulated further

Lightning does 1 after the training step; nothing else differs.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch.optim import Optimizer

from lightning_pipe.strategy.lightning_private import AutomaticOptimization, Closure


class PipelineOptimization(AutomaticOptimization):
    """Lightning's automatic optimization with gradients zeroed before the step that makes new ones."""

    def _make_closure(self, kwargs: OrderedDict[str, Any], optimizer: Optimizer, batch_idx: int) -> Closure:
        zero_gradients = self._make_zero_grad_fn(batch_idx, optimizer)
        step = self._make_step_fn(kwargs)

        def zero_then_step() -> Any:
            if zero_gradients is not None:
                zero_gradients()
            return step()

        return Closure(zero_then_step, backward_fn=self._make_backward_fn(optimizer))
