"""Private names of Lightning that this package uses, and why. All of them are here; a contract test reads this.

_AutomaticOptimization, Closure     the loop of one batch: ours zeroes gradients before the program runs, because
                                    the program is forward and backward in one
fit_loop.epoch_loop.automatic_optimization    where that loop hangs
_AutomaticOptimization._training_step, trainer.call._call_strategy_hook    refuses batches that several ranks skip; ours
                                    skips them on all ranks together
fit_loop.setup_data                 asks the user's loaders for data, as `Trainer.estimated_stepping_batches` does
_DataLoaderSource.dataloader, loop._data_source       ask the user's hooks for loaders
__old__init__, __old__setattr__, __old__delattr__     methods of loaders' classes, while hooks make some
fit_loop._combined_loader           the loaders it has asked for
_checkpoint_connector._loaded_checkpoint, restore_loops; _Loop._restarting, _loaded_from_state_dict,
_resuming_from_checkpoint           let loops have come as far as the checkpoint says, while loaders are asked for early
fit_loop._combined_loader_states_to_load      states of loaders in that checkpoint, which they have got then
_set_sampler_epoch                  tells samplers the epoch before their first batch
fit_loop.epoch_loop._broadcast_sigterm_tensor           asks rank 0 before every batch whether to stop, over the
                                    default group and without a deadline; ours asks over connections that are
                                    watched (newer than the oldest Lightning that we support)
a warning of _ResultCollection      recommends sync_dist=True, which does nothing here
_PrefetchDataFetcher.batches, fit_loop._data_fetcher    batches that are fetched before their turn
_Loop._load_from_state_dict         gives the trainer of a notebook the progress that other processes have made
LightningModule._on_before_batch_transfer     calls the user's hook with the batch; skipped where there is no batch
LightningModule._apply_batch_transfer_handler the other two batch hooks, for the first batch
LightningModule._device             what `self.device` says; the whole module is on the host before it is placed
_SubprocessScriptLauncher, _MultiProcessingLauncher     start processes
_basic_subprocess_cmd, _hydra_subprocess_cmd    the command that runs it again
_call_children_scripts              runs the script again; not followed by Lightning's own observer, which kills all
                                    ranks of the host before anybody can say why
_set_num_threads_if_needed          shares the cores of the host among its ranks
_signal_connector._sigterm_notifier_fn      what SIGTERM does; Lightning's broadcasts inside the signal handler and
                                    never returns where one rank alone got the signal
_init_dist_connection, _get_default_process_group_backend_for_device     open the default process group
ThroughputMonitor._throughputs      what it measures; made for the world size in its setup, before ours
WeightAveraging._average_model, ._swap_models, ._copy_average_to_current, ._device; StochasticWeightAveraging's
_average_model and _device          copies of the module that callbacks average, and what reads or writes both
_call_lightning_module_hook, _call_lightning_datamodule_hook, _call_callback_hooks, _call_callbacks_state_dict,
_call_callbacks_on_save_checkpoint, _call_callbacks_on_load_checkpoint    of trainer.call, run hooks of the user
trainer._logger_connector.on_epoch_end      collects what hooks at the end of an epoch have logged
Precision._after_closure            calls the hooks between the backward and the optimizer's step
_optimizer_to_device                moves optimizer state
"run-stage"                         how the trainer names the barrier that comes when `on_fit_start` is over
"""

from __future__ import annotations

import contextlib
import logging
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning_utilities.core.inheritance import get_all_subclasses
from torch.utils.data import BatchSampler, DataLoader

from lightning_pipe.lightning_names import (
    Checkpoint,
    CombinedLoader,
    EarlyStopping,
    Precision,
    SIGTERMException,
    Throughput,
    ThroughputMonitor,
    callbacks_of,
    lightning_module,
    pl,
)
from lightning_pipe.units import counted_noun

BARRIER_OF_STAGE = "run-stage"

if TYPE_CHECKING:
    from lightning.fabric.utilities.data import _set_sampler_epoch as set_sampler_epoch
    from lightning.fabric.utilities.distributed import (
        _get_default_process_group_backend_for_device as default_backend,
    )
    from lightning.fabric.utilities.distributed import _init_dist_connection as init_dist_connection
    from lightning.fabric.utilities.distributed import _set_num_threads_if_needed as limit_threads
    from lightning.fabric.utilities.optimizer import _optimizer_to_device as optimizer_to_device
    from lightning.pytorch.loops.fetchers import _DataFetcher as DataFetcher
    from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher as PrefetchDataFetcher
    from lightning.pytorch.loops.loop import _Loop as Loop
    from lightning.pytorch.loops.optimization.automatic import Closure
    from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization as AutomaticOptimization
    from lightning.pytorch.loops.progress import _BaseProgress as Progress
    from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher as ForkLauncher
    from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher as ScriptLauncher
    from lightning.pytorch.trainer.call import _call_strategy_hook as call_strategy_hook
