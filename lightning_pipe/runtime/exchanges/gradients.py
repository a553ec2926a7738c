"""Gradient reduction: gradients (and moving buffers) of the whole batch on every rank that holds them.

Each rank contributes its local sum once per bucket, however many stages of the bucket it holds. A bucket is summed in
flat pieces of at most `piece_bytes`, in the order in which the last W of its stage makes them, and finished at `Step`.
All pieces are posted at `Reduce`, or, along with that W, each as soon as its gradients are made. Gradients live in the
pieces from then on. Where the optimizer may step some parameters before others, all pieces but the first are left under
way: their parameters have no gradients until `land` waits for one piece after another and lets their part of the step
run beside the sums that are left.
Whether a parameter takes part is decided from the split, alike on all ranks: a parameter that some stage
differentiates contributes zeros where it has no gradient; one that no stage differentiates keeps `grad = None`, and so
does one of a replayed step of which no rank has made a gradient (an expert to which the batch sends nothing).

Buffers that F mutates: floating ones become the mean over the replicas of their stage, in proportion to the samples
that each has computed of this batch; others, those that change once per batch, and parameters that F writes to are
those of replica 0, which computes the first micro-batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from lightning_pipe.capture.steps.stage_program import Split, StageProgram
from lightning_pipe.core.program import Layout, Reduce
from lightning_pipe.core.sharding import PIECE_BYTES, pieces
from lightning_pipe.runtime.exchanges.groups import bucket_group, stage_group
from lightning_pipe.runtime.record import Mark, Recorder
from lightning_pipe.runtime.stage import State, gradients_due
from lightning_pipe.runtime.transport.protocol import Transport
from lightning_pipe.runtime.waiting import Handle, Wait, Walk


@dataclass(frozen=True)
class _Piece:
    """Gradients on their way since `posted`: `flat` holds those of `parameters` one after another."""

    names: tuple[str, ...]
    parameters: tuple[torch.Tensor, ...]
    flat: torch.Tensor
    handle: Handle
    reduce: Reduce
    posted: Mark


@dataclass
class _Along:
    """A sum that goes along with a W: pieces that are left, and the parameters whose gradients are still to be made."""

    reduce: Reduce
    pieces: deque[tuple[str, ...]]
    missing: set[str]


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
        self._under_way: deque[_Piece] = deque()
        self._along: _Along | None = None
        self._pieces: dict[int, list[tuple[str, ...]]] = {}

    def begin(self, recorder: Recorder) -> None:
        """Forget sums under way."""
        self._recorder = recorder
        self._under_way.clear()
        self._along = None

    @property
    def is_under_way(self) -> bool:
        """Return whether a sum is under way."""
        return bool(self._under_way)

    def start(self, reduce: Reduce) -> None:
        """Begin to sum a bucket; the local gradients of its parameters are complete, or made by the next compute."""
        bucket = self._split.traffic.buckets[reduce.bucket]
        if len(bucket_group(bucket, self._layout)) == 1:
            return
        missing = set(gradients_due(self._split.stages[bucket.stages[0]], "W")) if reduce.along else set[str]()
        self._along = _Along(reduce, deque(self._pieces_of(reduce.bucket)), missing)
        self._post_made()
        if not reduce.along:
            self._along = None

    def made(self, name: str) -> None:
        """Note that the gradient of a parameter is complete if it is the last of its sum; post what that completes."""
        if self._along is not None and name in self._along.missing:
            self._along.missing.discard(name)
            self._post_made()

    def computed(self) -> None:
        """Post what is left of a sum that went along with the compute that has just ended."""
        if self._along is not None:
            self._along.missing.clear()
            self._post_made()
            self._along = None

    def _post_made(self) -> None:
        """Post the next pieces that are complete, in their order, which is the same on all ranks."""
        along = self._along
        assert along is not None, "posted by a sum"
        while along.pieces and along.missing.isdisjoint(along.pieces[0]):
            self._post(along.reduce, along.pieces.popleft())

    def _post(self, reduce: Reduce, names: tuple[str, ...]) -> None:
        posted = self._recorder.mark()  # the copy is part of a sum, as where sums are measured
        parameters = tuple(self._state.parameters[name] for name in names)
        with torch.no_grad():
            dense = [_gradient(parameter).reshape(-1) for parameter in parameters]
            flat = torch.cat([*dense, *self._rows(names), *self._presence(parameters)])
        group = bucket_group(self._split.traffic.buckets[reduce.bucket], self._layout)
        handle = self._transport.all_reduce(flat, group=group)
        if not self._split.may_lack_gradients and self._state.sparse.isdisjoint(names):
            _put(parameters, flat)  # so that there is one copy
        self._under_way.append(_Piece(names, parameters, flat, handle, reduce, posted))

    def _rows(self, names: tuple[str, ...]) -> Iterator[torch.Tensor]:
        """Yield, for every parameter with sparse gradients, a number per row that is not zero where it has one."""
        for name in names:
            if name in self._state.sparse:
                parameter = self._state.parameters[name]
                rows = torch.zeros(len(parameter), dtype=parameter.dtype, device=parameter.device)
                if parameter.grad is not None and parameter.grad.is_sparse:
                    rows[parameter.grad.coalesce().indices()[0]] = 1.0
                yield rows

    def _pieces_of(self, bucket: int) -> list[tuple[str, ...]]:
        """Return the parameters of each piece of a bucket, in order."""
        if bucket not in self._pieces:
            names = [n for n in self._split.bucket_parameters[bucket] if n in self._differentiated]
            if len(stages := self._split.traffic.buckets[bucket].stages) == 1:
                order = _making_order(self._split.stages[stages[0]])
                names.sort(key=lambda name: order.get(name, -1))
            name_of = {self._state.parameters[name]: name for name in names}
            runs = flat_runs(name_of, most_bytes=self._piece_bytes)
            self._pieces[bucket] = [tuple(name_of[parameter] for parameter in run) for run in runs]
        return self._pieces[bucket]

    def _presence(self, parameters: tuple[torch.Tensor, ...]) -> Iterator[torch.Tensor]:
        """Yield a number per parameter that is not zero where it has a gradient, if some may have none."""
        if self._split.may_lack_gradients:
            first = parameters[0]
            yield torch.tensor([float(p.grad is not None) for p in parameters], dtype=first.dtype, device=first.device)

    def finish(self, *, leave: bool = False) -> Walk[None]:
        """Wait for all sums begun and put them into `grad`.

        Args:
            leave: whether to wait for the first piece only, and leave the others to `land`.
        """
        left = max(len(self._under_way) - 1, 0) if leave else 0
        while len(self._under_way) > left:
            yield from self._land(self._under_way.popleft())
        for piece in self._under_way:
            _hide(piece.parameters)

    def land(self, step: Callable[[], None], *, among: Iterable[torch.Tensor]) -> Walk[None]:
        """Wait for the pieces that `finish` has left, one after another; let the parameters of each step alone.

        Args:
            step: steps the parameters that have gradients.
            among: all that may have some.
        """
        if not self._under_way:
            return
        stepped: dict[torch.Tensor, torch.Tensor | None] = {p: p.grad for p in among if p.grad is not None}
        _hide(stepped)
        while self._under_way:
            piece = self._under_way.popleft()
            yield from self._land(piece)
            yield Wait(self._transport.reached(), piece.reduce)  # else a step could be queued behind a sum that fails
            step()
            stepped.update((parameter, parameter.grad) for parameter in piece.parameters)
            _hide(piece.parameters)
        for parameter, gradient in stepped.items():
            parameter.grad = gradient

    def _land(self, piece: _Piece) -> Walk[None]:
        """Wait for the sum of a piece and put it into `grad`."""
        yield Wait(piece.handle, piece.reduce)
        self._recorder.add(piece.reduce, piece.posted)
        _put(piece.parameters, piece.flat)
        behind = piece.flat[sum(parameter.numel() for parameter in piece.parameters) :]
        for parameter in (self._state.parameters[n] for n in piece.names if n in self._state.sparse):
            parameter.grad = _of_rows(parameter.grad, behind[: len(parameter)].nonzero())
            behind = behind[len(parameter) :]
        present = behind.tolist() if self._split.may_lack_gradients else []
        for parameter, count in zip(piece.parameters, present, strict=False):
            parameter.grad = parameter.grad if count else None

    def synchronise_buffers(self, sizes: Sequence[int]) -> Walk[None]:
        """Make what F writes to equal on all replicas of its stage.

        Args:
            sizes: samples of the micro-batches of the batch.
        """
        for program in self._split.stages:
            replicas = self._layout.stages[program.stage]
            if self._transport.rank not in replicas or len(replicas) == 1:
                continue
            computed = [
                sum(len(self._layout.samples(program.stage, replica, m, size)) for m, size in enumerate(sizes))
                for replica in range(len(replicas))
            ]
            means, copies = list[torch.Tensor](), list[torch.Tensor]()
            for name in sorted({*program.mutations, *program.written}):
                buffer = self._state.tensor(name).detach()
                is_equal = name in program.once or name in program.written
                (means if buffer.is_floating_point() and not is_equal else copies).append(buffer)
            for buffers, is_mean in ((means, True), (copies, False)):
                alike = sorted(buffers, key=lambda buffer: str(buffer.dtype))
                for run in flat_runs(alike, most_bytes=self._piece_bytes):
                    yield from self._synchronise(run, program.stage, computed, is_mean=is_mean)

    def _synchronise(
        self, buffers: Sequence[torch.Tensor], stage: int, shares: Sequence[int], *, is_mean: bool
    ) -> Walk[None]:
        """Make tensors of one type equal on all replicas, by one message: their means, or those of the first replica.

        Args:
            buffers: the tensors.
            stage: whose replicas they are.
            shares: samples that each of them has computed; a smaller batch may have none for some.
            is_mean: whether the means in these shares are wanted, not what the first replica with samples has.
        """
        replicas, group = self._layout.stages[stage], stage_group(stage, self._layout)
        flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
        if is_mean:
            share = shares[replicas.index(self._transport.rank)]
            flat = flat * share if share else torch.zeros_like(flat)
            handle = self._transport.all_reduce(flat, group=group)
        else:
            first = next(rank for rank, share in zip(replicas, shares, strict=True) if share)
            handle = self._transport.broadcast(flat, source=first, group=group)
        yield Wait(handle, f"the buffers of stage {stage}")
        parts = (flat / sum(shares) if is_mean else flat).split([buffer.numel() for buffer in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.copy_(part.view_as(buffer))


def flat_runs(tensors: Iterable[torch.Tensor], *, most_bytes: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Cut tensors into runs of one type and at most so many bytes (a larger tensor is a run of its own)."""
    for _, alike in groupby(tensors, key=lambda tensor: tensor.dtype):
        row = [*alike]
        yield from (tuple(row[i] for i in run) for run in pieces([t.nbytes for t in row], most_bytes=most_bytes))


def _put(parameters: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    """Let parts of a flat piece be the gradients of its parameters."""
    sizes = [parameter.numel() for parameter in parameters]
    for parameter, part in zip(parameters, flat[: sum(sizes)].split(sizes), strict=True):
        parameter.grad = part.view_as(parameter)


def _hide(parameters: Iterable[torch.Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = None


def _of_rows(dense: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
    """Return the sparse tensor of some rows of a dense one.

    Args:
        dense: (rows, ...).
        rows: (n, 1) numbers of the rows, rising.
    """
    assert dense is not None, "it was put there"
    return torch.sparse_coo_tensor(rows.T, dense[rows[:, 0]], dense.shape, is_coalesced=True, check_invariants=False)


def _making_order(program: StageProgram) -> dict[str, int]:
    """Number the parameters in the order in which W makes their gradients; what it gives away comes first, in order."""
    half = program.weight_grad
    given = half.streamed.gradients if half is not None and half.streamed is not None else ()
    due = dict.fromkeys((*given, *gradients_due(program, "W")))
    return {name: number for number, name in enumerate(due)}


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    if parameter.grad is None:
        return torch.zeros_like(parameter)
    return parameter.grad if parameter.grad.layout == torch.strided else parameter.grad.to_dense()
