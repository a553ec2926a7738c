"""Head of a replayed step: its Python runs once per batch, on what units gave for all micro-batches.

Plays of micro-batches end behind the last unit. The head runs the step from its beginning on the whole batch; calls of
units are answered with the rows of all micro-batches, as leaves of autograd. So loss, logs, metrics, what is returned
and the Python state of the step are those of one device, and the gradients of these rows go back to the micro-batches.

A head that only speaks makes no gradients: micro-batches, whose loss is proven to make that of the batch, go to the end
of the step themselves.

Units must have been given in all plays what the head gives them (`unit_inputs`); else the batch is run as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lightning_pipe.capture.recording.unit_inputs import is_alike, joined
from lightning_pipe.capture.replayed.stage_replayer import StageReplayer
from lightning_pipe.capture.replayed.stage_spec import BatchContext, PlayedStep, StageSpec, Tensors
from lightning_pipe.capture.steps.stage_program import RandomKey


class ReplayHead:
    """Run the head of a step.

    Args:
        step: the step.
        part: what it plays: no unit, to the end of the step.
        now: what changes from batch to batch.
    """

    def __init__(self, step: PlayedStep, part: StageSpec, now: BatchContext) -> None:
        self._step, self.part, self._now = step, part, now
        self._player = StageReplayer(step, part, now)
        self.holds = step.head == "holds"

    def run(
        self,
        samples: int,
        key: RandomKey,
        *,
        state: dict[str, torch.Tensor],
        leaves: Mapping[int, torch.Tensor],
        given: Mapping[int, Tensors],
        asked: Mapping[int, torch.Tensor],
        tangent: torch.Tensor | None,
    ) -> tuple[torch.Tensor, Mapping[int, Tensors], Mapping[str, torch.Tensor | None]]:
        """Run the step on the whole batch.

        Args:
            samples: of the batch.
            key: of the random numbers behind the last unit.
            state: parameters and buffers by name.
            leaves: tensors of the batch by number.
            given: outputs of units for all micro-batches, in the order of samples.
            asked: sums of the rows of what plays gave units, by unit.
            tangent: weight of the batch; None if it only speaks.

        Returns:
            The loss, its gradients for outputs of units (of tensors with a gradient only) and for parameters; no
            gradients if it only speaks.
        """
        whole = {k: tuple(self._together(k, i, t) for i, t in enumerate(tensors)) for k, tensors in given.items()}
        played = self._player.forward(samples, key, state=state, leaves=leaves, given=whole)
        recording = played.recording
        recording.loss = played.loss if recording.returned is not None else None
        for k, sums in asked.items():
            if not is_alike(sums, played.asked[k]):
                unit = self._step.trace.units[k]
                recording.unlike = recording.unlike or f"what it gives {unit.path} is made of all samples"
        if tangent is None:
            self._player.forget(played.tape)
            return played.loss, {}, {}
        returned, trained = self._player.backward(played.tape, tangent=torch.ones_like(played.loss), gradients={})
        numbers = {k: [i for i, o in enumerate(self._step.trace.units[k].outputs) if o.has_gradient] for k in returned}
        rows = {
            k: tuple(self._apart(k, i, tensor) for i, tensor in zip(numbers[k], tensors, strict=True))
            for k, tensors in returned.items()
        }
        return played.loss, rows, trained

    def _together(self, k: int, i: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return the rows of all samples in the order in which the step has them, from those of micro-batches."""
        unit = self._step.trace.units[k]
        dim = unit.outputs[i].batch_dim
        if unit.blocks == 1 or dim is None:
            return tensor
        sizes = [unit.outputs[i].rows * samples for samples in self._now.sizes]
        return joined(tensor.split(sizes, dim), dim, blocks=unit.blocks)

    def _apart(self, k: int, i: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return rows in the order of micro-batches."""
        unit = self._step.trace.units[k]
        dim = unit.outputs[i].batch_dim
        if unit.blocks == 1 or dim is None:
            return tensor
        blocks = tensor.unflatten(dim, (unit.blocks, -1))
        sizes = [unit.outputs[i].rows // unit.blocks * samples for samples in self._now.sizes]
        return torch.cat([part.flatten(dim, dim + 1) for part in blocks.split(sizes, dim + 1)], dim)


def added(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    """Return the sum of two gradients, of which either may not have been made."""
    return other if one is None else one if other is None else one + other
