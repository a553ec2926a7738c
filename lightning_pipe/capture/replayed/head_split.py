"""Functions of a stage with a head: the head itself, and the backward of what it has made the gradients of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lightning_pipe.capture.recording.units import Unit
from lightning_pipe.capture.replayed.replay_head import ReplayHead, added
from lightning_pipe.capture.replayed.replay_values import LOSS
from lightning_pipe.capture.replayed.stage_replayer import StageReplayer
from lightning_pipe.capture.replayed.stage_spec import BatchContext, StageSpec
from lightning_pipe.capture.steps.stage_program import BatchHead, Half

TAPE, TANGENT = "tape", "tangent"
OF_HEAD = -1  # in the place of a stage that gradients come back from


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
