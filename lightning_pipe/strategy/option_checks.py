"""Checks of options that need neither a batch nor a measurement, before any process is started.

When a Trainer takes the strategy, options are compared with its number of ranks and with the files that they name. When
a run begins, module, callbacks and loader are known as well. What the planner checks again is checked by its functions.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, default_collate

from lightning_pipe.config import DappleConfig
from lightning_pipe.core.plan import Plan, StagePlan
from lightning_pipe.errors import ConfigError, PlanError
from lightning_pipe.lightning_names import TrainerFn, is_overridden, pl
from lightning_pipe.planner.evaluation.resolve import check_ranks_of_plan
from lightning_pipe.planner.evaluation.rounds import refuse_rounds
from lightning_pipe.planner.registry import check_layout
from lightning_pipe.schedule.registry import SCHEDULES, Schedule, order_of
from lightning_pipe.strategy.checkpoints.files import open_weights
from lightning_pipe.strategy.plans.plan_report import make_room
from lightning_pipe.strategy.plans.planning import check_samples, given_cluster, given_plan
from lightning_pipe.strategy.refusals import refuse

_BATCH_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def check_options(config: DappleConfig, *, ranks: int, hosts: int) -> None:
    """Check options against the number of ranks and, on one host, the files that they name; on every rank.

    Of several hosts, the one of rank 0 alone needs these files: they are read when ranks can tell each other.

    Raises:
        PipeError: naming the option, what was found, and the way out.
    """
    if config.replicas is not None:
        check_layout(config.replicas, ranks)
    if config.replicas is not None and ranks > 1:
        _check_schedule(config, config.replicas)
    if hosts == 1:
        _check_files(config, ranks)


def _check_files(config: DappleConfig, ranks: int) -> None:
    order = config.constraints.order
    if order and len(order) != ranks:
        raise PlanError(
            f"schedule={config.schedule!r} has passes for {len(order)} ranks, the trainer has {ranks}. Change "
            "`devices` (times `num_nodes`), or the file."
        )
    if (plan := given_plan(config)) is not None:
        check_ranks_of_plan(plan, ranks)
    given_cluster(config, ranks)
    if config.weights is not None:
        open_weights(Path(config.weights))
    _check_cache(config.cache)


def check_run(config: DappleConfig, trainer: pl.Trainer, module: pl.LightningModule, given: Sequence[Any]) -> None:
    """Check what a run is given, before its processes start.

    Args:
        config: options.
        trainer: of the run.
        module: what is trained or evaluated.
        given: arguments of the run; the second may be a loader.

    Raises:
        PipeError: naming what cannot work, and the way out.
    """
    refuse(trainer, module)
    if trainer.state.fn != TrainerFn.FITTING:
        return
    if trainer.num_nodes == 1:
        make_room(config)
    loader = next(iter(given[1:]), None)
    is_cut_by_option = config.microbatches is not None and config.batch_dim == 0
    if not is_cut_by_option or any(is_overridden(hook, module, pl.LightningModule) for hook in _BATCH_HOOKS):
        return
    if isinstance(loader, DataLoader) and loader.collate_fn is default_collate and loader.batch_size is not None:
        check_samples(config.microbatches or 1, loader.batch_size)


def _check_schedule(config: DappleConfig, replicas: Sequence[int]) -> None:
    """Refuse a schedule that does not suit the layout, and versions of weights in which no forwards run ahead.

    Raises:
        ConfigError, PlanError: with the way out.
    """
    ends = [0, *itertools.accumulate(replicas)]
    devices = [tuple(range(start, end)) for start, end in itertools.pairwise(ends)]
    if config.versions != "sync":
        stages = tuple(StagePlan("", ranks) for ranks in devices)
        refuse_rounds(Plan(stages, config.microbatches or 1), versions=config.versions)
    schedule = SCHEDULES.get(config.schedule or "")
    if not isinstance(schedule, Schedule):
        return
    layout = schedule.layout(devices, config.stages_per_device)
    if config.microbatches is not None:
        order_of(str(config.schedule), layout=layout, microbatches=config.microbatches)


def _check_cache(cache: str | None) -> None:
    """Refuse a directory that cannot be made.

    Raises:
        ConfigError: naming what is in the way.
    """
    if cache in (None, "off"):
        return
    folder = Path(str(cache)).absolute()
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not nearest.is_dir() or (nearest != folder and not os.access(nearest, os.W_OK)):
        reason = "nothing can be made in it" if nearest.is_dir() else "it is no directory"
        raise ConfigError(
            f"found cache={cache!r}, but {nearest} is there, and {reason}; expected a directory that exists or can be "
            "made, or 'off'."
        )
