"""Talk with the guard of this process: one is started for the first fit, and stays until the process ends."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  # what it does at the exit of a script must come after our part
import logging
import os
import queue
import selectors
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from lightning_pipe.errors import PipelineError
from lightning_pipe.runtime.guard.failure import IDLE, LEAVING, NO_WAIT, OUTSIDE, Failure, GuardedState, unpacked
from lightning_pipe.runtime.guard.lines import Lines, Message
from lightning_pipe.runtime.guard.page import SharedPage
from lightning_pipe.runtime.guard.process import GuardTimeouts, say

_BEAT_S = 0.25
_ANSWER_S = 5.0  # for what the hub is asked
_MARGIN_S = 3.0  # after our deadline, the guard's
_MOST_FRAMES = 12  # of the place at which a rank stands that is ended
_CODE = "import sys; sys.path.insert(0, {root!r}); from lightning_pipe.runtime.guard.process import main; main()"


class GuardClient:
    """This process's end of its guard.

    Args:
        verdict: file into which the guard writes the first failure, for who has started this process.

    Attributes:
        page: where this rank says what it does.
        heard: set once a rank has failed in this session.
        has_met: whether the guards of all ranks are connected.
        unopened: what ranks could not open together, in this session or an earlier one; "" if they could.
    """

    def __init__(self, *, verdict: str = "") -> None:
        self.page = SharedPage()
        self.heard = threading.Event()
        self.owner = os.getpid()
        self.has_met, self.unopened = False, ""
        self.rank, self.session = 0, 0
        self._failure: Failure | None = None
        self._on_failure: Callable[[], None] = lambda: None
        self._answers: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._asking, self._asked = threading.Lock(), 0
        self._training = 0  # the thread that has begun a session
        self._deadline_s = GuardTimeouts.deadline_s
        here, there = socket.socketpair()
        self._process = self._start(there, verdict)
        there.close()
        self._channel = Lines(here)
        self._thread = threading.Thread(target=self._listen, name="guard", daemon=True)
        self._thread.start()

    def _start(self, there: socket.socket, verdict: str) -> subprocess.Popen[bytes]:
        root = str(Path(__file__).parents[3])
        arguments = [str(os.getpid()), str(there.fileno()), str(self.page.descriptor), verdict]
        try:
            return subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _CODE.format(root=root), *arguments],
                pass_fds=(there.fileno(), self.page.descriptor),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        except OSError as error:
            raise PipelineError(
                f"The process that watches over this rank cannot be started ({sys.executable}: {error}). Without it a "
                "rank that dies would leave the others waiting. Allow this process to start another."
            ) from error

    @property
    def failure(self) -> Failure | None:
        """Return the first failure of this session, once it was heard of."""
        return self._failure

    def begin(self, rank: int, limits: GuardTimeouts) -> None:
        """Begin a session: a fit (or validate, test, predict). The rank must come to the others by the deadline."""
        self.rank, self.session = rank, self.session + 1
        self._deadline_s = limits.deadline_s
        self._failure = None
        self.heard.clear()
        self.page.wait(NO_WAIT)
        self.page.write(OUTSIDE, -1, b"the start", limit=time.monotonic() + limits.deadline_s + _MARGIN_S)
        self._training = threading.get_ident()
        begin = {"do": "begin", "rank": rank, "session": self.session, "thread": threading.get_native_id()}
        self._send({**begin, "limits": asdict(limits)})

    def end(self) -> None:
        """End the session."""
        self._on_failure = lambda: None
        self.page.wait(NO_WAIT)
        self.page.write(IDLE, -1, b"the end of a fit")
        self.watch_processes(())

    def on_failure(self, function: Callable[[], None]) -> None:
        """Call this, from another thread, when a rank has failed."""
        self._on_failure = function

    def host(self, addresses: Sequence[str]) -> Message:
        """Become the place where guards meet, at addresses of this host; return how to reach it.

        Raises:
            PipelineError: if nobody can listen at any of them.
        """
        request = {"do": "host", "addresses": list(addresses)}
        answer = self._ask(request, wait_s=max(_ANSWER_S, self._deadline_s))
        if not answer["places"]:
            raise PipelineError(
                f"The guard of rank 0 cannot listen at {' or '.join(addresses)}. Set MASTER_ADDR to an address of its "
                "host."
            )
        return {"places": answer["places"], "token": answer["token"]}

    def join(self, hub: Message) -> None:
        """Meet the other guards.

        Raises:
            PipelineError: if they cannot be reached.
        """
        why = self._ask({"do": "join", "hub": hub}, wait_s=max(_ANSWER_S, self._deadline_s))["why"]
        if why:
            raise PipelineError(
                f"Rank {self.rank} cannot reach the guard of rank 0, at {why}. Either rank 0 has died, or its host "
                "refuses connections: training needs ports between all hosts."
            )

    def fail(self, failure: Failure, *, wait_s: float) -> Failure:
        """Tell all ranks of a failure, and return the first one."""
        self._send({"do": "fail", "failure": failure.packed()})
        self.heard.wait(wait_s)
        return self._failure or failure

    def where(self, ranks: Iterable[int]) -> dict[int, GuardedState]:
        """Return what ranks did a moment ago, as far as it is known."""
        try:
            states = self._ask({"do": "where", "ranks": list(ranks)}, wait_s=_ANSWER_S)["states"]
        except PipelineError:
            return {}
        return {int(rank): GuardedState(**state) for rank, state in states.items()}

    def watch_processes(self, pids: Iterable[int]) -> None:
        """Let these processes end with this one (workers of loaders)."""
        self._send({"do": "wards", "pids": list(pids)})

    def watch_children(self, pids: Mapping[int, int]) -> None:
        """Let processes that were started as ranks end with this one, as long as they have no guard."""
        self._send({"do": "children", "pids": {str(rank): pid for rank, pid in pids.items()}})

    def close(self) -> None:
        """Release the guard, which ends."""
        self._channel.connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._channel.close()
        self._process.wait()
        self.page.close()

    def _send(self, message: Message) -> None:
        if not self._channel.send(message):
            self._lose()

    def _ask(self, message: Message, *, wait_s: float) -> Message:
        with self._asking:
            self._asked += 1
            self._send({**message, "number": self._asked})
            end = time.monotonic() + wait_s
            try:
                while True:
                    answer = self._answers.get(timeout=max(0.0, end - time.monotonic()))
                    if answer["number"] == self._asked:  # not one that came too late
                        return answer
                    if answer["say"] == "lost":
                        raise PipelineError(f"Rank {self.rank} has lost the process that watches over it.")
            except queue.Empty:
                raise PipelineError(f"Rank {self.rank} gets no answer from the guards within {wait_s:g} s.") from None

    def _listen(self) -> None:
        """Beat, and hear what the guard says, until it is closed."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            while True:
                self.page.beat()
                if not selector.select(_BEAT_S):
                    continue
                messages = self._channel.read()
                if messages is None:
                    self._lose()
                    return
                for message in messages:
                    self._hear(message)

    def leave(self) -> None:
        """Tell the guard that the script is over, so that it sees to it that a rank that has failed ends.

        Threads that never end, handlers and destructors may keep a process for ever.
        """
        if self._failure is not None:
            self.page.write(LEAVING, -1, b"the exit of its script")

    def _hear(self, message: Message) -> None:
        match message["say"]:
            case "failure":
                failure = unpacked(message["failure"])
                if failure.lasting or failure.session >= self.session:
                    self._fail(failure)
            case "end":
                if self._failure is not None and self._failure.rank == self.rank:
                    say(f"Rank {self.rank} was at{_place_of(self._training)}")
                logging.shutdown()
                os._exit(1)
            case _:
                self._answers.put(message)

    def _lose(self) -> None:
        where = str(self.page.state)
        self._answers.put({"say": "lost", "number": 0})
        self._fail(Failure(self.rank, where, "the process that watches over it has died", lasting=True))

    def _fail(self, failure: Failure) -> None:
        if self._failure is None:
            self._failure = failure
        self.heard.set()
        self._on_failure()


