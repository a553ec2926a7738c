"""Results of a step on every rank, combined over micro-batches and slices.

All scalars travel in one float64 sum of slots: a slot is written by the one rank that has the value and is zero
elsewhere. The same sum carries the ranks' votes (stop, skip, overflow), so that all ranks decide alike. Values with
samples (and other tensors) are broadcast by the ranks that have them, one broadcast per rank, with shapes known from
the split. Then every rank combines the same pieces in the same order, in the type of the value:

    mean   weighted by samples, summed in the order of micro-batches and slices
    sum, max, min
    cat    along the batch dimension, in the order of samples
    same   the first

    results = Results(split, layout, transport=transport, device=device)
    collected = drive(results.collect(program, outcome.results, names, votes={"stop": 0.0}), wait=watch.wait)

Where results travel over the host and stages run on a device, they are copied to the host between what the device does
before and after, and the host waits for the copy when it puts results together: not for the backward behind it. The
pinned memory of the copies is used again once the host has read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch

from lightning_pipe.capture.steps.stage_program import Split, Value
from lightning_pipe.core.program import Layout, Program, Samples
from lightning_pipe.errors import PipelineError
from lightning_pipe.runtime.exchanges.groups import everyone
from lightning_pipe.runtime.exchanges.slicing import Content, combine, from_tensor, to_tensor
from lightning_pipe.runtime.job import ResultSlice
from lightning_pipe.runtime.transport.collectives import as_bytes
from lightning_pipe.runtime.transport.device_works import StreamReached
from lightning_pipe.runtime.transport.protocol import Transport
from lightning_pipe.runtime.waiting import Done, Handle, Wait, Walk


@dataclass(frozen=True)
class Collected:
    """What every rank knows after a program.

    Attributes:
        values: outputs of the batch by value name; scalars as well on the rank's device.
        pieces: the same before they were combined, in order of micro-batch and sample (scalars on the host).
        votes: sums of the ranks' votes.
    """

    values: Mapping[str, Content]
    pieces: Mapping[str, tuple[ResultSlice, ...]]
    votes: Mapping[str, float]


_Slice: TypeAlias = tuple[str, int, Samples]  # name of an output, micro-batch, samples


@dataclass(frozen=True)
class _Place:
    """One slice of one value: what it is called, which samples of how many it has, and which rank has it."""

    value: Value
    microbatch: int
    samples: Samples
    rank: int
    batch_samples: int

    @property
    def slice(self) -> _Slice:
        return self.value.name, self.microbatch, self.samples

    @property
    def shape(self) -> tuple[int, ...]:
        return () if self.value.dtype is None else self.value.shape(len(self.samples), self.batch_samples)

    @property
    def dtype(self) -> torch.dtype:
        return torch.int64 if self.value.dtype is None else self.value.dtype

    @property
    def is_scalar(self) -> bool:
        return self.shape == () and not self.dtype.is_complex

    @property
    def byte_count(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class _Letter:
    """Contents of `places`, in their order, in one tensor, and what posts it.

    Attributes:
        fill: writes what was copied from a device, once that has arrived.
        pinned: memory for these copies, free again when the letter has been read.
    """

    places: tuple[_Place, ...]
    content: torch.Tensor
    what: str
    post: Callable[[], Handle]
    fill: Callable[[], object] = lambda: None
    pinned: tuple[torch.Tensor, ...] = ()

    def posted(self) -> Wait:
        """Post it, and return what its end is waited for by."""
        self.fill()
        return Wait(self.post(), self.what)


class _PinnedBuffers:
    """Pinned memory of the host. Allocating it may wait for the whole device, so what has been read is used again."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    def take(self, count: int) -> torch.Tensor:
        """Return a buffer of at least so many bytes."""
        large_enough = [index for index, buffer in enumerate(self._free) if buffer.numel() >= count]
        if not large_enough:
            return torch.empty(count, dtype=torch.uint8, pin_memory=True)
        return self._free.pop(min(large_enough, key=lambda index: self._free[index].numel()))

    def leave(self, buffers: Iterable[torch.Tensor]) -> None:
        """Take buffers back whose copies have ended and have been read."""
        self._free += buffers


