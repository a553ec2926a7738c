"""Ranks that do not mean the same say so, each with what it means."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_pipe.strategy.steps.step_runtime import agree
from ranks.links import connected
from ranks.world import Raised, World


def say(plans: list[str]) -> None:
    with connected() as links:
        agree(links, {"torch": "2.13", "plan": plans[dist.get_rank()]})


def test_a_difference_is_told_on_every_rank_with_who_means_what() -> None:
    for result in World(3).results(say, ["a", "b", "a"]):
        assert isinstance(result, Raised) and result.kind == "PipelineError"
        assert "plan is a on ranks 0, 2, b on rank 1" in result.text and "torch" not in result.text
    for result in World(3).results(say, ["x" * 50, "x" * 50, "y" * 50]):
        assert isinstance(result, Raised) and "x" * 50 not in result.text


def test_agreement_says_nothing() -> None:
    assert World(3).run(say, ["same plan, whatever it is"] * 3) == [None] * 3


def exchange() -> tuple[object, ...]:
    rank = dist.get_rank()
    mine = torch.full((2,), float(rank))
    with connected() as links:
        control = links.control
        brought = [control.to_first(("from", source), source=source, what="test") for source in range(3)]
        return (
            control.broadcast({"rank": rank}, source=2, what="test"),
            brought,
            control.copy(mine.clone(), source=1, what="test").tolist(),
            control.sum(mine.clone(), what="test").tolist(),
        )


def test_objects_and_tensors_travel() -> None:
    first, *others = World(3).run(exchange)
    for said, brought, copied, summed in (first, *others):
        assert said == {"rank": 2} and copied == [1.0, 1.0] and summed == [3.0, 3.0]
        assert brought == ([("from", r) for r in range(3)] if brought[0] is not None else [None] * 3)
    assert first[1] == [("from", 0), ("from", 1), ("from", 2)]


def fail_together() -> None:
    with connected() as links:
        links.control.agreed(lambda: 1 // 0, source=1, what="test")


def test_an_error_of_the_rank_that_decides_is_raised_everywhere() -> None:
    assert all(isinstance(r, Raised) and r.kind == "ZeroDivisionError" for r in World(3).results(fail_together))
