"""Strategy of Lightning for pipelines: `Trainer(strategy="dapple", devices=n)`.

    setup_environment    processes find each other; everything that connects them is opened
    setup                refuse what cannot work, create optimizers, look at the first batch, capture, plan, place
    training_step        run the program of the batch: loss and gradients
    validation_step, ... run a forward-only program
    teardown             every rank gets the whole trained module back, where memory allows

`optimizer.step`, hooks, callbacks, loggers and loops are Lightning's; see `loop` for the one that is ours.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from lightning_pipe.cache_files import FOLDER_LOG
from lightning_pipe.capture import canonical_names
from lightning_pipe.capture.steps.other_ranks import is_in_step, refuse_in_step
from lightning_pipe.collection import older_set_aside
from lightning_pipe.config import DappleConfig
from lightning_pipe.core.plan import Plan
from lightning_pipe.errors import UnsupportedError
from lightning_pipe.lightning_names import (
    Accelerator,
    BasePredictionWriter,
    CheckpointIO,
    ClusterEnvironment,
    ParallelStrategy,
    Precision,
    TorchCheckpointIO,
    TrainerFn,
    callbacks_of,
    is_overridden,
    pl,
    rank_zero_only,
)
from lightning_pipe.lightning_package import choose, package_in_use, package_of
from lightning_pipe.report import Comparison
from lightning_pipe.runtime.guard.client import GuardClient
from lightning_pipe.runtime.guard.guarded_watch import GuardedWatch
from lightning_pipe.runtime.shortages import shortages_named
from lightning_pipe.runtime.transport.process_group import MARGIN_S
from lightning_pipe.strategy import lightning_private as private
from lightning_pipe.strategy.checkpoints.after_exception import (
    save_where_all_meet,
    saves_at_exception,
    tell_where_it_raises,
)
from lightning_pipe.strategy.checkpoints.collecting import collecting
from lightning_pipe.strategy.checkpoints.commit import existing
from lightning_pipe.strategy.checkpoints.files import give
from lightning_pipe.strategy.checkpoints.optimizer_tensors import state_dict_of_all
from lightning_pipe.strategy.checkpoints.saving import Directories, load, save_plain
from lightning_pipe.strategy.checks.separable import check_separable
from lightning_pipe.strategy.loading.asked_early import AskedEarly
from lightning_pipe.strategy.loading.batch_loading import Feed
from lightning_pipe.strategy.loading.world_size import WorldSizeReads, measure_whole_batches
from lightning_pipe.strategy.loop import PipelineOptimization
from lightning_pipe.strategy.option_checks import check_options, check_run
from lightning_pipe.strategy.parameters.building import building
from lightning_pipe.strategy.parameters.hook_weights import WeightsInHooks
from lightning_pipe.strategy.parameters.initial_values import make
from lightning_pipe.strategy.parameters.meta_modules import adopt
from lightning_pipe.strategy.parameters.optimizer import Groups
from lightning_pipe.strategy.parameters.pending import converting
from lightning_pipe.strategy.parameters.stand_ins import movable
from lightning_pipe.strategy.parameters.weights import Weights
from lightning_pipe.strategy.plans.plan_costs import reproducible
from lightning_pipe.strategy.plans.plan_report import make_room
from lightning_pipe.strategy.ranks.connections import Connections, begin_watch, connect_ranks, join_ranks, unconnected
from lightning_pipe.strategy.ranks.control_plane import ControlPlane
from lightning_pipe.strategy.ranks.launchers import GuardedForkLauncher, GuardedScriptLauncher
from lightning_pipe.strategy.ranks.limit import Foreseen, shortage_told
from lightning_pipe.strategy.ranks.network_card import choose_card, forget_card
from lightning_pipe.strategy.ranks.outcome import FitOutcome
from lightning_pipe.strategy.ranks.shown_errors import origin_of, raised_on, show_errors, tell_launcher
from lightning_pipe.strategy.refusals import (
    hooks_of_users,
    readers_of_gradients,
    refuse,
    refuse_averages,
    refuse_optimizers,
    refuse_parts,
    refuse_post_validation,
    refusing_several_optimizers,
    say_compiled,
)
from lightning_pipe.strategy.session import Session
from lightning_pipe.strategy.start.log_output import show_log
from lightning_pipe.strategy.start.mapped import MappedTensors
from lightning_pipe.strategy.start.stopwatch import Stopwatch

T = TypeVar("T")
log = logging.getLogger(__name__)

_LATE_UPDATES = "lightning_pipe_late_updates"
"""Key of a checkpoint: updates made while forwards ran ahead, by which rates of stages are annealed."""

_CHECKPOINTS = (
    "a checkpoint is taken after every batch, and a fit that resumes from it has nothing in flight (save every few "
    "batches, as with every_n_train_steps)"
)

_NO_DELAYS = (
    "Delays are known when there is a plan: from `on_fit_start` on, or `on_train_batch_end` where the plan waits for "
    "the first batch. Earlier, as in `configure_optimizers`, pass `strategy.delay_of` on and call it in `step`."
)


class PipelineStrategy(ParallelStrategy):
    """Run the ranks of a pipeline for a Trainer; users make a `lightning_pipe.DappleStrategy`, which becomes one.

    Args:
        config: all options.
        accelerator: as for every strategy of Lightning. The Trainer sets this and the next four arguments.
        parallel_devices: as for every strategy.
        cluster_environment: as for every strategy.
        checkpoint_io: as for every strategy.
        precision_plugin: as for every strategy.
        process_group_backend: backend of the default process group; by default the device's.
        origins: which options come from the environment, for the log; "" if none does.
        command_prefix: what stands between interpreter and script where ranks run the script again.
    """

    def __init__(
        self,
        config: DappleConfig,
        *,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        origins: str = "",
        command_prefix: Sequence[str] = (),
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self.config, self._origins, self._command_prefix = config, origins, command_prefix
        self._backend = process_group_backend
        self._directories = Directories(is_behind=self.config.async_checkpoint, deadline_s=self.config.deadline_s)
        self._num_nodes = 1
        self._device_number: int | None = None  # once this process is a rank
        self._links: Connections | None = None  # from setup to teardown
        self._watch: GuardedWatch | None = None  # from the launch to teardown
        self._has_met = False  # whether this rank was connected with the others
        self._feed: Feed | None = None
        self._session: Session | None = None
        self._groups: Sequence[Groups] = ()  # of the optimizers of the last fit, whatever has been evaluated since
        self._outcome = FitOutcome()  # of a fit in other processes, or of none
        self._synchronise = True
        self._failed = False
        self._undo: list[Callable[[], Any]] = []  # changes of the trainer, for teardown
        self._stopwatch = Stopwatch(is_running=False)  # of the last start
        self._until_first_step = contextlib.ExitStack()
        self._world_size_reads = WorldSizeReads()
        self._in_hooks: WeightsInHooks | None = None  # from setup to teardown
        self._is_resumed = False  # whether a checkpoint gives this run its weights
        self._initialised: pl.LightningModule | None = None  # that has got the weights of a file

    @property
    def accelerator(self) -> Accelerator | None:
        """Return the accelerator that the Trainer has given."""
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Accelerator) -> None:
        choose(package_of(type(accelerator)) or package_in_use())  # whose Trainer it is
        self._accelerator = accelerator

    @property
    def is_distributed(self) -> bool:
        """Return False: Lightning asks in order to shard samplers and to reduce logged values; both are done here."""
        return False

    @property
    def outcome(self) -> FitOutcome:
        """Return what is known of the last fit (or validate, test, predict)."""
        session = self._session
        if session is None:
            return self._outcome
        return FitOutcome(session.plan, session.comparison, session.steps_taken_back)

    @outcome.setter
    def outcome(self, outcome: FitOutcome) -> None:
        self._session, self._outcome = None, outcome
        if self.lightning_module is not None:  # which was loaded from what the other processes have trained
            make(self.lightning_module.parameters(), device=torch.device("cpu"))

    @property
    def plan(self) -> Plan | None:
        """Return the plan of the last fit, validate, test or predict; None before there is one."""
        return self.outcome.plan

    @property
    def comparison(self) -> Comparison | None:
        """Return the first steps of the last fit, predicted and measured; on rank 0, after these steps."""
        return self.outcome.comparison

    @property
    def pipe_metrics(self) -> Mapping[str, float]:
        """Return the last row that loggers were given, by its names (`pipe/bubble`); on rank 0, once there is one."""
        return {} if self._session is None else self._session.row

    @property
    def foreseen(self) -> tuple[Foreseen, ...]:
        """Return the predicted memory of the last fit by rank; () before there is a plan."""
        return () if self._session is None else self._session.foreseen

    @property
    def delays(self) -> tuple[int, ...]:
        """Return by stage how many updates late gradients are (`versions`): 0 where the pipeline is flushed.

        Known from `on_fit_start` on. The step that takes a gradient has version t of the weights, its forward has read
        version t - delay. Where micro-batches of a batch have different delays, it is the largest.

        Raises:
            UnsupportedError: before there is a plan.
        """
        delays = None if self._session is None else self._session.delays
        if delays is None:
            raise UnsupportedError(_NO_DELAYS)
        return delays

    def delay_of(self, parameter: torch.Tensor | str) -> int:
        """Return how many updates late the gradients of a parameter are, as of `delays`; 0 with versions="sync".

        Optimizers may ask for it in `step`; in `configure_optimizers` it is not known yet. Copies that take trial steps
        before there is a plan hear 0, as with "sync".

        Args:
            parameter: of the module, or its name.

        Raises:
            UnsupportedError: before there is a plan, or if the module has no such parameter.
        """
        if (module := self.lightning_module) is None:
            raise UnsupportedError(_NO_DELAYS)
        session = self._session
        if isinstance(parameter, str):
            name = canonical_names(module).get(parameter)
        else:
            name = next((name for name, one in module.named_parameters() if one is parameter), None)
        if name is None and isinstance(parameter, torch.Tensor) and session is not None and session.plan is None:
            return 0  # of a copy
        if name is None:
            wrong = repr(parameter) if isinstance(parameter, str) else f"a {type(parameter).__name__}"
            raise UnsupportedError(
                f"found {wrong}; expected a parameter of {type(module).__name__}, or its name, such as "
                f"{next(iter(canonical_names(module)), '')!r} (see named_parameters())."
            )
        if self.config.versions == "sync":
            return 0
        delay = None if session is None else session.delay_of(name)
        if delay is None:
            raise UnsupportedError(_NO_DELAYS)
        return delay

    @property
    def start_seconds(self) -> Mapping[str, float]:
        """Return the seconds of the phases of the last start on this rank, up to the end of the first step."""
        return self._stopwatch.seconds

    @property
    def steps_taken_back(self) -> int:
        """Return the number of optimizer steps of the last fit that were undone and repeated (`post_validation`)."""
        return self.outcome.steps_taken_back

    @property
    def root_device(self) -> torch.device:
        """Return this rank's device, also while loaders are told that there is one process."""
        assert self.parallel_devices is not None, "set by the trainer"
        return self.parallel_devices[super().local_rank if self._device_number is None else self._device_number]

    @property
    def world_size(self) -> int:
        """Return the number of ranks; code of the user that asks for it is told not to scale by it."""
        ranks = super().world_size
        self._world_size_reads.note(ranks)
        return ranks

    @property
    def global_rank(self) -> int:
        """Return the number of this rank; code that asks for it may do what others do not, but for a step."""
        if is_in_step():
            return 0
        if self._in_hooks is not None:
            self._in_hooks.note_question()
        return super().global_rank

    @property
    def local_rank(self) -> int:
        """Return the number of this rank on its host."""
        if is_in_step():
            return 0
        if self._in_hooks is not None:
            self._in_hooks.note_question()
        return super().local_rank

    @property
    def num_nodes(self) -> int:
        """Return the number of hosts."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Return the number of ranks of one host."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Return that there is one replica: every batch is that of a single device."""
        return {"num_replicas": 1, "rank": 0}

    def set_world_ranks(self) -> None:
        """Tell the environment which rank this is, and keep which device is this rank's."""
        self._device_number = super().local_rank
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]  # of the function, as Lightning sets it
        FOLDER_LOG.disabled = self.local_rank > 0  # all ranks of a host have one cache

    def _configure_launcher(self) -> None:
        environment = self.cluster_environment
        assert environment is not None, "set by the trainer"
        check_options(self.config, ranks=self.num_nodes * self.num_processes, hosts=self.num_nodes)
        if self.num_nodes * self.num_processes == 1:
            return
        if self.config.start_method == "popen":
            self._launcher = GuardedScriptLauncher(
                environment,
                self.num_processes,
                self.num_nodes,
                begin=self._launched,
                check=self._check_run,
                command_prefix=self._command_prefix,
            )
        else:
            self._launcher = GuardedForkLauncher(
                self, start_method=self.config.start_method, begin=self._launched, check=self._check_run
            )

    def _check_run(self, trainer: pl.Trainer, given: Sequence[Any]) -> None:
        """Check a run before its processes start."""
        if self.lightning_module is not None:
            check_run(self.config, trainer, self.lightning_module, given)

    def _launched(self, *, verdict: str = "") -> GuardClient:
        """Begin to guard a process that is launched, and to measure how long it takes to start."""
        self._stopwatch = Stopwatch()
        return self._begin_watch(verdict=verdict)

    def _begin_watch(self, *, verdict: str = "") -> GuardClient:
        """Begin to guard this process, for one fit."""
        self.set_world_ranks()
        ranks = self.num_nodes * self.num_processes
        with self._shortages_named():
            self._watch = begin_watch(
                self.global_rank, ranks, deadline_s=self.config.deadline_s, hosts=self.num_nodes, verdict=verdict
            )
        return self._watch.guard

    def setup_environment(self) -> None:
        """Refuse what cannot work, join the process group, and connect with the other ranks."""
        assert self.lightning_module is not None, "connected by the trainer"
        self._failed, self._session, self._is_resumed = False, None, False
        show_errors(rank=self.global_rank, ranks=self.world_size)
        refuse(self.lightning_module.trainer, self.lightning_module)
        adopt(self.lightning_module)
        super().setup_environment()
        self.set_world_ranks()
        show_log(rank=self.global_rank, verbose=self.config.verbose)
        if self._origins:
            log.info("%s", self._origins)
            self._origins = ""  # shown once
        self._undo.append(private.replace_sigterm_handler(self.lightning_module.trainer))
        self._undo.append(private.hide_advice_to_synchronise())
        self._adapt_callbacks(self.lightning_module)
        if not self._stopwatch.is_running:
            self._stopwatch = Stopwatch()
        with self._shortages_named():
            self._links = self._connect()
        show_errors(rank=self.global_rank, ranks=self.world_size)  # once more, as torch has set a hook of its own
        self._stopwatch.lap("processes")
        self._feed = Feed(
            self._links.control,
            ahead=self.config.post_validation or self.config.versions != "sync",
            device=self.root_device,
            watch=self._links.watch,
            connected=self._control,
        )
        callbacks = callbacks_of(self.lightning_module.trainer)
        self._feed.tells_indices = any(isinstance(callback, BasePredictionWriter) for callback in callbacks)

    def _adapt_callbacks(self, module: pl.LightningModule) -> None:
        """Let callbacks copy the module on the host, and save at an exception only where all ranks come to it."""
        for callback in callbacks_of(module.trainer):
            if private.keeps_average(callback):
                self._undo.append(private.copy_on_host(callback, module))
            if saves_at_exception(callback):
                self._undo.append(save_where_all_meet(callback, lambda: self._watch, self._settle_saves))
            if is_overridden("on_exception", callback, pl.Callback):
                self._undo.append(tell_where_it_raises(callback, self.on_exception))

    def _connect(self) -> Connections:
        """Join the process group, if this rank is in none, and connect with the other ranks."""
        if self.world_size == 1:
            return unconnected()
        if self._watch is None:
            self._begin_watch()
        assert self.cluster_environment is not None and self._watch is not None, "set by the trainer"
        environment = self.cluster_environment
        if choose_card(environment.main_address, hosts=self.num_nodes) is not None:
            self._undo.append(forget_card)
        if not dist.is_initialized():
            store = join_ranks(self._watch, address=environment.main_address, port=environment.main_port)
            backend = self._backend or private.default_backend(self.root_device)
            with self._watch.opening("the process group"):
                timeout = timedelta(seconds=self.config.deadline_s + MARGIN_S)
                private.init_dist_connection(environment, backend, store=store, timeout=timeout)
        links = connect_ranks(self._watch, device=self.root_device)
        self._has_met = True
        return links

    def _shortages_named(self) -> contextlib.AbstractContextManager[None]:
        return shortages_named(f"Rank {self.global_rank}")

    @contextlib.contextmanager
    def _connected(self) -> Iterator[Connections | None]:
        """Have connections inside: those of the fit, or new ones after it; None before, or where a rank has failed."""
        if self._links is not None or self._failed or not self._has_met:
            yield self._links
            return
        with contextlib.ExitStack() as undo:
            undo.callback(self._end_watch)
            links, is_healthy = self._connect(), False
            undo.callback(lambda: links.close(healthy=is_healthy))
            yield links
            # who closes while another still connects ends its connections
            links.control.sum(torch.zeros(1), what="the other ranks (before connections are closed)")
            is_healthy = True

    @contextlib.contextmanager
    def _control(self) -> Iterator[ControlPlane | None]:
        with self._connected() as links:
            yield None if links is None else links.control

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def setup(self, trainer: pl.Trainer) -> None:
        """Create optimizers, plan for the first batch, and place everything."""
        assert self.accelerator is not None and self._links is not None and self._feed is not None
        module = self.lightning_module
        assert module is not None, "connected by the trainer"
        self._stopwatch.lap("module")
        self._until_first_step.enter_context(older_set_aside())
        self.accelerator.setup(trainer)
        self._leave_compilation_out(module)
        measure_whole_batches(trainer, ranks=self.world_size)
        private.make_loaders_inside(trainer, self._feed.data.while_loading)
        self._give_weights(module)
        refuse_parts(module)
        with converting(module.parameters()):
            self.model = self.precision_plugin.convert_module(module)
        self._session = Session(
            module,
            config=reproducible(self.config, ranks=self.world_size),
            links=self._links,
            feed=self._feed,
            plugin=self.precision_plugin,
            device=self.root_device,
            connected=self._control,
            stopwatch=self._stopwatch,
        )
        self._session.share()
        self._stopwatch.lap("values")
        if trainer.state.fn == TrainerFn.FITTING:
            refuse_averages(trainer, module)
            control = self._links.control
            control.agreed(lambda: make_room(self.config), source=0, what="whether a report can be written")
            self._feed.hold_back()
            self._install_loop(trainer)
            self._undo.append(private.call_after_epoch_hooks(trainer, self._share_metrics))
            with refusing_several_optimizers(module):
                self.setup_optimizers(trainer)
            refuse_optimizers(self.optimizers, self.precision_plugin)
            are_movable = self.world_size == 1 or control.agreed(
                self._check_optimizers, source=0, what="whether optimizers are separable"
            )
            if self.config.post_validation:
                refuse_post_validation(module, self.precision_plugin, self.optimizers)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            self._session.use_optimizers(self.optimizers, are_movable=are_movable)
            self._groups = self._session.groups
            self._stopwatch.lap("optimizers")
            with self._shortages_named():
                self._session.look_ahead(trainer)
            begin = functools.partial(self._session.begin_loaders, AskedEarly(trainer))
            self._undo.append(private.call_before_training(trainer, begin))
            self._session.expect_readers(readers_of_gradients(trainer, module))
        if self.world_size > 1:
            self._in_hooks = WeightsInHooks(self._session.weights, self._whole)
            self._in_hooks.begin(hooks_of_users(trainer, module))

    def _leave_compilation_out(self, module: pl.LightningModule) -> None:
        """Let what the user has compiled run as it is written, until teardown: steps are captured as graphs."""
        say_compiled(module)
        stance = contextlib.ExitStack()
        stance.enter_context(torch.compiler.set_stance("force_eager"))
        self._undo.append(stance.close)

    def _give_weights(self, module: pl.LightningModule) -> None:
        """Let a module that comes here first have the weights that the user names, unless a checkpoint gives some."""
        if self.config.weights is None or self._initialised is module:
            return
        self._initialised = module
        if self._is_resumed:
            log.info("weights=%r is not read, because a checkpoint gives the module its weights.", self.config.weights)
            return
        give(module, Path(self.config.weights), reads=self.global_rank == 0)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the module's state from a checkpoint."""
        self._is_resumed = True
        with self.whole_module():  # that of a run which is under way has parts, as when the learning rate is searched
            super().load_model_state_dict(checkpoint, strict=strict)

    def _check_optimizers(self) -> bool:
        """Return whether the state of optimizers can move between ranks; refuse what no rank can step by itself."""
        if len(self.config.replicas or (1,) * self.world_size) == 1 and self.config.shard_optimizer == "off":
            return True  # every rank has all gradients, and all state
        return all(check_separable(one, self.world_size, device=self.root_device) for one in self.optimizers)

    def _install_loop(self, trainer: pl.Trainer) -> None:
        assert self._session is not None, "set up before"
        loop = PipelineOptimization(
            trainer,
            before_zeroing=self._session.put_gradients_aside,
            around_hooks=self._between,
            around_zeroing=self._apart,
        )
        before = private.swap_optimization(trainer, loop)
        loop.optim_progress = before.optim_progress
        private.replace_sigterm_broadcast(trainer, self._any_rank_stops)

        def undo() -> None:
            private.swap_optimization(trainer, before)
            private.restore_sigterm_broadcast(trainer)

        self._undo.append(undo)

    def _share_metrics(self) -> None:
        """Give every rank the metrics that rank 0 alone has logged, as one device has them all where they are read."""
        assert self.lightning_module is not None
        metrics = self.lightning_module.trainer.callback_metrics
        with self._control() as control:
            if control is not None:
                values = {name: value.cpu() for name, value in metrics.items()} if control.rank == 0 else {}
                # what this rank logs as well comes back from its own results wherever the trainer is asked
                metrics.update(control.broadcast(values, source=0, what="the metrics at the end of an epoch"))

    def _any_rank_stops(self, stops: bool) -> bool:
        """Return whether a rank is asked to stop: as the results of the last batch said, if that has run since."""
        said = self._session.take_stop() if self._session is not None else None
        return self._any_rank_stops_now(stops) if said is None else said

    def _any_rank_stops_now(self, stops: bool) -> bool:
        return self.reduce_boolean_decision(stops, all=False)

    def on_train_end(self) -> None:
        """End all ranks where one was asked to end since the last batch began."""
        assert self.lightning_module is not None
        private.end_where_asked(self.lightning_module.trainer, self._any_rank_stops_now)

    def process_dataloader(self, dataloader: object) -> object:
        """Let all ranks iterate the loader together; only the first stage loads."""
        assert self._feed is not None, "the environment is set up before data is asked for"
        return self._feed.wrap(dataloader)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move the batch where it was loaded; elsewhere return stand-ins."""
        move = super().batch_to_device
        if self._session is None:
            return move(batch, device, dataloader_idx)
        with self._apart():
            return self._session.receive(batch, lambda loaded: move(loaded, device, dataloader_idx))

    def training_step(self, batch: Any, *arguments: int) -> Any:
        """Run forward and backward of a batch; gradients are summed unless they are accumulated further."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        self._stopwatch.lap("hooks and data")
        result = self._step(
            "training_step",
            batch,
            arguments,
            number=trainer.fit_loop.total_batch_idx,
            weight=1.0 / trainer.accumulate_grad_batches,
            synchronise=self._synchronise,
        )
        self._stopwatch.lap("first step")
        if (line := self._stopwatch.stop()) and self.is_global_zero:
            log.info(line)
        return result

    def validation_step(self, batch: Any, *arguments: int) -> Any:
        """Run the module's validation step."""
        self._stopwatch.lap("hooks and data")
        result = self._step("validation_step", batch, arguments)
        self._stopwatch.lap("validation")  # before the first step, to see whether it runs
        return result

    def test_step(self, batch: Any, *arguments: int) -> Any:
        """Run the module's test step."""
        return self._step("test_step", batch, arguments)

    def predict_step(self, batch: Any, *arguments: int) -> Any:
        """Run the module's predict step; every rank gets the predictions."""
        return self._step("predict_step", batch, arguments)

    def _step(self, method: str, batch: Any, arguments: tuple[int, ...], **turn: Any) -> Any:
        assert self._session is not None, "set up by the trainer"
        turn = turn or {"number": arguments[0] if arguments else 0, "weight": 1.0, "synchronise": False}
        try:
            with self._apart(), shortage_told(method, self.foreseen, self.global_rank):
                result = self._session.step(method, batch, arguments, **turn)
        except StopIteration as error:  # which Lightning would take for the end of the data
            raise RuntimeError(f"{method} raised StopIteration") from error
        assert self.lightning_module is not None, "connected by the trainer"
        if not self.lightning_module.trainer.sanity_checking:  # which comes before the first step
            self._until_first_step.close()
        return result

    def optimizer_step(self, optimizer: Optimizer, *arguments: Any, **options: Any) -> Any:
        """Step as Lightning does, then what waits for sums; where memory does not suffice, say so as programs do."""
        with self._apart(), shortage_told("the optimizer's step", self.foreseen, self.global_rank):
            try:
                stepped = super().optimizer_step(optimizer, *arguments, **options)
                if self._session is not None:
                    self._session.step_rest(optimizer)
            finally:
                if self._session is not None:
                    self._session.end_step()
            return stepped

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Do not sum gradients over ranks inside: they are accumulated further."""
        self._synchronise = False
        try:
            yield
        finally:
            self._synchronise = True

    def backward(
        self, closure_loss: torch.Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Call the hooks around the backward, which the program has done."""
        assert self.lightning_module is not None
        loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        return self.precision_plugin.post_backward(loss, self.lightning_module)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state of the whole module on rank 0, the same names elsewhere; or each rank's part."""
        assert self.lightning_module is not None
        if self._session is None:
            return self.lightning_module.state_dict()
        self._session.empty(_CHECKPOINTS)
        with self._apart():
            if self.config.save_distributed_checkpoint:
                return self._session.weights.state_dict()
            with self._reached_weights() as weights, weights.whole(placed=self._placed(weights)):
                return weights.state_dict()

    def _placed(self, weights: Weights) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Return what puts what rank 0 collects for a plain file into files; None where there is room in memory."""
        assert self.lightning_module is not None
        files = MappedTensors.near(self.lightning_module)
        return collecting(weights.missing_bytes(), files=files) if self.is_global_zero else None

    @contextlib.contextmanager
    def whole_module(self) -> Iterator[None]:
        """Give the module of every rank the current values of all parameters and buffers, inside the context.

        Use it in hooks that all ranks run: averages of weights, histograms, copies, `state_dict()`. Writes to
        parameters are kept if all ranks make them. Every rank needs memory for the whole module meanwhile; gradients do
        not move.

        Example:
            >>> with self.trainer.strategy.whole_module():  # doctest: +SKIP
            ...     torch.save(self.state_dict(), "weights.pt")
        """
        refuse_in_step("trainer.strategy.whole_module")
        if self._session is None:
            yield
            return
        with self._apart(), self._whole():
            yield

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        assert self._session is not None, "asked before"
        with self._session.shown(), self._reached_weights() as weights, weights.everywhere():
            yield

    @contextlib.contextmanager
    def _reached_weights(self) -> Iterator[Weights]:
        """Have weights inside that other ranks can be asked for, after the fit too."""
        assert self._session is not None, "set up before"
        with self._connected() as links:
            if links is not None:
                self._session.weights.reach(links.control)
            yield self._session.weights

    def grad_norm(self, norm_type: float = 2.0) -> torch.Tensor:
        """Return the norm of the gradients of all parameters, on every rank; called by hooks that all ranks run.

        Args:
            norm_type: order of the norm.

        Raises:
            UnsupportedError: outside of fit.
        """
        refuse_in_step("trainer.strategy.grad_norm")
        if self._session is None:
            raise UnsupportedError("There are no gradients before fit, so there is no norm of them.")
        return self._session.grad_norm(norm_type)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of the optimizer on rank 0, as on a single device."""
        with self._connected() as links:
            if self._session is None or links is None or optimizer not in self.optimizers:
                return super().optimizer_state(optimizer)
            self._session.empty(_CHECKPOINTS)
            groups, weights = self._groups[self.optimizers.index(optimizer)], self._session.weights
            placed = self._placed(weights)
            whole = partial(weights.whole, placed=placed) if groups.has_own_state_dict else contextlib.nullcontext
            if self.config.save_distributed_checkpoint:
                return state_dict_of_all(groups, links.control, whole=whole)
            with whole():
                return groups.gather(links.control, placed=placed)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Write a checkpoint: rank 0 a file, or every rank its part of a directory; the one before is never lost."""
        session = self._session
        if session is not None and session.correction is not None:
            checkpoint[_LATE_UPDATES] = session.correction.updates
        if session is not None and self.config.save_distributed_checkpoint:
            with self._reached_weights() as weights:
                what = "where the checkpoint is written"
                path = Path(weights.control.broadcast(os.fspath(filepath), source=0, what=what))
                in_fit = self._links is not None
                self._directories.save(path, checkpoint, weights=weights, groups=self._groups, in_fit=in_fit)
        elif self.is_global_zero and storage_options is None and self._writes_files(filepath):
            save_plain(Path(filepath), checkpoint)
        else:
            super().save_checkpoint(checkpoint, cast("str", filepath), storage_options)  # it takes what is like a path

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Remove a checkpoint; when that which replaces it is complete."""
        self._directories.remove(partial(super().remove_checkpoint, cast("str", filepath)))

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint, file or directory; weights and optimizer states are read where they are needed."""
        path = Path(checkpoint_path)
        if "://" in os.fspath(checkpoint_path) or not existing(path).exists():
            options = {} if weights_only is None else {"weights_only": weights_only}
            found: dict[str, Any] = super().load_checkpoint(cast("str", checkpoint_path), **options)
            return found
        is_plain = self._writes_files(checkpoint_path)
        return load(path, self.checkpoint_io, is_plain=is_plain, weights_only=weights_only)

    def _writes_files(self, path: str | os.PathLike[str]) -> bool:
        """Return whether checkpoints are plain files of torch on this host."""
        return type(self.checkpoint_io) is TorchCheckpointIO and "://" not in os.fspath(path)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the states of the parameters that are here from those of all."""
        states = checkpoint["optimizer_states"]  # none in a checkpoint that was saved before there were optimizers
        for groups, state in zip(self._groups, states, strict=False):
            groups.load(state)
            groups.move(self.root_device)
        if self._session is not None and self._session.correction is not None:
            self._session.correction.updates = checkpoint.get(_LATE_UPDATES, 0)  # none in a synchronous run

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Build a module without its values where they are made later: in configure_model, and by `empty_init=True`."""
        configures = self._links is not None and self._session is None
        if self.num_nodes * self.num_processes > 1 and (configures or empty_init):
            with building():
                yield
            return
        with super().tensor_init_context(empty_init=False):
            yield

    def model_to_device(self) -> None:
        """Do nothing: the module is moved when it is known which parts of it stay."""

    def barrier(self, name: str | None = None) -> None:
        """Wait until all ranks have come here."""
        refuse_in_step("trainer.strategy.barrier")
        if name == private.BARRIER_OF_STAGE and self._session is not None:
            self._session.show_example()
        with self._connected() as links:
            if links is not None:
                links.control.sum(torch.zeros(1), what=f"the other ranks ({name or 'barrier'})", key="barrier")

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return the object of rank `src` on all ranks."""
        refuse_in_step("trainer.strategy.broadcast")
        with self._connected() as links:
            return obj if links is None else links.control.broadcast(obj, source=src, what="a broadcast")

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Return the tensor, as one device does: every rank has the values of the whole batch."""
        return tensor

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the value: logged values are those of the whole batch on every rank already."""
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks, or any of them, say yes."""
        refuse_in_step("trainer.strategy.reduce_boolean_decision")
        with self._connected() as links:
            if links is None:
                return decision
            said = links.control.sum(torch.tensor(float(decision)), what="a decision of all ranks")
            return bool(said == self.world_size) if all else bool(said > 0)

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other ranks, so that they do not wait for this one."""
        self._failed = True
        self._leave_hooks()
        if self._watch is not None:
            first = self._watch.report(exception, origin=origin_of(exception))
            if first != self.global_rank:
                raised_on(exception, first)
        tell_launcher(exception, rank=self.global_rank, ranks=self.world_size)

    def _apart(self) -> contextlib.AbstractContextManager[None]:
        """Let hooks of the user be over for the time of a call of this strategy."""
        return contextlib.nullcontext() if self._in_hooks is None else self._in_hooks.apart()

    def _between(self) -> contextlib.AbstractContextManager[None]:
        """Let hooks of the user run within a call of this strategy."""
        return contextlib.nullcontext() if self._in_hooks is None else self._in_hooks.between()

    def _leave_hooks(self) -> None:
        if self._in_hooks is not None:
            self._in_hooks.end()
            self._in_hooks = None

    def teardown(self) -> None:
        """Give ranks the whole trained module, as `restore` says, and let go of the others; whatever has happened."""
        self._stopwatch.stop()
        self._until_first_step.close()
        self._leave_hooks()
        with contextlib.ExitStack() as undo:
            undo.callback(self._end_watch)
            undo.callback(self._disconnect)
            undo.callback(self._restore_trainer)
            if self._session is not None:
                undo.callback(self._telling, self._end_session)
                self._telling(self._settle_saves)
        impossible = (NotImplementedError,) if self._failed else ()  # moving parameters that have no values
        module = self.lightning_module
        with contextlib.suppress(*impossible), contextlib.nullcontext() if module is None else movable(module):
            super().teardown()

    def _telling(self, ends: Callable[[], None]) -> None:
        """End something; tell the other ranks if that fails, as Lightning does when the connections are closed only."""
        try:
            ends()
        except BaseException as error:
            self.on_exception(error)
            raise

    def _end_session(self) -> None:
        assert self._session is not None, "asked before"
        self._session.end(healthy=not self._failed)

    def _settle_saves(self) -> None:
        """Wait for what is written behind the training: on all ranks together, unless training has failed."""
        if self._failed or self._links is None:
            self._directories.abandon()
        else:
            self._directories.settle(self._links.control)

    def _disconnect(self) -> None:
        links, self._links, self._feed = self._links, None, None
        if links is not None:
            links.close(healthy=not self._failed)

    def _restore_trainer(self) -> None:
        while self._undo:
            self._undo.pop()()
