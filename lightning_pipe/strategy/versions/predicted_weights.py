"""Weights predicted in a fit (option `versions`): by which optimizer, how far, and at which learning rates.

The learning rates of the next updates are those of copies of the schedulers, stepped as Lightning will step the
schedulers. Schedulers that step by epoch, or by a metric, do not change rates before an epoch has ended.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

from torch.optim import Optimizer

from lightning_pipe.core.plan import Plan
from lightning_pipe.errors import PlanError
from lightning_pipe.lightning_names import is_overridden, pl, rank_zero_info
from lightning_pipe.runtime.weights.prediction import Prediction, has_velocity
from lightning_pipe.schedule.weights import WeightPolicy
from lightning_pipe.strategy.parameters.weights import Weights


class PredictedWeights:
    """What predicts the weights of a fit.

    Args:
        optimizer: the user's.
        module: whose trainer fits.
        weights: where parameters live, and who steps them.
        batches_left: returns how many batches may follow the one at hand.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        module: pl.LightningModule,
        weights: Weights,
        batches_left: Callable[[pl.Trainer], int],
    ) -> None:
        self._optimizer, self._module, self._weights = optimizer, module, weights
        self._batches_left = batches_left
        self._of: tuple[Plan, Prediction] | None = None
        self._said: set[str] = set()

    def of(self, policy: WeightPolicy, plan: Plan) -> Prediction | None:
        """Return what predicts under a plan; None if the policy reads no predictions."""
        horizons, stages = policy.horizons, len(plan.layout.stages)
        if horizons is None:
            return None
        if self._of is None or self._of[0] is not plan:
            shared = {id(self._weights.parameters[name]) for name in self._weights.sharing()}
            prediction = Prediction(
                self._optimizer,
                horizons=lambda stage: horizons(stage, stages, plan.microbatches),
                form=policy.prediction,
                once=policy.predicts_once,
                rates=self.rates,
                stateless=shared,
            )
            self._of = plan, prediction
            if policy.prediction == "velocity":
                self._say_form(is_shared=bool(shared))
        return self._of[1]

    def _say_form(self, *, is_shared: bool) -> None:
        name = type(self._optimizer).__name__
        if not all(has_velocity(self._optimizer, group) for group in self._optimizer.param_groups):
            self._say(f"The state of {name} does not tell its next update, so weights are predicted from the last one.")
        if is_shared:
            self._say(
                "Ranks share optimizer state, so weights of which others have it are predicted from the last update. "
                "shard_optimizer='off' predicts all from the state."
            )

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            rank_zero_info(text)

    def rates(self, count: int) -> list[list[float]]:
        """Return the learning rates of the next updates: of each, those of all parameter groups."""
        trainer, found = self._module.trainer, [_rates_of(self._optimizer)]
        configs = [c for c in trainer.lr_scheduler_configs if c.interval == "step" and not c.reduce_on_plateau]
        if count == 1 or not (configs or is_overridden("optimizer_step", self._module)):
            return found * count
        try:
            return found + self._foreseen(configs, count - 1)
        except Exception as error:  # of the user's own scheduler
            self._say(
                f"The learning rates of the next updates are not known ({error}), so predictions take that of the next."
            )
            return found * count

    def _foreseen(self, configs: Sequence[Any], count: int) -> list[list[float]]:
        trainer, optimizer, module = self._module.trainer, self._optimizer, self._module
        if changed := [x for x in ("optimizer_step", "lr_scheduler_step") if is_overridden(x, module)]:
            raise ValueError(f"{type(module).__name__}.{changed[0]} may change them")
        if any(config.scheduler.optimizer is not optimizer for config in configs):
            raise ValueError("a scheduler has another optimizer")
        twin: Optimizer = object.__new__(type(optimizer))  # with rates, and without parameters
        groups = [
            {k: x if k == "params" else deepcopy(x) for k, x in group.items()} for group in optimizer.param_groups
        ]
        vars(twin).update(param_groups=groups, defaults=optimizer.defaults, state={}, _opt_called=True)
        memo: dict[int, Any] = {id(x): x for x in (module, trainer, *module.parameters())} | {id(optimizer): twin}
        found, batch = [], trainer.fit_loop.epoch_loop.batch_idx
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the twin takes no steps, of which schedulers warn
            copies = [(deepcopy(config.scheduler, memo), config.frequency) for config in configs]
            for number in range(batch + 1, batch + 1 + min(count, self._batches_left(trainer))):  # some refuse to go on
                for scheduler, frequency in copies:
                    if number % frequency == 0:
                        scheduler.step()
                found.append(_rates_of(twin))
        return found + [_rates_of(twin)] * (count - len(found))


def _rates_of(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def refuse_recompute(versions: str) -> None:
    """Refuse to compute activations again with other weights.

    Raises:
        PlanError: with the way out.
    """
    raise PlanError(
        f"found activations that are computed again in the backward, with versions={versions!r}: the backward reads "
        "other weights than the forward, and would compute other activations. Remove checkpoints from the module and "
        "`recompute` from the plan, or set versions='pipedream' or '2bw', whose backward reads the weights of its "
        "forward."
    )
