"""Captures of the zoo, made once for all tests of costs."""

from __future__ import annotations

import functools

from zoo.test_zoo_pipelines import captured, made, sizes_of

QUICK = (  # captured in about a second each, and every trait of graphs is there
    "mlp_classifier",
    "resnet_batchnorm",
    "tied_convolutions",
    "nanogpt_tied",
    "vae",
    "simclr",
    "byol_buffers",
    "byol_parameters",
    "gcn_index_add",
    "dense_graphs",
    "tabular_mixed",
    "autocast_inside",
    "masked_mean_loss",
)


@functools.cache
def zoo_capture(name: str):
    """Return (capture, module, batch) of a module of the zoo."""
    module, batch = made(name)
    return captured(module, batch, sizes_of(batch)).capture, module, batch
