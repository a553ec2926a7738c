"""Training loop of one batch: one optimizer step as in Lightning, with the program as forward and backward.

    1. on_before_zero_grad, optimizer_zero_grad     at the first batch of an accumulation
    2. training_step of the strategy                runs the program: loss and gradients
    3. on_before_backward, on_after_backward
    4. on_before_optimizer_step, clipping, step     by Lightning, unless gradients are accumulated further

Lightning does 1 after the training step; nothing else differs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.optim import Optimizer

from lightning_pipe.lightning_names import pl
from lightning_pipe.strategy.lightning_private import AutomaticOptimization, Closure, call_strategy_hook


class PipelineOptimization(AutomaticOptimization):
    """Lightning's automatic optimization with gradients zeroed before the step that makes new ones.

    Args:
        trainer: the trainer.
        before_zeroing: called before the optimizer zeroes gradients.
        around_hooks, around_zeroing: what hooks before that, and that itself, run inside.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        *,
        before_zeroing: Callable[[], None],
        around_hooks: Callable[[], AbstractContextManager[None]] = nullcontext,
        around_zeroing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        super().__init__(trainer)
        self._before_zeroing = before_zeroing
        self._around_hooks, self._around_zeroing = around_hooks, around_zeroing

    def _optimizer_zero_grad(self, batch_idx: int, optimizer: Optimizer) -> None:
        with self._around_zeroing():
            self._before_zeroing()
            super()._optimizer_zero_grad(batch_idx, optimizer)

    def _training_step(self, kwargs: OrderedDict[str, Any]) -> Any:
        """Run the step; where it returns None all ranks skip the batch, as one device does."""
        output = call_strategy_hook(self.trainer, "training_step", *kwargs.values())
        self.trainer.strategy.post_training_step()
        return self.output_result_cls.from_training_step_output(output, self.trainer.accumulate_grad_batches)

    def _make_closure(self, kwargs: OrderedDict[str, Any], optimizer: Optimizer, batch_idx: int) -> Closure:
        zero_gradients = self._make_zero_grad_fn(batch_idx, optimizer)
        step = self._make_step_fn(kwargs)

        def zero_then_step() -> Any:
            if zero_gradients is not None:
                with self._around_hooks():
                    zero_gradients()
            return step()

        return Closure(zero_then_step, backward_fn=self._make_backward_fn(optimizer))
