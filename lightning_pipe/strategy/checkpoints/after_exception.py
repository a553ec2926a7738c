"""Hooks at an exception: checkpoints are saved where every rank comes to the exception between two programs.

Then all weights are those after the same optimizer step, and the connections are free: a preemption (SIGTERM), an error
of a hook that all ranks run, of a loader, of a check of losses. Which exception it is on a rank does not matter: an
error of one rank's loader is another one where batches are waited for. Where one rank alone has failed, or ranks stand
at different steps, nothing is saved, and the reason is said.

Lightning calls these hooks before it tells the strategy, and does not do so any more where one of them raises an error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from lightning_pipe.errors import PipeError
from lightning_pipe.lightning_names import OnExceptionCheckpoint, pl, rank_zero_warn
from lightning_pipe.runtime.guard.guarded_watch import GuardedWatch

log = logging.getLogger(__name__)

_HOOK = "on_exception"
_PATIENCE_S = 10.0  # for the other ranks, which get the results of a batch at the same time
_SHARE = 3  # of the deadline, so that ranks which wait for this one hear its failure before


def saves_at_exception(callback: pl.Callback) -> bool:
    """Return whether a callback saves a checkpoint when training ends by an exception."""
    return isinstance(callback, OnExceptionCheckpoint) or bool(getattr(callback, "save_on_exception", False))


def save_where_all_meet(
    callback: pl.Callback, watch: Callable[[], GuardedWatch | None], settle: Callable[[], None]
) -> Callable[[], Any]:
    """Let a callback save at an exception only if all ranks have come to it; return what undoes this.

    Args:
        callback: one that saves.
        watch: of this rank; None where there is a single rank.
        settle: waits for what is written behind the training.
    """
    usual = callback.on_exception

    def on_exception(trainer: pl.Trainer, module: pl.LightningModule, exception: BaseException) -> None:
        guarded = watch()
        step = f"after optimizer step {trainer.global_step}"
        where = f"the exception {type(exception).__name__} {step}"
        patience_s = 0.0 if guarded is None else patience_after_failure(guarded.patience.deadline_s)
        absent = "" if guarded is None else guarded.meet(f"an exception {step}, {guarded.begun}", patience_s=patience_s)
        if absent:
            rank_zero_warn(
                f"{type(callback).__name__} saves no checkpoint at {where}: the weights of all ranks are needed, as "
                f"they are after one and the same step, but {absent}. Checkpoints that are saved often "
                "(every_n_train_steps) stay as they are."
            )
            return
        try:
            usual(trainer, module, exception)
            settle()
        except PipeError as error:  # must not hide the exception
            log.warning("%s could save no checkpoint: %s", type(callback).__name__, error)

    vars(callback)["on_exception"] = on_exception
    return lambda: vars(callback).pop("on_exception", None)


def tell_where_it_raises(callback: pl.Callback, tell: Callable[[BaseException], None]) -> Callable[[], Any]:
    """Let other ranks hear of an exception also where a callback raises another one at it; return what undoes this.

    Args:
        callback: with a hook for exceptions.
        tell: tells the other ranks.
    """
    usual, before = callback.on_exception, vars(callback).get(_HOOK)

    def on_exception(trainer: pl.Trainer, module: pl.LightningModule, exception: BaseException) -> None:
        try:
            usual(trainer, module, exception)
        except BaseException:
            tell(exception)
            raise

    vars(callback)[_HOOK] = on_exception
    return lambda: vars(callback).pop(_HOOK, None) if before is None else vars(callback).update({_HOOK: before})


def patience_after_failure(deadline_s: float) -> float:
    """Return for how many seconds a rank waits for others, or for its disk, when training has failed."""
    return min(_PATIENCE_S, deadline_s / _SHARE)
