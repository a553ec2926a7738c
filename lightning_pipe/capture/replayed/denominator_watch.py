"""Denominators of a replayed loss, watched to detect micro-batches that would be weighted wrongly.

A graph reads what it divides by from totals of the whole batch (`denominator_totals`). A replayed step runs as is, so
its micro-batches divide by their own counts. `Denominators` notes these, per call and relative to the number of
samples: where they are not the same for all micro-batches, the loss is not that of the whole batch.

    cross_entropy, nll_loss with reduction="mean"     weight of the valid targets
    loss / count                                      a single number without a gradient
    mean(), mse_loss and the like                     number of elements: of a selection it depends on the data

Nor does it know how losses of micro-batches make that of the batch: numbers have told for the first batch. So the calls
that decide it (`loss_calls`) are noted, too: one that was not there then is one of which numbers have told nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from lightning_pipe.capture.recording.loss_calls import loss_call
from lightning_pipe.capture.steps.hazards import user_line

_DIVISIONS = (torch.Tensor.__truediv__, torch.Tensor.div, torch.div, torch.true_divide, torch.Tensor.true_divide)
_MEANS = (torch.Tensor.mean, torch.mean)
_LOSSES = (
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
)
_SAME = 1e-6  # relative; shares are quotients of counts


@dataclass(frozen=True)
class Denominator:
    """What one call divides by: its number among those of the play, the user's line, and the value."""

    number: int
    line: str
    value: torch.Tensor
    samples: int


class Denominators(TorchFunctionMode):
    """Note what a play of some samples divides losses by.

    Args:
        samples: their number.
        sink: gets every denominator.
        calls: gets the first line of every kind of call that returns something with a gradient.
    """

    def __init__(self, samples: int, sink: Callable[[Denominator], None], calls: dict[str, str]) -> None:
        super().__init__()
        self._samples, self._sink, self._calls, self._count = samples, sink, calls, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a call, and look what it divides by."""
        kwargs = kwargs or {}
        value = None
        if func in (F.cross_entropy, F.nll_loss):
            value = _valid_weight(*args, **kwargs)
        elif func in _DIVISIONS and len(args) == 2:
            value = _divisor(*args)
        elif _is_mean(func, args, kwargs):
            value = _elements(args[0])
        if value is not None:
            self._sink(Denominator(self._count, user_line(2), value.detach(), self._samples))
            self._count += 1
        result = func(*args, **kwargs)
        kind = loss_call(getattr(func, "__name__", ""), args, kwargs)
        if kind not in self._calls and kind != "__get__" and _is_trained(result):
            self._calls[kind] = user_line(2)
        return result


def _is_trained(result: Any) -> bool:
    results = result if isinstance(result, tuple) else (result,)
    return any(isinstance(one, torch.Tensor) and one.requires_grad for one in results)


def _valid_weight(
    input: Any,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor | None:
    """Return what the mean of a cross entropy divides by, None if it is no mean over targets that are classes."""
    if reduction != "mean" or target.is_floating_point() or size_average is False or reduce is False:
        return None
    valid = target != ignore_index
    return valid.sum() if weight is None else (weight.detach().take(target * valid) * valid).sum()


def _divisor(loss: Any, count: Any) -> torch.Tensor | None:
    if not isinstance(loss, torch.Tensor) or not isinstance(count, torch.Tensor):
        return None
    is_loss = loss.requires_grad and loss.ndim == 0 and count.ndim == 0
    return count if is_loss and not count.requires_grad else None


def _is_mean(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if func in _MEANS:
        return len(args) == 1 and not kwargs.keys() & {"dim", "axis"}
    return func in _LOSSES and bool(args) and kwargs.get("reduction", "mean") == "mean"


def _elements(loss: Any) -> torch.Tensor | None:
    return torch.tensor(loss.numel()) if isinstance(loss, torch.Tensor) and loss.requires_grad else None


def unequal(found: Sequence[Denominator]) -> str:
    """Return the line of the first denominator that neither is the same for all plays nor grows with their samples."""
    by_call: dict[tuple[int, str], list[Denominator]] = defaultdict(list)
    for one in found:
        by_call[one.number, one.line].append(one)
    for (_, line), ones in by_call.items():
        values = [float(one.value) for one in ones]
        shares = [value / one.samples for value, one in zip(values, ones, strict=True)]
        if not _all_same(values) and not _all_same(shares):
            return line
    return ""


def _all_same(values: Sequence[float]) -> bool:
    return max(values) - min(values) <= _SAME * max(map(abs, values), default=0.0)
