"""Results whose operations do not prove how micro-batches make that of the batch: numbers tell.

The number of samples may enter a result as a number: `hits.sum() / len(y)`, `loss * float(len(y))`. A graph of constant
size says not even that. So rank 0, where the module is whole for that long, runs the captured step forward, without
randomness: on two parts of some samples and on all of these, twice, as a replayed step is tried (`said_roles`).

It costs six forwards of at most one micro-batch, where there are such results, and one trace for each number of samples
where the graph holds for one only.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence, Set

import torch

from lightning_pipe.capture import Request, Route
from lightning_pipe.capture.graphs.sample_flow import SampleRows
from lightning_pipe.capture.recording.no_randomness import NoRandomness
from lightning_pipe.capture.steps.batch import sorted_samples
from lightning_pipe.capture.steps.numbers import leaves_said
from lightning_pipe.capture.steps.record import Read, Ref
from lightning_pipe.capture.steps.stage_program import RandomKey
from lightning_pipe.capture.weighing.parts_and_whole import PartsAndWhole, TriedResult, found_role, unlike_order
from lightning_pipe.lightning_names import rank_zero_warn
from lightning_pipe.runtime.exchanges.slicing import Content
from lightning_pipe.strategy.checks.check import Incomparable, on_one_device, run_forward
from lightning_pipe.strategy.steps.captured import Captured

log = logging.getLogger(__name__)

_MOST = 64  # samples, if fewer tell nothing


def tried_results(captured: Captured, tensors: Sequence[torch.Tensor]) -> dict[str, TriedResult]:
    """Return how results are combined that operations do not prove, by name, as far as numbers tell.

    Args:
        captured: the step; its module is whole.
        tensors: leaves of a batch that can be cut.
    """
    capture, request = captured.capture, captured.request
    dim, cut = request.batch_dim, request.structure.cut(request.batch_dim)
    total = next(t.shape[dim] for t, c in zip(tensors, cut, strict=True) if c)
    found: dict[str, TriedResult] = {}
    few = min(max(2, request.samples or 0), total)
    for many in sorted({few, min(max(few, _MOST), total)}):  # of few samples, what is counted may be zero
        if capture.unproven and not found.keys() >= {*capture.unproven} and many > 1:
            try:
                found = _tried(capture, request, tensors, many)
            except Exception as reason:  # whatever operations raise for so few samples
                log.debug("How results of %s are combined is not tried: %s", request.method, reason)
    return found


def _tried(capture: Route, request: Request, tensors: Sequence[torch.Tensor], many: int) -> dict[str, TriedResult]:
    """Return what parts and the whole of so many samples tell."""
    dim, cut = request.batch_dim, request.structure.cut(request.batch_dim)
    counts = ((many - many // 2, many // 2), (many // 2, many - many // 2))
    if why := next(filter(None, map(capture.misfit, {many, *counts[0]})), ""):
        raise Incomparable(why)
    arranged = sorted_samples(tensors, cut, dim) or tensors
    total = next(t.shape[dim] for t, c in zip(tensors, cut, strict=True) if c)
    rows = torch.linspace(0, total - 1, many).long()  # of all kinds, in their order
    trials, key = [], RandomKey(0, 0, 0)
    no_randomness = NoRandomness()  # type: ignore[no-untyped-call]  # torch's constructor has no types
    with on_one_device(capture, request, many) as prepare, no_randomness:
        for order, sizes in zip((rows, unlike_order(rows)), counts, strict=True):
            own = [t.index_select(dim, order.to(t.device)) if c else t for t, c in zip(arranged, cut, strict=True)]
            parts = run_forward(capture, request, prepare(own), sizes=sizes, key=key)
            (whole,) = run_forward(capture, request, prepare(own), sizes=(many,), key=key)
            trials.append(PartsAndWhole(tuple(map(_tensors, parts)), sizes, _tensors(whole)))
    found = {name: _found(trials, name, many, capture) for name in capture.unproven}
    return {n: one for n, one in found.items() if one.how != "unknown" or capture.result_role(n) == "same"}


def _tensors(results: Mapping[str, Content]) -> dict[str, torch.Tensor]:
    return {name: torch.as_tensor(content).detach().cpu() for name, content in results.items()}


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


def warn_of_untried_results(captured: Captured, names: Set[str]) -> None:
    """Warn of results that neither operations nor numbers explain."""
    record = captured.capture.record
    said = leaves_said(record.returned, record.calls)
    places = dict.fromkeys(str(x) for x in said if isinstance(x.value, Ref | Read) and x.value.name in names)
    if places:
        rank_zero_warn(
            f"The number of samples may enter as a number what {captured.request.method} says: {'; '.join(places)}. It "
            "could not be tried how micro-batches make that of the batch, which may be something else than what is "
            "taken. microbatches=1 has that of the batch, as does a torchmetrics object that is given the samples."
        )
