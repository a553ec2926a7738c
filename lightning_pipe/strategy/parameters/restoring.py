"""Where the module is whole after a fit: where the user wants it, and where memory allows."""

from __future__ import annotations

import logging
import socket

import torch

from lightning_pipe.config import DappleConfig
from lightning_pipe.strategy.parameters.weights import Weights
from lightning_pipe.strategy.ranks.control_plane import ControlPlane
from lightning_pipe.strategy.start.room import room_bytes
from lightning_pipe.units import format_bytes

log = logging.getLogger(__name__)

_SPARE = 2  # times what is missing: somebody will want to do something with the module


def whole_ranks(config: DappleConfig, weights: Weights, control: ControlPlane) -> tuple[int, ...]:
    """Return the ranks that get the whole module after a fit; on all ranks together."""
    if config.restore == "none":
        return ()
    everyone = tuple(range(control.ranks))
    if config.restore == "all" or control.ranks == 1:
        return everyone
    if config.restore == "first":
        return (0,)
    tight = control.sum(torch.tensor(float(not _fits(weights, control))), what="whether the whole module fits")
    if not tight:
        return everyone
    if config.start_method != "popen":  # the other processes end
        return (0,)
    log.warning(
        "After this fit each rank keeps the parameters of its own stages, as not all have the memory for the whole "
        "module (%s are missing on rank %d). trainer.save_checkpoint, trainer.strategy.whole_module() and another fit, "
        "test or predict of this trainer go on with them; restore='first' or 'all' collects them all the same.",
        *(format_bytes(weights.missing_bytes()), control.rank),
    )
    return ()


def _fits(weights: Weights, control: ControlPlane) -> bool:
    """Return whether the memory of this rank's host allows what is missing, on all of its ranks."""
    hosts = [
        control.broadcast(socket.gethostname(), source=rank, what="the name of a host") for rank in range(control.ranks)
    ]
    sharers = hosts.count(hosts[control.rank])
    return _SPARE * weights.missing_bytes() * sharers <= room_bytes()
