"""Section `nccl`: what communicators of one rank cost, and whether abort and close of the transport work on them."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.gpu_once.findings import Assignment
from lightning_pipe.runtime.transport.nccl import NcclTransport

COMMUNICATORS = 4


def nccl(assignment: Assignment) -> None:
    """Report memory and seconds of communicators; what the transport does after an abort."""
    torch.cuda.set_device(0)
    x = torch.ones(1 << 20, device="cuda")
    torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder) / "store"), 1)  # type: ignore[attr-defined]
        dist.init_process_group("nccl", store=store, rank=0, world_size=1)
        _costs(assignment, x)
        _transport(assignment, x)
    sys.stdout.flush()
    os._exit(0)  # torch's watchdog would wait for what was aborted


def _costs(assignment: Assignment, x: torch.Tensor) -> None:
    """Report what each communicator takes outside of torch's allocator, and what sending adds to the last."""
    for number in range(COMMUNICATORS):
        begin_s, used_bytes = time.perf_counter(), _used_bytes()
        group = dist.new_group([0], backend="nccl")
        dist.all_reduce(x, group=group)
        mebibytes = (_used_bytes() - used_bytes) / 2**20
        took_s = time.perf_counter() - begin_s
        assignment.report(f"communicator {number} of one rank, all_reduce: {mebibytes:.0f} MiB, {took_s:.2f} s")
    begin_s, used_bytes, y = time.perf_counter(), _used_bytes(), torch.empty_like(x)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 0, group), dist.P2POp(dist.irecv, y, 0, group)]):
        work.wait()
    mebibytes, took_s = (_used_bytes() - used_bytes) / 2**20, time.perf_counter() - begin_s
    assignment.report(f"send to itself: {mebibytes:.0f} MiB more, {took_s:.2f} s, equal {torch.equal(x, y)}")


def _transport(assignment: Assignment, x: torch.Tensor) -> None:
    """Report whether a sum lands, whether abort comes back, and what close does after it."""
    transport = NcclTransport(rank=0, device=torch.device("cuda", 0), timeout_s=60)
    transport.open(channels=[], groups=[(0,)])
    handle = transport.all_reduce(x, group=(0,))
    handle.wait(0)
    torch.cuda.synchronize()
    assignment.report(f"NcclTransport.all_reduce: landed after synchronize {handle.landed()}")
    for step in (transport.abort, transport.close):
        begin_s = time.perf_counter()
        try:
            step()
            outcome = "ended"
        except Exception as error:
            outcome = f"{type(error).__name__}: {str(error)[:150]}"
        assignment.report(f"NcclTransport.{step.__name__}: {outcome} after {time.perf_counter() - begin_s:.2f} s")


def _used_bytes() -> int:
    """Return the device's memory that is taken, except what torch's allocator has set aside."""
    torch.cuda.synchronize()
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return total_bytes - free_bytes - torch.cuda.memory_reserved()
