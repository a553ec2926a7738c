"""Run the guard of one rank: a loop over the rank's signs of life, the other guards, and clocks.

Started by `client.py` with the standard library alone. It ends when its rank has ended and everybody knows; it stops
with its rank when a shell suspends the job (they share a process group), and its clock does not count that time.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import selectors
import signal
import socket
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from lightning_pipe.runtime.callers import TOKEN_BYTES, Callers, hello, received, welcome
from lightning_pipe.runtime.guard.failure import IDLE, INSIDE, LEAVING, Failure, GuardedState, unpacked
from lightning_pipe.runtime.guard.hub import CUT_OFF, GuardHub
from lightning_pipe.runtime.guard.lines import SEND_S, Lines, Message
from lightning_pipe.runtime.guard.page import SharedPage
from lightning_pipe.runtime.guard.pids import ending, is_stopped, kill, open_process, used_ns

_TICK_S = 0.1
_BEAT_S = 0.5
_CONNECT_S = 3.0  # for one address of the hub
_JOIN_S = 10.0  # for all of them, as often as they do not answer
_LAST_WORD_S = 1.0  # for a rank to end once it was told to, and for a hub to be heard
_SUSPENDED_S = 1.0  # between two looks: more is time in which the job was suspended


@dataclass(frozen=True)
class GuardTimeouts:
    """How long what may take, in seconds; see `runtime.guard.watch.Patience`."""

    deadline_s: float = 300.0
    stale_s: float = 15.0
    grace_s: float = 5.0


class RankGuard:
    """The guard of one rank.

    Args:
        parent: process of the rank.
        channel: to the rank.
        page: what the rank does.
        verdict: file for the first failure, for who has started the ranks; "" for none.
    """

    def __init__(self, parent: int, channel: socket.socket, page: SharedPage, *, verdict: str = "") -> None:
        self._parent, self._channel, self._page, self._verdict = parent, Lines(channel), page, verdict
        self._limits = GuardTimeouts()
        self._rank, self._session = 0, 0
        self._hub: GuardHub | None = None
        self._callers: Callers | None = None  # at the hub
        self._where: Message = {}  # the hub is
        self._upstream: Lines | None = None  # to the hub
        self._of_hub = GuardedState()  # what rank 0 does
        self._guests: dict[int, Lines] = {}  # of the hub
        self._failure: Failure | None = None
        self._wards: list[int] = []  # descriptors of processes that must not outlive the rank
        self._children: dict[int, int] = {}  # rank -> descriptor of a process that it has started as a rank
        self._is_over = False  # whether the rank has ended
        self._awake, self._last = 0.0, time.monotonic()
        self._failed_at = self._told_at = self._beat_at = self._heard_at = 0.0
        self._beats, self._beaten_at = -1, 0.0
        self._limit, self._due = 0.0, 0.0  # the limit on the page, and when that is on the clock of this guard
        self._thread, self._used_ns, self._used_at = parent, 0, 0.0  # the rank's thread that fits, its processor time
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._channel, selectors.EVENT_READ, self._from_rank)
        self._process = open_process(parent)
        if self._process is not None:
            self._selector.register(self._process, selectors.EVENT_READ, self._end_of_rank)

    def run(self) -> None:
        """Guard until the rank has ended and everybody knows."""
        while not self._is_finished():
            for key, _ in self._selector.select(_TICK_S):
                key.data()
            self._pass(time.monotonic())

    def _pass(self, now: float) -> None:
        """Look at everything at a time of `time.monotonic`; a suspended job does not age."""
        passed, self._last = now - self._last, now
        self._awake += min(passed, _SUSPENDED_S)
        limit = self._page.limit
        if limit != self._limit:  # it may have been written before the job was suspended
            left = limit - now if passed < _SUSPENDED_S else self._limits.deadline_s
            self._limit, self._due = limit, self._awake + left
        self._tick()

    def _is_finished(self) -> bool:
        if not self._is_over:
            return False
        if self._hub is None or self._failure is None:
            return self._hub is None or self._hub.is_settled
        is_alone = self._guests.keys().isdisjoint(self._hub.members)  # those that are cut off never say good-bye
        return self._hub.is_settled and is_alone and self._awake - self._failed_at > _LAST_WORD_S

    def _tick(self) -> None:
        if os.getppid() != self._parent:
            self._end_of_rank()
        if not self._is_over:
            if self._awake - self._beat_at > _BEAT_S:
                self._beat_at = self._awake
                self._to_hub({"do": "beat", "state": asdict(self._page.state)})
            if self._failure is None:
                self._look()
            else:
                self._enforce(self._failure)
        if self._hub is not None:
            self._welcome()
            self._hub.tick(self._awake)
        elif self._upstream is not None and self._awake - self._heard_at > self._limits.stale_s:
            silent = f"no word from its host for {self._limits.stale_s:g} s: it is down, or cut off"
            self._lose_hub(silent, late_s=self._limits.stale_s)

    # --- the rank ---

    def _look(self) -> None:
        """Find out whether the rank is stopped, stuck or late."""
        beats, state, stale_s = self._page.beats, self._page.state, self._limits.stale_s
        if beats != self._beats or state.mode == IDLE:
            self._beats, self._beaten_at = beats, self._awake
        if self._awake - self._beaten_at > stale_s and is_stopped(self._parent):
            self._declare(state, f"its process has been stopped (SIGSTOP) for {stale_s:g} s", late_s=stale_s)
        elif state.mode == INSIDE and self._awake - self._beaten_at > stale_s:
            self._declare(state, f"no sign of life for {stale_s:g} s; its interpreter is blocked", late_s=stale_s)
        elif self._limit and self._awake > self._due:
            late_s = self._limits.deadline_s
            cause = f"it is still there after {late_s:g} s; the deadline is over"
            self._declare(state, f"{cause}. If that takes so long, raise deadline_s", late_s=late_s)
        else:
            self._look_whether_idle(state, has_limit=self._limit > 0)

    def _look_whether_idle(self, state: GuardedState, *, has_limit: bool) -> None:
        """Find out whether the rank waits, where we have not made it wait: then all ranks may, so that nobody tells."""
        used, late_s = used_ns(self._parent, self._thread), self._limits.deadline_s
        if used is None or used != self._used_ns or has_limit or state.mode == IDLE:
            self._used_ns, self._used_at = used or 0, self._awake
        elif self._awake - self._used_at > late_s:
            cause = f"its training thread has done nothing for {late_s:g} s: it waits for a thread, a lock or a process"
            self._declare(state, f"{cause}. If that takes so long, raise deadline_s", late_s=late_s)

    def _enforce(self, failure: Failure) -> None:
        """End the rank if it has not ended in time after a failure."""
        mode, since = self._page.state.mode, self._awake - self._failed_at
        grace_s, left_s = self._limits.grace_s, self._limits.deadline_s - failure.late_s
        if mode == IDLE or since < (grace_s if mode == INSIDE else max(grace_s, left_s)):
            return
        if not self._told_at:
            self._told_at = self._awake
            say(f"Rank {self._rank} is ended {self._page.state}. {failure}")
            self._channel.send({"say": "end"})
        elif self._awake - self._told_at > _LAST_WORD_S:
            kill(self._process, self._parent)

    def _end_of_rank(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._selector.unregister(self._channel)
        if self._process is not None:
            self._selector.unregister(self._process)
        state = self._page.state
        if state.mode in (IDLE, LEAVING):
            self._to_hub({"do": "bye"})
            if self._hub is not None and self._failure is None:
                for guest in self._guests.values():
                    guest.send({"say": "bye"})
        else:
            self._declare(state, ending(self._parent), lasting=True, is_said=bool(self._told_at))
        for ward in self._wards:
            kill(ward)
        if self._failure is not None or state.mode != IDLE:
            for rank, child in self._children.items():
                if self._hub is None or not self._hub.has_met(rank):
                    kill(child)

    def _from_rank(self) -> None:
        messages = self._channel.read()
        if messages is None:
            self._end_of_rank()
            return
        for message in messages:
            self._obey(message)

    def _obey(self, message: Message) -> None:
        match message["do"]:
            case "begin":
                self._rank, self._session, self._thread = message["rank"], message["session"], message["thread"]
                self._limits = GuardTimeouts(**message["limits"])
                self._failure, self._told_at = None, 0.0
                if self._hub is not None:
                    self._hub.stale_s = self._limits.stale_s
                self._to_hub({"do": "session", "number": self._session})
            case "host":
                self._channel.send({"say": "hosting", "number": message["number"], **self._host(message["addresses"])})
            case "join":
                why = self._join(**message["hub"])
                self._channel.send({"say": "joined", "number": message["number"], "why": why})
            case "fail":
                self._to_hub({"do": "fail", "failure": message["failure"]})
            case "where":
                self._to_hub(message)
            case "wards":
                for ward in self._wards:
                    os.close(ward)
                self._wards = [d for pid in message["pids"] if (d := open_process(pid)) is not None]
            case "children":
                found = {int(rank): open_process(pid) for rank, pid in message["pids"].items()}
                self._children = {rank: d for rank, d in found.items() if d is not None}

    def _declare(
        self, state: GuardedState, cause: str, *, late_s: float = 0.0, lasting: bool = False, is_said: bool = False
    ) -> None:
        """Tell all of a failure of this rank; `is_said`: the terminal has read already why it ends."""
        failure = Failure(
            self._rank, str(state), cause, session=self._session, raised=is_said, lasting=lasting, late_s=late_s
        )
        self._to_hub({"do": "fail", "failure": failure.packed()})

    # --- the other guards ---

    def _to_hub(self, message: Message) -> None:
        if self._hub is not None:
            self._hub.take(self._rank, message, self._awake)
        elif self._upstream is not None:
            self._upstream.send(message)
        elif message["do"] == "fail":  # nobody else is there yet
            failure = unpacked(message["failure"])
            if not failure.raised and self._failure is None:
                say(str(failure))
            self._hear({"say": "failure", "failure": failure.packed()})
        elif message["do"] == "where":
            self._hear({"say": "where", "states": {}, "number": message["number"]})

    def _hear(self, message: Message) -> None:
        """Hear a message of the hub."""
        match message["say"]:
            case "failure":
                failure = unpacked(message["failure"])
                if self._failure is None and (failure.lasting or failure.session >= self._session):
                    self._failure, self._failed_at = failure, self._awake
                    self._write_verdict(failure)
                    self._channel.send(message)
            case "where":
                self._channel.send(message)
            case "beat":
                self._of_hub = GuardedState(**message["state"])
            case "bye":
                self._drop_hub()

    def _write_verdict(self, failure: Failure) -> None:
        if self._verdict:
            part = Path(f"{self._verdict}.{os.getpid()}")
            part.write_text(str(failure), encoding="utf-8")
            part.replace(self._verdict)

    def _host(self, addresses: list[str]) -> Message:
        """Become the hub, at these addresses as far as this host has them; return how to reach it."""
        if self._hub is None:
            token, listeners = secrets.token_bytes(TOKEN_BYTES), dict[str, socket.socket]()
            for address in addresses:
                with contextlib.suppress(OSError):
                    family, *_, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
                    listeners[address] = socket.create_server(place[:2], family=family, backlog=1024)
            self._callers = Callers([*listeners.values()], lambda _: token)
            self._selector.register(self._callers, selectors.EVENT_READ, self._welcome)
            places = [(address, listener.getsockname()[1]) for address, listener in listeners.items()]
            self._where, self._token = {"places": places, "token": token.hex()}, token
            self._hub = GuardHub(self._send, say, stale_s=self._limits.stale_s)
            self._hub.join(self._rank, self._awake)
            self._hub.take(self._rank, {"do": "session", "number": self._session}, self._awake)
        return self._where

    def _send(self, rank: int, message: Message) -> None:
        """Send a message of the hub to the guard of a rank."""
        if rank == self._rank:
            self._hear(message)
        elif rank in self._guests:
            self._guests[rank].send(message)

    def _welcome(self) -> None:
        """Let in the guards that have called and shown the token."""
        assert self._hub is not None and self._callers is not None, "callers come to the hub"
        for rank, _, connection in self._callers.known():
            connection.settimeout(SEND_S)
            with contextlib.suppress(OSError):
                connection.sendall(welcome(self._token))
            guest = self._guests[rank] = Lines(connection)
            self._hub.join(rank, self._awake)
            self._selector.register(guest, selectors.EVENT_READ, partial(self._from_guest, guest, rank))

    def _from_guest(self, guest: Lines, rank: int) -> None:
        assert self._hub is not None, "guests come to the hub"
        messages = guest.read()
        if messages is None:
            self._selector.unregister(guest)
            guest.close()
            if self._guests.get(rank) is guest:
                self._guests.pop(rank)
                self._hub.lost(rank, self._awake)
            return
        for message in messages:
            self._hub.take(rank, message, self._awake)
            if message["do"] == "beat":
                guest.send({"say": "beat", "state": asdict(self._page.state)})

    def _join(self, places: list[tuple[str, int]], token: str) -> str:
        """Connect with the hub; return why that is not possible, "" if it is."""
        end = time.monotonic() + _JOIN_S
        while self._upstream is None:
            errors = {f"{address}:{port}": self._call(address, port, bytes.fromhex(token)) for address, port in places}
            is_hopeless = all(isinstance(error, ConnectionRefusedError) for error in errors.values())
            if self._upstream is None and (is_hopeless or time.monotonic() > end):
                return "; ".join(f"{place} ({error})" for place, error in errors.items())
        return ""

    def _call(self, address: str, port: int, token: bytes) -> OSError | None:
        """Connect with the hub at an address, unless that is done; return why that is not possible."""
        if self._upstream is not None:
            return None
        try:
            connection = socket.create_connection((address, port), timeout=_CONNECT_S)
            connection.sendall(hello(token, self._rank))
        except OSError as error:
            return error
        expected = welcome(token)
        if not hmac.compare_digest(received(connection, len(expected), timeout_s=_CONNECT_S), expected):
            connection.close()
            return OSError("another program answers, or nobody does")
        self._upstream, self._heard_at = Lines(connection), self._awake
        self._selector.register(self._upstream, selectors.EVENT_READ, self._from_hub)
        self._to_hub({"do": "session", "number": self._session})
        return None

    def _from_hub(self) -> None:
        assert self._upstream is not None, "registered with it"
        self._heard_at = self._awake
        messages = self._upstream.read()
        if messages is None:
            self._lose_hub(CUT_OFF)
            return
        for message in messages:
            self._hear(message)

    def _lose_hub(self, cause: str, *, late_s: float = 0.0) -> None:
        self._drop_hub()
        if self._failure is None and not self._is_over and self._page.state.mode != IDLE:
            session = self._session
            failure = Failure(0, str(self._of_hub), cause, session=session, lasting=True, late_s=late_s)
            say(str(failure))
            self._hear({"say": "failure", "failure": failure.packed()})

    def _drop_hub(self) -> None:
        if self._upstream is not None:
            self._selector.unregister(self._upstream)
            self._upstream.close()
            self._upstream = None


def say(text: str) -> None:
    """Show a text in the terminal of the job."""
    with contextlib.suppress(OSError):  # the terminal is gone
        os.write(2, f"lightning_pipe: {text}\n".encode())


def main() -> None:
    """Guard the process whose number, socket, page and verdict file the command line gives."""
    parent, channel, page, verdict = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # a guard ends with its rank, not before
    os.chdir("/")
    connection = socket.socket(fileno=int(channel))
    RankGuard(int(parent), connection, SharedPage(int(page)), verdict=verdict).run()
