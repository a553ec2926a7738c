"""The test world itself: results, failures, and a fresh start after them."""

import os

import pytest
import torch
import torch.distributed as dist

from ranks import world
from ranks.world import Died, Raised, Returned, TimedOut, World


def rank_and_sum(addend: int) -> tuple[int, float, int]:
    tensor = torch.tensor(float(dist.get_rank() + addend))
    dist.all_reduce(tensor)
    return dist.get_rank(), tensor.item(), os.getpid()


def misbehave() -> str:
    if dist.get_rank() == 0:
        raise ValueError("zero is not welcome")
    if dist.get_rank() == 1:
        os._exit(3)
    return "fine"


def wait_for_nobody() -> None:
    if dist.get_rank() == 0:
        dist.recv(torch.zeros(1), src=1)


def test_all_ranks_run_together_and_processes_are_kept() -> None:
    first, second = World(2).run(rank_and_sum, 1), World(2).run(rank_and_sum, 1)
    assert [result[:2] for result in first] == [(0, 3.0), (1, 3.0)]
    assert first == second


def test_every_rank_says_what_became_of_it_and_the_next_call_starts_afresh() -> None:
    raised, died, returned = World(3).results(misbehave)
    assert isinstance(raised, Raised) and raised.kind == "ValueError" and "not welcome" in raised.text
    assert isinstance(died, Died) and died.exitcode == 3
    assert returned == Returned("fine")
    assert [result[0] for result in World(3).run(rank_and_sum, 0)] == [0, 1, 2]


def test_a_rank_that_hangs_is_ended_at_the_deadline() -> None:
    stuck, returned = World(2).results(wait_for_nobody, deadline_s=1)
    assert isinstance(stuck, TimedOut)
    assert returned == Returned(None)


def test_what_a_given_up_test_had_asked_is_no_answer_to_the_next(monkeypatch) -> None:
    def give_up(*_) -> None:
        raise TimeoutError

    with monkeypatch.context() as patch:
        patch.setattr(world, "wait", give_up)
        with pytest.raises(TimeoutError):
            World(2).run(os.getpid)
    first, second = World(2).run(os.getppid)
    assert first == second, "processes of one parent"