else:
    default_backend = lightning_module("fabric.utilities.distributed")._get_default_process_group_backend_for_device
    set_sampler_epoch = lightning_module("fabric.utilities.data")._set_sampler_epoch
    init_dist_connection = lightning_module("fabric.utilities.distributed")._init_dist_connection
    limit_threads = lightning_module("fabric.utilities.distributed")._set_num_threads_if_needed
    optimizer_to_device = lightning_module("fabric.utilities.optimizer")._optimizer_to_device
    Loop = lightning_module("pytorch.loops.loop")._Loop
    Progress = lightning_module("pytorch.loops.progress")._BaseProgress
    Closure = lightning_module("pytorch.loops.optimization.automatic").Closure
    AutomaticOptimization = lightning_module("pytorch.loops.optimization.automatic")._AutomaticOptimization
    ForkLauncher = lightning_module("pytorch.strategies.launchers.multiprocessing")._MultiProcessingLauncher
    ScriptLauncher = lightning_module("pytorch.strategies.launchers.subprocess_script")._SubprocessScriptLauncher
    call_strategy_hook = lightning_module("pytorch.trainer.call")._call_strategy_hook
    DataFetcher = lightning_module("pytorch.loops.fetchers")._DataFetcher
    PrefetchDataFetcher = lightning_module("pytorch.loops.fetchers")._PrefetchDataFetcher

__all__ = [
    "AutomaticOptimization",
    "Closure",
    "ForkLauncher",
    "ScriptLauncher",
    "call_strategy_hook",
    "default_backend",
    "init_dist_connection",
    "limit_threads",
    "optimizer_to_device",
]

log = logging.getLogger(__name__)


_CALL_HOOKS = frozenset(
    getattr(lightning_module("pytorch.trainer.call"), name).__code__
    for name in """_call_lightning_module_hook _call_lightning_datamodule_hook _call_callback_hooks
    _call_callbacks_state_dict _call_callbacks_on_save_checkpoint _call_callbacks_on_load_checkpoint""".split()
)


def calls_a_hook(frame: types.FrameType) -> bool:
    """Return whether a frame is Lightning's call of hooks of the module, of its data or of callbacks."""
    return frame.f_code in _CALL_HOOKS


@contextlib.contextmanager
def prefixed_commands(prefix: Sequence[str]) -> Iterator[None]:
    """Put words between interpreter and script of the commands by which ranks are started inside."""
    module = vars(lightning_module("pytorch.strategies.launchers.subprocess_script"))
    usual = {name: module[name] for name in ("_basic_subprocess_cmd", "_hydra_subprocess_cmd")}

    def basic() -> Sequence[str]:
        interpreter, *words = usual["_basic_subprocess_cmd"]()
        return [interpreter, *prefix, *words]

    def hydra(local_rank: int) -> tuple[Sequence[str], str]:
        (interpreter, *words), folder = usual["_hydra_subprocess_cmd"](local_rank=local_rank)
        return [interpreter, *prefix, *words], folder

    module.update(_basic_subprocess_cmd=basic, _hydra_subprocess_cmd=hydra)
    try:
        yield
    finally:
        module.update(usual)


def train_loaders(trainer: pl.Trainer) -> CombinedLoader | None:
    """Let the fit loop ask for its data now, and return its loaders; None if there is nothing to train on."""
    try:
        trainer.fit_loop.setup_data()
    except BaseException:
        unwrap_loader_classes()
        raise
    return trainer.fit_loop._combined_loader


def unwrap_loader_classes() -> None:
    """Take off what Lightning puts over the classes of loaders while hooks make some: an error in a hook leaves it."""
    for base in (DataLoader, BatchSampler):
        for cls in (base, *get_all_subclasses(base)):
            for name in ("__init__", "__setattr__", "__delattr__"):
                if f"__old{name}" in vars(cls):
                    setattr(cls, name, getattr(cls, f"__old{name}"))
                    delattr(cls, f"__old{name}")


