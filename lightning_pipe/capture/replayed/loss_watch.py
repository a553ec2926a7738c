"""How a replayed step makes its loss, watched to detect micro-batches that would be weighted wrongly.

A graph reads what it divides by from totals of the whole batch (`denominator_totals`). A replayed step runs as is, so
its micro-batches divide by their own counts. `LossWatch` notes these, per call and relative to the number of samples:
where they are not the same for all micro-batches, the loss is not that of the whole batch.

    cross_entropy, nll_loss with reduction="mean"     weight of the valid targets
    loss / count                                      a single number without a gradient
    mean(), mse_loss and the like                     number of elements: of a selection it depends on the data

Nor does it know how losses of micro-batches make that of the batch: numbers have told for the first batch. So the calls
that decide it (`loss_calls`) are noted, too: one that was not there then is one of which numbers have told nothing. And
where a single number is bent, it is noted on which side of the bend it lies: numbers have told for one side.

    abs(), clamp(), relu(), maximum(), where()        which argument the result is, or lies above or below of
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from lightning_pipe.capture.python.users_code import is_ours
from lightning_pipe.capture.recording.unit_loss import loss_call
from lightning_pipe.capture.steps.hazards import user_line
from lightning_pipe.capture.steps.record import Bend, Denominator, LossNotes

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
_BENDS = frozenset(
    "abs absolute __abs__ clamp clamp_ clip clamp_min clamp_max relu leaky_relu hardtanh threshold maximum minimum "
    "fmax fmin max min where nan_to_num".split()
)
_SAME = 1e-6  # relative; shares are quotients of counts


def unequal_denominators(plays: Iterable[tuple[int, LossNotes]]) -> list[str]:
    """Return the lines of the denominators that neither are the same for all plays nor grow with their samples.

    Args:
        plays: samples of every play of a batch, and how it made its loss.
    """
    by_call: dict[tuple[int, str], list[tuple[float, int]]] = defaultdict(list)
    for samples, notes in plays:
        for number, one in enumerate(notes.denominators):
            by_call[number, one.line].append((float(one.value), samples))
    found: dict[str, None] = {}
    for (_, line), ones in by_call.items():
        values, shares = [value for value, _ in ones], [value / samples for value, samples in ones]
        if not _all_same(values) and not _all_same(shares):
            found[line] = None
    return list(found)


def unlike_bend(plays: Iterable[LossNotes]) -> str:
    """Return the line of the first call that bends a number of one play and not of another.

    A line that runs several times in a play is left out: its numbers may be those of single samples.
    """
    by_line: dict[str, list[tuple[int, torch.Tensor]]] = defaultdict(list)
    for number, notes in enumerate(plays):
        for one in notes.bends:
            by_line[one.line].append((number, one.side))
    for line, ones in by_line.items():
        is_single = len({number for number, _ in ones}) == len(ones)
        if is_single and any(not torch.equal(side, ones[0][1]) for _, side in ones):
            return line
    return ""


class LossWatch(TorchFunctionMode):
    """Note how a play of some samples makes its loss.

    Args:
        samples: their number.
        notes: of this play.
        calls: of all plays of the batch: the first line of every kind of call that returns something with a gradient.
    """

    def __init__(self, samples: int, notes: LossNotes, calls: dict[str, str]) -> None:
        super().__init__()
        self._samples, self._notes, self._calls = samples, notes, calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a call, and look what it divides by, and what it bends."""
        kwargs = kwargs or {}
        value, notes = None, self._notes
        if func in (F.cross_entropy, F.nll_loss):
            value = _valid_weight(*args, **kwargs)
        elif func in _DIVISIONS and len(args) == 2:
            value = _divisor(*args)
        elif _is_mean(func, args, kwargs):
            value = _elements(args[0])
        result = func(*args, **kwargs)
        if value is not None and _is_trained(result):
            notes.denominators.append(Denominator(user_line(2), value.detach()))
        name = getattr(func, "__name__", "")
        kind = loss_call(name, args, kwargs)
        is_users = not is_ours(sys._getframe(1).f_code.co_filename)  # this package gives units their inputs
        if kind not in self._calls and kind != "__get__" and is_users and _is_trained(result):
            self._calls[kind] = user_line(2)
        if name in _BENDS and self._samples > 1 and (side := _side(result, args, kwargs)) is not None:
            notes.bends.append(Bend(user_line(2), side))
        return result


def _side(result: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return whether a single number with a gradient lies above, below or at each of those that it was made of."""
    if not isinstance(result, torch.Tensor) or result.ndim > 0 or not result.requires_grad:
        return None
    given = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
    if any(one.ndim > 0 for one in given):
        return None
    sides = [one.sign() if one.dtype == torch.bool else (result - one).sign() for one in given]
    return torch.stack([side.to(result.device) for side in sides]).detach()


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


def _all_same(values: Sequence[float]) -> bool:
    return max(values) - min(values) <= _SAME * max(map(abs, values), default=0.0)
