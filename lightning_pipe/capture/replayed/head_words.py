"""Words of a replayed step whose head has run once per batch: they are those of the batch, if its micro-batches agree.

Micro-batches agree if their units were called and given what the head calls and gives, if what the step asked of its
tensors on the way had the same answers, if units left the same behind in Python state, and if a proven loss is that of
the batch. Else the batch is run as a whole.

Legend: the head is the words of micro-batch -1, of which every replica of the last stage has some; others are plays.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch

from lightning_pipe.capture.recording.replay_state import same_left
from lightning_pipe.capture.replayed.replay_values import LOSS
from lightning_pipe.capture.replayed.stage_spec import WHOLE_BATCH
from lightning_pipe.capture.steps.call_recording import StepRecording
from lightning_pipe.capture.steps.record import KeptState, LogCall, ObjectCall, Ref, StepRecord
from lightning_pipe.capture.steps.trees import found_in, mapped

Words: TypeAlias = tuple[int, int, int, StepRecording]  # micro-batch, first sample, samples, what was said


@dataclass(frozen=True)
class HeadWords:
    """What the head of a batch, and plays of its micro-batches, have said.

    Attributes:
        head: the words of the head.
        plays: those of plays.
    """

    head: Words
    plays: tuple[Words, ...]

    def record(self, device: torch.device) -> tuple[StepRecord, dict[str, torch.Tensor]]:
        """Return the record of the batch, with what units have left behind, and the values that it refers to.

        Args:
            device: where values are wanted.
        """
        head, values = self.head[-1], dict[str, torch.Tensor]()
        left = [recording for microbatch, *_, recording in self.plays if microbatch == 0]
        named = [partial(_named, recording, values, f"said{number}.") for number, recording in enumerate((head, *left))]
        kept = [
            replace(k, value=name(k.value)) for name, one in zip(named, (head, *left), strict=True) for k in one.kept
        ]
        returned = named[0](head.returned)
        loss = LOSS if any(ref.name == LOSS for ref in found_in(returned, Ref)) else None
        record = StepRecord(tuple(_call(call, named[0]) for call in head.calls), loss, returned, (), tuple(kept))
        if head.loss is not None:
            values[LOSS] = head.loss
        return record, {name: value.to(device) for name, value in values.items()}

    def unlike(self, loss: Any) -> str:
        """Return what micro-batches have done that is not what the batch does; "" if nothing.

        Args:
            loss: that micro-batches have made together.
        """
        head, plays = self.head[-1], [recording for *_, recording in self.plays]
        if head.unlike:
            return head.unlike
        if any(play.called != head.called for play in plays if play.called):
            return "it calls other sub-modules for some micro-batches than for the batch"
        if any(play.answers != head.answers[: len(play.answers)] for play in plays):
            return "a question that the step asks of its tensors has different answers for micro-batches"
        if any((play.returned is None) != (head.returned is None) for play in plays if play.is_whole):
            return "some of its micro-batches are skipped"
        if left := left_unlike(self.plays):
            return left
        if isinstance(loss, torch.Tensor) and head.loss is not None and not _alike(loss, head.loss):
            return f"micro-batches make its loss {float(loss):.6g}, and the batch makes it {float(head.loss):.6g}"
        return ""


def head_words(words: Sequence[Words]) -> HeadWords | None:
    """Return the words of a batch that has a head; None if it has none."""
    heads = [one for one in words if one[0] == WHOLE_BATCH]
    return HeadWords(heads[0], tuple(one for one in words if one[0] != WHOLE_BATCH)) if heads else None


def left_unlike(words: Sequence[Words]) -> str:
    """Return what micro-batches have left behind differently, "" if they have left the same."""
    left: dict[int, list[KeptState]] = {}
    for microbatch, _, _, recording in words:
        named = partial(_named, recording, None, "")
        left.setdefault(microbatch, []).extend(replace(kept, value=named(kept.value)) for kept in recording.kept)
    first, *others = left.values() or ([],)
    for other in others:
        for one, two in itertools.zip_longest(first, other):
            if one is None or two is None or not same_left(one, two):
                return f"what it keeps in {(one or two).name} is different for micro-batches"
    return ""


def _named(recording: StepRecording, values: dict[str, torch.Tensor] | None, prefix: str, said: Any) -> Any:
    """Return what was said with other names of its tensors, which are added to values; None puts tensors in place."""

    def one(ref: Ref) -> Any:
        if not ref.name.isdigit():
            return ref
        tensor = recording.results[int(ref.name)]
        if values is None:
            return tensor
        values[prefix + ref.name] = tensor
        return Ref(prefix + ref.name, ref.is_array)

    return mapped(said, Ref, one)


def _call(call: LogCall | ObjectCall, named: Any) -> LogCall | ObjectCall:
    if isinstance(call, LogCall):
        return replace(call, value=named(call.value), kwargs=named(call.kwargs))
    return replace(call, args=named(call.args), kwargs=named(call.kwargs))


def _alike(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Return whether rounding explains a difference: half of the digits; not-a-number equals itself."""
    tolerance = torch.finfo(two.dtype).eps ** 0.5
    return math.isclose(float(one), float(two), rel_tol=tolerance) or bool(one != one and two != two)
