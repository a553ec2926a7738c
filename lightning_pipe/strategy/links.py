"""How does one rank reach the others? All connections of one fit (or validate, test, predict), made together."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from lightning_pipe.runtime.store_watch import StoreWatch, watch_default_group
from lightning_pipe.runtime.transport.gloo import GlooTransport
from lightning_pipe.runtime.transport.local import Hub
from lightning_pipe.runtime.transport.process_group import MARGIN_S, process_group_transport
from lightning_pipe.runtime.transport.protocol import Transport
from lightning_pipe.runtime.watch import Patience, Unwatched
from lightning_pipe.strategy.control import Control

_names = itertools.count()


@dataclass(frozen=True)
class Links:
    """Everything that connects this rank.

    Attributes:
        transport: carries the messages of programs.
        control: carries everything else, on the host.
        watch: looks after waits.
    """

    transport: Transport
    control: Control
    watch: StoreWatch | Unwatched

    def end_programs(self) -> None:
        """Release what programs need; objects can still be exchanged."""
        self.transport.close()
        if isinstance(self.watch, StoreWatch):
            self.watch.close()


def connect_ranks(rank: int, ranks: int, *, device: torch.device, deadline_s: float) -> Links:
    """Connect this rank with the others of the default process group; on all ranks together."""
    if ranks == 1:
        watch = Unwatched()
        return Links(Hub().endpoint(0), Control(None, rank=0, ranks=1, wait=watch.wait), watch)
    transport = process_group_transport(device, deadline_s=deadline_s)
    store_watch = watch_default_group(
        f"pipeline {next(_names)}",
        peers=range(ranks),
        patience=Patience(deadline_s=deadline_s),
        abort=transport.abort,
    )
    host = GlooTransport(rank=rank, ranks=ranks, timeout_s=deadline_s + MARGIN_S)
    return Links(transport, Control(host, rank=rank, ranks=ranks, wait=store_watch.wait), store_watch)
