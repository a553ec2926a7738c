"""Connect one rank with the others: everything that one fit (or validate, test, predict) needs, made together.

    begin_watch      a guard watches over this process; from here on no death goes unheard
    join_ranks       the rendezvous: who comes, who is missing, where the guards meet
    connect_ranks    messages of programs, and everything else on the host

Every wait in here ends by the deadline.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_pipe.errors import PipelineError
from lightning_pipe.runtime.guard.client import guard_of_this_process
from lightning_pipe.runtime.guard.guarded_watch import GuardedWatch
from lightning_pipe.runtime.guard.watch import POLL_S, OverdueError, Unwatched, patience_until
from lightning_pipe.runtime.shortages import shortage
from lightning_pipe.runtime.transport.gloo import GlooTransport
from lightning_pipe.runtime.transport.local import Hub
from lightning_pipe.runtime.transport.process_group import MARGIN_S, process_group_transport
from lightning_pipe.runtime.transport.protocol import Transport
from lightning_pipe.strategy.ranks.control_plane import ControlPlane
from lightning_pipe.strategy.ranks.network_card import LOOPBACK, is_here, is_loopback, listening, own_addresses

log = logging.getLogger(__name__)

_SAY_AFTER_S = 10.0  # that not all ranks have come
_CONNECT_S = 5.0  # of one attempt
_CLOSE_S = 2.0  # after a failure
_KEY = "lightning_pipe/{}"


@dataclass(frozen=True)
class Connections:
    """Everything that connects this rank.

    Attributes:
        transport: carries the messages of programs.
        control: carries everything else, on the host.
        watch: looks after waits.
    """

    transport: Transport
    control: ControlPlane
    watch: GuardedWatch | Unwatched

    @property
    def on_device(self) -> Transport | None:
        """Return what adds tensors of a device without the host; None where everything goes over the host."""
        return None if self.transport.device is None else self.transport

    def close(self, *, healthy: bool = True) -> None:
        """Release everything but the watch. On all ranks, with nothing under way; after a failure, with whatever is.

        A group of gloo that still waits for another rank cannot be destroyed before torch's own time-out, so after a
        failure a thread does that, which nobody waits for longer than a moment. Where there is no memory for a thread,
        groups stay open until the process ends, so that the failure itself is what the user reads.
        """
        if healthy:
            self._close()
            return
        closing = threading.Thread(target=self._close, name="closing", daemon=True)
        try:
            closing.start()
        except RuntimeError as error:
            log.warning("Connections to other ranks stay open until this process ends: %s.", error)
            return
        closing.join(_CLOSE_S)

    def _close(self) -> None:
        self.transport.close()
        self.control.close()


def begin_watch(rank: int, ranks: int, *, deadline_s: float, hosts: int = 1, verdict: str = "") -> GuardedWatch:
    """Begin a fit on this rank: its guard is told, or started.

    Args:
        rank: this rank.
        ranks: number of ranks.
        deadline_s: for every wait.
        hosts: number of hosts; ranks of one host meet where no other host comes.
        verdict: file for the first failure, for who has started this process.
    """
    guard, patience = guard_of_this_process(verdict=verdict), patience_until(deadline_s)
    guard.begin(rank, patience.limits)
    return GuardedWatch(guard, rank=rank, ranks=ranks, patience=patience, hosts=hosts)


def join_ranks(watch: GuardedWatch, *, address: str, port: int) -> dist.Store:  # type: ignore[name-defined]
    """Meet the other ranks at an address, and return their store.

    Raises:
        PipelineError: if ranks are missing when the deadline is over, or have died; it names them.
    """
    patience, start = watch.patience, time.monotonic()
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if watch.hosts == 1 and not has_agent:
        address = LOOPBACK
    timeout = timedelta(seconds=patience.deadline_s)
    with watch.opening(f"the rendezvous at {address}:{port}"):
        try:
            if watch.rank:
                _await_host(watch, address, port)
            hosts = watch.rank == 0 and not has_agent
            store = _store(address, port, ranks=watch.ranks, hosts=hosts, timeout=timeout)
        except (RuntimeError, OSError) as error:
            if shortage(error):
                raise
            watch.raise_failure()
            missing = "The rendezvous cannot be hosted" if watch.rank == 0 else "Rank 0, which hosts it, has not come"
            kind = OverdueError if isinstance(error, OverdueError) else PipelineError
            raise kind(
                f"Rank {watch.rank} cannot join the others at {address}:{port}: {missing}, or has died. ({error})"
            ) from None
        try:
            meet_guards(watch, store, start=start)
            store.set(_KEY.format(f"here/{watch.rank}"), socket.gethostname())
            _wait_for_all(watch, store, start=start)
        except dist.DistError as error:
            watch.hear()
            raise PipelineError(
                f"Rank {watch.rank} has lost the rendezvous at {address}:{port}: rank 0, which hosts it, has died "
                f"(or the launcher, where that hosts it). ({str(error).partition(chr(10))[0]})"
            ) from None
    return store


def _await_host(watch: GuardedWatch, address: str, port: int) -> None:
    """Wait until somebody listens at an address. Torch would do so too, for twice its time-out and with much noise."""
    end = time.monotonic() + watch.patience.deadline_s
    while True:
        watch.raise_failure()
        try:
            socket.create_connection((address, port), timeout=min(_CONNECT_S, watch.patience.deadline_s)).close()
        except OSError as error:
            if shortage(error):
                raise
            if time.monotonic() > end:
                raise OverdueError(f"nobody listens there after {watch.patience.deadline_s:g} s: {error}") from None
            time.sleep(POLL_S)
        else:
            return


def _store(address: str, port: int, *, ranks: int, hosts: bool, timeout: timedelta) -> dist.Store:  # type: ignore[name-defined]
    """Return the store of the rendezvous: that of torchrun's agent, which outlives all ranks, or rank 0's."""
    listener: int | None = None  # at all addresses of this host, as torch chooses
    if hosts and (address == LOOPBACK or (not is_loopback(address) and is_here(address))):
        listener = listening(address, port).detach()
    store = dist.TCPStore(  # type: ignore[attr-defined]
        address, port, ranks, is_master=hosts, timeout=timeout, wait_for_workers=False, master_listen_fd=listener
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"attempt {attempt}", store)  # type: ignore[attr-defined]


def _wait_for_all(watch: GuardedWatch, store: dist.Store, *, start: float) -> None:  # type: ignore[name-defined]
    """Wait until all ranks are at the rendezvous, to which this one came at `start`; log which are late."""
    keys = {rank: _KEY.format(f"here/{rank}") for rank in range(watch.ranks)}
    said = False
    while not store.check(list(keys.values())):
        watch.raise_failure()
        waited = time.monotonic() - start
        if waited < _SAY_AFTER_S and waited < watch.patience.deadline_s:
            time.sleep(POLL_S)
            continue
        missing = [rank for rank, key in keys.items() if not store.check([key])]
        names = ("rank " if len(missing) == 1 else "ranks ") + ", ".join(map(str, missing))
        if waited > watch.patience.deadline_s and missing:
            raise OverdueError(
                f"Of {watch.ranks} ranks, {names} did not come to the rendezvous within "
                f"{watch.patience.deadline_s:g} s: not started, or ended before. Start one process for every device of "
                "all num_nodes hosts, or set num_nodes to the hosts that there are."
            )
        if not said and watch.rank == min(set(keys) - set(missing), default=0):
            log.warning("Waiting for %s of %d ranks.", names, watch.ranks)
            said = True
        time.sleep(POLL_S)


def meet_guards(watch: GuardedWatch, store: dist.Store, *, start: float) -> None:  # type: ignore[name-defined]
    """Let the guards of all ranks meet at that of rank 0, in time counted from `start`; on all ranks, once."""
    guard, key = watch.guard, _KEY.format("guard")
    if guard.has_met:
        guard.where(())  # when that is answered, the others are no longer told what this rank did in its last session
        return
    if watch.rank == 0:
        store.set(key, json.dumps(guard.host(own_addresses(watch.hosts))))
    else:
        while not store.check([key]):
            watch.raise_failure()
            if time.monotonic() > start + watch.patience.deadline_s:
                raise OverdueError(f"Rank 0 did not come to the rendezvous within {watch.patience.deadline_s:g} s.")
            time.sleep(POLL_S / 10)
        guard.join(json.loads(store.get(key)))
    guard.has_met = True


def unconnected() -> Connections:
    """Return what stands for connections where there is one rank."""
    alone = Unwatched()
    return Connections(Hub().endpoint(0), ControlPlane(None, rank=0, ranks=1, wait=alone.wait), alone)


def connect_ranks(watch: GuardedWatch, *, device: torch.device) -> Connections:
    """Connect this rank with the others of the default process group; on all ranks together.

    Args:
        watch: over this rank; who has begun it ends it.
        device: of the messages of programs.

    Raises:
        PipelineError: if that is impossible since an earlier fit of this process could not open its connections.
    """
    what, unopened = "the connections between ranks", watch.guard.unopened
    advice = f"an earlier fit could not open {unopened}; start the script again"
    try:
        links = _connected(watch, f"{what} ({advice})" if unopened else what, device)
    except Exception as error:
        watch.guard.unopened = what
        if not unopened or isinstance(error, PipelineError) or not isinstance(error, RuntimeError):
            raise
        raise PipelineError(
            f"Rank {watch.rank} cannot connect with the others again: {advice}, as ranks have ended or count their "
            f"groups otherwise. `ckpt_path=` goes on from a checkpoint. ({error})"
        ) from error
    watch.guard.unopened = ""
    return links


def _connected(watch: GuardedWatch, what: str, device: torch.device) -> Connections:
    deadline_s = watch.patience.deadline_s
    with watch.opening(what):
        assert dist.group.WORLD is not None, "torch.distributed is initialised"
        meet_guards(watch, dist.group.WORLD.get_group_store(), start=time.monotonic())
        transport = process_group_transport(device, deadline_s=deadline_s)
        watch.guard.on_failure(transport.abort)
        host = GlooTransport(rank=watch.rank, ranks=watch.ranks, timeout_s=deadline_s + MARGIN_S)
        control = ControlPlane(host, rank=watch.rank, ranks=watch.ranks, wait=watch.wait, begun=watch.exchange)
        return Connections(transport, control, watch)
