"""Two hosts on one machine: network namespaces, joined by a pair of virtual cards that are shaped to a rate.

    with two_hosts(1e9) as hosts:
        results = run_on_both(hosts, function, *args)       # one rank on each, torch.distributed over gloo

Needs Linux, root, and the commands `ip` and `tc` (Debian: iproute2). Nothing outside the namespaces is touched, and
they are removed in the end.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.ranks import run_ranks

MAIN_ADDRESS = "10.0.0.1"  # of the first host
CARD = "card"  # name of the virtual card, inside its namespace
BURST_S = 0.001  # of sending at the rate: what may pass at once
LEAST_BURST = 64 * 2**10  # bytes; packets are cut from pieces of this size
QUEUE_S = 0.1  # how long a packet may wait for its turn
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET of <sched.h>


class NoNamespacesError(Exception):
    """Report that this machine or user cannot make network namespaces, or cannot shape them."""


@dataclass(frozen=True)
class TwoHosts:
    """Names of the two namespaces."""

    names: tuple[str, str]


@contextmanager
def two_hosts(rate_bit_s: float, delay_s: float = 0.0) -> Iterator[TwoHosts]:
    """Make two namespaces that reach each other at this rate per direction; remove them in the end.

    Args:
        rate_bit_s: bits per second, headers included.
        delay_s: additional seconds in each direction (needs the kernel's `netem`).

    Raises:
        NoNamespacesError: if they cannot be made; the text says why.
    """
    _require_tools()
    names = (f"pipe{os.getpid()}a", f"pipe{os.getpid()}b")
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # or nobody would clean up
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        a, b = names
        _run("ip", "link", "add", CARD, "netns", a, "type", "veth", "peer", "name", CARD, "netns", b)
        for number, name in enumerate(names, start=1):
            _run("ip", "-n", name, "address", "add", f"{MAIN_ADDRESS[:-1]}{number}/30", "dev", CARD)
            for card in ("lo", CARD):
                _run("ip", "-n", name, "link", "set", card, "up")
            _shape(name, rate_bit_s, delay_s)
        yield TwoHosts(names)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
        signal.signal(signal.SIGTERM, before)


def run_on_both(hosts: TwoHosts, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call the function on one rank of each host at the same time, and return both results.

    Args:
        hosts: where.
        function: what to call, with torch.distributed initialised; it need not be picklable, its result must be.
        args: its arguments.
    """
    with tempfile.TemporaryDirectory(prefix="hosts") as folder:
        return run_ranks(len(hosts.names), partial(_on_host, hosts, Path(folder), function), *args)


def _on_host(hosts: TwoHosts, folder: Path, function: Callable[..., Any], *args: Any) -> Any:
    """Move this rank to its host, and let the ranks meet again there."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()  # its threads belong to the namespace that we leave
    _enter(hosts.names[rank])
    os.environ.update(GLOO_SOCKET_IFNAME=CARD, MASTER_ADDR=MAIN_ADDRESS)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), ranks), rank=rank, world_size=ranks)
    return function(*args)


def _enter(name: str) -> None:
    """Let this thread, and those that it starts from now on, live in a namespace."""
    with Path("/run/netns", name).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {name}")


def _shape(name: str, rate_bit_s: float, delay_s: float) -> None:
    burst = max(round(rate_bit_s / 8 * BURST_S), LEAST_BURST)
    bucket = ["rate", f"{rate_bit_s:.0f}bit", "burst", f"{burst}b", "latency", f"{QUEUE_S * 1e3:.0f}ms"]
    _run("tc", "-n", name, "qdisc", "add", "dev", CARD, "root", "handle", "1:", "tbf", *bucket)
    if delay_s:
        delay = ["netem", "delay", f"{delay_s * 1e6:.0f}us", "limit", "100000"]
        _run("tc", "-n", name, "qdisc", "add", "dev", CARD, "parent", "1:1", "handle", "10:", *delay)


def _require_tools() -> None:
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise NoNamespacesError(f"found no command {' and '.join(missing)}; expected both of iproute2. Install it.")
    if os.geteuid() != 0:
        raise NoNamespacesError("found an ordinary user; expected root, who alone may make network namespaces.")


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise NoNamespacesError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
