"""Strangers who connect to listeners, and who listens where."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from lightning_pipe.runtime.callers import TOKEN_BYTES, hello

_MOST_OPEN = 100  # connections that a stranger keeps
LISTENS = "0A"  # a state of /proc/net/tcp


def garbage(number: int, generator: random.Random) -> bytes:
    """Return what a stranger says: of every kind in turn."""
    kinds: tuple[Callable[[], bytes], ...] = (
        lambda: generator.randbytes(generator.randrange(1, 5000)),
        lambda: b"x" * 2**20,
        lambda: b'{"rank": 1, "tok',
        lambda: json.dumps({"rank": 1, "token": "0" * 64, "do": "fail"}).encode() + b"\n",
        lambda: b"[" * 100_000 + b"\n",
        lambda: hello(generator.randbytes(TOKEN_BYTES), 1),
        lambda: hello(bytes(TOKEN_BYTES), 2**32 - 1),
        lambda: hello(bytes(TOKEN_BYTES), 0)[:-1],
        lambda: b"\n" * 50,
        lambda: b"",
    )
    return kinds[number % len(kinds)]()


@contextlib.contextmanager
def strangers(connect: Callable[[], socket.socket], count: int, *, seed: int = 0) -> Iterator[int]:
    """Connect so often, and say garbage; some hang up, others stay until the end. Yield how many have got in."""
    generator, opened, reached = random.Random(seed), list[socket.socket](), 0
    for number in range(count):
        with contextlib.suppress(OSError):
            stranger = connect()
            reached += 1
            stranger.setblocking(False)
            opened.append(stranger)
            stranger.send(garbage(number, generator) or b"\0")
        while len(opened) > (_MOST_OPEN if number % 3 else 0):
            opened.pop(0).close()
    try:
        yield reached
    finally:
        for stranger in opened:
            stranger.close()


def listening(process: int) -> list[tuple[str, int]]:
    """Return the addresses and ports at which a process listens; Linux only."""
    places = {}
    for table, row in itertools.chain(*([(t, r) for r in _rows(t)] for t in ("tcp", "tcp6"))):
        _, local, _, state, *rest = row.split()
        if state == LISTENS:
            address, _, port = local.partition(":")
            places[rest[5]] = (_text_of(address, table), int(port, 16))
    return [places[inode] for inode in _sockets(process) if inode in places]


def names_of(process: int) -> set[str]:
    """Return the names of Unix sockets of this package that a process listens at; Linux only."""
    rows = [row.split() for row in _rows("unix")]
    own, prefix = {*_sockets(process)}, "@lightning_pipe."
    return {row[7].removeprefix("@") for row in rows if row[6] in own and row[-1].startswith(prefix)}


def _sockets(process: int) -> list[str]:
    return [link.removeprefix("socket:[").removesuffix("]") for link in _links(process)]


def _rows(table: str) -> list[str]:
    return Path("/proc/net", table).read_text().splitlines()[1:]


def _text_of(address: str, table: str) -> str:
    words = b"".join(bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8))
    return socket.inet_ntop(socket.AF_INET if table == "tcp" else socket.AF_INET6, words)


def _links(process: int) -> Iterator[str]:
    folder = Path(f"/proc/{process}/fd")
    with contextlib.suppress(OSError):  # it has ended
        for descriptor in os.listdir(folder):
            with contextlib.suppress(OSError):
                yield os.readlink(folder / descriptor)


def processes_of(session: int) -> dict[int, str]:
    """Return the processes of a session (`setsid`), with their command lines; Linux only."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                if os.getsid(int(folder.name)) == session:
                    found[int(folder.name)] = (folder / "cmdline").read_text()
    return found
