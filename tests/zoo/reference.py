"""What a pipeline is compared with: autograd of the plain module, micro-batch by micro-batch, with the same dice.

Random operations of the plain module draw from the keys of the captured graph (`keyed_random`): the k-th random
operation of a run has the k-th key. Dropout runs as the fused operator that a traced step has.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_pipe.capture.operators import draws
from lightning_pipe.capture.steps.call_recording import StepRecording, recording_calls
from lightning_pipe.capture.steps.keyed_random import seed_of, undisturbed
from lightning_pipe.capture.steps.stage_program import RandomKey

CPU = torch.device("cpu")


class KeyedDice(TorchDispatchMode):
    """Seed the generator before every random operation as the captured graph does."""

    def __init__(self, key: RandomKey) -> None:
        super().__init__()
        self.key, self.drawn = key, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if draws(func, args, kwargs or {}):
            torch.default_generator.manual_seed(seed_of(self.key, self.drawn))
            self.drawn += 1
        return func(*args, **(kwargs or {}))


def fused_dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    return torch.native_dropout(input, p, training)[0] if training and p else input


def accumulate(
    module: pl.LightningModule,
    microbatches: Sequence[Any],
    *,
    weights: Sequence[float],
    seed: int,
    once: frozenset[str] = frozenset(),
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return the losses of the micro-batches and the accumulated gradients of a copy of the module."""
    module = copy.deepcopy(module)
    losses = []
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    before = {name: state[name].detach().clone() for name in once}
    for m, (microbatch, weight) in enumerate(zip(microbatches, weights, strict=True)):
        for name, content in before.items():  # changes once per batch
            state[name].data.copy_(content)
        with (
            undisturbed(CPU),
            mock.patch("torch.nn.functional.dropout", fused_dropout),
            mock.patch("zoo.habits.checkpoint", lambda function, *args, **_: function(*args)),
            recording_calls(module, StepRecording()),
        ):
            with KeyedDice(RandomKey(seed, 0, m)):
                output = module.training_step(microbatch, 0)
            loss = output["loss"] if isinstance(output, dict) else output
            loss.backward(torch.tensor(weight, dtype=loss.dtype).reshape(loss.shape))
        losses.append(loss.detach())
    return losses, {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
