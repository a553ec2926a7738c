"""How does every rank hear of the first failure of any? By signs of life and one entry in a store.

Every rank has a thread that speaks to the others through a store (the rendezvous of torch.distributed):

    beat/<rank>   every second: whether the rank is inside a program, at which instruction, and what it waits for
    failure       written once, by the first rank that fails; every thread reads it within a second
    seen          counts the ranks that have read it, so that the failing rank can stay until all have

A rank that waits looks up every 0.2 s and raises the first failure, whoever's it is, instead of the consequence it
sees itself ("Connection closed by peer"). A rank that cannot look up, because it waits inside the device, gets its
communicators aborted; if that does not help within `grace_s`, its process prints the failure and ends.

A peer whose beats stay the same is taken for dead only while it is inside a program: saving a checkpoint, validating or
compiling may take as long as they like.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch.distributed as dist

from lightning_pipe.core.program import Instruction, Message, Recv, Send
from lightning_pipe.errors import PipelineError
from lightning_pipe.runtime.waiting import Wait
from lightning_pipe.runtime.watch import PATIENCE, POLL_S, Patience, PeerFailure

_LAST_LINES = 6  # of a traceback, as much as names the user's line and the operation
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Beat:
    """A sign of life: `count` grows with every one."""

    count: int = 0
    inside: bool = False
    step: int = 0
    at: str = "no instruction yet"

    def __str__(self) -> str:
        return f"at {self.at} of step {self.step}" if self.inside else f"outside a program, after step {self.step}"


_UNHEARD = Beat(inside=True, at="an unknown instruction")


@dataclass(frozen=True)
class Failure:
    """The first thing that went wrong anywhere."""

    rank: int
    step: int
    at: str
    cause: str
    lines: str

    def __str__(self) -> str:
        where = f"Rank {self.rank} failed at {self.at} of step {self.step}: {self.cause}"
        return where + (f"\n{self.lines}" if self.lines else "")


class StoreWatch:
    """Watch over a rank by a thread and a store.

    Args:
        store: a client of its own, e.g. `PrefixStore("pipe0", group_store.clone())`, under a prefix that is new.
        rank: this rank.
        ranks: number of ranks.
        peers: ranks whose signs of life are read; those it talks with (`groups.peers`).
        patience: deadlines.
        abort: ends waits inside the device (`transport.abort`).
    """

    def __init__(
        self,
        store: dist.Store,  # type: ignore[name-defined]  # exported where torch has distributed
        *,
        rank: int,
        ranks: int,
        peers: Sequence[int],
        patience: Patience = PATIENCE,
        abort: Callable[[], None] = lambda: None,
    ) -> None:
        self._store, self._rank, self._ranks, self._patience, self._abort = store, rank, ranks, patience, abort
        self._peers = tuple(peer for peer in peers if peer != rank)
        self._beats: dict[int, tuple[Beat, float]] = {}  # with the time at which it was new
        self._depth, self._step = 0, 0
        self._at: Instruction | str = "no instruction yet"
        self._waiting: Wait | None = None
        self._failure: Failure | None = None
        self._failed, self._entered, self._outside, self._closed = (threading.Event() for _ in range(4))
        self._outside.set()
        self._thread = threading.Thread(target=self._watch, name=f"watch {rank}", daemon=True)
        self._thread.start()

    @contextmanager
    def program(self, step: int) -> Iterator[None]:
        """Surround one program; may be nested."""
        self._depth += 1
        self._step = step
        self._outside.clear()
        self._entered.set()
        try:
            self._raise_failure()
            yield
        except PeerFailure:
            raise
        except BaseException as error:
            self._report(error)
            raise
        finally:
            self._depth -= 1
            self._waiting = None
            if not self._depth:
                self._outside.set()

    def at(self, instruction: Instruction) -> None:
        """Note the instruction that begins."""
        self._at = instruction
        self._raise_failure()

    def wait(self, wait: Wait) -> None:
        """Wait for a handle until the deadline."""
        self._waiting = wait
        end = time.monotonic() + self._patience.deadline_s
        try:
            while not wait.handle.wait(POLL_S):
                self._raise_failure()
                if time.monotonic() > end:
                    raise PipelineError(self._overdue(wait))
        except PipelineError:
            raise
        except RuntimeError as error:
            raise self._disconnected(wait, error) from None
        self._waiting = None

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._entered.set()
        self._thread.join()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise PeerFailure(str(self._failure))

    def _report(self, error: BaseException) -> None:
        """Tell the other ranks of a failure of this one, and stay until they have heard."""
        if self._failure is not None:
            return
        root = error.__cause__ or error
        cause = str(error) if isinstance(root, PipelineError) else f"{type(root).__name__}: {root}"
        lines = traceback.format_exception(type(root), root, root.__traceback__)[-_LAST_LINES:]
        shown = "" if isinstance(root, PipelineError) else "".join(lines).rstrip()
        self._declare(Failure(self._rank, self._step, str(self._at), cause, shown))
        self._part()

    def _disconnected(self, wait: Wait, error: RuntimeError) -> PipelineError:
        """Return the failure behind a lost connection: what a rank has told, else that the peer is gone."""
        self._failed.wait(self._patience.parting_s)
        if self._failure is not None:
            return PeerFailure(str(self._failure))
        seen = f"rank {self._rank} lost its connection while it waited for {_described(wait)} ({error})"
        if not isinstance(wait.what, (Recv, Send)):
            return PipelineError(f"R{seen[1:]}; {self._whereabouts(wait)}.")
        peer = wait.what.peer
        beat = self._last(peer)
        first = self._declare(Failure(peer, beat.step, beat.at, f"its process has probably died: {seen}", ""))
        self._part()
        return PeerFailure(str(first))

    def _overdue(self, wait: Wait) -> str:
        return (
            f"Rank {self._rank} waits for {_described(wait)} for more than {self._patience.deadline_s:g} s; "
            f"{self._whereabouts(wait)}. If that is only slow, raise deadline_s."
        )

    def _whereabouts(self, wait: Wait) -> str:
        peers = (wait.what.peer,) if isinstance(wait.what, (Recv, Send)) else self._peers
        return ", ".join(f"rank {peer} is {self._last(peer)}" for peer in peers)

    def _last(self, peer: int) -> Beat:
        return self._beats[peer][0] if peer in self._beats else _UNHEARD

    def _part(self) -> None:
        """Stay until all ranks have heard of the failure, for this process may hold the store."""
        end = time.monotonic() + self._patience.parting_s
        while time.monotonic() < end and self._heard() < self._ranks - 1:
            time.sleep(POLL_S / 4)

    def _declare(self, failure: Failure) -> Failure:
        """Write a failure unless there is one; return the first."""
        try:
            text = self._store.compare_set("failure", "", json.dumps(asdict(failure)))
            first = Failure(**json.loads(text))
        except RuntimeError:  # the store is gone; what we know is all there is
            first = failure
        self._fail(first)
        return first

    def _heard(self) -> int:
        try:
            return int(self._store.add("seen", 0))
        except RuntimeError:
            return self._ranks

    def _fail(self, failure: Failure) -> None:
        if self._failure is None:
            self._failure = failure
        self._failed.set()

    def _watch(self) -> None:
        """Beat, look for a failure and for signs of life, until closed or failed."""
        count = 0
        while not self._closed.is_set():
            count += 1
            try:
                self._store.set(f"beat/{self._rank}", json.dumps(asdict(self._beat(count))))
                self._read_failure()
                self._read_beats()
            except RuntimeError as error:
                lost = f"the store of the rendezvous is gone, and with it probably the process that holds it ({error})"
                self._fail(Failure(self._rank, self._step, str(self._at), lost, ""))
            if self._failed.is_set():
                self._leave()
                return
            self._closed.wait(POLL_S)
            self._entered.wait(self._patience.beat_s - POLL_S)
            self._entered.clear()

    def _beat(self, count: int) -> Beat:
        waiting = self._waiting
        at = f"{self._at}, waiting for {waiting.what}" if waiting is not None else str(self._at)
        return Beat(count, self._depth > 0, self._step, at)

    def _read_failure(self) -> None:
        if self._store.check(["failure"]):
            self._fail(Failure(**json.loads(self._store.get("failure"))))
            self._store.add("seen", 1)

    def _read_beats(self) -> None:
        now = time.monotonic()
        for peer in self._peers:
            if not self._store.check([f"beat/{peer}"]):
                continue
            beat = Beat(**json.loads(self._store.get(f"beat/{peer}")))
            known, since = self._beats.get(peer, (None, now))
            if beat != known:
                self._beats[peer] = (beat, now)
            elif self._depth and beat.inside and now - since > self._patience.stale_s:
                cause = f"no sign of life for {self._patience.stale_s:g} s; its process or host has probably died"
                self._declare(Failure(peer, beat.step, beat.at, cause, ""))
                return

    def _leave(self) -> None:
        """See to it that the rank's own thread raises the failure; if it cannot, end the process."""
        self._abort()
        if not self._outside.wait(self._patience.grace_s):
            _log.critical("Rank %d ends at %s. %s", self._rank, self._at, self._failure)
            logging.shutdown()
            os._exit(1)


