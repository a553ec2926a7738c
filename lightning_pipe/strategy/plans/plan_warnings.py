"""Warnings of what a plan changes beside one device: samples that are mixed, hooks that run more often."""

from __future__ import annotations

from collections.abc import Set

from torch import nn

from lightning_pipe.capture.steps.backward_hooks import hooked_modules
from lightning_pipe.core.graph import CALL, Graph
from lightning_pipe.core.plan import Plan
from lightning_pipe.lightning_names import (
    pl,
    rank_zero_warn,
)
from lightning_pipe.strategy.steps.captured import Captured


def warn_of_backward_hooks(module: pl.LightningModule) -> None:
    """Warn of backward hooks that run more often than on one device."""
    if hooked := hooked_modules(module):
        rank_zero_warn(
            f"The hook on the backward of {hooked[0]} runs once for each micro-batch, on the ranks that have it. One "
            "that treats samples by themselves gives the same gradients; one that keeps or averages them does not. "
            "microbatches=1 keeps the batch whole."
        )


def warn_of_mixing(plan: Plan, graph: Graph, *, measured: bool) -> None:
    """Warn of what micro-batches (unless that was measured, and said) and slices of them change."""
    nodes = (node for node in graph.nodes if node.name in graph.coupled and node.op != CALL)
    mixed = dict.fromkeys(node.module or node.op for node in nodes)
    is_cut = plan.microbatches > 1 and not measured
    if mixed and (is_cut or any(len(s.ranks) > 1 and s.share == "samples" for s in plan.stages)):
        rank_zero_warn(
            f"Samples are mixed in {', '.join(mixed)}: it sees micro-batches (or slices) instead of whole batches, as "
            "with gradient accumulation, so results differ a little from those of one device without accumulation."
        )


def warn_of_whole_batches(method: str, why: str) -> None:
    """Warn that a step takes whole batches, for a reason in words after "since"."""
    rank_zero_warn(
        f"{method} takes whole batches, as one micro-batch each, since {why}. So ranks work one after another; a step "
        "whose batches can be cut is faster (see docs/capture.md)."
    )


def warn_of_mixed_results(captured: Captured, *, known: Set[str]) -> set[str]:
    """Warn of results that micro-batches change.

    Returns:
        Where they are said, in words; those that are `known` have been told.
    """
    mixed = captured.capture.mixed_results()
    if new := [place for place in mixed if place not in known]:
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
