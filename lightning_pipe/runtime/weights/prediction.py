"""Prediction of the weights that an optimizer will have made some updates from now, without a gradient.

    velocity     SGD with momentum      w - v (lr_1 + ... + lr_s)
                 Adam, AdamW            w <- (1 - lr_k decay) w - lr_k m' / (sqrt(v') + eps), for k = 1 ... s
    difference   any other              w + s (w - w_before)

The velocity form goes on as the last update went, with the learning rates of the next ones, and decays weights where
the optimizer does so apart from gradients. `m'` and `v'` are without bias. Nesterov's momentum, SGD without momentum,
and other classes keep no velocity: they take the difference. After Chen et al., "SpecTrain" (2018), Guan et al.,
"XPipe" (2019), and Kosson et al., "Pipelined Backpropagation at Scale" (2021), for both forms.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_pipe.schedule.weights import Form

Rates = Callable[[int], Sequence[Sequence[float]]]
"""Return the learning rates of the next updates: of each, those of all parameter groups."""

Contents = dict[str, torch.Tensor]


class Prediction:
    """Predict parameters that a rank reads.

    Args:
        optimizer: that updates them.
        horizons: by stage, how many updates ahead F reads, and I and W.
        form: "velocity" where the optimizer has one, or always "difference".
        once: whether all micro-batches of a batch read one prediction.
        rates: of the next updates.
        stateless: ids of parameters whose state other ranks have, so that only their difference is known here.

    Attributes:
        horizons, once: as given.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        horizons: Callable[[int], tuple[int, int]],
        form: Form,
        once: bool,
        rates: Rates,
        stateless: Container[int] = frozenset(),
    ) -> None:
        self.once = once
        self.horizons = horizons
        self._optimizer, self._form = optimizer, form
        self._rates, self._stateless = rates, stateless
        self._last: dict[int, torch.Tensor] = {}  # weights before the last update, by id of a parameter
        self._buffers: dict[int, torch.Tensor] = {}  # that these lie in

    def predict(
        self, parameters: Mapping[str, torch.Tensor], horizon: int, *, into: Callable[[str], torch.Tensor]
    ) -> Contents:
        """Return the parameters as they are expected to be after some updates; those that stay are returned themselves.

        Args:
            parameters: by name.
            horizon: the number of updates.
            into: returns a buffer for the prediction of a name.
        """
        if not horizon:
            return dict(parameters)
        groups, predicted = self._groups(), dict(parameters)
        rates = None
        with torch.no_grad():
            for name, parameter in parameters.items():
                if not parameter.requires_grad or (number := groups.get(id(parameter))) is None:
                    continue
                if self._takes_difference(parameter, number):
                    if (last := self._last.get(id(parameter))) is not None:
                        predicted[name] = torch.lerp(last, parameter, 1.0 + horizon, out=into(name))
                elif state := self._optimizer.state.get(parameter):
                    rates = rates or self._rates(horizon)
                    form = _VELOCITY[type(self._optimizer)]
                    own = [float(row[number]) for row in rates]
                    predicted[name] = form(parameter, state, self._optimizer.param_groups[number], own, into(name))
        return predicted

    def _groups(self) -> dict[int, int]:
        """Return the numbers of the groups of parameters, by the ids of these."""
        return {id(p): number for number, group in enumerate(self._optimizer.param_groups) for p in group["params"]}

    def _takes_difference(self, parameter: torch.Tensor, number: int) -> bool:
        if self._form == "difference" or id(parameter) in self._stateless:
            return True
        return not has_velocity(self._optimizer, self._optimizer.param_groups[number])

    def before_step(self, parameters: Iterable[torch.Tensor]) -> None:
        """Note the weights of which only the difference will tell the next updates."""
        groups, self._last = self._groups(), {}
        for parameter in parameters:
            number = groups.get(id(parameter))
            if number is not None and parameter.requires_grad and self._takes_difference(parameter, number):
                buffer = self._buffers.setdefault(id(parameter), torch.empty_like(parameter, requires_grad=False))
                self._last[id(parameter)] = buffer.copy_(parameter.detach())

    def forget(self) -> None:
        """Forget the last update, as a run that begins here from a checkpoint does not know it."""
        self._last = {}


def has_velocity(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Return whether an optimizer keeps what it has last added to the parameters of a group, but for the rate."""
    if type(optimizer) not in _VELOCITY:
        return False
    return type(optimizer) is not SGD or bool(group["momentum"] and not group["nesterov"])


def _of_momentum(
    parameter: torch.Tensor,
    state: Mapping[str, Any],
    group: Mapping[str, Any],
    rates: Sequence[float],
    out: torch.Tensor,
) -> torch.Tensor:
    velocity = state.get("momentum_buffer")
    return out.copy_(parameter) if velocity is None else torch.sub(parameter, velocity, alpha=sum(rates), out=out)


def _of_adam(
    parameter: torch.Tensor,
    state: Mapping[str, Any],
    group: Mapping[str, Any],
    rates: Sequence[float],
    out: torch.Tensor,
) -> torch.Tensor:
    beta1, beta2 = group["betas"]
    step = state["step"]
    on_device = isinstance(step, torch.Tensor) and step.device.type != "cpu"  # where reading it would wait
    step = step.double() if on_device else float(step)
    square = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]
    scale = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
    velocity = (state["exp_avg"] / (1 - beta1**step)).div_(scale)
    apart = group["weight_decay"] if group["decoupled_weight_decay"] else 0.0
    factor, way = 1.0, 0.0
    for rate in rates:
        factor, way = factor * (1 - rate * apart), way * (1 - rate * apart) + rate
    return torch.mul(parameter, factor, out=out).sub_(velocity, alpha=way)


_VELOCITY = {SGD: _of_momentum, Adam: _of_adam, AdamW: _of_adam}