def watch_default_group(
    name: str, *, peers: Sequence[int], patience: Patience = PATIENCE, abort: Callable[[], None] = lambda: None
) -> StoreWatch:
    """Return a watch that speaks through the store of the default process group, over a connection of its own.

    Args:
        name: the same on all ranks, and new for every pipeline of this process group.
        peers: ranks whose signs of life are read (`groups.peers`).
        patience: deadlines.
        abort: ends waits inside the device (`transport.abort`).
    """
    assert dist.group.WORLD is not None, "torch.distributed is initialised"
    own: dist.Store = dist.group.WORLD.get_group_store().clone()  # type: ignore[attr-defined,name-defined]
    store = dist.PrefixStore(f"pipe/{name}", own)  # type: ignore[attr-defined]
    return StoreWatch(
        store, rank=dist.get_rank(), ranks=dist.get_world_size(), peers=peers, patience=patience, abort=abort
    )


def _described(wait: Wait) -> str:
    """Name what is waited for: `stage 2, micro-batch 0, direction F from rank 1`."""
    match wait.what:
        case Recv(message, peer):
            return f"{_spelled(message)} from rank {peer}"
        case Send(message, peer):
            return f"rank {peer} to take {_spelled(message)}"
        case other:
            return str(other)


def _spelled(message: Message) -> str:
    return f"stage {message.source}, micro-batch {message.microbatch}, direction {message.direction}"
