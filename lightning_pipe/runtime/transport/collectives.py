"""Collectives (sum, broadcast) of groups of ranks over torch.distributed.

One process group per set of ranks, created on all ranks in the order of the arguments: every rank takes part in the
creation of every group, whether it is a member or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from lightning_pipe.capture.torch_private import is_profiling
from lightning_pipe.errors import PipelineError
from lightning_pipe.runtime.transport.device_works import AbortFlag, StreamWork
from lightning_pipe.runtime.transport.protocol import Group
from lightning_pipe.runtime.waiting import Handle


@dataclass(frozen=True)
class HostWork:
    """A collective whose completion the host can wait for (gloo)."""

    work: dist.Work

    def wait(self, timeout_s: float) -> bool:
        """Wait at most so long for the end of the collective."""
        try:
            return bool(self.work.wait(timedelta(seconds=timeout_s)))
        except RuntimeError:
            if not self.work.is_completed():
                return False  # only this call timed out; the collective goes on
            return bool(self.work.wait())  # it has ended since, or this raises why it could not

    def landed(self) -> bool:
        """Return whether the collective has ended."""
        return bool(self.work.is_completed())


class Collectives:
    """Sums and broadcasts over groups of ranks.

    Args:
        backend: `gloo` or `nccl`.
        timeout_s: after which torch gives up an operation by itself.
        aborted: of the transport; None where the host waits for operations.
    """

    def __init__(self, backend: str, *, timeout_s: float, aborted: AbortFlag | None = None) -> None:
        self._backend, self._aborted = backend, aborted
        self._timeout = timedelta(seconds=timeout_s)
        self._groups: dict[Group, dist.ProcessGroup | None] = {}  # None: this rank is no member

    def open(self, groups: Sequence[Group]) -> list[Group]:
        """Create the groups that do not exist yet, and return them; on every rank with the same arguments."""
        missing = [group for group in dict.fromkeys(groups) if group not in self._groups]
        for group in missing:
            self._groups[group] = self.new_group(group)
        return missing

    def new_group(self, group: Group) -> dist.ProcessGroup | None:
        """Create a process group of these ranks, on every rank; None on a rank that is no member."""
        created = dist.new_group(list(group), timeout=self._timeout, backend=self._backend)
        return created if dist.get_rank() in group else None

    def all_reduce(self, tensor: torch.Tensor, *, group: Group) -> Handle:
        """Post a sum, in place."""
        work = unrecorded(tensor, partial(dist.all_reduce, tensor, group=self._of(group), async_op=True))
        return self._handle(work, tensor)

    def broadcast(self, tensor: torch.Tensor, *, source: int, group: Group) -> Handle:
        """Post the copying of the source's tensor into those of the other members; all of them contiguous."""
        assert tensor.is_contiguous(), "a broadcast into a copy would be lost"
        content = as_bytes(tensor)
        work = unrecorded(content, partial(dist.broadcast, content, source, group=self._of(group), async_op=True))
        return self._handle(work, content)

    def close(self) -> None:
        """Destroy the groups."""
        for group in self.process_groups():
            dist.destroy_process_group(group)
        self._groups.clear()

    def process_groups(self) -> list[dist.ProcessGroup]:
        """Return the groups of which this rank is a member; from any thread."""
        return [group for group in [*self._groups.values()] if group is not None]

    def _of(self, group: Group) -> dist.ProcessGroup:
        found = self._groups.get(group)
        if found is None:
            raise PipelineError(f"No group of ranks {list(group)} is open; groups.connect opens those of a program.")
        return found

    def _handle(self, work: dist.Work | None, tensor: torch.Tensor) -> Handle:
        assert work is not None, "posted by a member"
        return HostWork(work) if self._aborted is None else StreamWork((work,), (tensor,), self._aborted)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as its bytes, so that every element type can travel."""
    flat = tensor.as_strided((tensor.numel(),), (1,))  # a contiguous tensor may have any stride along a size of one
    return flat.view(torch.uint8)


def unrecorded(tensor: torch.Tensor, start: Callable[[], dist.Work | None]) -> dist.Work | None:
    """Start an operation on a tensor; one of the host from a thread that no profiler of torch records.

    What a recorded thread starts tells its profiler also of its end, from whatever thread that comes. If the profiler
    stops before, or at that moment, it writes to released memory: `std::bad_alloc`, or a segmentation fault somewhere
    (torch 2.13).
    """
    if tensor.is_cuda or not is_profiling():
        return start()
    with ThreadPoolExecutor(max_workers=1) as elsewhere:
        return elsewhere.submit(start).result()


def isend(tensor: torch.Tensor, *, peer: int, group: dist.ProcessGroup) -> dist.Work:
    """Post the sending of a contiguous tensor to a rank."""
    work = unrecorded(tensor, partial(dist.isend, as_bytes(tensor), dst=peer, group=group))
    assert work is not None, "posted by a member"
    return work


def irecv(buffer: torch.Tensor, *, peer: int, group: dist.ProcessGroup) -> dist.Work:
    """Post the receiving of a tensor from a rank into a contiguous buffer."""
    work = unrecorded(buffer, partial(dist.irecv, as_bytes(buffer), src=peer, group=group))
    assert work is not None, "posted by a member"
    return work
