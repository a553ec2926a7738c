"""Head of the last stage at run time: values of all micro-batches put together, run once, and cut for micro-batches.

Replicas of the stage give each other what their samples make, one broadcast per value and replica in one order on all
of them; then each puts the same parts together in the order of samples and runs the same function on the same bits.

    heads = BatchHeads(split, stages, layout=layout, transport=transport, device=device)
    results = yield from heads.run(program.sizes, slice_)          at HEAD
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from lightning_pipe.capture.steps.stage_program import Split, Value
from lightning_pipe.core.milestones import Head
from lightning_pipe.core.program import Layout, Samples
from lightning_pipe.errors import PipelineError
from lightning_pipe.runtime.exchanges.groups import stage_group
from lightning_pipe.runtime.exchanges.slicing import Content, cut, from_tensor, join, to_tensor
from lightning_pipe.runtime.job import ResultSlice
from lightning_pipe.runtime.stage import Slice, Stage
from lightning_pipe.runtime.transport.protocol import Transport
from lightning_pipe.runtime.waiting import Wait, Walk


class _Place(NamedTuple):
    """Samples of the batch that a rank has in a micro-batch."""

    microbatch: int
    rank: int
    samples: Samples


class BatchHeads:
    """Run the head of the last stage on a rank that holds it.

    Args:
        split: its last stage has the head.
        stages: stages of this rank by number.
        layout: ranks of each stage.
        transport: the group of the replicas must be open.
        device: where values live.
    """

    def __init__(
        self, split: Split, stages: Mapping[int, Stage], *, layout: Layout, transport: Transport, device: torch.device
    ) -> None:
        self._split, self._stages, self._layout = split, stages, layout
        self._transport, self._device = transport, device
        self._number = len(layout.stages) - 1

    def run(self, sizes: Sequence[int], slice_: Slice) -> Walk[dict[str, ResultSlice]]:
        """Run the head on what all micro-batches hold, give them what it makes, and return its results.

        Args:
            sizes: samples of the micro-batches.
            slice_: the whole batch.

        Raises:
            PipelineError: if a value cannot be put together from its parts.
        """
        stage, places, batch = self._stages[self._number], self._places(sizes), Samples(0, sum(sizes))
        inputs, parts = stage.give_to_head()
        for name in [*parts]:
            value = self._split.values[name]
            inputs[name] = yield from self._together(value, parts.pop(name), places, batch)
        outputs = stage.run_head(inputs, slice_)
        for place in (place for place in places if place.rank == self._transport.rank):
            names = stage.wanted_from_head(place.microbatch)
            stage.receive(place.microbatch, {n: self._part(n, outputs[n], batch, place.samples) for n in names})
        return {name: ResultSlice(0, batch, content) for name, content in stage.results_of_head(outputs).items()}

    def _places(self, sizes: Sequence[int]) -> list[_Place]:
        """List the slices of a batch in the order of its samples."""
        places = []
        for microbatch, (size, end) in enumerate(zip(sizes, accumulate(sizes), strict=True)):
            for replica, rank in enumerate(self._layout.stages[self._number]):
                if part := self._layout.samples(self._number, replica, microbatch, size):
                    samples = Samples(end - size + part.start, end - size + part.stop)
                    places.append(_Place(microbatch, rank, samples))
        return places

    def _part(self, name: str, content: Content, batch: Samples, part: Samples) -> Content:
        if not isinstance(content, torch.Tensor):
            return content
        return cut(content, self._split.values[name], local=batch, part=part)

    def _together(
        self, value: Value, local: Mapping[int, Content], places: Sequence[_Place], batch: Samples
    ) -> Walk[Content]:
        """Return the content of a value for the batch from this rank's, by micro-batch, and those of its replicas."""
        if value.batch_dim is None and value.combine == "same":
            places = [place._replace(samples=batch) for place in places[:1]]
        tensors = {(m, self._transport.rank): to_tensor(c, device=self._device) for m, c in local.items()}
        if len(self._layout.stages[self._number]) > 1:
            tensors = yield from self._exchanged(value, tensors, places)
        parts = [(place.samples, tensors[place.microbatch, place.rank]) for place in places]
        return from_tensor(join(parts, value, local=batch), value)

    def _exchanged(
        self, value: Value, local: Mapping[tuple[int, int], torch.Tensor], places: Sequence[_Place]
    ) -> Walk[dict[tuple[int, int], torch.Tensor]]:
        """Return the contents of a value on all replicas, those of this rank too in the memory order of messages."""
        dtype, group = value.dtype or torch.int64, stage_group(self._number, self._layout)
        flats: dict[int, torch.Tensor] = {}
        for rank in dict.fromkeys(place.rank for place in places):
            slices = [place for place in places if place.rank == rank]
            if rank == self._transport.rank:
                contents = [self._checked(value, local[place.microbatch, rank], place, places) for place in slices]
                flats[rank] = torch.cat([content.reshape(-1) for content in contents])
            else:
                count = sum(math.prod(_shape(value, place, places)) for place in slices)
                flats[rank] = torch.empty(count, dtype=dtype, device=self._device)
        full = [(rank, flat) for rank, flat in flats.items() if flat.numel()]
        for handle in [self._transport.broadcast(flat, source=rank, group=group) for rank, flat in full]:
            yield Wait(handle, Head())
        tensors: dict[tuple[int, int], torch.Tensor] = {}
        for place in places:
            shape = _shape(value, place, places)
            tensors[place.microbatch, place.rank] = flats[place.rank][: math.prod(shape)].view(shape)
            flats[place.rank] = flats[place.rank][math.prod(shape) :]
        return tensors

    def _checked(self, value: Value, content: torch.Tensor, place: _Place, places: Sequence[_Place]) -> torch.Tensor:
        """Return a content if it has the size and the type that other replicas expect."""
        shape, dtype = _shape(value, place, places), value.dtype or torch.int64
        if content.shape == shape and content.dtype == dtype:
            return content
        raise PipelineError(
            f"Value {value.name}, which the head of the last stage reads, is {list(content.shape)} of {content.dtype} "
            f"for {len(place.samples)} samples; expected {list(shape)} of {dtype}. Set microbatches=1."
        )


def _shape(value: Value, place: _Place, places: Sequence[_Place]) -> tuple[int, ...]:
    return () if value.dtype is None else value.shape(len(place.samples), max(p.samples.stop for p in places))
