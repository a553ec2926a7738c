"""Callers at listeners, of whom nobody knows yet whether they belong to the job.

Whoever reaches an address may connect to it. Until a caller has shown the token, at most `len(hello(...))` bytes of it
are read, none is interpreted, and what it does concerns its own connection alone: that is closed after a wrong word,
after `PATIENCE_S` of silence, and when `_MOST_WAITING` newer callers wait. The standard library suffices.
"""

from __future__ import annotations

import contextlib
import hmac
import selectors
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

TOKEN_BYTES = 32
PATIENCE_S = 5.0
_HELLO = struct.Struct(f"<{TOKEN_BYTES}sII")  # token, rank, topic
_MOST_WAITING = 256
_MOST_AT_ONCE = 32  # accepted before something else has its turn


class Caller(NamedTuple):
    """A caller who has shown the token: its rank, and what it calls for."""

    rank: int
    topic: int
    connection: socket.socket


def hello(token: bytes, rank: int, topic: int = 0) -> bytes:
    """Return what a caller says first; callers are heard in any order, so one that calls twice says for what."""
    return _HELLO.pack(token, rank, topic)


def welcome(token: bytes) -> bytes:
    """Return what only a listener that knows the token can answer."""
    return hmac.digest(token, b"welcome", "sha256")


def received(connection: socket.socket, size: int, *, timeout_s: float) -> bytes:
    """Return what comes within a time, at most `size` bytes."""
    end, content = time.monotonic() + timeout_s, b""
    with contextlib.suppress(OSError):
        while len(content) < size and (left := end - time.monotonic()) > 0:
            connection.settimeout(left)
            if not (part := connection.recv(size - len(content))):
                break
            content += part
    return content


class Callers:
    """Callers at some listeners; readable, for selectors, whenever `known` has something to do.

    Args:
        listeners: sockets that listen; they are closed with this.
        token_of: returns the token that a rank must show, None for a rank that there is not.
    """

    def __init__(self, listeners: Sequence[socket.socket], token_of: Callable[[int], bytes | None]) -> None:
        self._listeners, self._token_of = listeners, token_of
        self._selector = selectors.DefaultSelector()
        self._waiting: dict[socket.socket, tuple[float, bytes]] = {}  # the oldest first: since when, what it has said
        for listener in listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)

    def fileno(self) -> int:
        """Return a descriptor that is readable while somebody calls or speaks."""
        return self._selector.fileno()

    def known(self) -> list[Caller]:
        """Return the callers that have shown the token since the last time, in any order; close others in time."""
        found = []
        for key, _ in self._selector.select(0):
            connection = key.fileobj
            assert isinstance(connection, socket.socket), "nothing else is registered"
            for line in self._accepted(connection) if connection in self._listeners else [connection]:
                if (caller := self._caller(line)) is not None:
                    found.append(caller)
        now = time.monotonic()
        for line in [one for one, (since, _) in self._waiting.items() if now - since > PATIENCE_S]:
            self._turn_away(line)
        return found

    def close(self) -> None:
        """Close the listeners, and turn away who waits."""
        for caller in list(self._waiting):
            self._turn_away(caller)
        self._selector.close()
        for listener in self._listeners:
            listener.close()

    def _accepted(self, listener: socket.socket) -> list[socket.socket]:
        callers = []
        with contextlib.suppress(OSError):  # nobody calls any more, or has hung up already
            for _ in range(_MOST_AT_ONCE):
                caller, _ = listener.accept()
                caller.setblocking(False)
                if len(self._waiting) >= _MOST_WAITING:
                    self._turn_away(next(iter(self._waiting)))
                self._waiting[caller] = (time.monotonic(), b"")
                self._selector.register(caller, selectors.EVENT_READ)
                callers.append(caller)
        return callers

    def _caller(self, line: socket.socket) -> Caller | None:
        """Read what somebody says; return who it is once that is the token, and stop waiting for it then."""
        if line not in self._waiting:  # turned away just now
            return None
        since, said = self._waiting[line]
        try:
            part = line.recv(_HELLO.size - len(said))
        except BlockingIOError:
            return None
        except OSError:
            part = b""
        said += part
        if part and len(said) < _HELLO.size:
            self._waiting[line] = (since, said)
            return None
        if part:
            token, rank, topic = _HELLO.unpack(said)
            expected = self._token_of(rank)
            if expected is not None and hmac.compare_digest(token, expected):
                self._forget(line)
                return Caller(rank, topic, line)
        self._turn_away(line)
        return None

    def _turn_away(self, caller: socket.socket) -> None:
        self._forget(caller)
        caller.close()

    def _forget(self, caller: socket.socket) -> None:
        del self._waiting[caller]
        self._selector.unregister(caller)
