"""Head of a replayed step: its Python runs once per batch, on what units gave for all micro-batches.

Plays of micro-batches end behind the last unit. The head runs the step from its beginning on the whole batch; calls of
units are answered with the rows of all micro-batches, as leaves of autograd. So loss, logs, metrics, what is returned
and the Python state of the step are those of one device, and the gradients of these rows go back to the micro-batches.

A head that only speaks makes no gradients: micro-batches, whose loss is proven to make that of the batch, go to the end
of the step themselves.

Units must have been given in all plays what the head gives them (`unit_inputs`); else the batch is run as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightning_pipe.capture.recording.unit_inputs import is_alike, joined
from lightning_pipe.capture.recording.units import Unit
from lightning_pipe.capture.replayed.replay_values import LOSS
from lightning_pipe.capture.replayed.stage_replayer import StageReplayer
from lightning_pipe.capture.replayed.stage_spec import BatchContext, PlayedStep, StageSpec, Tensors
from lightning_pipe.capture.steps.stage_program import BatchHead, Half, RandomKey

TAPE, TANGENT = "tape", "tangent"
OF_HEAD = -1  # in the place of a stage that gradients come back from


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
        returned, trained = self._player.backward(played.tape, tangent=tangent, gradients={})
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


def batch_head(units: Sequence[Unit], head: ReplayHead) -> BatchHead:
    """Return what runs once per batch as a function of values."""
    part = head.part
    state = state_names(part)
    inputs = [*state_values(part), *(f"leaf{i}" for i in part.leaves)]
    inputs += [name for k in part.given for name in output_names(units, k)] + [asked_name(k) for k in part.asked]
    inputs += [TANGENT] if head.holds else []
    outputs: list[str] = []
    if head.holds:
        outputs = [LOSS, *(n for k in part.given for n in gradient_names(units, k, OF_HEAD))]
        outputs += [head_gradient(name) for name in part.trained]

    def run(samples: int, key: Any, *values: Any) -> tuple[Any, ...]:
        tensors = iter(values)
        hung = {name: next(tensors) for name in state}
        batch = {i: next(tensors) for i in part.leaves}
        given = {k: tuple(next(tensors) for _ in units[k].outputs) for k in part.given}
        asked = {k: next(tensors) for k in part.asked}
        loss, rows, trained = head.run(
            samples, key, state=hung, leaves=batch, given=given, asked=asked, tangent=next(tensors, None)
        )
        if not head.holds:
            return ()
        return (loss, *(g for k in part.given for g in rows[k]), *(trained[name] for name in part.trained))

    return BatchHead(Half(tuple(inputs), tuple(outputs), run), holds_backwards=head.holds)


def headed_backward(
    units: Sequence[Unit], player: StageReplayer, head: StageSpec, number: int, now: BatchContext
) -> Half:
    """Return the backward of a stage whose head has made the gradients of rows, and of parameters that it reads.

    A micro-batch has its rows, and its share of the gradients of parameters.

    Args:
        units: the units.
        player: plays the stage.
        head: what the head plays.
        number: of the stage.
        now: what changes from batch to batch.
    """
    part, own = player.part, range(player.part.begin, player.part.end)
    rows = [(k, name) for k in head.given for name in gradient_names(units, k, OF_HEAD)]
    inputs = [TAPE, *(name for _, name in rows), *(head_gradient(name) for name in head.trained)]
    outputs = [name for k in part.given for name in gradient_names(units, k, number)]

    def run(samples: int, key: Any, handle: int, *values: Any) -> tuple[Any, ...]:
        of_rows, share = values[: len(rows)], samples / sum(now.sizes)
        parameters = [None if gradient is None else gradient * share for gradient in values[len(rows) :]]
        of_head = dict(zip(head.trained, parameters, strict=True))
        back: dict[int, tuple[torch.Tensor, ...]] = dict.fromkeys(head.given, ())
        for (k, _), gradient in zip(rows, of_rows, strict=True):
            back[k] = (*back[k], gradient)
        gradients = {(k, OF_HEAD): tensors for k, tensors in back.items() if k in own}
        returned, trained = player.backward(handle, tangent=None, gradients=gradients)
        sums = {k: tuple(map(added, returned[k], back.get(k, (None,) * len(returned[k])))) for k in part.given}
        made = (added(trained[name], of_head.get(name)) for name in part.trained)
        return (*(gradient for k in part.given for gradient in sums[k]), *made)

    return Half(tuple(inputs), (*outputs, *(f"gradient:{name}" for name in part.trained)), run)


def output_names(units: Sequence[Unit], k: int) -> list[str]:
    """Name the outputs of a unit."""
    return [f"unit{k}.{i}" for i in range(len(units[k].outputs))]


def gradient_names(units: Sequence[Unit], k: int, target: int) -> list[str]:
    """Name the gradients of a unit's outputs that come back from a stage."""
    return [f"unit{k}.{i}.gradient{target}" for i, output in enumerate(units[k].outputs) if output.has_gradient]


def state_names(part: StageSpec) -> list[str]:
    """Name the parameters and buffers that a stage reads."""
    return [*(name for own in part.parameters.values() for name in own), *part.buffers]


def asked_name(k: int) -> str:
    """Name the sums of the rows of what a unit is given."""
    return f"asked{k}"


def head_gradient(name: str) -> str:
    """Name the gradient of a parameter that the head reads."""
    return f"head:gradient:{name}"


def state_values(part: StageSpec) -> list[str]:
    """Name the values of the parameters and buffers that a stage reads."""
    parameters = [f"parameter:{name}" for own in part.parameters.values() for name in own]
    return parameters + [f"buffer:{name}" for name in part.buffers]


def fixed_size(shape: tuple[int, ...], samples: int) -> tuple[int, ...]:
    """Return a shape, whatever the number of samples."""
    return shape
