"""Gradient reduction: gradients (and moving buffers) of the whole batch on every rank that holds them.

Each rank contributes its local sum once per bucket, however many stages of the bucket it holds. A bucket is summed in
flat pieces of at most `piece_bytes`, begun at `Reduce` while other stages still compute, and finished at `Step`.
Whether a parameter takes part is decided from the split, alike on all ranks: a parameter that some stage
differentiates contributes zeros where it has no gradient; one that no stage differentiates keeps `grad = None`, and so
does one of a replayed step of which no rank has made a gradient (an expert to which the batch sends nothing).

Buffers that F mutates: floating ones become the mean over the replicas of their stage, in the proportions in which
these share the samples; others, and those that change once per batch, are those of replica 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from lightning_pipe.capture.steps.stage_program import Split
from lightning_pipe.core.program import Layout, Reduce
from lightning_pipe.runtime.exchanges.groups import bucket_group, stage_group
from lightning_pipe.runtime.record import Mark, Recorder
from lightning_pipe.runtime.stage import State
from lightning_pipe.runtime.transport.protocol import Transport
from lightning_pipe.runtime.waiting import Handle, Wait, Walk

PIECE_BYTES = 25 * 2**20  # as DistributedDataParallel's default bucket


@dataclass(frozen=True)
class _Piece:
    """Gradients on their way since `posted`: `flat` holds those of `parameters` one after another."""

    parameters: tuple[torch.Tensor, ...]
    flat: torch.Tensor
    handle: Handle
    reduce: Reduce
    posted: Mark


class Gradients:
    """Sum the gradients of one rank with those of the other holders.

    Args:
        split: buckets and the gradients of every stage.
        layout: ranks of each stage.
        transport: its groups (`groups.groups`) must be open.
        state: parameters and buffers of this rank.
        piece_bytes: largest flat piece.
    """

    def __init__(
        self,
        split: Split,
        layout: Layout,
        *,
        transport: Transport,
        state: State,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self._split = split
        self._layout = layout
        self._transport = transport
        self._state = state
        self._piece_bytes = piece_bytes
        self._differentiated = {name for stage in split.stages for name in stage.gradients.values()}
        self._under_way: list[_Piece] = []

    def begin(self, recorder: Recorder) -> None:
        """Forget sums under way."""
        self._recorder = recorder
        self._under_way.clear()

    def start(self, reduce: Reduce) -> None:
        """Begin to sum a bucket. The local gradients of its parameters must be complete."""
        group = bucket_group(self._split.traffic.buckets[reduce.bucket], self._layout)
        names = [name for name in self._split.bucket_parameters[reduce.bucket] if name in self._differentiated]
        if len(group) == 1:
            return
        own = (self._state.parameters[name] for name in names)
        for parameters in flat_runs(own, most_bytes=self._piece_bytes):
            flat = torch.cat([*(_gradient(p).reshape(-1) for p in parameters), *self._presence(parameters)])
            handle = self._transport.all_reduce(flat, group=group)
            self._under_way.append(_Piece(parameters, flat, handle, reduce, self._recorder.mark()))

    def _presence(self, parameters: tuple[torch.Tensor, ...]) -> Iterator[torch.Tensor]:
        """Yield a number per parameter that is not zero where it has a gradient, if some may have none."""
        if self._split.may_lack_gradients:
            first = parameters[0]
            yield torch.tensor([float(p.grad is not None) for p in parameters], dtype=first.dtype, device=first.device)

    def finish(self) -> Walk[None]:
        """Wait for all sums begun and put them into `grad`."""
        for piece in self._under_way:
            yield Wait(piece.handle, piece.reduce)
            self._recorder.add(piece.reduce, piece.posted)
            sizes = [parameter.numel() for parameter in piece.parameters]
            gradients, present = piece.flat.split((sum(sizes), piece.flat.numel() - sum(sizes)))
            absent = (present == 0).tolist() or [False] * len(sizes)
            for p, summed, is_absent in zip(piece.parameters, gradients.split(sizes), absent, strict=True):
                p.grad = None if is_absent else summed.view_as(p)
        self._under_way.clear()

    def synchronise_buffers(self) -> Walk[None]:
        """Make the buffers that F mutates equal on all replicas of their stage."""
        for program in self._split.stages:
            replicas = self._layout.stages[program.stage]
            if self._transport.rank not in replicas or len(replicas) == 1:
                continue
            for name in sorted(program.mutations):
                yield from self._synchronise(name, program.stage, equal=name in program.once)

    def _synchronise(self, name: str, stage: int, *, equal: bool) -> Walk[None]:
        replicas, shares = self._layout.stages[stage], self._layout.shares(stage)
        group, buffer = stage_group(stage, self._layout), self._state.tensor(name)
        is_mean = buffer.is_floating_point() and not equal
        if is_mean:
            content = buffer.contiguous() * shares[replicas.index(self._transport.rank)]
            handle = self._transport.all_reduce(content, group=group)
        else:
            content = buffer.contiguous()
            handle = self._transport.broadcast(content, source=replicas[0], group=group)
        yield Wait(handle, f"buffer {name}")
        buffer.copy_(content / sum(shares) if is_mean else content)


def flat_runs(tensors: Iterable[torch.Tensor], *, most_bytes: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Cut tensors into runs of one type and at most so many bytes (a larger tensor is a run of its own)."""
    run: list[torch.Tensor] = []
    run_bytes = 0
    for tensor in tensors:
        if run and (run_bytes + tensor.nbytes > most_bytes or tensor.dtype != run[0].dtype):
            yield tuple(run)
            run, run_bytes = [], 0
        run.append(tensor)
        run_bytes += tensor.nbytes
    if run:
        yield tuple(run)


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    if parameter.grad is None:
        return torch.zeros_like(parameter)
    return parameter.grad if parameter.grad.layout == torch.strided else parameter.grad.to_dense()
