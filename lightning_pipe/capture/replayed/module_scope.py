"""Module state swapped in around a replay and restored after it: parameters, buffers and random generators.

Torch's, Python's and NumPy's generators are seeded before the step and after every unit with the key of the
micro-batch and a number, so that every rank draws in glue what one device would, whatever it skips. Python's and
NumPy's take long: of steps that were not seen to draw from them they are seeded before the step only.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from lightning_pipe.capture.steps.keyed_random import Randomness, seed_of
from lightning_pipe.capture.steps.stage_program import RandomKey

Slot: TypeAlias = tuple[dict[str, Any], str]  # parameters or buffers of a sub-module, and the name of one
_NUMPY_SEEDS = 2**32


def slots_of(module: nn.Module, names: Iterable[str]) -> dict[str, Slot]:
    """Return where parameters and buffers hang, by name."""
    found = {}
    for name in names:
        path, _, attribute = name.rpartition(".")
        owner = module.get_submodule(path)
        found[name] = (owner._parameters if attribute in owner._parameters else owner._buffers, attribute)
    return found


class TrainedParameters:
    """Which parameters of a module are to get gradients (`requires_grad`), whatever hangs in their places.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        owners = [(f"{path}.".lstrip("."), owner._parameters) for path, owner in module.named_modules()]
        self._places = [(prefix + key, table, key) for prefix, table in owners for key in table]

    def now(self) -> dict[str, bool]:
        """Return it by name."""
        found = ((name, table[key]) for name, table, key in self._places if table.get(key) is not None)
        return {name: parameter.requires_grad for name, parameter in found if parameter is not None}

    def put(self, wanted: Mapping[str, bool]) -> None:
        """Set it where it is wanted."""
        for name, table, key in self._places:
            parameter = table.get(key)
            if parameter is not None and parameter.requires_grad != wanted.get(name, parameter.requires_grad):
                parameter.requires_grad_(wanted[name])


@contextlib.contextmanager
def hung(slots: Mapping[str, Slot], tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Hang tensors into their slots for a while."""
    before = [(slot, attribute, slot[attribute]) for slot, attribute in map(slots.__getitem__, tensors)]
    try:
        for (slot, attribute, _), tensor in zip(before, tensors.values(), strict=True):
            slot[attribute] = tensor
        yield
    finally:
        for slot, attribute, tensor in before:
            slot[attribute] = tensor


@contextlib.contextmanager
def keyed(key: RandomKey, device: torch.device) -> Iterator[None]:
    """Seed all generators for a play, and give them their states back."""
    before = Randomness.now(device)
    seed(key, 0, device)
    try:
        yield
    finally:
        before.restore(device)


def seed(key: RandomKey, number: int, device: torch.device, *, all_generators: bool = True) -> None:
    """Seed torch's generator, and Python's and NumPy's too unless they are known not to be drawn from."""
    own = seed_of(key, number)
    if device.type == "cuda":
        torch.cuda.manual_seed(own)
    torch.default_generator.manual_seed(own)
    if all_generators:
        random.seed(own)
        np.random.seed(own % _NUMPY_SEEDS)
