"""Warnings of what a plan changes beside one device: samples that are mixed, hooks that run more often."""

from __future__ import annotations

from lightning_pipe.capture.steps.backward_hooks import hooked_modules
from lightning_pipe.core.graph import CALL, Graph
from lightning_pipe.core.plan import Plan
from lightning_pipe.lightning_names import (
    pl,
    rank_zero_warn,
)


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
