"""Write a directory of `torch.distributed.checkpoint`: every rank its part, and rank 0 what holds the parts together.

    save, BehindTraining    the whole way, at once or while training goes on: then a thread writes copies
    Writing(...)            on all ranks together: who writes what
    write                   every rank for itself: its tensors, then a note of where they are
    finish                  rank 0: waits for the notes of all ranks, and puts the directory in its place

Notes are files beside the tensors, so that nothing but the file system is needed behind a training that goes on.
"""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from threading import Event, Lock
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from lightning_pipe.capture.torch_private import StorageInfo
from lightning_pipe.disk import write_failure
from lightning_pipe.errors import PipelineError
from lightning_pipe.strategy.checkpoints.checksums import write_checksums
from lightning_pipe.strategy.checkpoints.commit import begin, commit, discard
from lightning_pipe.strategy.checkpoints.sharded import REST
from lightning_pipe.strategy.checkpoints.stored_tensors import METADATA
from lightning_pipe.strategy.ranks.control_plane import ControlPlane

log = logging.getLogger(__name__)

Tensors = Mapping[str, Mapping[str, torch.Tensor]]  # by group and name

_LOOKS_EVERY_S = 0.02
_PARTS, _END = "what ranks have written", "the end of the checkpoint"


class Writing:
    """A checkpoint that is being written.

    Args:
        path: the directory, on a file system that all ranks see.
        tensors: those of this rank, by group and name; no two ranks have one name.
        write_rest: writes what else there is into a file; that of rank 0 is called.
        control: to the other ranks.

    Attributes:
        path: as given.
        own_bytes: of the tensors of this rank.
    """

    def __init__(
        self,
        path: Path,
        tensors: Tensors,
        write_rest: Callable[[Path], object],
        control: ControlPlane,
    ) -> None:
        self.path, self._write_rest = path, write_rest
        self._rank, self._ranks = control.rank, control.ranks
        first = control.rank == 0
        self._part = control.agreed(lambda: begin(path), source=0, what="where the checkpoint is written")
        self._writer, self._planner = FileSystemWriter(self._part), DefaultSavePlanner()
        self._writer.set_up_storage_writer(first)
        parts = {name: dict(group) for name, group in tensors.items()}
        self.own_bytes = sum(tensor.nbytes for group in parts.values() for tensor in group.values())
        self._planner.set_up_planner(parts, self._writer.storage_meta(), first)
        local = self._writer.prepare_local_plan(self._planner.create_local_plan())
        what = "what ranks will write"
        plans: list[Any] = [control.to_first(local, source=rank, what=what) for rank in range(control.ranks)]
        if first:
            plans, self._metadata = self._planner.create_global_plan(plans)
            plans = self._writer.prepare_global_plan(plans)
        self._plan = self._planner.finish_plan(control.broadcast(plans, source=0, what=what)[control.rank])

    def write(self) -> None:
        """Write the tensors of this rank, and leave a note of where they are."""
        results = self._writer.write_data(self._plan, self._planner).wait()
        note = self._note(self._rank)
        unfinished = note.with_suffix(".part")
        unfinished.write_text(json.dumps([_noted(result) for result in results]), encoding="utf-8")
        os.replace(unfinished, note)

    def finish(self, given_up: Event) -> None:
        """Put the checkpoint in its place once every rank has written its part; on rank 0.

        Args:
            given_up: ends the wait for the other ranks.

        Raises:
            PipelineError: if the wait was given up.
        """
        results = [self._results(rank, given_up) for rank in range(self._ranks)]
        self._writer.finish(self._metadata, results)
        self._write_rest(self._part / REST)
        write_checksums(self._part, [METADATA, REST])
        commit(self.path)

    def _results(self, rank: int, given_up: Event) -> list[WriteResult]:
        """Return where a rank has put its tensors, as soon as it says so."""
        note = self._note(rank)
        while not note.exists():
            if given_up.wait(_LOOKS_EVERY_S):
                raise PipelineError(f"rank {rank} has not written its part of the checkpoint {self.path}.")
        results = [_result(row) for row in json.loads(note.read_bytes())]
        note.unlink()
        return results

    def _note(self, rank: int) -> Path:
        return self._part / f".{rank}.written"