_mine: list[GuardClient] = []
_leaves: list[int] = []  # processes whose exit is noted


def guard_of_this_process(*, verdict: str = "") -> GuardClient:
    """Return the guard of this process, which is started if there is none; a forked process gets its own."""
    if not _mine or _mine[0].owner != os.getpid():
        _mine[:] = [GuardClient(verdict=verdict)]
        _note_exit()
    return _mine[0]


def has_guard() -> bool:
    """Return whether this process has a guard."""
    return bool(_mine) and _mine[0].owner == os.getpid()


def _note_exit() -> None:
    """Let the guard of this process hear of the exit of the script before its threads are waited for; once."""
    if not _leaves:
        _leaves.append(os.getpid())  # inherited by forked processes, as what is registered is
        register: Callable[[Callable[[], None]], object] = getattr(threading, "_register_atexit", atexit.register)
        register(_leave)


def _leave() -> None:
    if has_guard():
        _mine[0].leave()


def _place_of(thread: int) -> str:
    """Return the lines at which a thread stands, the innermost last."""
    frame = sys._current_frames().get(thread)
    frames = [] if frame is None else traceback.extract_stack(frame)[-_MOST_FRAMES:]
    return "".join(f"\n    {place.filename}:{place.lineno} in {place.name}" for place in frames) or " an unknown place"
