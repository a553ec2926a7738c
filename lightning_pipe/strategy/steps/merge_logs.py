"""Merge of what a replayed step without a head logged over the micro-batches of a batch into one record.

Calls of `self.log` and of metrics are matched over the micro-batches by name and occurrence; where only some of them
made a call, the batch is run whole (`uneven`). Tensors and numbers in their arguments, and in what the step returned,
are combined:

    tensor, list with rows of samples      joined, in the order of samples
    number in proportion to samples        sum (a size)
    other tensors and numbers              as they are if they agree, else their mean, weighted by samples; sum, max,
                                           min if `reduce_fx` of the log says so (it is told which of these differ)
    batch_size of a log                    sum, if it counts samples

Runs with other numbers of samples have shown what has rows, and what is in proportion.

Legend: a piece is what one play of the last stage said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from lightning_pipe.capture.replayed.head_words import Words, left_unlike
from lightning_pipe.capture.replayed.replay_values import LOSS
from lightning_pipe.capture.steps.call_recording import StepRecording
from lightning_pipe.capture.steps.numbers import (
    LENGTH,
    RETURNED,
    VALUE,
    Place,
    SaidLeaf,
    call_keys,
    is_number,
    is_under,
    leaves_said,
    lists_said,
)
from lightning_pipe.capture.steps.record import (
    STAND_INS,
    LogCall,
    MetricValue,
    ObjectCall,
    Ref,
    StepRecord,
)
from lightning_pipe.capture.steps.trees import branches, found_in, rebuilt
from lightning_pipe.errors import PipelineError
from lightning_pipe.runtime.exchanges.slicing import Content
from lightning_pipe.strategy.ranks.control_plane import ControlPlane

Rows: TypeAlias = "Mapping[Place, int]"


def _lists_of(rows: Rows) -> frozenset[Place]:
    """Return the places of the lists that have an item for every sample."""
    return frozenset(place[:-1] for place in rows if place[-1] == LENGTH)


@dataclass(frozen=True)
class _Piece:
    """What one play said, with the calls by key."""

    samples: int
    recording: StepRecording
    keys: tuple[Place, ...]

    def lists(self, rows: Rows) -> Iterator[tuple[Place, Sequence[Any]]]:
        """Yield the lists that have no item for every sample, and are in none that has."""
        lists, joined = lists_said(self.recording.returned, self.recording.calls), _lists_of(rows)
        return ((place, items) for place, items in lists if not is_under(place, joined))

    def leaves(self, rows: Rows) -> Iterator[SaidLeaf]:
        """Yield what is in no list that has an item for every sample."""
        leaves, joined = leaves_said(self.recording.returned, self.recording.calls), _lists_of(rows)
        return (leaf for leaf in leaves if not is_under(leaf.place, joined))

    @property
    def calls(self) -> dict[Place, LogCall | ObjectCall]:
        return dict(zip(self.keys, self.recording.calls, strict=True))


def gathered(words: Sequence[Words], speakers: Sequence[int], control: ControlPlane) -> list[Words]:
    """Return what all plays said, in the order of samples, on every rank.

    Args:
        words: those of this rank; none if it does not speak.
        speakers: ranks of the stages that say something.
        control: to the other ranks.
    """
    mine = [(m, first, count, _on_host(recording)) for m, first, count, recording in words]
    told = [control.broadcast(mine, source=rank, what="what the step logged") for rank in speakers]
    return sorted((one for ones in told for one in ones), key=lambda one: one[:2])


def combined(
    words: Sequence[Words],
    *,
    device: torch.device,
    proportional: Set[Place] = frozenset(),
    rows: Rows,
) -> tuple[StepRecord, dict[str, Content], tuple[str, ...]]:
    """Return the record of a batch, the values that it refers to, and where it says what is not understood.

    The loss is left to others.

    Args:
        words: what all plays said, in the order of samples.
        device: where values are wanted.
        proportional: places of numbers that are in proportion to the samples.
        rows: dimension along which tensors and lists have rows of samples, by place.
    """
    heard = [_Piece(samples, recording, call_keys(recording.calls)) for _, _, samples, recording in words]
    pieces = [piece for piece in heard if piece.recording.is_whole]
    order = list(dict.fromkeys(key for piece in pieces for key in piece.keys))
    merger = _Merger(order, device, proportional, rows)
    calls = tuple(merger.call(key, pieces) for key in order)
    returned = merger.value([piece.recording.returned for piece in pieces], pieces, RETURNED)
    loss = LOSS if any(_holds_loss(piece.recording.returned) for piece in pieces) else None
    first, _, _, _ = words[0]
    left = [p for (microbatch, *_), p in zip(words, heard, strict=True) if microbatch == first]
    kept = [replace(k, value=merger.value([k.value], [p], (k.name,))) for p in left for k in p.recording.kept]
    return StepRecord(calls, loss, returned, (), tuple(kept)), merger.values, _unknown(pieces, proportional, rows)


def uneven(words: Sequence[Words], *, rows: Rows) -> str:
    """Return what micro-batches have left behind or said that does not make that of the batch, "" if there is nothing.

    Args:
        words: what all plays said, in the order of samples.
        rows: dimension along which tensors and lists have rows of samples, by place.
    """
    if differing := _differing(words):
        return differing
    pieces = [_Piece(n, one, call_keys(one.calls)) for *_, n, one in words if one.is_whole]
    return _inseparable(pieces, rows) if len(pieces) > 1 else ""


def _inseparable(pieces: Sequence[_Piece], rows: Rows) -> str:
    """Return what the pieces say that cannot be put together."""
    first, *others = ({place: len(items) for place, items in piece.lists(rows)} for piece in pieces)
    if any(other != first for other in others):
        return "a list that it returns or logs is longer for some micro-batches than for others"
    told, *rest = ({leaf.place: leaf for leaf in piece.leaves(rows)} for piece in pieces)
    if any(other.keys() != told.keys() for other in rest):
        return "what it returns or logs has other entries for some micro-batches than for others"
    for place, leaf in told.items():
        values = [leaf.value, *(other[place].value for other in rest)]
        if why := _unlike(values, pieces, has_rows=place in rows):
            return f"{leaf} {why}"
    return ""


def _unlike(values: Sequence[Any], pieces: Sequence[_Piece], *, has_rows: bool) -> str:
    """Return how what the pieces say at one place cannot be put together, or ""."""
    first = values[0]
    if isinstance(first, Ref):
        if first.name == LOSS or has_rows:
            return ""
        tensors = [piece.recording.results[int(ref.name)] for piece, ref in zip(pieces, values, strict=False)]
        return "" if len({tensor.shape for tensor in tensors}) == 1 else "has another shape for some micro-batches"
    if isinstance(first, STAND_INS) or first is None or is_number(first):
        return ""
    try:
        return (
            "" if all(bool(one == first) for one in values) else "is other text, or another object, for micro-batches"
        )
    except Exception:  # whatever an object raises that is compared
        return "is an object"


def _differing(words: Sequence[Words]) -> str:
    """Return what micro-batches have left behind, answered or returned differently, "" if they were alike."""
    ends = [recording for *_, recording in words if recording.is_whole]
    if len({recording.returned is None for recording in ends}) > 1:
        return "some of its micro-batches are skipped"
    if any(recording.answers != ends[0].answers for recording in ends):
        return "a question that the step asks of its tensors has different answers for micro-batches"
    if len({call_keys(recording.calls) for recording in ends}) > 1:
        return "it logs other names for some of its micro-batches"
    return left_unlike(words)


def _holds_loss(returned: Any) -> bool:
    return any(ref.name == LOSS for ref in found_in(returned, Ref))


def _on_host(recording: StepRecording) -> StepRecording:
    results = [tensor.detach().cpu() for tensor in recording.results]
    loss = None if recording.loss is None else recording.loss.detach().cpu()
    return replace(recording, results=results, loss=loss)


class _Merger:
    """Combine arguments of calls; tensors get names of their own."""

    def __init__(self, order: Sequence[Place], device: torch.device, proportional: Set[Place], rows: Rows) -> None:
        self._places = {key: number for number, key in enumerate(order)}
        self._device, self._proportional, self._rows = device, proportional, rows
        self._lists = _lists_of(rows)
        self.values: dict[str, Content] = {}

    def call(self, key: Place, pieces: Sequence[_Piece]) -> LogCall | ObjectCall:
        """Return one call of all pieces that made it."""
        speaking = [piece for piece in pieces if key in piece.calls]
        calls = [piece.calls[key] for piece in speaking]
        first = calls[0]
        if isinstance(first, LogCall):
            logs = [call for call in calls if isinstance(call, LogCall)]
            how = first.kwargs.get("reduce_fx", "mean")
            kwargs = {
                name: (
                    self._batch_size([int(call.kwargs[name]) for call in logs], speaking, (*key, name))
                    if name == "batch_size" and isinstance(value, int)
                    else self.value([call.kwargs.get(name) for call in logs], speaking, (*key, name))
                )
                for name, value in first.kwargs.items()
            }
            value = self.value([call.value for call in logs], speaking, (*key, VALUE), how=how)
            return replace(first, value=value, kwargs=kwargs)
        metrics = [call for call in calls if isinstance(call, ObjectCall)]
        args = self.value([call.args for call in metrics], speaking, (*key, VALUE))
        named = {name: [call.kwargs[name] for call in metrics] for name in first.kwargs}
        kwargs = {name: self.value(values, speaking, (*key, name)) for name, values in named.items()}
        return replace(first, args=args, kwargs=kwargs)

    def _batch_size(self, found: Sequence[int], pieces: Sequence[_Piece], place: Place) -> int:
        """Return the weight of a batch in the mean of an epoch: a number that is no size weighs every batch alike."""
        counts = place in self._proportional or all(n == piece.samples for n, piece in zip(found, pieces, strict=True))
        return found[0] if len({*found}) == 1 and not counts else sum(found)

    def value(self, found: Sequence[Any], pieces: Sequence[_Piece], place: Place, *, how: Any = "mean") -> Any:
        """Return one value of all pieces."""
        first = found[0]
        if isinstance(first, Ref):
            if any(ref.name == LOSS for ref in found):
                return Ref(LOSS)
            is_array = first.is_array
            tensors = [piece.recording.results[int(ref.name)] for piece, ref in zip(pieces, found, strict=True)]
            if place in self._rows:
                return self._named(self._chained(tensors, place), is_array)
            return self._named(_joined(tensors, [piece.samples for piece in pieces], how), is_array)
        if isinstance(first, MetricValue):
            return MetricValue(self._places[pieces[0].keys[first.call]])
        if place in self._lists:
            pairs = [(item, piece) for piece, one in zip(pieces, found, strict=True) for item in one]
            return type(first)([self.value([item], [piece], (*place, "")) for item, piece in pairs])
        if (inside := branches(first)) is not None:
            each = [branches(one) or {} for one in found]
            if any(one.keys() != inside.keys() for one in each):
                raise PipelineError(
                    f"What the step returns or logs has other entries for some micro-batches than for others, at "
                    f"{'.'.join(place)}: {[*map(list, each)]}. Return the same entries always, or set microbatches=1."
                )
            items = {k: self.value([one[k] for one in each], pieces, (*place, str(k)), how=how) for k in inside}
            return rebuilt(first, items)
        if place in self._proportional:
            return sum(found)
        if isinstance(first, (int, float)) and any(one != first for one in found):
            numbers = [torch.tensor(float(one), dtype=torch.float64) for one in found]
            return float(_joined(numbers, [piece.samples for piece in pieces], how))
        return first

    def _chained(self, tensors: Sequence[torch.Tensor], place: Place) -> torch.Tensor:
        """Return tensors with samples in one."""
        try:
            return torch.cat(list(tensors), dim=self._rows[place])
        except RuntimeError:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
            raise PipelineError(
                f"What the step returns or logs at {'.'.join(place)} cannot be put together from micro-batches, which "
                f"have the shapes {shapes}. Return one row per sample, or set microbatches=1."
            ) from None

    def _named(self, tensor: torch.Tensor, is_array: bool) -> Ref:
        name = f"said{len(self.values)}"
        self.values[name] = tensor.to(self._device)
        return Ref(name, is_array)


def _unknown(pieces: Sequence[_Piece], sizes: Set[Place], rows: Rows) -> tuple[str, ...]:
    """Return where something is said that differs between pieces, and of which nobody knows what it is of the batch."""
    if len(pieces) == 1:
        return ()
    first, *others = ({leaf.place: (leaf, value) for leaf, value in _unclear(piece, sizes, rows)} for piece in pieces)

    def differs(place: Place, value: torch.Tensor) -> bool:
        return any(place in other and not torch.equal(value, other[place][1]) for other in others)

    return tuple(dict.fromkeys(str(leaf) for place, (leaf, value) in first.items() if differs(place, value)))


def _unclear(piece: _Piece, sizes: Set[Place], rows: Rows) -> Iterator[tuple[SaidLeaf, torch.Tensor]]:
    """Yield the numbers, and tensors without rows of samples, that a piece has said."""
    for leaf in piece.leaves(rows):
        value = leaf.value
        if leaf.place in sizes or leaf.place in rows:
            continue
        if isinstance(value, Ref) and value.name != LOSS:
            yield leaf, piece.recording.results[int(value.name)]
        elif is_number(value) and (leaf.place[0] != "log" or leaf.place[-1] == VALUE):  # no option of a log
            yield leaf, torch.tensor(value)


def _joined(tensors: Sequence[torch.Tensor], samples: Sequence[int], how: Any) -> torch.Tensor:
    """Return what tensors of one shape make together: their sum, an extreme, the first or last, or else their mean."""
    first = tensors[0]
    if len(tensors) == 1:
        return first
    stacked = torch.stack(list(tensors))
    match getattr(how, "__name__", how):
        case "first":
            return first
        case "last":
            return tensors[-1]
        case "sum":
            return stacked.sum(0)
        case "max":
            return stacked.amax(0)
        case "min":
            return stacked.amin(0)
    if not first.is_floating_point() and bool((stacked == first).all()):
        return first
    shares = torch.tensor(samples, dtype=torch.float64, device=stacked.device) / sum(samples)
    weights = shares.reshape(-1, *[1] * first.ndim)
    mean = (stacked.to(torch.float64) * weights).sum(0)
    return mean.to(first.dtype if first.is_floating_point() else torch.float32)
