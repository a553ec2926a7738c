"""Ranks that do not mean the same say so, all of them."""

import pytest
import torch.distributed as dist

from lightning_pipe.errors import PipelineError
from lightning_pipe.runtime.agree import agree
from ranks.world import World


def say(odd_rank: int) -> str:
    try:
        agree({"plan": "odd" if dist.get_rank() == odd_rank else "even", "graph": "g"})
    except PipelineError as error:
        return str(error)
    return "agreed"


@pytest.mark.parametrize("odd_rank", [0, 1, 2])
def test_all_ranks_hear_who_differs_in_what(odd_rank: int) -> None:
    texts = World(3).run(say, odd_rank)
    assert len(set(texts)) == 1
    assert "plan is" in texts[0] and f"odd on rank {odd_rank}" in texts[0] and "graph" not in texts[0]


def test_equal_ranks_agree() -> None:
    assert World(3).run(say, 3) == ["agreed"] * 3
