"""Inputs of units, as a number per sample: whether micro-batches give units what the whole batch gives them.

Glue in front of a unit may look at all samples (`(x - x.mean(0)) / x.std(0)`), or put them in another order
(`cat([first_view, second_view])`). Units of micro-batches are then given something else than those of the batch, and no
head can make up for it. The sums of what the rows of each sample have, weighted by their places, tell.

A tensor has its samples along the first dimension whose size is their number, or a multiple of it. Where a step calls a
unit with several blocks of all samples, one behind the other, these are its *blocks*.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_pipe.capture.graphs.request import Request
from lightning_pipe.capture.recording.units import MOST_SAID, Head, UnitTrace
from lightning_pipe.capture.steps.batch import LeafSlot
from lightning_pipe.capture.steps.trees import found_in, mapped
from lightning_pipe.capture.torch_private import answered_calls, version_of

_MOST_BLOCKS = 8
_TOLERANCE = 0.75  # the power of a type's precision by which sums differ that are made of the same numbers


class Untouched:
    """Tensors that glue has not made: of the batch, and what units returned."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[torch.Tensor, int]] = {}  # by identity: the tensor, and its version

    def note(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note such tensors, as they are now."""
        self._known |= {id(tensor): (tensor, version_of(tensor)) for tensor in tensors}

    def are(self, given: Any) -> bool:
        """Return whether a unit is given such tensors as they were, and no numbers."""
        if any(found_in(given, (int, float))):
            return False
        known = ((self._known.get(id(tensor)), tensor) for tensor in found_in(given, torch.Tensor))
        return all(noted is not None and noted[1] == version_of(tensor) for noted, tensor in known)


def row_sums(given: Any, samples: int, device: torch.device, *, blocks: int = 1) -> torch.Tensor:
    """Return a number per sample of what a unit is given, and one of how large it is, as (samples, 2).

    Args:
        given: arguments of the call.
        samples: their number.
        device: where tensors are.
        blocks: how often all samples follow each other along the dimension of samples.
    """
    total = torch.zeros(samples, 2, dtype=torch.float64, device=device)
    for place, one in enumerate(found_in(given, (torch.Tensor, int, float)), start=1):
        if not isinstance(one, torch.Tensor):
            total[:, 0] += place * one
        elif one.layout == torch.strided and not one.is_complex():
            total += place * _sums_of(one.detach(), samples, blocks)
    return total


def forms_of(given: Any, samples: int, *, blocks: int = 1) -> tuple[Any, ...]:
    """Return what is comparable of what units are given: the shapes of rows of one sample; arguments as `row_sums`."""
    tensors = list(found_in(given, torch.Tensor))
    dims = [_along(tensor, samples * blocks) for tensor in tensors]
    shapes = [[*tensor.shape] for tensor in tensors]
    return tuple(
        (dim, tuple(size // (samples if d == dim else 1) for d, size in enumerate(shape)))
        for dim, shape in zip(dims, shapes, strict=True)
    )


def _along(tensor: torch.Tensor, samples: int) -> int | None:
    """Return the dimension along which a tensor has samples; None if it has none."""
    dims = [d for d, size in enumerate(tensor.shape) if size == samples]
    dims += [d for d, size in enumerate(tensor.shape) if size and size % samples == 0]
    return dims[0] if dims else None


def _sums_of(tensor: torch.Tensor, samples: int, blocks: int) -> torch.Tensor:
    rows, dim = tensor.double(), _along(tensor, samples * blocks)
    if dim is None:
        rows = rows.reshape(1, -1).expand(samples, -1)
    else:
        rows = rows.movedim(dim, 0).reshape(blocks, samples, -1).transpose(0, 1).reshape(samples, -1)
    precision = torch.finfo(tensor.dtype if tensor.is_floating_point() else rows.dtype).eps
    weights = torch.linspace(1, 2, rows.shape[1], dtype=torch.float64, device=rows.device)
    return torch.stack([rows @ weights, (rows.abs() @ weights) * precision**_TOLERANCE], dim=1)


def is_alike(parts: torch.Tensor, whole: torch.Tensor) -> bool:
    """Return whether units of micro-batches were given what the batch gives, as far as sums of rows tell."""
    if parts.shape != whole.shape:
        return False
    away = (parts[:, 0] - whole[:, 0]).abs()
    return bool(((away <= whole[:, 1]) | (parts[:, 0] == whole[:, 0]) | (parts[:, 0] != parts[:, 0])).all())


def joined(parts: Sequence[torch.Tensor], dim: int, *, blocks: int) -> torch.Tensor:
    """Return the rows of all samples from those of parts, each of which has the same number of blocks."""
    if blocks == 1:
        return torch.cat(list(parts), dim)
    split = [part.unflatten(dim, (blocks, part.shape[dim] // blocks)) for part in parts]
    return torch.cat(split, dim + 1).flatten(dim, dim + 1)


class _Enough(BaseException):
    """The last unit was called. No `except Exception` of the user's catches it."""


class GlueTrial:
    """Compare what units are given, and return, for parts of some samples and for all of them.

    Glue is given for all samples what units have returned for the parts.

    Args:
        trace: the units.
        module: the module that calls them.
        device: where they run.

    Attributes:
        unlike: path of the first unit that is given something else; "" if there is none.
        is_unknown: whether some are given tensors that cannot be compared (as many rows as samples have words).
        blocks: of the units that are called with several blocks of all samples, by number.
        mixing: paths of the units that return something else for parts than for all.
    """

    def __init__(self, trace: UnitTrace, module: nn.Module, device: torch.device) -> None:
        self._units, self._device = trace.units, device
        paths = {unit.path for unit in trace.units}
        self.modules = {path: child for path, child in module.named_modules() if path in paths}
        self._given: list[dict[tuple[int, int], tuple[Any, torch.Tensor]]] = []  # of every part, by unit and blocks
        self._returned: list[list[Any]] = []  # of the units, by part
        self.unlike = ""
        self.is_unknown = False
        self.blocks: dict[int, int] = {}
        self.mixing: dict[str, None] = {}

    def compare(
        self, quietly: Callable[[torch.Tensor], AbstractContextManager[Callable[[], Any]]], *, total: int, count: int
    ) -> None:
        """Run glue on two parts of some samples, and on these.

        Args:
            quietly: gives what runs the step on samples with these indices, without randomness.
            total: number of all samples.
            count: that of a part.
        """
        counts = (count, min(2 * count, total) - count)
        rows = torch.linspace(0, total - 1, sum(counts)).long()
        for part in (*rows.split(counts), rows):
            with quietly(part) as step:
                self.run(step, len(part), is_part=part is not rows)

    def run(self, step: Callable[[], Any], samples: int, *, is_part: bool) -> None:
        """Run a step up to its last unit.

        Args:
            step: runs it on some samples.
            samples: their number.
            is_part: whether they are a part, the next one; else all.
        """
        if is_part:
            self._given.append({})
            self._returned.append([])
        counter, inside = itertools.count(), [False]

        def answer(module: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if inside[0]:
                return call(*args, **kwargs)
            number = next(counter)
            inside[0] = True
            try:
                made = partial(self._part if is_part else self._whole, number, samples, (args, kwargs))
                result = made(partial(call, *args, **kwargs))
            finally:
                inside[0] = False
            if number == len(self._units) - 1:
                raise _Enough
            return result

        with contextlib.suppress(_Enough), torch.no_grad(), answered_calls(self.modules.values(), answer):
            step()

    def _part(self, number: int, samples: int, given: Any, call: Callable[[], Any]) -> Any:
        for blocks in self._candidates(number):
            sums = row_sums(given, samples, self._device, blocks=blocks)
            self._given[-1][number, blocks] = forms_of(given, samples, blocks=blocks), sums
        result = call()
        self._returned[-1].append(mapped(result, torch.Tensor, torch.Tensor.clone))
        return result

    def _whole(self, number: int, samples: int, given: Any, call: Callable[[], Any]) -> Any:
        unit, is_unknown = self._units[number], False
        for blocks in self._candidates(number):
            parts = [part[number, blocks] for part in self._given]
            is_unknown |= any(form != forms_of(given, samples, blocks=blocks) for form, _ in parts)
            sums = torch.cat([sums for _, sums in parts])
            if is_alike(sums, row_sums(given, samples, self._device, blocks=blocks)):
                break
        else:
            self.is_unknown |= is_unknown
            self.unlike = self.unlike or ("" if self.is_unknown else unit.path)
            return call()
        if blocks > 1:
            self.blocks[number] = blocks
        if not unit.is_fixed or any(output.batch_dim is None for output in unit.outputs):
            return call()
        pieces = zip(*(found_in(returned[number], torch.Tensor) for returned in self._returned), strict=True)
        outputs = zip(pieces, unit.outputs, strict=True)
        whole = [joined(tensors, output.batch_dim or 0, blocks=blocks) for tensors, output in outputs]
        for own, tensor in zip(found_in(call(), torch.Tensor), whole, strict=True):
            pair = (row_sums([one], samples, self._device, blocks=blocks) for one in (own, tensor))
            if not is_alike(*pair):
                self.mixing[unit.path] = None
        return mapped(unit.template, LeafSlot, lambda slot: whole[slot.index])

    def _candidates(self, number: int) -> list[int]:
        """Return numbers of blocks that a unit may be called with: those of which all its outputs may have rows."""
        rows = math.gcd(*(output.rows for output in self._units[number].outputs if output.batch_dim is not None))
        return [1, *(blocks for blocks in range(2, rows + 1) if rows % blocks == 0 and blocks <= _MOST_BLOCKS)]


def head_of(
    request: Request, trace: UnitTrace, first_draws: Sequence[int | None], *, hooked: str, drawn: bool
) -> tuple[Head, str]:
    """Return what the head of a step does, and why there is none, after "since".

    Args:
        request: the step.
        trace: the units.
        first_draws: how many units had begun when glue drew random numbers first, by run; None where it has not.
        hooked: path of a unit with hooks, which a head does not run; "" if there is none.
        drawn: whether it has drawn random numbers of Python or NumPy.
    """
    last = len(trace.units)
    if request.whole_batch == "by_microbatch":
        return "", "whole_batch='by_microbatch'"
    if drawn or any(begun is not None and begun < last for begun in first_draws):
        return "", "it draws random numbers before its last sub-module"
    if hooked:
        return "", f"hooks of {hooked} may take what they see elsewhere"
    if trace.changes:
        return "", f"it changes {trace.changes[0].name}"
    read = [trace.units[int(k)] for kind, k in trace.tail if kind == "unit"]
    outputs = [output for unit in read for output in unit.outputs]
    if not all(unit.is_fixed for unit in read) or any(output.batch_dim is None for output in outputs):
        return "", "its sub-modules return tensors that have no rows of single samples"
    if trace.loss is not None and not (trace.law is not None and all(output.batch_dim == 0 for output in outputs)):
        return "holds", ""
    if trace.loss is not None and any(begun is not None for begun in first_draws):
        return "", "it draws random numbers behind its last sub-module"
    if trace.loss is not None and any(math.prod(output.shape) > MOST_SAID * trace.samples for output in outputs):
        return "", f"its sub-modules return more than {MOST_SAID:,} numbers of every sample"
    return "speaks", ""


STATISTICS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
RUNNING = (*STATISTICS, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)  # keep means of statistics


def by_microbatch(request: Request, trace: UnitTrace) -> tuple[str, ...]:
    """Name what would see a micro-batch of a step that is cut, and makes something else of it than of the batch.

    These are modules with batch statistics, units that mix samples or change buffers by them, and a loss that
    `whole_batch="by_microbatch"` takes of micro-batches although it needs the batch.
    """
    names: list[str] = []
    for unit in trace.units:
        inside = request.module.get_submodule(unit.path).named_modules(prefix=unit.path)
        statistics = [path for path, child in inside if isinstance(child, STATISTICS) and child.training]
        changes = unit.path in trace.mixing or not trace.once.issuperset(unit.mutations)
        names += statistics or [unit.path] * changes
    is_accumulated = request.whole_batch == "by_microbatch" and trace.loss is not None and trace.law is None
    return (*dict.fromkeys(names), *[request.method] * is_accumulated)


def without_head(request: Request, trace: UnitTrace, headless: str) -> str:
    """Return why batches of a step without a head must not be cut, in words after "since"; "" if they may be."""
    if not headless or trace.law is not None or request.whole_batch == "by_microbatch":
        return ""
    what = "what micro-batches say does not" if trace.loss is None else "losses of micro-batches are not known to"
    return f"{what} make that of the batch: {headless}"
