"""Results and buffers of which operations do not prove how micro-batches make those of the batch: numbers tell.

The number of samples may enter a result as a number: `hits.sum() / len(y)`, `loss * float(len(y))`. A graph of constant
size says not even that. And what is kept in a buffer may be anything. So rank 0, where the module is whole for that
long, runs the captured step forward, without randomness: on two parts of some samples and on all of these, twice, as a
replayed step is tried (`said_roles`).

It costs six forwards of at most one micro-batch, where there are such results or buffers, and six of more samples where
these are too few to tell; and one trace for each number of samples where the graph holds for one only.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from lightning_pipe.capture import Route
from lightning_pipe.capture.graphs.sample_flow import SampleRows
from lightning_pipe.capture.recording.no_randomness import NoRandomness
from lightning_pipe.capture.steps.batch import sorted_samples
from lightning_pipe.capture.steps.numbers import leaves_said
from lightning_pipe.capture.steps.record import Read, Ref
from lightning_pipe.capture.steps.stage_program import RandomKey
from lightning_pipe.capture.weighing.parts_and_whole import (
    ENDS,
    PartsAndWhole,
    TriedResult,
    found_role,
    uneven_parts,
    unlike_order,
)
from lightning_pipe.lightning_names import rank_zero_warn
from lightning_pipe.runtime.exchanges.slicing import Content
from lightning_pipe.strategy.checks.captured_run import run_forward
from lightning_pipe.strategy.checks.check import Incomparable, on_one_device
from lightning_pipe.strategy.steps.captured import Captured

log = logging.getLogger(__name__)

_MOST = 64  # samples, if fewer tell nothing
_MOST_SECONDS = 60.0


@dataclass(frozen=True)
class Tried:
    """What numbers tell.

    Attributes:
        results: how results are combined, by name.
        buffers: names of those that parts change to something else than the whole does.
    """

    results: Mapping[str, TriedResult] = field(default_factory=dict)
    buffers: frozenset[str] = frozenset()


def is_to_be_tried(captured: Captured) -> bool:
    """Return whether operations do not tell how all results and buffers are made."""
    capture = captured.capture
    return bool(capture.unproven) or bool(capture.picked) or bool(_kept_buffers(captured))


def _kept_buffers(captured: Captured) -> frozenset[str]:
    """Name the buffers that a step changes with its samples, but for batch statistics, of which all know."""
    changed = captured.capture.unproven_buffers
    buffers = dict(captured.request.module.named_buffers(remove_duplicate=False))
    return frozenset(name for name in changed & buffers.keys() if not is_of_norm(captured, name))


def is_of_norm(captured: Captured, buffer: str) -> bool:
    """Return whether a buffer is one of a batch norm."""
    owner = captured.request.module.get_submodule(buffer.rpartition(".")[0])
    return isinstance(owner, nn.modules.batchnorm._BatchNorm)


def tried(captured: Captured, tensors: Sequence[torch.Tensor]) -> Tried:
    """Return what numbers tell of a step.

    Args:
        captured: the step; its module is whole.
        tensors: leaves of a batch that can be cut.
    """
    capture, request = captured.capture, captured.request
    dim, cut = request.batch_dim, request.structure.cut(request.batch_dim)
    total = next(t.shape[dim] for t, c in zip(tensors, cut, strict=True) if c)
    found = Tried()
    few, seconds = min(max(2, request.samples or 0), total), 0.0
    for many in sorted({few, min(max(few, _MOST), total)}):  # of few samples, what is counted may be zero
        is_open = not found.results.keys() >= {*capture.unproven, *capture.picked} or bool(_kept_buffers(captured))
        is_open |= any(map(_may_be_picked, found.results.values()))  # of so few samples
        if many < 2 or not is_open or seconds * many / few > _MOST_SECONDS:
            continue
        begin = time.perf_counter()
        try:
            found = _tried(captured, tensors, many, total=total)
        except Exception as reason:  # whatever operations raise for so few samples
            log.debug("How results of %s are combined is not tried: %s", request.method, reason)
            sure = {n: one for n, one in found.results.items() if not _may_be_picked(one)}
            found = replace(found, results=sure)
        seconds = time.perf_counter() - begin
    return found


def _may_be_picked(result: TriedResult) -> bool:
    """Return whether a result may be of some samples alone, which are as many as a few samples have, or the first."""
    return isinstance(result.how, SampleRows) or result.how in ENDS


def _tried(captured: Captured, tensors: Sequence[torch.Tensor], many: int, *, total: int) -> Tried:
    """Return what parts and the whole of so many samples, of all that there are, tell."""
    capture, request = captured.capture, captured.request
    dim, cut = request.batch_dim, request.structure.cut(request.batch_dim)
    half, more = many // 2, many // 2 + 1  # one of them is odd: what is picked by places may fit even ones alone
    uneven = (
        (half, many - half) if many == 2 or capture.misfit(more) or capture.misfit(many - more) else (more, many - more)
    )
    counts = ((many - half, half), uneven)
    if why := next(filter(None, map(capture.misfit, {many, *counts[0]})), ""):
        raise Incomparable(why)
    arranged = sorted_samples(tensors, cut, dim) or tensors
    rows = torch.linspace(0, total - 1, many).long()  # of all kinds, in their order
    kept, trials, states = sorted(_kept_buffers(captured)), list[PartsAndWhole[str]](), list[PartsAndWhole[str]]()
    no_randomness = NoRandomness()  # type: ignore[no-untyped-call]  # torch's constructor has no types
    with on_one_device(capture, request, many) as prepare, no_randomness:

        def run(leaves: Sequence[torch.Tensor], sizes: tuple[int, ...]) -> tuple[Any, dict[str, torch.Tensor]]:
            results = run_forward(capture, request, prepare(leaves), sizes=sizes, key=RandomKey(0, 0, 0))
            return tuple(map(_tensors, results)), _tensors({n: request.module.get_buffer(n) for n in kept})

        def of(order: torch.Tensor) -> list[torch.Tensor]:
            return [t.index_select(dim, order.to(t.device)) if c else t for t, c in zip(arranged, cut, strict=True)]

        for order, sizes in zip((rows, unlike_order(rows)), counts, strict=True):
            (parts, after_parts), ((whole,), after_whole) = run(of(order), sizes), run(of(order), (many,))
            trials.append(PartsAndWhole(parts, sizes, whole))
            states.append(PartsAndWhole((after_parts,), (many,), after_whole))
        trials.append(trials[0].turned(run(of(rows.roll(-counts[0][0])), (many,))[0][0]))
        names = dict.fromkeys((*capture.unproven, *capture.picked))
        picked, is_sure = {name for name in names if _found(trials, name, many, capture).how in ENDS}, False
        if picked:
            with contextlib.suppress(Exception):  # whatever the step raises for so few samples
                for order, sizes in uneven_parts(rows):
                    trials.append(PartsAndWhole(run(of(order), sizes)[0], sizes, run(of(order), (many,))[0][0]))
                is_sure = True  # that nothing is picked by what it is
    found = {name: _found(trials, name, many, capture) for name in names}
    found |= {name: TriedResult("mixed", True) for name in picked if not is_sure}
    unproven = {*capture.unproven}
    clear = {
        n: one
        for n, one in found.items()
        if one.how in ENDS or (n in unproven and (one.how != "unknown" or capture.result_role(n) == "same"))
    }
    return Tried(clear, frozenset(n for n in kept if any(not state.is_whole(n) for state in states)))


def _tensors(results: Mapping[str, Content]) -> dict[str, torch.Tensor]:
    return {name: torch.as_tensor(content).detach().cpu().clone() for name, content in results.items()}


def _found(trials: Sequence[PartsAndWhole[str]], name: str, samples: int, capture: Route) -> TriedResult:
    """Return how a result is combined."""
    if all(trial.has_samples(name) for trial in trials):
        dim, size = trials[0].sample_dim(name), trials[0].whole[name].shape
        rows = SampleRows(dim, size[dim] // samples) if dim is not None and size[dim] % samples == 0 else None
        return TriedResult(rows, rows is None or any(trial.joined_along(name) != dim for trial in trials))
    said = capture.result_role(name)
    role = found_role(trials, name, wanted=None if said == "sum" else said)  # of zeros it may be a mean as well
    if role == "unknown" and all("sum" not in trial.reductions(name) for trial in trials):
        role = "mean"  # it is the same everywhere, and not zero
    return TriedResult(role, role == "mixed")


def warn_of_other_batches(captured: Captured, samples: int) -> None:
    """Warn of results of a graph that does not hold for a whole batch, of which operations prove nothing then."""
    capture = captured.capture
    if capture.plays is not None:
        return
    said = leaves_said(capture.record.returned, capture.record.calls, capture.record.kept)
    names = {leaf.value.name for leaf in said if isinstance(leaf.value, Ref | Read)} - {capture.record.loss}
    if names and not capture.tells_of_batch and capture.misfit(samples):
        warn_of_untried_results(captured, names)


def warn_of_untried_results(captured: Captured, names: Set[str]) -> None:
    """Warn of results that neither operations nor numbers explain."""
    record = captured.capture.record
    said = leaves_said(record.returned, record.calls, record.kept)
    places = dict.fromkeys(str(x) for x in said if isinstance(x.value, Ref | Read) and x.value.name in names)
    if places:
        rank_zero_warn(
            f"The number of samples may enter as a number what {captured.request.method} says: {'; '.join(places)}. It "
            "could not be tried how micro-batches make that of the batch, which may be something else than what is "
            "taken. microbatches=1 has that of the batch, as does a torchmetrics object that is given the samples."
        )


def warn_of_mixed_results(captured: Captured, *, known: Set[str]) -> set[str]:
    """Warn of results that micro-batches change: those that are no sum, mean or extreme over samples.

    Returns:
        Where they are said, in words; those that are `known` have been told.
    """
    mixed = captured.capture.mixed_results()
    if new := [place for place in mixed if place not in known]:
        rank_zero_warn(
            f"{captured.request.method} says what is no sum, mean or extreme over samples: {'; '.join(new)}. It is "
            "computed for each of the micro-batches, and their mean is taken; microbatches=1 has that of the batch, as "
            "does a torchmetrics object that is given the samples."
        )
    return {*new}


def warn_of_buffers_by_parts(captured: Captured, *, count: int, known: Set[str]) -> set[str]:
    """Warn of buffers that each of several micro-batches changes, but for those of batch norms, which all know of.

    Returns:
        Their names; those that are `known` have been told.
    """
    said = {name for name in captured.capture.buffers_by_parts() if not is_of_norm(captured, name)}
    if (new := sorted((said | captured.tried_buffers) - known)) and count > 1:
        rank_zero_warn(
            f"{captured.request.method} changes {', '.join(new)} for the samples that it is given: {count} times per "
            "batch, once for every micro-batch, as with gradient accumulation, and not once as on one device. "
            "microbatches=1 has no such difference."
        )
    return {*new}
