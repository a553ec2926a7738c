"""Optimizers of the user's own may step every parameter by itself, and are not changed by looking whether they do."""

from __future__ import annotations

import copy
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_pipe.errors import UnsupportedError
from lightning_pipe.strategy.checks.separable import check_separable
from lightning_pipe.strategy.parameters.inner_optimizers import with_tensors
from ranks.world import World
from strategy.small import Small, assert_as_on_one_device, run


class Own(torch.optim.SGD):
    """SGD that changes rates or gradients before it steps."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.taken: list[int] = []
        self.counts = {"steps": 0}
        self.inner = torch.optim.SGD(self.param_groups, lr=0.1)

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]

    def change(self) -> None:
        """Do so."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        self.change()
        super().step()
        return loss


class Counting(Own):
    """Warms up by what it counts in containers of its own, and steps by another optimizer that it wraps."""

    def change(self) -> None:
        self.taken.append(1)
        self.counts["steps"] += 1
        self.param_groups[0]["lr"] = 0.1 * min(1.0, self.counts["steps"] / 4) / len(self.taken)
        self.inner.step()


class ByGroup(Own):
    """Divides by the norm of each group's gradients: half of all parameters may be a group."""

    def change(self) -> None:
        for group in self.param_groups:
            if gradients := [p.grad for p in group["params"] if p.grad is not None]:
                norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
                for gradient in gradients:
                    gradient.div_(norm)


class ByDistance(Own):
    """One rate for all, from how far they have come, as Prodigy: the first step couples nothing."""

    def change(self) -> None:
        found = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p in found:
            self.state[p].setdefault("start", p.detach().clone())
        moved = sum(float((p.grad * (self.state[p]["start"] - p)).sum()) for p in found)
        for group in self.param_groups:
            group["lr"] = max(group["lr"], 0.1 + 0.1 * moved)


class Unguarded(Own):
    """Takes for granted that all parameters have gradients."""

    def change(self) -> None:
        torch.stack([p.grad.norm() for group in self.param_groups for p in group["params"]])


def parameters() -> list[dict[str, Any]]:
    """Return groups of weights and biases, large ones among them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 2), nn.Linear(2, 2))
    found = [*model.parameters()]
    return [{"params": [p for p in found if p.ndim == n]} for n in (2, 1)]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (ByGroup, "ByGroup steps a parameter differently if others have gradients too"),
        (ByDistance, "ByDistance steps a parameter differently"),
        (Unguarded, "Unguarded fails where some parameters have no gradient .AttributeError.*whose gradient is None"),
    ],
)
def test_one_that_couples_parameters_is_refused(kind: type[Own], said: str) -> None:
    with pytest.raises(UnsupportedError, match=f'{said}.*layout="3" with shard_optimizer="off"'):
        check_separable(kind(parameters()), 3, device=torch.device("cpu"))


def test_one_that_counts_is_not_and_stays_as_it_was() -> None:
    """The lists and dicts of its own were those of the trial, so that training began some steps later."""
    optimizer = Counting(parameters())
    before = copy.deepcopy(optimizer.param_groups)
    check_separable(optimizer, 2, device=torch.device("cpu"))
    assert (optimizer.taken, optimizer.counts, dict(optimizer.state)) == ([], {"steps": 0}, {})
    for group, old in zip(optimizer.param_groups, before, strict=True):
        assert group["lr"] == old["lr"]
        torch.testing.assert_close(group["params"], old["params"], rtol=0, atol=0)


class WithGroups(Small):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return ByGroup([{"params": [p for p in self.parameters() if p.ndim == n]} for n in (2, 1)])


def fit(name: str, options: dict[str, Any] | None) -> tuple[Any, ...]:
    """Fit it; a worker function."""
    return run(WithGroups, options)


def test_data_parallel_ranks_train_with_one_as_the_refusal_advises() -> None:
    for result in World(2).results(fit, "", {"layout": "2"}):
        assert 'layout="2" with shard_optimizer="off"' in result.text
    assert_as_on_one_device(fit, "", {"layout": "2", "shard_optimizer": "off"})


def test_a_copy_of_a_state_has_containers_of_the_same_kind() -> None:
    """Queues without a length would grow, once they have moved to another rank."""
    state = {"queue": deque([torch.ones(2)], maxlen=3), "inner": [SimpleNamespace(tensor=torch.ones(1)), 1]}
    found = with_tensors(state, lambda tensor: tensor + 1)
    assert found["queue"].maxlen == 3 and torch.equal(found["queue"][0], torch.full((2,), 2.0))
    assert found["inner"][0].tensor == 2 and state["inner"][0].tensor == 1
