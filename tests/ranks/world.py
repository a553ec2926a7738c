"""A world of gloo processes that is kept between tests: `World(2).run(function, *args) -> [result of each rank]`.

The function is defined at the top of a module (beside its test); it and its arguments are pickled, and it runs at the
same time in every process, in which torch.distributed is initialised (`dist.get_rank()` tells it who it is). Worlds of
one size share their processes, so `World(2)` costs nothing once there is one. A rank that raises, dies or takes too
long ends its processes; the next call makes new ones.

Processes are forked from a server that has imported torch and the package and nothing else: forking pytest itself would
fork the threads of autograd, which then refuses to work. No ports are chosen: ranks meet in a file.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, ClassVar

PRELOAD = [
    "lightning.pytorch",
    "lightning_pipe.strategy.strategy",
    "lightning_pipe.entry.dapple_strategy",
    "pytest",
    "sympy.tensor.tensor",
    "torch.export",
]
DEADLINE_S = 60.0  # on an idle machine


def forking() -> ForkServerContext:
    """Return what starts processes that have imported the package and done nothing yet."""
    os.environ["OMP_NUM_THREADS"] = "1"  # for the server, which reads it as it imports torch
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


class Crowding:
    """How many processes share a core of this machine, at least one; deadlines of tests are as much longer."""

    now = 1.0

    @classmethod
    def look(cls) -> float:
        """Return it, and keep it for the deadlines of the test that begins."""
        cls.now = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        return cls.now


@dataclass(frozen=True)
class Returned:
    """The rank returned a value."""

    value: Any


@dataclass(frozen=True)
class Raised:
    """The rank raised: type and text of the exception, and the traceback."""

    kind: str
    text: str
    traceback: str


@dataclass(frozen=True)
class Died:
    """The process of the rank ended with this exit code (negative: a signal); `stderr` is what it printed last."""

    exitcode: int | None
    stderr: str


@dataclass(frozen=True)
class TimedOut:
    """The rank gave no answer within the deadline."""

    stderr: str


Result = Returned | Raised | Died | TimedOut


class World:
    """Processes of one size of world."""

    def __init__(self, size: int) -> None:
        self.size = size

    def run(self, function: Callable[..., Any], *args: Any, deadline_s: float | None = None) -> list[Any]:
        """Call the function on all ranks and return its results.

        Raises:
            AssertionError: if a rank did not return, with what every such rank said.
        """
        results = self.results(function, *args, deadline_s=deadline_s)
        failures = [f"rank {rank}: {_story(r)}" for rank, r in enumerate(results) if not isinstance(r, Returned)]
        if failures:
            raise AssertionError("\n".join(failures))
        return [result.value for result in results if isinstance(result, Returned)]

    def results(self, function: Callable[..., Any], *args: Any, deadline_s: float | None = None) -> list[Result]:
        """Call the function on all ranks and say what became of each."""
        processes = _Processes.of(self.size)
        deadline_s = DEADLINE_S * Crowding.now if deadline_s is None else deadline_s
        try:
            results = processes.call(pickle.dumps((list(sys.path), pickle.dumps((function, args)))), deadline_s)
        except BaseException:  # a test that was given up: no later one may take its answers for its own
            processes.end()
            raise
        if not all(isinstance(result, Returned) for result in results):
            processes.end()
        return results


class _Processes:
    """The processes behind all worlds of one size."""

    _by_size: ClassVar[dict[int, _Processes]] = {}

    @classmethod
    def of(cls, size: int) -> _Processes:
        if size not in cls._by_size:
            cls._by_size[size] = cls(size)
        return cls._by_size[size]

    def __init__(self, size: int) -> None:
        context = forking()
        atexit.register(self.end)
        self._size = size
        self._folder = Path(tempfile.mkdtemp(prefix="world"))
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, self._folder, there), daemon=True)
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)

    def call(self, payload: bytes, deadline_s: float) -> list[Result]:
        """Send the call to all ranks and collect their answers until the deadline."""
        results: dict[int, Result] = {}
        for rank, connection in enumerate(self._connections):
            try:
                connection.send_bytes(payload)
            except OSError:
                results[rank] = self._died(rank)
        end = time.monotonic() + deadline_s
        while len(results) < self._size and (left := end - time.monotonic()) > 0:
            waiting = {c: rank for rank, c in enumerate(self._connections) if rank not in results}
            for connection in wait(list(waiting), left):
                assert isinstance(connection, Connection)
                results[waiting[connection]] = self._receive(waiting[connection], connection)
        return [results.get(rank) or TimedOut(self._stderr(rank)) for rank in range(self._size)]

    def end(self) -> None:
        """Kill what is left and forget these processes."""
        atexit.unregister(self.end)
        self._by_size.pop(self._size, None)
        for process in self._processes:
            process.kill()
            process.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _receive(self, rank: int, connection: Connection) -> Result:
        try:
            result = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return self._died(rank)
        assert isinstance(result, (Returned, Raised))
        return result

    def _died(self, rank: int) -> Died:
        self._processes[rank].join()
        return Died(self._processes[rank].exitcode, self._stderr(rank))

    def _stderr(self, rank: int) -> str:
        return (self._folder / f"stderr{rank}").read_text(errors="replace")[-10_000:]


def _serve(rank: int, size: int, folder: Path, connection: Connection) -> None:
    """Run in a process of the world: join the others, then answer calls until the connection closes."""
    import torch
    import torch.distributed as dist

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    log = os.open(folder / f"stderr{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, sys.stderr.fileno())
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    gc.freeze()  # what the server has imported
    gc.set_threshold(2_000_000, 20, 100)  # as in conftest
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), size), rank=rank, world_size=size)
    while True:
        try:
            payload = connection.recv_bytes()
        except EOFError:
            os._exit(0)
        connection.send_bytes(pickle.dumps(_answer(payload)))


def _answer(payload: bytes) -> Result:
    try:
        sys.path[:], call = pickle.loads(payload)
        function, args = pickle.loads(call)
        result = Returned(function(*args))
        pickle.dumps(result)
        _refuse_busy_guard()
    except Exception as error:
        return Raised(type(error).__name__, str(error), traceback.format_exc())
    return result


def _refuse_busy_guard() -> None:
    """Raise if this process is still watched as in a fit: it would be ended for waiting for its next call."""
    from lightning_pipe.runtime.guard.client import guard_of_this_process, has_guard
    from lightning_pipe.runtime.guard.failure import IDLE

    if has_guard() and (state := guard_of_this_process().page.state).mode != IDLE:
        raise AssertionError(f"the rank has returned, but its guard takes it for one that trains: {state}")


def _story(result: Result) -> str:
    match result:
        case Returned(value):
            return f"returned {value}"
        case Raised():
            return result.traceback
        case Died():
            return f"died with exit code {result.exitcode}\n{result.stderr}"
        case TimedOut():
            return f"gave no answer in time\n{result.stderr}"
