"""Micro-batches that are steps of their own, as gradient accumulation has them, and batches that are not cut.

The loss of a batch is then the mean of those of its micro-batches, by samples. Its results are the samples of all, sums
where these add up, and means of all else.
"""

from __future__ import annotations

import torch

from lightning_pipe.capture.graphs.joint_graph import JointGraph
from lightning_pipe.capture.graphs.sample_flow import BATCH_STATISTICS, Flow, SampleRows
from lightning_pipe.capture.operators import takes_batch_statistics
from lightning_pipe.capture.slicing.placement import TERMS, Rows
from lightning_pipe.capture.slicing.slicing import Slicing
from lightning_pipe.capture.steps.stage_program import Combine
from lightning_pipe.capture.torch_private import is_backward


def accumulated(joint: JointGraph, *, batch_dim: int) -> Flow:
    """Return how micro-batches make the values of a batch.

    Args:
        joint: the graph of a micro-batch.
        batch_dim: dimension of the samples in tensors of the batch.
    """
    slicing = Slicing(joint, joint.samples, batch_dim=batch_dim)
    combine: dict[str, Combine] = {}
    samples: dict[str, SampleRows] = {}
    made_of_samples = set[str]()
    for node in joint.module.graph.nodes:
        placement = slicing.placements.get(node)
        if isinstance(placement, Rows):
            combine[node.name] = "cat"
            samples[node.name] = SampleRows(placement.dim, placement.per_sample, placement.outer)
        elif placement is TERMS:
            combine[node.name] = "sum"
        elif any(source.name in made_of_samples for source in node.all_input_nodes):
            value = node.meta.get("val")
            is_number = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
            combine[node.name] = "mean" if is_number else "last"
        else:
            combine[node.name] = "same"
            continue
        made_of_samples.add(node.name)
    questions = joint.results[len(joint.results) - len(joint.record.guards) :]
    statistics = (node for node in slicing.operations if takes_batch_statistics(node) and not is_backward(node))
    coupled = {node.name: BATCH_STATISTICS for node in statistics if slicing.operations[node].trains}
    loss: Combine = "same" if joint.loss is None else "sum" if combine[joint.loss] == "sum" else "mean"
    for name in questions:
        combine[name] = "max"
    if joint.loss is not None:
        combine[joint.loss] = loss
    return Flow(combine, samples, coupled, loss)


def uncut(joint: JointGraph) -> Flow:
    """Return how the only micro-batch of a batch makes its values."""
    combine: dict[str, Combine] = {node.name: "same" for node in joint.module.graph.nodes}
    loss: Combine = "same" if joint.loss is None else "mean"
    return Flow(combine | ({joint.loss: loss} if joint.loss else {}), {}, {}, loss)