class Results:
    """Exchange the outputs of programs.

    Args:
        split: says which stage produces an output, and what is known of it.
        layout: ranks of each stage.
        transport: the group of all ranks must be open.
        device: where values live.
        carrier: the device from which the transport takes values; by default the same.
        sums: what scalars travel by from the host, if that is another transport.
    """

    def __init__(
        self,
        split: Split,
        layout: Layout,
        *,
        transport: Transport,
        device: torch.device,
        carrier: torch.device | None = None,
        sums: Transport | None = None,
    ) -> None:
        self._split = split
        self._layout = layout
        self._transport, self._sums = transport, sums or transport
        self._device = device
        self._carrier = carrier or device
        self._sums_on = self._carrier if sums is None else torch.device("cpu")
        self._group = everyone(layout)
        self._of_head = {name for stage in split.stages if stage.head for name in stage.head.half.outputs}
        self._pinned = _PinnedBuffers()

    def collect(
        self,
        program: Program,
        pieces: Mapping[str, Sequence[ResultSlice]],
        names: Sequence[str],
        *,
        votes: Mapping[str, float | torch.Tensor] | None = None,
    ) -> Walk[Collected]:
        """Post what this rank has, and return the coroutine that gives all pieces of the outputs and their combination.

        What must be copied to the host first is posted by the coroutine.

        Args:
            program: the program that was run.
            pieces: what this rank's forwards gave.
            names: the wanted outputs, the same on all ranks.
            votes: numbers to be summed over ranks, under the same names on all of them; tensors are not waited for.

        Raises:
            PipelineError: from the coroutine, if an output cannot be put together from its pieces.
        """
        own = {(name, p.microbatch, p.samples): p.content for name, ps in pieces.items() for p in ps}
        places = [place for name in dict.fromkeys(names) for place in self._places(name, program)]
        sums = self._sum([place for place in places if place.is_scalar], own, votes or {})
        sent = self._sent([place for place in places if not place.is_scalar], own)
        if self._sums_on == self._device or self._device.type != "cuda":
            under_way: Handle | list[Wait] = [letter.posted() for letter in (sums, *sent)]
        else:
            under_way = StreamReached(self._device)
        return self._collected(program, places, sums, sent, sorted(votes or {}), under_way)

    def _collected(
        self,
        program: Program,
        places: Sequence[_Place],
        sums: _Letter,
        sent: Sequence[_Letter],
        votes: Sequence[str],
        under_way: Handle | list[Wait],
    ) -> Walk[Collected]:
        if not isinstance(under_way, list):
            yield Wait(under_way, "the results of this rank")
            under_way = [letter.posted() for letter in (sums, *sent)]
        yield under_way[0]
        numbers = sums.content.cpu()
        found = {place: from_tensor(numbers[i].to(place.dtype), place.value) for i, place in enumerate(sums.places)}
        for letter, end in zip(sent, under_way[1:], strict=True):
            yield end
            counts = [place.byte_count for place in letter.places]
            for place, content in zip(letter.places, torch.split(letter.content, counts), strict=True):
                found[place] = content.clone().view(place.dtype).view(place.shape)  # a clone: bytes may lie askew
        pieces: dict[str, list[ResultSlice]] = {}
        for place in places:
            pieces.setdefault(place.value.name, []).append(ResultSlice(place.microbatch, place.samples, found[place]))
        self._pinned.leave(buffer for letter in (sums, *sent) for buffer in letter.pinned)
        values = {name: self._combined(self._split.values[name], own, program) for name, own in pieces.items()}
        counted = dict(zip(votes, numbers[len(sums.places) :].tolist(), strict=True))
        return Collected(values, {name: tuple(own) for name, own in pieces.items()}, counted)

    def _places(self, name: str, program: Program) -> Iterator[_Place]:
        """List the slices of an output in order of micro-batch and samples."""
        stage = self._split.owners[name]
        sizes = program.sizes[: program.batch]
        if name in self._of_head:  # all replicas have it, of the whole batch
            batch = Samples(0, sum(sizes))
            yield _Place(self._split.values[name], 0, batch, self._layout.stages[stage][0], sum(sizes))
            return
        for microbatch, size in enumerate(sizes):
            for replica, rank in enumerate(self._layout.stages[stage]):
                samples = self._layout.samples(stage, replica, microbatch, size)
                if len(samples):
                    yield _Place(self._split.values[name], microbatch, samples, rank, sum(sizes))

    def _sum(
        self, places: Sequence[_Place], own: Mapping[_Slice, Content], votes: Mapping[str, float | torch.Tensor]
    ) -> _Letter:
        """Post one sum of the slots of scalars and of votes."""
        slots = torch.zeros(len(places) + len(votes), dtype=torch.float64, device=self._sums_on)
        mine = {i: own[place.slice] for i, place in enumerate(places) if place.rank == self._transport.rank}
        for slot, name in enumerate(sorted(votes), start=len(places)):
            if isinstance(vote := votes[name], torch.Tensor):
                mine[slot] = vote
            else:
                slots[slot] = vote
        if _by_copy(self._device, self._sums_on):
            for slot in [slot for slot, content in mine.items() if not _is_on_device(content)]:
                slots[slot] = to_tensor(
                    mine.pop(slot), device=self._sums_on
                )  # the way to the device makes the host wait
        numbers = [to_tensor(content, device=self._device).double() for content in mine.values()]
        copied, pinned = self._carried(torch.stack(numbers), self._sums_on) if numbers else (None, ())

        def fill() -> None:
            if copied is not None:
                slots[[*mine]] = copied

        alone = len(self._group) == 1
        post = Done if alone else partial(self._sums.all_reduce, slots, group=self._group)
        return _Letter(tuple(places), slots, "the results of the step", post, fill, pinned)

    def _sent(self, places: Sequence[_Place], own: Mapping[_Slice, Content]) -> tuple[_Letter, ...]:
        """Post the bytes of other tensors, one broadcast per rank that has some."""
        letters = []
        for rank in sorted({place.rank for place in places}):
            theirs, pinned = tuple(place for place in places if place.rank == rank), tuple[torch.Tensor, ...]()
            if rank == self._transport.rank:
                contents = [to_tensor(own[place.slice], device=self._device) for place in theirs]
                for place, content in zip(theirs, contents, strict=True):
                    if content.shape != place.shape:
                        found = f"{list(content.shape)} for {len(place.samples)} samples, not {list(place.shape)}"
                        raise _no_rows(place.value.name, f"one slice of it is {found}")
                packed = torch.cat([as_bytes(content.contiguous()) for content in contents])
                packed, pinned = self._carried(packed, self._carrier)
            else:
                count = sum(place.byte_count for place in theirs)
                packed = torch.empty(count, dtype=torch.uint8, device=self._carrier)
            alone = len(self._group) == 1
            post = Done if alone else partial(self._transport.broadcast, packed, source=rank, group=self._group)
            letters.append(_Letter(theirs, packed, f"the results of rank {rank}", post, pinned=pinned))
        return tuple(letters)

    def _carried(self, tensor: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Return a tensor on another device, and the pinned memory that it is in; that is filled in passing."""
        if not _by_copy(tensor.device, device):
            return tensor.to(device), ()
        buffer = self._pinned.take(tensor.nbytes)
        target = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return target.copy_(tensor, non_blocking=True), (buffer,)

    def _combined(self, value: Value, pieces: Sequence[ResultSlice], program: Program) -> Content:
        """Combine the pieces of one output, in order."""
        contents = [piece.content for piece in pieces]
        if any(not isinstance(content, torch.Tensor) for content in contents):
            return contents[0]
        if value.combine == "cat" and value.batch_dim is None and len(pieces) > 1:
            raise _no_rows(
                value.name, f"it has {len(pieces)} slices of a batch of {sum(program.sizes[: program.batch])}"
            )
        parts = [
            (piece.samples, content)
            for piece, content in zip(pieces, contents, strict=True)
            if isinstance(content, torch.Tensor)
        ]
        return combine(parts, value, how=value.combine).to(self._device, non_blocking=True)


def _no_rows(name: str, found: str) -> PipelineError:
    return PipelineError(
        f"Output {name} of the step has its samples in no separate rows, so that it cannot be put together: {found}. "
        "Return one row per sample, or set microbatches=1."
    )


def _by_copy(source: torch.device, target: torch.device) -> bool:
    """Return whether what goes from one device to another is copied through pinned memory."""
    return source.type == "cuda" and target.type == "cpu"


def _is_on_device(content: Content) -> bool:
    return isinstance(content, torch.Tensor) and content.device.type != "cpu"
