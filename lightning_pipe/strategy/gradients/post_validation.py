"""Post-validation: a rank steps before it knows the norm of all gradients, and checks it later.

Clipping by norm makes every rank wait for the last one before it may step, so a pipeline empties after every batch.
With post-validation a rank steps as if nothing had to be clipped, keeps what it needs to take the step back, and begins
the next batch. The norms of all ranks are summed meanwhile. Before its first backward of that batch each rank looks:

    norm < clip_val           the step was right; what was kept is dropped
    otherwise, or no number   all ranks take the step back, take it with clipped gradients, and begin the batch again

After Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 4; parameters are those of steps that wait. What is
kept are copies of parameters and optimizer state (any optimizer can be taken back), and the gradients themselves.

Where the last norm was clipped the next one is waited for, as it is for the last batch of an epoch or of the training:
all ranks decide that alike. Whoever reads weights between two steps calls `settle` first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_pipe.capture.torch_private import version_of
from lightning_pipe.errors import PipelineError
from lightning_pipe.runtime.waiting import Wait, Walk, drive
from lightning_pipe.strategy.gradients.grad_norm import Norms


@dataclass(frozen=True)
class _Gradient:
    """A gradient as it was when the optimizer stepped."""

    parameter: torch.Tensor
    content: torch.Tensor
    version: int

    @property
    def is_written(self) -> bool:
        return version_of(self.content) != self.version


class _Kept:
    """What is needed to take an optimizer step back, and to take it again.

    Args:
        optimizer: about to step.
        clip_val: largest norm of all gradients.
        norms: of these.
    """

    def __init__(self, optimizer: Optimizer, clip_val: float, norms: Norms) -> None:
        self.norms, self.clip_val, self._optimizer = norms, clip_val, optimizer
        here = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self._gradients = [_Gradient(p, p.grad, version_of(p.grad)) for p in here]
        self._parameters = [(p, p.detach().clone()) for p in here]
        self._state = {p: _copied(optimizer.state[p]) if p in optimizer.state else None for p in here}
        self._settings = _settings(optimizer)

    @property
    def bytes(self) -> int:
        """Return the bytes of the copies, and of the gradients."""
        state = [x for own in self._state.values() for x in (own or {}).values() if isinstance(x, torch.Tensor)]
        kept = [*(copy for _, copy in self._parameters), *(gradient.content for gradient in self._gradients), *state]
        return sum(tensor.nbytes for tensor in kept)

    def put_gradients_aside(self) -> None:
        """Take the gradients out of the parameters, so that zeroing them changes nothing here.

        Raises:
            PipelineError: if somebody has written into one.
        """
        if any(gradient.is_written for gradient in self._gradients):
            raise PipelineError(
                f"Something wrote into gradients after they were clipped: {type(self._optimizer).__name__}, or a hook "
                "after its step. With post_validation a step may have to be taken again with the same gradients. Set "
                "post_validation=False."
            )
        for gradient in self._gradients:
            if gradient.parameter.grad is gradient.content:
                gradient.parameter.grad = None

    def redo(self) -> None:
        """Take the step back, and take it again with clipped gradients."""
        now, current = _settings(self._optimizer), [(g.parameter, g.parameter.grad) for g in self._gradients]
        with torch.no_grad():
            for parameter, copy in self._parameters:
                parameter.copy_(copy)
        for parameter, state in self._state.items():
            self._optimizer.state.pop(parameter, None)
            if state is not None:
                self._optimizer.state[parameter] = state
        for gradient in self._gradients:
            gradient.parameter.grad = gradient.content
        parameters = [gradient.parameter for gradient in self._gradients]
        torch.nn.utils.clip_grads_with_norm_(parameters, self.clip_val, self.norms.total())
        _set(self._optimizer, self._settings)
        self._optimizer.step()
        _set(self._optimizer, now)
        for parameter, grad in current:
            parameter.grad = grad


class PostValidation:
    """The last optimizer step of one rank, while it is not known whether it was right.

    Args:
        wait: waits for a handle, with a deadline.
        is_last: says of the batch at hand whether no other follows soon, so that waiting costs nothing.

    Attributes:
        taken_back: how many steps were taken back.
    """

    def __init__(self, wait: Callable[[Wait], None], *, is_last: Callable[[], bool]) -> None:
        self._wait, self._is_last = wait, is_last
        self._kept: _Kept | None = None
        self._trusts = False
        self.taken_back = 0

    @property
    def bytes(self) -> int:
        """Return the bytes that are kept in order to take a step back."""
        return 0 if self._kept is None else self._kept.bytes

    @property
    def pending(self) -> bool:
        """Return whether the last step may still be wrong."""
        return self._kept is not None

    def goes_on(self, optimizer: Optimizer, clip_val: float, norms: Norms) -> bool:
        """Return whether the optimizer is to step with gradients as they are; if not, `norms` has been waited for."""
        if self._trusts and not self._is_last():
            self._kept = _Kept(optimizer, clip_val, norms)
            return True
        self._wait(norms.wait)
        self._trusts = norms.are_below(clip_val)
        return False

    def holds(self) -> Walk[bool]:
        """Wait until it is known whether the last step was right, and return it; if not, `redo` must follow."""
        if self._kept is not None:
            yield self._kept.norms.wait
            self._trusts = self._kept.norms.are_below(self._kept.clip_val)
            if self._trusts:
                self._kept = None
        return self._kept is None

    def redo(self) -> None:
        """Take the last step back, and take it again with clipped gradients."""
        assert self._kept is not None, "a step that was not right"
        self._kept.redo()
        self._kept = None
        self.taken_back += 1

    def settle(self) -> None:
        """Have the weights that steps which wait would have made."""
        if not drive(self.holds(), wait=self._wait):
            self.redo()

    def put_gradients_aside(self) -> None:
        """Keep the gradients of the last step from being zeroed."""
        if self._kept is not None:
            self._kept.put_gradients_aside()


def _copied(values: dict[str, Any]) -> dict[str, Any]:
    return {name: x.detach().clone() if isinstance(x, torch.Tensor) else x for name, x in values.items()}


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return what the groups say beside their parameters (learning rate, ...)."""
    return [_copied({name: x for name, x in group.items() if name != "params"}) for group in optimizer.param_groups]


def _set(optimizer: Optimizer, settings: list[dict[str, Any]]) -> None:
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        for name, x in own.items():
            if isinstance(x, torch.Tensor):
                group[name].copy_(x)  # a scheduler holds this very tensor
            else:
                group[name] = x