def asked_loaders(trainer: pl.Trainer) -> CombinedLoader | None:
    """Return the loaders that the fit loop has; None if it has not asked for them."""
    return trainer.fit_loop._combined_loader


def forget_train_loaders(trainer: pl.Trainer) -> None:
    """Let the fit loop ask for its data again when it begins."""
    trainer.fit_loop._combined_loader = None


def call_before_training(trainer: pl.Trainer, then: Callable[[], None]) -> Callable[[], None]:
    """Call a function when the fit loop begins, where it would iterate its loaders; return what undoes it."""
    own, usual = vars(trainer.fit_loop), trainer.fit_loop.setup_data

    def setup_data() -> None:
        del own["setup_data"]
        then()
        usual()

    own["setup_data"] = setup_data
    return lambda: own.pop("setup_data", None)


def forget_loader_states(trainer: pl.Trainer) -> None:
    """Do not give the loaders of a fit the states of a checkpoint again, if they were asked for and have them."""
    if trainer.fit_loop._combined_loader is not None:
        trainer.fit_loop._combined_loader_states_to_load = []


def tell_epoch(trainer: pl.Trainer, loader: Any) -> None:
    """Tell the samplers of a loader the epoch, as Lightning does before their first batch."""
    epochs: Any = trainer.fit_loop.epoch_progress.current
    set_sampler_epoch(loader, epochs.processed)


@contextlib.contextmanager
def progress_of_checkpoint(trainer: pl.Trainer) -> Iterator[None]:
    """Let the fit loop have come, inside, as far as the checkpoint that the run resumes from; Lightning does it later.

    Loaders that are asked for inside get their states, and hooks see the epoch and the step that one device has then.
    """
    connector, has_come = trainer._checkpoint_connector, progress(trainer)
    flags = [(loop, {name: getattr(loop, name) for name in _RESUMES}) for loop, _ in _loops(trainer)]
    if not connector._loaded_checkpoint:
        yield
        return
    try:
        connector.restore_loops()
        yield
    finally:
        restore_progress(trainer, has_come)
        for loop, values in flags:
            vars(loop).update(values)


_RESUMES = ("_restarting", "_loaded_from_state_dict", "_resuming_from_checkpoint")


def progress(trainer: pl.Trainer) -> dict[str, Any]:
    """Return how far the fit loop has come: steps, epochs, batches; without states of loaders."""
    state: dict[str, Any] = {}
    for loop, prefix in _loops(trainer):
        parts = ((name, part) for name, part in vars(loop).items() if isinstance(part, Progress))
        state |= {f"{prefix}{name}": part.state_dict() for name, part in parts}
        if loop is not trainer.fit_loop:  # whose state is that of its loaders
            state[f"{prefix}state_dict"] = loop.on_save_checkpoint()
    return state


def restore_progress(trainer: pl.Trainer, progress: dict[str, Any]) -> None:
    """Let the fit loop have come so far, without resuming there."""
    for loop, prefix in _loops(trainer):
        loop._load_from_state_dict(progress, prefix)


def _loops(trainer: pl.Trainer) -> list[tuple[Any, str]]:
    """List the fit loop and those inside of it, with the prefixes of their states."""
    loops: list[tuple[Any, str]] = [(trainer.fit_loop, "")]
    for loop, prefix in loops:
        loops += [(child, f"{prefix}{name}.") for name, child in vars(loop).items() if isinstance(child, Loop)]
    return loops


def call_before_step(plugin: Precision, then: Callable[[], None]) -> None:
    """Call a function after the hooks and the clipping that precede an optimizer step, until `forget_before_step`."""
    usual = type(plugin)._after_closure

    def after_closure(*arguments: Any, **options: Any) -> None:
        usual(plugin, *arguments, **options)
        then()

    vars(plugin)["_after_closure"] = after_closure


def forget_before_step(plugin: Precision) -> None:
    """Let the plug-in do as usual again."""
    vars(plugin).pop("_after_closure", None)


def hide_advice_to_synchronise() -> Callable[[], None]:
    """Do not recommend `sync_dist=True`, since all ranks log the value of the whole batch; return what undoes it."""
    warnings.filterwarnings("ignore", message=r"It is recommended to use `self\.log\(.*sync_dist=True\)`")
    added = warnings.filters[0]

    def undo() -> None:
        with contextlib.suppress(ValueError):  # somebody else has restored the filters
            cast("list[Any]", warnings.filters).remove(added)

    return undo


