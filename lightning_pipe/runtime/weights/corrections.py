"""Corrections of late gradients: learning rates by stage, weights that backwards read, and spikes of the momentum.

    annealed       lr_s(k) = lr(k) tau^-(1 - min(k / K, 1))                                        PipeMare, T1
    discrepancy    delta <- gamma delta + (1 - gamma) (w_new - w_old), gamma = D^(1 / tau)         PipeMare, T2
                   I and W read w - tau delta, as forwards of a batch have read weights tau updates ago
    spike          v <- mu v + g, w <- w - lr (a v + b g), a = mu^tau, b = (1 - mu^tau) / (1 - mu)

Legend: tau delay of stage s in updates, k updates so far, K steps of annealing, D decay, g gradient with weight decay.

    Yang et al., "PipeMare: Asynchronous Pipeline Parallel DNN Training" (MLSys 2021), sections 3.1 and 3.2
    Kosson et al., "Pipelined Backpropagation at Scale: Training Large Models without Batches" (MLSys 2021), 3.2

A rank runs one stage, so its factor is for all that it steps. Groups have it from right before the optimizer's step to
right behind it: schedulers, monitors, closures and checkpoints see the rates of the user. `delta` is state of the
optimizer, so that it is saved, loaded and moved with the rest; other optimizers of torch pass over it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from lightning_pipe.errors import UnsupportedError

DISCREPANCY = "discrepancy"
"""Name of `delta` in the state of a parameter."""


def annealed(delay: float, updates: int, anneal: int) -> float:
    """Return the factor of a stage's learning rate; 1 where gradients are at most one update late."""
    if updates >= anneal:
        return 1.0
    return float(max(1.0, delay) ** -(1 - updates / anneal))


def spike_factors(momentum: float, delay: float) -> tuple[float, float]:
    """Return a and b, by which velocity and gradient are stepped."""
    return momentum**delay, (1 - momentum**delay) / (1 - momentum)


