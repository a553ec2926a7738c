"""Laws of predicted weights: they are those that the optimizer makes where its next updates are as its last one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer, RMSprop

from lightning_pipe.runtime.weights.prediction import Prediction, has_velocity

STEPS, AHEAD = 4, 3
RATES = [[0.1, 0.01], [0.05, 0.02], [0.2, 0.04]]  # of the next updates, by group


def stepped(optimizer: Optimizer, gradient: Callable[[nn.Parameter], torch.Tensor]) -> None:
    """Make an update."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = gradient(parameter) if parameter.requires_grad else None
    optimizer.step()


def parameters() -> list[nn.Parameter]:
    """Return parameters of two groups; the last is frozen."""
    torch.manual_seed(0)
    made = [nn.Parameter(torch.randn(3, dtype=torch.float64)) for _ in range(3)]
    made[2].requires_grad_(False)
    return made


def predicted(optimizer: Optimizer, prediction: Prediction, horizon: int = AHEAD) -> list[torch.Tensor]:
    """Return what is predicted of all parameters."""
    everything = [p for group in optimizer.param_groups for p in group["params"]]
    named = {str(k): p for k, p in enumerate(everything)}
    return [*prediction.predict(named, horizon, into=lambda name: torch.empty_like(named[name].detach())).values()]


def made(kind: Callable[..., Optimizer]) -> tuple[Optimizer, Prediction]:
    """Return an optimizer of two groups, and what predicts from it."""
    first, second, frozen = parameters()
    optimizer = kind([{"params": [first], "lr": 0.1}, {"params": [second, frozen], "lr": 0.01}], lr=0.1)
    horizons, rates = (lambda stage: (AHEAD, 0)), (lambda count: RATES[:count])
    return optimizer, Prediction(optimizer, horizons=horizons, form="velocity", once=False, rates=rates)


@pytest.mark.parametrize(
    "kind",
    [
        Adam,
        partial(Adam, weight_decay=0.0, amsgrad=True),
        partial(AdamW, weight_decay=0.3),
        partial(AdamW, weight_decay=0.3, fused=True),
        partial(AdamW, foreach=True, maximize=True),
        partial(SGD, momentum=0.9),
        partial(SGD, momentum=0.9, dampening=0.5, maximize=True),
    ],
)
def test_predicted_weights_are_those_after_updates_that_go_on_alike(kind: Callable[..., Optimizer]) -> None:
    """At the rates of the next updates; what is frozen, or has no state yet, stays where it is."""
    optimizer, prediction = made(kind)
    everything = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(a is b for a, b in zip(predicted(optimizer, prediction), everything, strict=True))
    is_sgd = isinstance(optimizer, SGD)

    def same(parameter: nn.Parameter) -> torch.Tensor:  # for which the velocity stays
        if not is_sgd or not optimizer.state:
            return torch.ones_like(parameter)
        group = optimizer.param_groups[0]
        way = optimizer.state[parameter].get("momentum_buffer", torch.ones_like(parameter))
        gradient = way * (1 - group["momentum"]) / (1 - group["dampening"])
        return -gradient if group["maximize"] else gradient

    for _ in range(STEPS):
        stepped(optimizer, same)
    foreseen = [x.detach().clone() for x in predicted(optimizer, prediction)]
    assert foreseen[2].equal(everything[2])
    for rates in RATES:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        stepped(optimizer, same)
    for parameter, one in zip(everything, foreseen, strict=True):
        torch.testing.assert_close(parameter.detach(), one, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "kind", [SGD, RMSprop, NAdam, partial(SGD, momentum=0.9, nesterov=True), type("Own", (AdamW,), {})]
)
def test_other_optimizers_go_on_as_the_last_update_went(kind: Callable[..., Optimizer]) -> None:
    """By the difference of weights, until it is forgotten."""
    optimizer, prediction = made(kind)
    everything = [p for group in optimizer.param_groups for p in group["params"]]
    assert not has_velocity(optimizer, optimizer.param_groups[0])
    for _ in range(STEPS):
        before = [p.detach().clone() for p in everything]
        prediction.before_step(everything)
        stepped(optimizer, torch.ones_like)
    wanted = [now + AHEAD * (now - old) for now, old in zip(everything, before, strict=True)]
    for one, other in zip(predicted(optimizer, prediction), wanted, strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=1e-12, atol=1e-12, check_stride=False)
    prediction.forget()
    assert all(a is b for a, b in zip(predicted(optimizer, prediction), everything, strict=True))
