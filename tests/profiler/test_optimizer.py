"""Costs of an optimizer step are those of the user's class and options; the user's optimizer is not touched."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lightning_pipe.profiler.optimizer import profile_optimizer

CPU = torch.device("cpu")


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(600, 500)), nn.Parameter(torch.ones(500))]


@pytest.mark.parametrize(
    ("make", "state"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0.0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1.0),
        (lambda p: torch.optim.AdamW(p), 2.0),
        (lambda p: torch.optim.Adam(p, amsgrad=True), 3.0),
        (lambda p: torch.optim.Adagrad(p), 1.0),
        (lambda p: torch.optim.RMSprop(p), 1.0),
    ],
    ids=["sgd", "momentum", "adamw", "amsgrad", "adagrad", "rmsprop"],
)
def test_state_is_counted_per_byte_of_parameters(make, state: float):
    found = profile_optimizer(make(parameters()), device=CPU)
    assert found.state_bytes_per_byte == state
    assert found.seconds_per_byte + found.seconds_per_tensor + found.fixed_s > 0, "on a busy machine, one may be lost"
    assert min(found.seconds_per_byte, found.seconds_per_tensor, found.fixed_s) >= 0
    assert 1e-12 < found.copy_s_per_byte < 1e-7


def test_of_parameters_larger_than_memory_only_a_small_sample_is_made():
    huge = [nn.Parameter(torch.empty(2**20, 2**16, device="meta")) for _ in range(3)]
    assert profile_optimizer(torch.optim.Adam(huge), device=CPU).state_bytes_per_byte == 2.0


def test_options_of_the_user_count_and_his_optimizer_stays_as_it_is():
    own = parameters()
    optimizer = torch.optim.SGD(own, lr=0.1, momentum=0.9)
    torch.optim.lr_scheduler.StepLR(optimizer, 3)  # adds a key to the groups that the class does not take
    before = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in own]
    state = torch.get_rng_state()
    assert profile_optimizer(optimizer, device=CPU).state_bytes_per_byte == 1.0
    assert optimizer.state_dict() == before[0]
    assert all(torch.equal(p, q) and p.grad is None for p, q in zip(own, before[1], strict=True))
    assert torch.equal(torch.get_rng_state(), state)


class Exotic(torch.optim.SGD):
    def __init__(self, params, secret, **options) -> None:
        super().__init__(params, **options)


@pytest.mark.parametrize("make", [lambda p: Exotic(p, 1, lr=0.1), lambda p: torch.optim.LBFGS(p)], ids=["own", "lbfgs"])
def test_an_optimizer_that_cannot_be_copied_is_said_and_counts_as_nothing(make, caplog):
    found = profile_optimizer(make(parameters()), device=CPU)
    assert (found.seconds_per_byte, found.fixed_s) == (0.0, 0.0)
    assert "cannot be timed" in caplog.text
