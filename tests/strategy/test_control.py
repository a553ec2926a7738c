"""Laws of what ranks tell each other beside their programs."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ranks.links import connected
from ranks.world import World


def tell_in_turns() -> int:
    """Rank 0 tells; each rank listens only when the one before it has gone on."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    note = torch.zeros(1)
    heard = torch.tensor([7 if rank == 0 else 0])
    with connected() as links:
        if rank > 0:
            dist.recv(note, src=rank - 1)
        links.control.tell(heard, source=0, what="a number")
        if rank + 1 < ranks:
            dist.send(note, dst=rank + 1)
        links.control.sum(torch.zeros(1), what="the other ranks")
    return int(heard)


def test_neither_who_tells_nor_who_has_heard_waits_for_the_others() -> None:
    assert World(3).run(tell_in_turns) == [7, 7, 7]
