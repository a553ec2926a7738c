"""The strategy as users make it: options until a Trainer takes it, then a strategy of that Trainer's package.

Lightning has two package names (`lightning_package`), and a Trainer takes strategies of its own package only. So a
`DappleStrategy` has no base class of Lightning at first, and both packages take it for one of theirs (a virtual
subclass). The first thing that a Trainer gives it is an accelerator. Its package is then that of the process, and
`PipelineStrategy` for this package becomes the base class.
"""

from __future__ import annotations

import os
import sys
from abc import ABC
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from lightning_pipe.config import (
    CaptureMode,
    CostSource,
    DappleConfig,
    RestoredRanks,
    StartMethod,
    WeightVersions,
    WholeBatch,
    chosen_config,
)
from lightning_pipe.entry.environment_options import with_environment
from lightning_pipe.entry.run_program import command_prefix
from lightning_pipe.lightning_package import TRAINERS, choose, package_in_use, package_of
from lightning_pipe.planner.problem import Sharding
from lightning_pipe.planner.registry import PlannerName
from lightning_pipe.schedule.orders.one_f_one_b import Warmup
from lightning_pipe.schedule.registry import ScheduleName

if TYPE_CHECKING:
    from lightning_pipe.strategy.strategy import PipelineStrategy as _Undecided
else:

    class _Undecided(ABC):  # noqa: B024 - an ABC, since the base that takes its place must be laid out in the same way
        """Base of strategies until the package is known: options, and what a Trainer looks at before it takes one."""

        def __init__(self, config: DappleConfig, **arguments: Any) -> None:
            self.config, self._arguments = config, arguments
            self._accelerator, self._checkpoint_io = arguments["accelerator"], arguments["checkpoint_io"]
            self._precision_plugin = arguments["precision_plugin"]
            vars(self).update({name: arguments[name] for name in ("parallel_devices", "cluster_environment")})
            _undecided.add(self)

        @property
        def accelerator(self) -> Any:
            return self._accelerator

        @accelerator.setter
        def accelerator(self, accelerator: Any) -> None:
            _decide(package_of(type(accelerator)) or package_in_use())
            self.accelerator = accelerator  # by Lightning's property from now on

        def __getattr__(self, name: str) -> Any:
            """Return what a strategy has, where it is asked for before a Trainer takes it: of the package in use."""
            if name.startswith("_") or self not in _undecided:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            _decide(package_in_use())
            return getattr(self, name)


class DappleStrategy(_Undecided):
    """Train as a pipeline of stages; import it from `lightning_pipe`.

    Options that are left at their defaults may come from the environment: `LIGHTNING_PIPE`, `LIGHTNING_PIPE_CONFIG`.

    Args:
        config: all options at once. Or set its fields as keyword arguments (`plan` to `verbose`): see `DappleConfig`.
        accelerator: as for every strategy of Lightning. The Trainer sets this and the next four arguments.
        parallel_devices: as for every strategy.
        cluster_environment: as for every strategy.
        checkpoint_io: as for every strategy.
        precision_plugin: as for every strategy.
        process_group_backend: backend of the default process group; by default the device's.
        unknown: not accepted: an option that does not exist is refused, with the nearest existing name.

    Raises:
        ConfigError: if an option is unknown, or has a value that cannot be; also of those from the environment.

    Example:
        >>> strategy = DappleStrategy(layout="2-1", microbatches=8)
    """

    strategy_name = "dapple"

    def __init__(
        self,
        config: DappleConfig | None = None,
        *,
        accelerator: Any = None,
        parallel_devices: list[Any] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        process_group_backend: str | None = None,
        plan: str | os.PathLike[str] | None = None,
        planner: PlannerName = "auto",
        layout: str | int | list[int] | None = None,
        schedule: ScheduleName | str | os.PathLike[str] | None = None,
        stages_per_device: int | None = None,
        warmup: Warmup | str | int | list[int] | None = None,
        microbatches: int | None = None,
        costs: CostSource = "measured",
        cluster: str | os.PathLike[str] | None = None,
        cache: str | os.PathLike[str] | None = None,
        capture: CaptureMode = "auto",
        whole_batch: WholeBatch = "auto",
        check: bool = True,
        recheck: bool = False,
        witness: bool = True,
        post_validation: bool = False,
        compile: bool = False,
        cuda_graphs: bool = False,
        batch_dim: int = 0,
        seed: int | None = None,
        exact_ties: bool = False,
        deadline_s: float = 300.0,
        report: str | os.PathLike[str] | None = None,
        memory_limit: str | int | dict[str, str | int] | None = None,
        keep_freed_memory: bool = True,
        shard_optimizer: Sharding | bool = "auto",
        measure_memory: bool = False,
        trace: str | os.PathLike[str] | None = None,
        timeline_steps: int = 5,
        watch_every: int = 50,
        replan: bool = True,
        start_method: StartMethod = "popen",
        weights: str | os.PathLike[str] | None = None,
        versions: WeightVersions = "sync",
        versions_options: str | dict[str, float] | None = None,
        save_distributed_checkpoint: bool = False,
        async_checkpoint: bool = False,
        restore: RestoredRanks = "auto",
        verbose: bool = True,
        **unknown: Any,
    ) -> None:
        options = {name: value for name, value in locals().items() if name in DappleConfig.__dataclass_fields__}
        config, origins = with_environment(chosen_config(config, {**options, **unknown}), os.environ)
        super().__init__(
            config,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            origins=origins,
            command_prefix=command_prefix(),
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return how a copy is made, in another process too: it is of the same package."""
        package = None if self in _undecided else package_in_use()
        return (_made_again, (type(self), package), *super().__reduce_ex__(protocol)[2:])

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state of another one."""
        if _ARGUMENTS not in state:
            super().__setstate__(state)
            return
        vars(self).update(state)
        _undecided.add(self)
        if _Undecided not in type(self).__mro__:
            _decide(package_in_use())


_ARGUMENTS = "_arguments"  # of the constructor, until the package is known
_undecided: WeakSet[DappleStrategy] = WeakSet()


def _made_again(kind: type[DappleStrategy], package: str | None) -> DappleStrategy:
    if package is not None:
        _decide(package)
    return kind.__new__(kind)


def _decide(package: str) -> None:
    """Let the strategies of this process be those of a package.

    Raises:
        ConfigError: if this process uses the other package.
    """
    choose(package)
    from lightning_pipe.strategy.strategy import PipelineStrategy

    DappleStrategy.__bases__ = (PipelineStrategy,)
    _Forgetful.register(type("_Unlike", (), {}))
    for strategy in list(_undecided):
        arguments = vars(strategy).pop(_ARGUMENTS)
        vars(strategy).pop("parallel_devices")  # a property from now on
        PipelineStrategy.__init__(strategy, strategy.config, **arguments)
    _undecided.clear()


class _Forgetful(ABC):  # noqa: B024
    """Make all abstract classes forget whom they have found to be none of theirs, as every registration does.

    Lightning asks whether a strategy is parallel before it is: gradients would be summed in every batch of a window.
    """


def accept_in(strategies: Any) -> None:
    """Let Trainers of a package, given its module of strategies, take a `DappleStrategy` for one of theirs."""
    strategies.Strategy.register(DappleStrategy)


for _module in TRAINERS.values():
    if hasattr(_strategies := sys.modules.get(f"{_module}.strategies"), "Strategy"):
        accept_in(_strategies)