def make_loaders_inside(trainer: pl.Trainer, context: Callable[[], AbstractContextManager[None]]) -> None:
    """Let the hooks that make loaders run inside of a context."""
    fit = trainer.fit_loop
    loops = (fit, fit.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
    for source in (loop._data_source for loop in loops):
        vars(source)["dataloader"] = partial(_inside, context, partial(type(source).dataloader, source))


def _inside(context: Callable[[], AbstractContextManager[None]], function: Callable[[], Any]) -> Any:
    with context():
        return function()


def throughputs(monitor: ThroughputMonitor) -> list[Throughput]:
    """Return what a monitor measures throughput with, one for each kind of loop."""
    return list(monitor._throughputs.values())


_AVERAGING = ("WeightAveraging", "StochasticWeightAveraging")  # the first is newer than the oldest Lightning


def keeps_average(callback: pl.Callback) -> bool:
    """Return whether a callback is one of Lightning's that average weights."""
    return any(is_lightnings(callback, name) for name in _AVERAGING)


def is_lightnings(callback: pl.Callback, name: str) -> bool:
    """Return whether a callback is Lightning's of this name, or made from it."""
    kind = getattr(lightning_module("pytorch.callbacks"), name, None)
    return kind is not None and isinstance(callback, kind)


def averaged_model(callback: Any) -> Any:
    """Return what a callback averages into: a module, or torch's `AveragedModel` around one; None if there is none."""
    return callback._average_model


def average_of(callback: pl.Callback) -> pl.LightningModule | None:
    """Return the copy of the module into which a callback averages, once it is made."""
    averaged = averaged_model(callback)
    is_bare = averaged is None or is_lightnings(callback, _AVERAGING[1])
    copy: pl.LightningModule | None = averaged if is_bare else averaged.module
    return copy


def device_of_average(callback: Any) -> torch.device | None:
    """Return where a callback wants its averages; None beside the weights."""
    return None if callback._device is None else torch.device(callback._device)


def function_of_all(callback: pl.Callback) -> Any:
    """Return the function with which a callback averages all parameters at once, None if there is none."""
    return getattr(averaged_model(callback), "multi_avg_fn", None)


def averaging_methods(callback: pl.Callback) -> list[tuple[Any, str]]:
    """Return objects and names of their methods that go through the parameters of a module and of its average."""
    averaged = averaged_model(callback)
    if is_lightnings(callback, _AVERAGING[1]):
        return [(callback, "update_parameters"), (callback, "transfer_weights"), (averaged, "to")]
    return [(averaged, "update_parameters"), (callback, "_swap_models"), (callback, "_copy_average_to_current")]


def copy_on_host(callback: pl.Callback, module: pl.LightningModule) -> Callable[[], Any]:
    """Let a callback copy the module on the host, before it is known which part stays here; return what undoes this."""
    usual = callback.setup

    def setup(*arguments: Any, **options: Any) -> None:
        with on_host(module):
            usual(*arguments, **options)

    vars(callback)["setup"] = setup
    return lambda: vars(callback).pop("setup", None)


def swap_optimization(trainer: pl.Trainer, loop: AutomaticOptimization) -> AutomaticOptimization:
    """Let the training loop use another loop for a batch, and return the one before."""
    epoch_loop = trainer.fit_loop.epoch_loop
    before = epoch_loop.automatic_optimization
    epoch_loop.automatic_optimization = loop
    return before


def replace_sigterm_broadcast(trainer: pl.Trainer, any_rank_stops: Callable[[bool], bool]) -> None:
    """Ask all ranks in our way before every batch whether the process is to end."""
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    vars(epoch_loop)["_broadcast_sigterm_tensor"] = partial(end_where_asked, trainer, any_rank_stops)


def end_where_asked(trainer: pl.Trainer, any_rank_stops: Callable[[bool], bool]) -> None:
    """End the run where a rank is asked to end, which says so: the exception ends scripts in silence; on all ranks.

    Raises:
        SIGTERMException: on all ranks.
    """
    is_asked = is_asked_to_end(trainer)
    if any_rank_stops(is_asked):
        if is_asked:
            rank, steps = trainer.global_rank, trainer.global_step
            log.warning(
                "Rank %d received SIGTERM; all ranks stop after %s.", rank, counted_noun(steps, "optimizer step")
            )
        connector: Any = trainer._signal_connector
        connector.received_sigterm = True
        raise SIGTERMException


def is_asked_to_end(trainer: pl.Trainer) -> bool:
    """Return whether this process has got SIGTERM, though Lightning may not have been told yet."""
    connector: Any = getattr(trainer, "_signal_connector", None)
    return connector is not None and bool(connector.received_sigterm or vars(connector).get(_NOTED))


_NOTED = "noted_sigterm"


def replace_sigterm_handler(trainer: pl.Trainer) -> Callable[[], Any]:
    """Let SIGTERM be noted, and passed on to the processes that this one has started; return what undoes this.

    While training, Lightning is not told before all ranks are: it would end this one alone, after the batch.
    """
    connector: Any = trainer._signal_connector

    def note(signum: Any, _: Any) -> None:
        launcher = trainer.strategy.launcher
        if launcher is not None and not is_asked_to_end(trainer):
            launcher.kill(signum)
        if trainer.training:
            vars(connector)[_NOTED] = True
        else:
            connector.received_sigterm = True

    def undo() -> None:
        for name in ("_sigterm_notifier_fn", _NOTED):
            vars(connector).pop(name, None)

    connector._sigterm_notifier_fn = note
    return undo


def call_after_epoch_hooks(trainer: pl.Trainer, then: Callable[[], None]) -> Callable[[], None]:
    """Call a function when the hooks at the end of an epoch have logged, before others read it; return what undoes it.

    Lightning collects what they log behind them, but lets callbacks that monitor a value of training read it before.
    """
    connector: Any = trainer._logger_connector
    monitors = [callback for callback in callbacks_of(trainer) if isinstance(callback, (Checkpoint, EarlyStopping))]
    places: list[tuple[Any, str, bool]] = [(connector, "on_epoch_end", True)]
    places += [(callback, "on_train_epoch_end", False) for callback in monitors[:1]]
    for owner, name, comes_first in places:
        vars(owner)[name] = _with_call(getattr(owner, name), then, comes_first=comes_first)

    def undo() -> None:
        for owner, name, _ in places:
            vars(owner).pop(name, None)

    return undo


def _with_call(usual: Callable[..., None], then: Callable[[], None], *, comes_first: bool) -> Callable[..., None]:
    def called(*arguments: Any) -> None:
        if comes_first:
            usual(*arguments)
        then()
        if not comes_first:
            usual(*arguments)

    return called


def restore_sigterm_broadcast(trainer: pl.Trainer) -> None:
    """Let Lightning ask again."""
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    vars(epoch_loop).pop("_broadcast_sigterm_tensor", None)


def transfer(module: pl.LightningModule, batch: Any, device: Any) -> Any:
    """Move a training batch to a device as the training loop does, through the user's hooks."""
    batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
    return module._apply_batch_transfer_handler(batch, device=device, dataloader_idx=0)


@contextlib.contextmanager
def located(module: pl.LightningModule, device: torch.device) -> Iterator[None]:
    """Let `module.device` say that the module is on this device, inside."""
    before = module._device
    module._device = device
    try:
        yield
    finally:
        module._device = before


def on_host(module: pl.LightningModule) -> AbstractContextManager[None]:
    """Let `module.device` say that the module is on the host, where it is, inside."""
    return located(module, torch.device("cpu"))


def skip_hook_before_transfer(module: pl.LightningModule, skip: type) -> None:
    """Do not call `on_before_batch_transfer` for batches of type `skip`, until `call_hook_before_transfer`."""
    vars(module)["_on_before_batch_transfer"] = _Skipping(module, skip)


def note_before_transfer(module: pl.LightningModule, note: Callable[[], object], skip: type) -> None:
    """Call `note` before the hooks of every batch's transfer, until `call_hook_before_transfer`; none for `skip`."""

    def noting(batch: Any, dataloader_idx: int = 0) -> Any:
        if isinstance(batch, skip):
            return batch
        note()
        return type(module)._on_before_batch_transfer(module, batch, dataloader_idx)

    vars(module)["_on_before_batch_transfer"] = noting


def call_hook_before_transfer(module: pl.LightningModule) -> None:
    """Call `on_before_batch_transfer` for every batch again."""
    vars(module).pop("_on_before_batch_transfer", None)


class _Skipping:
    """The module's method, except for batches of one type (also inside lists and dicts of loaders)."""

    def __init__(self, module: pl.LightningModule, skip: type) -> None:
        self.module, self.skip = module, skip

    def __call__(self, batch: Any, dataloader_idx: int = 0) -> Any:
        return (
            batch
            if _holds(batch, self.skip)
            else type(self.module)._on_before_batch_transfer(self.module, batch, dataloader_idx)
        )


def _holds(batch: Any, kind: type) -> bool:
    if isinstance(batch, dict):
        return any(_holds(item, kind) for item in batch.values())
    if isinstance(batch, (list, tuple)):
        return any(_holds(item, kind) for item in batch)
    return isinstance(batch, kind)


NO_BATCH = object()


class _AheadFetcher(PrefetchDataFetcher):
    """Lightning's fetcher, which can be asked for batches before their turn."""

    note: Callable[[], Any]
    notes: list[Any]  # made before each of the batches was fetched
    last: Any = None  # what was noted where an epoch was left
    has_ended: bool = False

    def __iter__(self) -> Any:
        super().__iter__()
        self.notes, self.last = [None] * len(self.batches), None
        self.has_ended = False
        return self

    def reset(self) -> None:
        self.last = self.noted()
        super().reset()
        self.notes = []

    def noted(self) -> Any:
        """Return the note before the first batch that Lightning would not have fetched yet; None without one."""
        return next(iter(self.notes[0 if self.length is not None else self.prefetch_batches :]), self.last)

    def _keep(self, note: Any) -> None:
        if len(self.notes) == len(self.batches):  # else the end was met before
            self.notes.append(note)

    def peek(self, place: int) -> Any:
        """Return the batch that comes `place` batches later; NO_BATCH if there is none."""
        while len(self.batches) <= place and not self.done and not self.has_ended:
            note = self.note()
            try:
                batch = DataFetcher.__next__(self)
            except StopIteration:
                self.done, self.has_ended = not self.batches, True
                self._keep(note)
                break
            if self.length is not None:  # batches are counted when their turn comes
                self.fetched, self.done = self.fetched - 1, False
                if self.fetched + len(self.batches) + 1 > self.length:
                    break
            self._keep(note)
            self.batches.append(batch)
        return self.batches[place][0] if place < len(self.batches) else NO_BATCH

    def __next__(self) -> Any:
        if self.length is None:
            note, self.notes = self.note(), self.notes[1:]
            waiting = len(self.batches) - 1
            batch = super().__next__()
            if len(self.notes) <= waiting:  # else the end was met before
                self.notes.append(note)
            return batch
        if not self.batches:
            return super().__next__()
        self.notes.pop(0)
        self.fetched += 1
        self.done = self.fetched >= self.length
        return self.batches.pop(0)


def training_loaders(trainer: pl.Trainer) -> list[Any]:
    """Return the loaders of a fit, once it has them."""
    combined: CombinedLoader | None = trainer.fit_loop._combined_loader
    return [] if combined is None else [*combined.flattened]


def can_peek(trainer: pl.Trainer) -> bool:
    """Return whether training batches can be fetched before their turn."""
    return type(trainer.fit_loop._data_fetcher) in (PrefetchDataFetcher, _AheadFetcher)


def fetched_early(trainer: pl.Trainer) -> list[Any] | None:
    """Return batches that wait for their turn; None where Lightning fetches some early itself, or from many loaders."""
    fetcher: Any = trainer.fit_loop._data_fetcher
    is_plain = isinstance(fetcher, _AheadFetcher) and fetcher.length is not None and len(training_loaders(trainer)) == 1
    return [batch for batch, *_ in fetcher.batches] if is_plain else None


def noted_ahead(trainer: pl.Trainer) -> Any:
    """Return what was noted before the first training batch that was fetched early; None if there is none."""
    fetcher: Any = trainer.fit_loop._data_fetcher
    return fetcher.noted() if isinstance(fetcher, _AheadFetcher) else None


def peek_at(trainer: pl.Trainer, place: int, note: Callable[[], Any]) -> Any:
    """Return the training batch that comes `place` batches after the next one; NO_BATCH if there is none.

    Args:
        trainer: whose batches.
        place: of the batch.
        note: called before every batch is fetched, for `noted_ahead`.
    """
    fetcher: Any = trainer.fit_loop._data_fetcher
    if type(fetcher) is PrefetchDataFetcher:
        vars(fetcher)["notes"] = [None] * len(fetcher.batches)
        fetcher.__class__ = _AheadFetcher
    if not isinstance(fetcher, _AheadFetcher):
        return NO_BATCH
    fetcher.note = note
    return fetcher.peek(place)


def put_ahead(trainer: pl.Trainer, place: int, batch: Any) -> None:
    """Let the trainer have another object in the place of a batch that was peeked at."""
    fetcher: Any = trainer.fit_loop._data_fetcher
    _, *rest = fetcher.batches[place]
    fetcher.batches[place] = (batch, *rest)
