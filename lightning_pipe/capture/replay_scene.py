"""What is set up around a play, and put back after it? Parameters, buffers and random numbers.

Torch's, Python's and NumPy's generators are seeded before the step and after every unit with the key of the
micro-batch and a number, so that every rank draws in glue what one device would, whatever it skips.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_pipe.capture.randomness import seed_of, undisturbed
from lightning_pipe.capture.stage_program import RandomKey

_NUMPY_SEEDS = 2**32


@contextlib.contextmanager
def hung(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Hang tensors into the module in the places of its parameters and buffers for a while."""
    before: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for name, tensor in tensors.items():
            path, _, attribute = name.rpartition(".")
            owner = module.get_submodule(path)
            slots = owner._parameters if attribute in owner._parameters else owner._buffers
            before.append((slots, attribute, slots[attribute]))
            slots[attribute] = tensor
        yield
    finally:
        for slots, attribute, tensor in reversed(before):
            slots[attribute] = tensor


@contextlib.contextmanager
def keyed(key: RandomKey, device: torch.device) -> Iterator[None]:
    """Seed all generators for a play, and give them their states back."""
    python, numpy = random.getstate(), np.random.get_state()
    with undisturbed(device):
        seed(key, 0, device)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def seed(key: RandomKey, number: int, device: torch.device) -> None:
    """Seed torch's, Python's and NumPy's generators."""
    own = seed_of(key, number)
    if device.type == "cuda":
        torch.cuda.manual_seed(own)
    torch.default_generator.manual_seed(own)
    random.seed(own)
    np.random.seed(own % _NUMPY_SEEDS)
