"""Laws of what ranks tell each other beside their programs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from lightning_pipe.strategy.ranks.control_plane import ControlPlane
from ranks.links import connected
from ranks.world import Raised, World


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


def add(dtype: torch.dtype) -> torch.Tensor:
    with connected() as links:
        added = torch.tensor([[1, 0], [3, 2**20]]).to(dtype)
        links.control.sum(added, what="numbers")
        return added


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.int64])
def test_a_sum_is_that_of_all_ranks_in_its_own_type_and_form(dtype: torch.dtype) -> None:
    for added in World(2).run(add, dtype):
        assert added.dtype == dtype
        assert added.tolist() == (torch.tensor([[2, 0], [6, 2**21]]).to(dtype)).tolist()


def _sum(what: str, numbers: int = 1) -> Callable[[ControlPlane], object]:
    return lambda control: control.sum(torch.ones(numbers), what=what)


def _broadcast(what: str, source: int = 0) -> Callable[[ControlPlane], object]:
    return lambda control: control.broadcast("something", source=source, what=what)


DIFFERENT = {
    "sums of one form": (_sum("a decision"), _sum("a barrier")),
    "sums of different forms": (_sum("a decision", 3), _sum("a barrier")),
    "a sum and a broadcast": (_sum("a decision"), _broadcast("a broadcast")),
    "broadcasts of different things": (_broadcast("the plan"), _broadcast("a broadcast")),
    "broadcasts of different ranks": (_broadcast("a broadcast", 0), _broadcast("a broadcast", 1)),
}


def do_different(which: str) -> None:
    with connected() as links:
        DIFFERENT[which][dist.get_rank()](links.control)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("which", DIFFERENT)
def test_ranks_that_do_different_things_together_get_an_error_and_no_numbers(which: str) -> None:
    results = World(2).results(do_different, which, deadline_s=20)
    assert all(isinstance(result, Raised) for result in results), results
    assert any("Ranks wait for different things" in result.text for result in results if isinstance(result, Raised))
