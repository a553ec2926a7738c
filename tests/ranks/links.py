"""Connections of the ranks of a test world, without a trainer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

import torch
import torch.distributed as dist

from lightning_pipe.strategy.ranks.connections import Connections, begin_watch, connect_ranks


@contextmanager
def connected() -> Iterator[Connections]:
    """Connect this rank with the others of its world while the block runs; on all of them together."""
    with (
        closing(begin_watch(dist.get_rank(), dist.get_world_size(), deadline_s=20.0)) as watch,
        closing(connect_ranks(watch, device=torch.device("cpu"))) as links,
    ):
        yield links
