"""Output of a replayed step: once per batch, of the output of its micro-batches.

A head, and a batch that is not cut, output what the batch does. Of micro-batches is known

    tensors with rows of samples          joined, in the order of samples
    numbers in proportion to samples      added
    the loss                              the batch's
    what is equal for all of them         as it is, if runs with other numbers of samples had it, too

What is left has no value of the batch, and is not shown.

Legend: a piece is the output of one play at one place of the code.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from lightning_pipe.capture.output.printed_tensors import GradientKind
from lightning_pipe.capture.recording.units import OutputRules
from lightning_pipe.capture.replayed.head_words import HeadWords, Words, head_words
from lightning_pipe.capture.replayed.replay_values import LOSS
from lightning_pipe.capture.steps.call_recording import StepRecording
from lightning_pipe.capture.steps.numbers import Place, is_number, keyed_outputs
from lightning_pipe.capture.steps.record import STAND_INS, OutputCall, Ref
from lightning_pipe.capture.steps.trees import branches, mapped, rebuilt

_Piece: TypeAlias = tuple[StepRecording, OutputCall]


class _Unknown(Exception):
    """Nothing tells what micro-batches make of the batch."""


def merged_outputs(
    words: Sequence[Words], rules: OutputRules, device: torch.device
) -> tuple[tuple[OutputCall, ...], dict[str, torch.Tensor], tuple[str, ...]]:
    """Return the output of a batch, the values that it refers to, and the lines whose output is not known.

    Args:
        words: of all plays, in the order of samples.
        rules: what is known of the output.
        device: where values are wanted.
    """
    headed = head_words(words)
    plays = words if headed is None else headed.plays
    total = sum(count for *_, count, one in plays if one.is_whole) if headed is None else headed.head[2]
    said = [] if headed is None else [headed.head]
    said += [(m, begin, count, replace(one, outputs=_heard(one, headed))) for m, begin, count, one in plays]
    pieces: dict[Place, list[_Piece]] = defaultdict(list)
    samples: Counter[Place] = Counter()
    for *_, count, recording in said:
        for key, call in keyed_outputs(recording.outputs).items():
            pieces[key].append((recording, call))
            samples[key] += count
    merger = _Merger(rules, device)
    made: list[OutputCall] = []
    unknown: dict[str, None] = {}
    for key, calls in pieces.items():
        try:
            if samples[key] != total:
                raise _Unknown
            made.append(merger.call(key, calls))
        except _Unknown:
            unknown[f"{calls[0][1].name}() at {calls[0][1].line}"] = None
    return tuple(sorted(made, key=lambda call: call.position)), merger.values, tuple(unknown)


def _heard(play: StepRecording, headed: HeadWords | None) -> list[OutputCall]:
    """Return the output of a play that is that of its samples; where there is a head, of units that it has not run."""
    if headed is None:
        return play.outputs
    by_head = {call.position for call in headed.head[-1].outputs}
    return [call for call in inside_units(play) if call.position not in by_head]


class _Merger:
    def __init__(self, rules: OutputRules, device: torch.device) -> None:
        self._rules, self._device = rules, device
        self.values: dict[str, torch.Tensor] = {}

    def call(self, key: Place, pieces: Sequence[_Piece]) -> OutputCall:
        """Return one call of all pieces.

        Raises:
            _Unknown: if it is not known.
        """
        recordings = [recording for recording, _ in pieces]
        args, kwargs = self._value([(call.args, call.kwargs) for _, call in pieces], recordings, key)
        first = pieces[0][1]
        return OutputCall(first.path, first.method, args, kwargs, first.line, first.position)

    def _value(self, said: Sequence[Any], recordings: Sequence[StepRecording], place: Place) -> Any:
        first = said[0]
        if isinstance(first, Ref):
            return self._tensor(said, recordings, place)
        if len(said) == 1 and not isinstance(first, STAND_INS):
            return mapped(first, Ref, lambda ref: self._tensor([ref], recordings, place))
        if (inside := branches(first)) is not None:
            each = [branches(one) or {} for one in said]
            if any(one.keys() != inside.keys() for one in each):
                raise _Unknown
            items = {k: self._value([one[k] for one in each], recordings, (*place, str(k))) for k in inside}
            return rebuilt(first, items)
        if is_number(first) and place in self._rules.proportional:
            return sum(said)
        if isinstance(first, GradientKind):
            return first
        if any(one is not first and one != first for one in said):
            raise _Unknown
        is_text_alone = isinstance(first, str) and not any(map(str.isdigit, first))
        if isinstance(first, str | int | float) and not (
            place in self._rules.same or is_text_alone or len(said) == 1 or isinstance(first, bool)
        ):
            raise _Unknown
        return first

    def _tensor(self, said: Sequence[Any], recordings: Sequence[StepRecording], place: Place) -> Ref:
        if any(ref.name == LOSS for ref in said):
            return Ref(LOSS)
        tensors = [recording.results[int(ref.name)] for recording, ref in zip(recordings, said, strict=True)]
        dim = self._rules.rows.get(place)
        first = tensors[0]
        if len(tensors) > 1 and dim is not None:
            first = torch.cat(tensors, dim=dim)
        elif any(one.shape != first.shape or not torch.equal(one, first) for one in tensors):
            raise _Unknown
        name = f"output{len(self.values)}"
        self.values[name] = first.to(self._device)
        return Ref(name, said[0].is_array)


def inside_units(recording: StepRecording) -> list[OutputCall]:
    """Return what sub-modules have output, and not what is between them."""
    return [call for call in recording.outputs if call.position % 2]