@dataclass
class Correction:
    """What is done about late gradients on one rank.

    Args:
        optimizer: that steps.
        kind: "discrepancy", "spike" or "".
        anneal: steps over which the learning rate becomes that of the optimizer; 0 for none.
        decay: what is left of a difference of weights after `delay` updates.

    Attributes:
        delay: of the rank's stage, in updates; known with the plan.
        updates: made so far while forwards ran ahead.
        is_ahead: whether forwards run ahead now, so that gradients may be late.

    Raises:
        UnsupportedError: if the optimizer cannot be corrected so.
    """

    optimizer: Optimizer
    kind: str
    anneal: int = 0
    decay: float = 0.0
    delay: float = 0.0
    updates: int = 0
    is_ahead: bool = False
    _rates: list[Any] = field(default_factory=list)
    _deltas: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)
    _has_stepped: bool = False
    _rounds: int = 0  # since the pipeline was empty
    once: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.kind == "spike":
            _refuse_other_momentum(self.optimizer)
        if any("lr" not in group for group in self.optimizer.param_groups):
            raise UnsupportedError(
                f"{type(self.optimizer).__name__} has a group without `lr`, and the policy of weight versions changes "
                "the learning rate of stages. Set versions='2bw', or versions='sync'."
            )
        if not getattr(self.optimizer.step, "hooked", False):  # by the constructor of torch.optim.Optimizer
            raise UnsupportedError(
                f"{type(self.optimizer).__name__} does not call the constructor of torch.optim.Optimizer, so nobody "
                "hears of its steps, which the policy of weight versions corrects. Call it, or set versions='2bw'."
            )
        self._hook = self.optimizer.register_step_post_hook(lambda *_: self._stepped())

    @property
    def gamma(self) -> float:
        """Return what an update leaves of the differences before it."""
        return float(self.decay ** (1 / self.delay)) if self.delay else 0.0

    def begin(self) -> None:
        """Prepare for the optimizer's step, when all gradients are there."""
        self._has_stepped = False
        if self.is_ahead and self.anneal:
            factor = annealed(self.delay, self.updates, self.anneal)
            self._rates = [group["lr"] for group in self.optimizer.param_groups]
            for group in self.optimizer.param_groups:
                group["lr"] = group["lr"] * factor
        if self.kind == "discrepancy":
            self._note_weights()

    def end(self) -> None:
        """Put rates back after the step, or where it was not taken."""
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=False):
            group["lr"] = rate
        deltas, has_stepped = self._deltas, self._has_stepped
        self._rates, self._deltas, self._has_stepped = [], {}, False
        for parameter, delta in deltas.items():
            delta.add_(parameter.detach(), alpha=1 - self.gamma)
        if has_stepped:
            self.updates += self.is_ahead
            for parameter, delta in deltas.items():  # now only: optimizers begin with a state that is empty
                self.optimizer.state[parameter][DISCREPANCY] = delta

    def remove(self) -> None:
        """Leave the optimizer alone."""
        self._hook.remove()

    def _note_weights(self) -> None:
        """Take the weights before the step from what is left of earlier differences."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                known = self.optimizer.state.get(parameter, {}).get(DISCREPANCY)
                if known is None and parameter.grad is None:
                    continue
                delta = torch.zeros_like(parameter.detach()) if known is None else known
                self._deltas[parameter] = delta.mul_(self.gamma).sub_(parameter.detach(), alpha=1 - self.gamma)

    def predict(
        self, parameters: Mapping[str, torch.Tensor], horizon: int, *, into: Callable[[str], torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return what I and W read: the weights of now, less the discrepancy of what late forwards have read.

        Args:
            parameters: by name.
            horizon: 0 for F, which reads the weights of now.
            into: returns a buffer for the corrected weights of a name.
        """
        read, late = dict(parameters), min(self.delay, self._rounds) if horizon else 0.0
        for name, parameter in parameters.items() if late else ():
            delta = self.optimizer.state.get(parameter, {}).get(DISCREPANCY)
            if delta is not None:
                read[name] = torch.sub(parameter.detach(), delta, alpha=late, out=into(name))
        return read

    def horizons(self, _: int) -> tuple[int, int]:
        """Return that I and W read corrected weights."""
        return 0, -1

    def before_step(self, _: Iterable[torch.Tensor]) -> None:
        """Count a round since the pipeline was empty."""
        self._rounds += 1

    def forget(self) -> None:
        """Note that the pipeline is empty: forwards of the next batch read the weights of now."""
        self._rounds = 0

    def _stepped(self) -> None:
        """Compensate spikes right after the step."""
        self._has_stepped = True
        if self.kind == "spike" and self.is_ahead and self.delay:
            with torch.no_grad():
                for group in self.optimizer.param_groups:
                    self._compensate(group)

    def _compensate(self, group: Mapping[str, Any]) -> None:
        """Make of the step -lr v, which was taken, the step -lr (a v + b g); in place, without copies of weights."""
        rate, (a, b) = float(group["lr"]), spike_factors(group["momentum"], self.delay)
        decay = b * group["weight_decay"]  # of the weights before the step: w + lr v
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            velocity = self.optimizer.state[parameter]["momentum_buffer"]
            parameter.mul_(1 - rate * decay)
            parameter.add_(velocity, alpha=-rate * (a - 1 + rate * decay)).add_(parameter.grad, alpha=-rate * b)


def _refuse_other_momentum(optimizer: Optimizer) -> None:
    groups = optimizer.param_groups
    is_plain = type(optimizer) is torch.optim.SGD and all(
        0 < group["momentum"] < 1 and not (group["dampening"] or group["nesterov"] or group["maximize"])
        for group in groups
    )
    if not is_plain:
        raise UnsupportedError(
            f"found {type(optimizer).__name__}; spike compensation is defined for torch.optim.SGD with a momentum "
            "between 0 and 1, without dampening, nesterov or maximize. Take that one, or versions='2bw' or 'pipedream'."
        )