def _noted(result: WriteResult) -> list[Any]:
    """Return what a note says of a tensor: its name and place, and where it was written."""
    index, where = result.index, result.storage_data
    return [index.fqn, index.offset, index.index, result.size_in_bytes, where.relative_path, where.offset, where.length]


def _result(row: list[Any]) -> WriteResult:
    name, offset, number, size, file, start, length = row
    return WriteResult(MetadataIndex(name, offset, number), size, StorageInfo(file, start, length))


def save(path: Path, tensors: Tensors, rest: dict[str, Any], control: ControlPlane) -> None:
    """Write a checkpoint; on all ranks together.

    Args:
        path: the directory, on a file system that all ranks see.
        tensors: those of this rank; no two ranks have one name.
        rest: what else there is; that of rank 0 is written.
        control: to the other ranks.

    Raises:
        PipelineError: if a rank could not write its part.
    """
    writing = Writing(path, tensors, partial(torch.save, rest), control)
    _meet(writing, writing.write, partial(writing.finish, Event()), control)


class BehindTraining:
    """A checkpoint that is written while training goes on.

    Args: as of `save`; everything is copied.
    """

    def __init__(self, path: Path, tensors: Tensors, rest: dict[str, Any], control: ControlPlane) -> None:
        copies = {group: {name: _copy(value) for name, value in named.items()} for group, named in tensors.items()}
        packed = io.BytesIO()
        if control.rank == 0:
            torch.save(rest, packed)
        writing = Writing(path, copies, lambda file: file.write_bytes(packed.getbuffer()), control)
        self._writing, self._given_up = writing, Event()
        self._lock, self._removals, self._is_complete = Lock(), list[Callable[[], None]](), False
        thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._part = thread.submit(writing.write)
        self._whole = thread.submit(self._finish, writing) if control.rank == 0 else self._part
        thread.shutdown(wait=False)

    def remove(self, removal: Callable[[], None]) -> None:
        """Remove another checkpoint, once this one is complete; never if it is not to be."""
        with self._lock:
            if not self._is_complete:
                self._removals.append(removal)
                return
        removal()

    def settle(self, control: ControlPlane) -> None:
        """Wait until it is complete; on all ranks together.

        Raises:
            PipelineError: if a rank could not write its part.
        """
        try:
            _meet(self._writing, self._part.result, self._whole.result, control)
        finally:
            self._given_up.set()

    def abandon(self, patience_s: float) -> None:
        """Wait a while, on this rank alone, as training has failed; say so where it does not become complete."""
        wait([self._part, self._whole], timeout=patience_s)
        self._given_up.set()
        if not self._whole.done() or self._whole.exception() is not None:
            log.warning(
                "Training has failed before %s was complete. The checkpoints before it are there.", self._writing.path
            )

    def _finish(self, writing: Writing) -> None:
        writing.finish(self._given_up)
        with self._lock:
            self._is_complete = True
        for removal in self._removals:
            removal()


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu", copy=True)


def _meet(writing: Writing, write: Callable[[], None], finish: Callable[[], None], control: ControlPlane) -> None:
    """Write this rank's part, hear how that of the others went, and let rank 0 finish; on all ranks together."""
    path, failure = writing.path, ""
    try:
        write()
    except Exception as error:
        failure = write_failure(error, path, writing.own_bytes)
    failures = [control.to_first(failure, source=rank, what=_PARTS) for rank in range(control.ranks)]

    def finished() -> None:
        rank, reason = next(((rank, one) for rank, one in enumerate(failures) if one), (0, ""))
        try:
            if not reason:
                finish()
        except Exception as error:
            reason = write_failure(error, path, writing.own_bytes)
        if reason:
            discard(path)
            raise PipelineError(
                f"rank {rank} could not write its part of the checkpoint {path}: {reason}. Checkpoints that were "
                "complete before are still there."
            )

    control.agreed(finished, source=0, what=_END)
