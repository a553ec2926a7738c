"""Merge of what a replayed step logged over the micro-batches of a batch into one record.

Calls of `self.log` and of metrics are matched over the micro-batches by name and occurrence; where only some of them
made a call, the batch is run whole (`uneven`). Tensors and numbers in their arguments, and in what the step returned,
are combined:

    tensor with samples                joined along the dimension in which they lie, in their order
    floating number, other tensor      by its role, if that is known (`said_roles`), or else:
                                       mean weighted by samples; sum, max, min if `reduce_fx` of the log says so
                                       (it is told which of these differ)
    number in proportion to samples    sum (a size: of the traced runs, with several numbers of samples)
    other numbers                      as they are if they agree, else as floating ones
    batch_size of a log                sum, if it counts samples

Legend: a piece is what one play of the last stage said.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_pipe.capture.recording.parts_and_whole import ENDS, FoundRole
from lightning_pipe.capture.recording.said_roles import LENGTH, Said
from lightning_pipe.capture.replayed.head_words import Words, left_unlike
from lightning_pipe.capture.replayed.loss_watch import unequal_denominators, unlike_bend
from lightning_pipe.capture.replayed.replay_values import LOSS
from lightning_pipe.capture.steps.call_recording import StepRecording
from lightning_pipe.capture.steps.numbers import (
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


@dataclass(frozen=True)
class _Piece:
    """What one play said, with the calls by key."""

    samples: int
    recording: StepRecording
    keys: tuple[Place, ...]

    def lists(self, how: Said) -> Iterator[tuple[Place, Sequence[Any]]]:
        """Yield the lists that have no item for every sample, and are in none that has."""
        found = lists_said(self.recording.returned, self.recording.calls)
        return ((place, one) for place, one in found if not is_under(place, how.lists))

    def leaves(self, how: Said) -> Iterator[SaidLeaf]:
        """Yield what is in no list that has an item for every sample."""
        found = leaves_said(self.recording.returned, self.recording.calls)
        return (leaf for leaf in found if not is_under(leaf.place, how.lists))

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
    how: Said,
) -> tuple[StepRecord, dict[str, Content], tuple[str, ...]]:
    """Return the record of a batch, the values that it refers to, and where it says what is not understood.

    The loss is left to others.

    Args:
        words: what all plays said, in the order of samples.
        device: where values are wanted.
        proportional: places of numbers that are in proportion to the samples.
        how: how all else is combined.
    """
    heard = [_Piece(samples, recording, call_keys(recording.calls)) for _, _, samples, recording in words]
    pieces = [piece for piece in heard if piece.recording.is_whole]
    order = list(dict.fromkeys(key for piece in pieces for key in piece.keys))
    merger = _Merger(order, device, proportional, how)
    calls = tuple(merger.call(key, pieces) for key in order)
    returned = merger.value([piece.recording.returned for piece in pieces], pieces, RETURNED)
    loss = LOSS if any(_holds_loss(piece.recording.returned) for piece in pieces) else None
    first, _, _, _ = words[0]
    left = [p for (microbatch, *_), p in zip(words, heard, strict=True) if microbatch == first]
    kept = [replace(k, value=merger.value([k.value], [p], (k.name,))) for p in left for k in p.recording.kept]
    return StepRecord(calls, loss, returned, (), tuple(kept)), merger.values, _unknown(pieces, proportional, how)


def uneven(words: Sequence[Words], *, how: Said, sizes: Set[Place]) -> tuple[str, bool]:
    """Return what micro-batches have left behind or said that does not make that of the batch, "" if there is nothing.

    And whether it may be so in every batch.

    Args:
        words: what all plays said, in the order of samples.
        how: how what they say is combined.
        sizes: places of numbers that are in proportion to the samples.
    """
    if found := _differing(words):
        return found, True
    pieces = [_Piece(n, one, call_keys(one.calls)) for *_, n, one in words if one.is_whole]
    return _inseparable(pieces, how, sizes) if len(pieces) > 1 else ("", True)


def _inseparable(pieces: Sequence[_Piece], how: Said, sizes: Set[Place]) -> tuple[str, bool]:
    """Return what the pieces say that cannot be put together, and whether it may be so in every batch."""
    first, *others = ({place: len(one) for place, one in piece.lists(how)} for piece in pieces)
    if any(other != first for other in others):
        return "a list that it returns or logs is longer for some micro-batches than for others", True
    counts = [piece.samples for piece in pieces]
    for place, length in first.items():
        if how.places is not None and (*place, LENGTH) not in how.places and [length] * len(counts) == counts:
            return "it says what it has not said when it was tried: a list", False
    told, *rest = ({leaf.place: leaf for leaf in piece.leaves(how)} for piece in pieces)
    if any(other.keys() != told.keys() for other in rest):
        return "what it returns or logs has other entries for some micro-batches than for others", True
    for place, leaf in told.items():
        values = [leaf.value, *(other[place].value for other in rest)]
        if place in sizes or (why := _unlike(values, pieces, how.roles.get(place), how.shapes.get(place))) == "":
            continue
        if why == _OTHER_NUMBERS and (how.places is None or place in how.places):
            continue  # it is known what these make, or said that it is not
        return f"{leaf} {why}", why != _OTHER_NUMBERS
    return "", True


_OTHER_NUMBERS = "has not been said when it was tried"


def _unlike(values: Sequence[Any], pieces: Sequence[_Piece], role: FoundRole | None, shape: torch.Size | None) -> str:
    """Return how what the pieces say at one place is not the same, or ""."""
    first = values[0]
    if isinstance(first, Ref):
        if first.name == LOSS:
            return ""
        tensors = [piece.recording.results[int(ref.name)] for piece, ref in zip(pieces, values, strict=False)]
        same_shape = len({tensor.shape for tensor in tensors}) == 1
        if (role in ENDS and tensors[0].shape != shape) or (role not in (None, *ENDS) and not same_shape):
            return "has another shape for some micro-batches"
        return "" if same_shape and all(torch.equal(one, tensors[0]) for one in tensors) else _OTHER_NUMBERS
    if isinstance(first, STAND_INS) or first is None:
        return ""
    if is_number(first):
        return "" if all(one == first for one in values) else _OTHER_NUMBERS
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


def unequally_divided(words: Sequence[Words]) -> list[str]:
    """Return the lines where a loss may be divided by what is not in proportion to the samples of micro-batches."""
    return unequal_denominators((samples, recording.loss_notes) for _, _, samples, recording in words)


def bent_unlike(words: Sequence[Words]) -> str:
    """Return the line where numbers of some micro-batches are bent and not of all, or ""."""
    return unlike_bend(recording.loss_notes for *_, recording in words)


def _holds_loss(returned: Any) -> bool:
    return any(ref.name == LOSS for ref in found_in(returned, Ref))


def _on_host(recording: StepRecording) -> StepRecording:
    results = [tensor.detach().cpu() for tensor in recording.results]
    loss = None if recording.loss is None else recording.loss.detach().cpu()
    return replace(recording, results=results, loss=loss, loss_notes=recording.loss_notes.on_host())


class _Merger:
    """Combine arguments of calls; tensors get names of their own."""

    def __init__(self, order: Sequence[Place], device: torch.device, proportional: Set[Place], said: Said) -> None:
        self._places = {key: number for number, key in enumerate(order)}
        self._device, self._proportional, self._said = device, proportional, said
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
        first, role = found[0], self._said.roles.get(place)
        how, is_sum = how if role in (None, "unknown") else role, role == "sum"
        if isinstance(first, Ref):
            if any(ref.name == LOSS for ref in found):
                return Ref(LOSS)
            is_array = first.is_array
            tensors = [piece.recording.results[int(ref.name)] for piece, ref in zip(pieces, found, strict=True)]
            shapes = {tensor.shape for tensor in tensors}
            if tensors[0].ndim and (role is None or len(shapes) > 1):
                return self._named(self._chained(tensors, place), is_array)
            return self._named(_joined(tensors, [piece.samples for piece in pieces], how), is_array)
        if isinstance(first, MetricValue):
            return MetricValue(self._places[pieces[0].keys[first.call]])
        if place in self._said.lists:
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
        if role in ENDS:
            return found[-1 if role == "last" else 0]
        if place in self._proportional:
            return sum(found)
        if is_sum and all(type(one) is int for one in found):
            return sum(found)
        if isinstance(first, (int, float)) and (is_sum or any(one != first for one in found)):
            numbers = [torch.tensor(float(one), dtype=torch.float64) for one in found]
            return float(_joined(numbers, [piece.samples for piece in pieces], how))
        return first

    def _chained(self, tensors: Sequence[torch.Tensor], place: Place) -> torch.Tensor:
        """Return tensors with samples in one."""
        try:
            return torch.cat(list(tensors), dim=self._said.joins.get(place, 0))
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


def _unknown(pieces: Sequence[_Piece], sizes: Set[Place], how: Said) -> tuple[str, ...]:
    """Return where something is said that differs between pieces, and of which nobody knows what it is of the batch."""
    if len(pieces) == 1:
        return ()
    first, *others = ({leaf.place: (leaf, value) for leaf, value in _unclear(piece, sizes, how)} for piece in pieces)

    def differs(place: Place, value: torch.Tensor) -> bool:
        return any(place in other and not torch.equal(value, other[place][1]) for other in others)

    return tuple(dict.fromkeys(str(leaf) for place, (leaf, value) in first.items() if differs(place, value)))


def _unclear(piece: _Piece, sizes: Set[Place], how: Said) -> Iterator[tuple[SaidLeaf, torch.Tensor]]:
    """Yield the numbers, and tensors without samples, that a piece has said and of which nothing is known."""
    for leaf in piece.leaves(how):
        value, role = leaf.value, how.roles.get(leaf.place)
        if role not in (None, "unknown") or leaf.place in sizes:
            continue
        if isinstance(value, Ref) and value.name != LOSS:
            tensor = piece.recording.results[int(value.name)]
            if not tensor.ndim or role is not None:
                yield leaf, tensor
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
