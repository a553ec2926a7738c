"""How does every rank get the step's outputs, combined over micro-batches and slices?

All scalars travel in one float64 sum of slots: a slot is written by the one rank that has the value and is zero
elsewhere. The same sum carries the ranks' votes (stop, skip, overflow), so that all ranks decide alike. Values with
samples (and other tensors) are broadcast by the ranks that have them, one broadcast per rank, with shapes known from
the split. Then every rank combines the same pieces in the same order, in the type of the value:

    mean   weighted by samples, summed in the order of micro-batches and slices
    sum, max, min
    cat    along the batch dimension, in the order of samples
    same   the first

    results = Results(split, layout, transport=transport, device=device)
    collected = drive(results.collect(program, outcome, names, votes={"stop": 0.0}), wait=watch.wait)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from lightning_pipe.capture.stage_program import Split, Value
from lightning_pipe.core.program import Layout, Program, Samples
from lightning_pipe.errors import PipelineError
from lightning_pipe.runtime.groups import everyone
from lightning_pipe.runtime.job import Outcome, Piece
from lightning_pipe.runtime.parts import Content, combine, from_tensor, to_tensor
from lightning_pipe.runtime.transport.collectives import as_bytes
from lightning_pipe.runtime.transport.protocol import Transport
from lightning_pipe.runtime.waiting import Wait, Walk


@dataclass(frozen=True)
class Collected:
    """What every rank knows after a program.

    Attributes:
        values: outputs of the batch by value name; scalars as well on the rank's device.
        pieces: the same before they were combined, in order of micro-batch and sample (scalars on the host).
        votes: sums of the ranks' votes.
    """

    values: Mapping[str, Content]
    pieces: Mapping[str, tuple[Piece, ...]]
    votes: Mapping[str, float]


@dataclass(frozen=True)
class _Place:
    """One slice of one value: what it is called, which samples it has, and which rank has it."""

    value: Value
    microbatch: int
    samples: Samples
    rank: int

    @property
    def shape(self) -> tuple[int, ...]:
        return () if self.value.dtype is None else self.value.size(len(self.samples))

    @property
    def dtype(self) -> torch.dtype:
        return torch.int64 if self.value.dtype is None else self.value.dtype

    @property
    def is_scalar(self) -> bool:
        return self.shape == () and not self.dtype.is_complex

    @property
    def byte_count(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Results:
    """Exchange the outputs of programs.

    Args:
        split: says which stage produces an output, and what is known of it.
        layout: ranks of each stage.
        transport: the group of all ranks must be open.
        device: where values live.
    """

    def __init__(self, split: Split, layout: Layout, *, transport: Transport, device: torch.device) -> None:
        self._split = split
        self._layout = layout
        self._transport = transport
        self._device = device
        self._group = everyone(layout)

    def collect(
        self, program: Program, outcome: Outcome, names: Sequence[str], *, votes: Mapping[str, float] | None = None
    ) -> Walk[Collected]:
        """Return the coroutine that gives every rank all pieces of the named outputs and their combination.

        Args:
            program: the program that was run.
            outcome: what this rank has after it.
            names: the wanted outputs, the same on all ranks.
            votes: numbers to be summed over ranks, under the same names on all of them.

        Raises:
            PipelineError: if an output cannot be put together from its pieces.
        """
        own = {(name, p.microbatch, p.samples): p.content for name, ps in outcome.results.items() for p in ps}
        places = [place for name in dict.fromkeys(names) for place in self._places(name, program)]
        scalars = [place for place in places if place.is_scalar]
        tensors = [place for place in places if not place.is_scalar]
        found, summed = yield from self._sum(scalars, own, votes or {})
        found |= yield from self._broadcast(tensors, own)
        pieces: dict[str, tuple[Piece, ...]] = {
            name: tuple(Piece(p.microbatch, p.samples, found[p]) for p in places if p.value.name == name)
            for name in names
        }
        values = {name: self._combined(self._split.values[name], pieces[name], program) for name in names}
        return Collected(values, pieces, summed)

    def _places(self, name: str, program: Program) -> Iterator[_Place]:
        """List the slices of an output in order of micro-batch and samples."""
        stage = self._split.owners[name]
        for microbatch, size in enumerate(program.sizes):
            for replica, rank in enumerate(self._layout.stages[stage]):
                samples = self._layout.samples(stage, replica, microbatch, size)
                if len(samples):
                    yield _Place(self._split.values[name], microbatch, samples, rank)

    def _sum(
        self, places: Sequence[_Place], own: Mapping[tuple[str, int, Samples], Content], votes: Mapping[str, float]
    ) -> Walk[tuple[dict[_Place, Content], dict[str, float]]]:
        slots = torch.zeros(len(places) + len(votes), dtype=torch.float64, device=self._device)
        for slot, place in enumerate(places):
            if place.rank == self._transport.rank:
                slots[slot] = own[place.value.name, place.microbatch, place.samples]
        for slot, name in enumerate(sorted(votes), start=len(places)):
            slots[slot] = votes[name]
        if len(self._group) > 1:
            yield Wait(self._transport.all_reduce(slots, group=self._group), "the results of the step")
        numbers = slots.cpu()
        contents = {p: from_tensor(numbers[slot].to(p.dtype), p.value) for slot, p in enumerate(places)}
        return contents, dict(zip(sorted(votes), numbers[len(places) :].tolist(), strict=True))

    def _broadcast(
        self, places: Sequence[_Place], own: Mapping[tuple[str, int, Samples], Content]
    ) -> Walk[dict[_Place, Content]]:
        found: dict[_Place, Content] = {}
        for rank in sorted({place.rank for place in places}):
            theirs = [place for place in places if place.rank == rank]
            counts = [place.byte_count for place in theirs]
            if rank == self._transport.rank:
                contents = [own[p.value.name, p.microbatch, p.samples] for p in theirs]
                tensors = [to_tensor(content, device=self._device).contiguous() for content in contents]
                packed = torch.cat([as_bytes(tensor) for tensor in tensors])
            else:
                packed = torch.empty(sum(counts), dtype=torch.uint8, device=self._device)
            if len(self._group) > 1:
                handle = self._transport.broadcast(packed, source=rank, group=self._group)
                yield Wait(handle, f"the results of rank {rank}")
            for place, content in zip(theirs, torch.split(packed, counts), strict=True):
                found[place] = content.clone().view(place.dtype).view(place.shape)  # a clone, as bytes may lie askew
        return found

    def _combined(self, value: Value, pieces: Sequence[Piece], program: Program) -> Content:
        """Combine the pieces of one output, in order."""
        contents = [piece.content for piece in pieces]
        if any(not isinstance(content, torch.Tensor) for content in contents):
            return contents[0]
        if value.combine == "cat" and value.batch_dim is None and len(pieces) > 1:
            raise PipelineError(
                f"Output {value.name} of the step has its samples in no separate rows, so that it cannot be put "
                f"together from {len(pieces)} slices of a batch of {sum(program.sizes)}. Return one row per sample, or "
                "set microbatches=1."
            )
        parts = [
            (piece.samples, content)
            for piece, content in zip(pieces, contents, strict=True)
            if isinstance(content, torch.Tensor)
        ]
        return combine(parts, value, how=value.combine).to(self._device)
