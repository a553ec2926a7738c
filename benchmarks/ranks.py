"""Ranks of a benchmark on this host: `run_ranks(4, function, *args) -> [result of each rank]`.

Every rank is a forked process with torch.distributed (gloo) initialised; they meet in a file, so no port is chosen. The
function need not be picklable, its results must be. Call it before this process has computed on several threads or run
a backward: forking would fork those threads too. (Tests have `tests/ranks/world.py`, which forks from a clean server
and keeps its processes; a benchmark wants fresh ones.)
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

DEADLINE_S = 300.0


def run_ranks(ranks: int, function: Callable[..., Any], *args: Any, deadline_s: float = DEADLINE_S) -> list[Any]:
    """Call the function at the same time in this many processes and return their results.

    Args:
        ranks: number of processes; `dist.get_rank()` tells each who it is.
        function: what to call.
        args: its arguments.
        deadline_s: seconds after which the processes are ended.

    Raises:
        RuntimeError: if a rank raised, died or took too long, with what it said.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="ranks") as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
        processes = [
            context.Process(target=_serve, args=(rank, ranks, Path(folder), there, function, args), daemon=True)
            for rank, (_, there) in enumerate(pipes)
        ]
        try:
            for process, (_, there) in zip(processes, pipes, strict=True):
                process.start()
                there.close()
            return _results([here for here, _ in pipes], time.monotonic() + deadline_s)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _results(connections: Sequence[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while missing := [rank for rank in range(len(connections)) if rank not in results]:
        ready = wait([connections[rank] for rank in missing], deadline - time.monotonic())
        if not ready:
            raise RuntimeError(f"ranks {missing} gave no result in time")
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = connections.index(connection)
            results[rank] = _answer(rank, connection)
    return [results[rank] for rank in range(len(connections))]


def _answer(rank: int, connection: Connection) -> Any:
    try:
        succeeded, value = pickle.loads(connection.recv_bytes())
    except EOFError:
        raise RuntimeError(f"rank {rank} died") from None
    if not succeeded:
        raise RuntimeError(f"rank {rank} failed:\n{value}")
    return value


def _serve(
    rank: int, ranks: int, folder: Path, connection: Connection, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """Run in the process of a rank."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(str(folder / "store"), ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        answer = pickle.dumps((True, function(*args)))
    except Exception:
        answer = pickle.dumps((False, traceback.format_exc()))
    sys.stdout.flush()  # the process is ended as soon as everybody has answered
    connection.send_bytes(answer)
