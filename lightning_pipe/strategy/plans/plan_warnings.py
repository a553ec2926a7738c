"""Warnings of what a plan changes beside one device: sub-modules that mix samples, hooks that run more often."""

from __future__ import annotations

import logging
from collections.abc import Sequence, Set

from torch import nn

from lightning_pipe.capture.steps.backward_hooks import hooked_modules
from lightning_pipe.capture.steps.stage_program import Split
from lightning_pipe.core.program import Layout
from lightning_pipe.lightning_names import (
    pl,
    rank_zero_warn,
)
from lightning_pipe.planner.candidates.microbatch_share import LEAST_SHARE
from lightning_pipe.strategy.steps.captured import Captured

log = logging.getLogger(__name__)

MOST_DRAWS = 3  # that one line names


def warn_of_backward_hooks(module: pl.LightningModule) -> None:
    """Warn of backward hooks that run more often than on one device."""
    if hooked := hooked_modules(module):
        rank_zero_warn(
            f"The hook on the backward of {hooked[0]} runs once for each micro-batch, on the ranks that have it. One "
            "that treats samples by themselves gives the same gradients; one that keeps or averages them does not. "
            "microbatches=1 keeps the batch whole."
        )


def warn_of_parts_seen(captured: Captured, *, sizes: Sequence[int], share: int, known: Set[str]) -> set[str]:
    """Warn of what sees the samples of a micro-batch where one device sees those of the batch, and say the way out.

    Args:
        captured: the step.
        sizes: samples of its micro-batches.
        share: micro-batches with which planning began.
        known: what has been warned of.

    Returns:
        What has these samples, by name.
    """
    module, samples = captured.request.module, sum(sizes)
    new = [name for name in captured.capture.graph.by_microbatch if name not in known]
    if new and len(sizes) > 1:
        wider = f"microbatches={share}: {samples // share}, if that fits; " if 1 < share < len(sizes) else ""
        others = f" (and {len(new) - 1} more)" * (len(new) > 1)
        rank_zero_warn(
            f"{_with_class(module, new[0])}{others} sees {min(sizes)} of {samples} samples, so the "
            f"number of micro-batches changes what is trained; {wider}microbatches=1 or whole_batch='exact': all "
            f"{samples}, as on one device, but ranks work one after another."
        )
    return {*new}


def _with_class(module: nn.Module, name: str) -> str:
    """Return the path of a sub-module behind the name of its class; another name as it is."""
    owner = dict(module.named_modules()).get(name)
    return name if owner is None else f"{type(owner).__name__} {name}"


def tell_of_draws(captured: Captured, *, known: Set[str]) -> set[str]:
    """Log which random numbers of a step are not those of one device.

    Returns:
        What draws them, in words; what is `known` has been told.
    """
    new = [draw for draw in captured.capture.draws if draw not in known]
    if new:
        log.info(
            "%s draws random numbers that are not those of one device with the same seed: %s. To compare runs, draw "
            "them in the data set, or in a hook such as on_train_batch_start.",
            captured.request.method,
            "; ".join(new[:MOST_DRAWS]) + (f"; and {len(new) - MOST_DRAWS} more" if len(new) > MOST_DRAWS else ""),
        )
    return {*new}


def warn_of_whole_batches(method: str, why: str) -> None:
    """Warn that a step takes whole batches, for a reason in words after "since"."""
    rank_zero_warn(
        f"{method} takes whole batches, as one micro-batch each, since {why}. So ranks work one after another; a step "
        "whose batches can be cut is faster (see docs/capture.md)."
    )


def warn_of_few_samples(captured: Captured, *, samples: int, ranks: int) -> None:
    """Warn that a batch has too few samples to be cut by itself, where micro-batches change what is trained."""
    if captured.capture.graph.by_microbatch and not captured.capture.whole:
        name = _with_class(captured.request.module, captured.capture.graph.by_microbatch[0])
        rank_zero_warn(
            f"{name} would see fewer than {LEAST_SHARE} samples, so the batch of {samples} is one micro-batch, and "
            f"ranks work one after another. microbatches={ranks} cuts it: {name} then sees {max(1, samples // ranks)}."
        )


def warn_of_results_by_parts(captured: Captured, *, known: Set[str]) -> set[str]:
    """Warn of results that micro-batches change.

    Returns:
        Where they are said, in words; those that are `known` have been told.
    """
    if new := [place for place in captured.capture.by_parts if place not in known]:
        rank_zero_warn(
            f"{captured.request.method} says what micro-batches do not make together: {'; '.join(new)}. It is computed "
            "for each of the micro-batches, and their mean is taken; microbatches=1 has that of the batch, as does a "
            "torchmetrics object that is given the samples."
        )
    return {*new}


def warn_of_buffers_by_parts(captured: Captured, *, count: int, known: Set[str]) -> set[str]:
    """Warn of buffers that each of several micro-batches changes, but for those of batch norms, which all know of.

    Returns:
        Their names; those that are `known` have been told.
    """
    changed = {name for name in captured.capture.buffers_by_parts() if not _is_of_norm(captured, name)}
    if (new := sorted(changed - known)) and count > 1:
        rank_zero_warn(
            f"{captured.request.method} changes {', '.join(new)} for the samples that it is given: {count} times per "
            "batch, once for every micro-batch, as with gradient accumulation, and not once as on one device. "
            "microbatches=1 has no such difference."
        )
    return {*new}


def _is_of_norm(captured: Captured, buffer: str) -> bool:
    owner = captured.request.module.get_submodule(buffer.rpartition(".")[0])
    return isinstance(owner, nn.modules.batchnorm._BatchNorm)


def kept_by_replicas(captured: Captured, split: Split, layout: Layout) -> list[str]:
    """Name the buffers that replicas would change for their own samples, and whose mean no device would have.

    Those of a replayed step become the mean of its micro-batches wherever they run.
    """
    if captured.capture.plays is not None:
        return []
    changed = {*captured.capture.buffers_by_parts()}
    replicated = (program for program in split.stages if len(layout.stages[program.stage]) > 1)
    return sorted(changed & {name for program in replicated for name in program.mutations})
