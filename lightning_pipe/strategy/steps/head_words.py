"""Words of a replayed step whose head has run once per batch: they are those of the batch, if its micro-batches agree.

Micro-batches agree if their units were called and given what the head calls and gives, if what the step asked of its
tensors on the way had the same answers, if units left the same behind in Python state, and if a proven loss is that of
the batch. Else the batch is run as a whole.

Legend: the head is the words of micro-batch -1, of which every replica of the last stage has some; others are plays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from lightning_pipe.capture.recording.said_roles import NOTHING_SAID
from lightning_pipe.capture.replayed.replay_values import LOSS
from lightning_pipe.capture.replayed.stage_spec import WHOLE_BATCH
from lightning_pipe.capture.steps.record import StepRecord
from lightning_pipe.runtime.exchanges.slicing import Content
from lightning_pipe.strategy.steps.merge_logs import Words, combined, left_unlike


@dataclass(frozen=True)
class HeadWords:
    """What the head of a batch, and plays of its micro-batches, have said.

    Attributes:
        head: the words of the head.
        plays: those of plays.
    """

    head: Words
    plays: tuple[Words, ...]

    def record(self, device: torch.device) -> tuple[StepRecord, Mapping[str, Content]]:
        """Return the record of the batch, with what units have left behind, and the values that it refers to.

        Args:
            device: where values are wanted.
        """
        left = [replace_number(words) for words in self.plays if words[0] == 0]
        record, values, _ = combined([self.head, *left], device=device, how=NOTHING_SAID)
        loss = self.head[-1].loss
        return record, values if loss is None else {**values, LOSS: loss.to(device)}

    def unlike(self, loss: Content) -> str:
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


def replace_number(words: Words) -> Words:
    """Return what a play has left behind as words of the head."""
    _, first, samples, recording = words
    return WHOLE_BATCH, first, samples, replace(recording, is_whole=False)


def _alike(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Return whether rounding explains a difference: half of the digits."""
    apart, size = abs(float(one) - float(two)), max(abs(float(one)), abs(float(two)))
    return one.equal(two) or not apart > size * torch.finfo(two.dtype).eps ** 0.5
