"""What we touch of Lightning without its promise is still there, and does what we think."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.trainer.states import RunningStage

import lightning_pipe.strategy as package
from lightning_pipe.strategy import lightning_private as private
from lightning_pipe.strategy.loop import PipelineOptimization
from models.parity import make_loader, make_module
from strategy.fits import make_trainer


def test_private_names_of_lightning_are_in_one_file() -> None:
    folder = Path(package.__file__).parent
    pattern = re.compile(r"from lightning[\w.]* import .*\b_[a-z]\w*|fit_loop\._|epoch_loop\._|trainer\._|module\._on_")
    found = {
        f"{path.name}: {line.strip()}"
        for path in folder.glob("*.py")
        if path.name != "lightning_private.py"
        for line in path.read_text().splitlines()
        if pattern.search(line)
    }
    assert found == set()


def test_the_loop_of_a_batch_hangs_where_we_put_ours() -> None:
    trainer = make_trainer("auto")
    before = private.swap_optimization(trainer, loop := PipelineOptimization(trainer, before_zeroing=lambda: None))
    assert type(before) is private.AutomaticOptimization
    assert trainer.fit_loop.epoch_loop.automatic_optimization is loop
    assert private.swap_optimization(trainer, before) is loop


def test_a_closure_runs_step_then_backward_and_takes_no_other_functions() -> None:
    assert list(inspect.signature(private.Closure).parameters) == ["step_fn", "backward_fn", "zero_grad_fn"]
    source = inspect.getsource(private.Closure.closure)
    assert source.index("_step_fn()") < source.index("_zero_grad_fn()") < source.index("_backward_fn(step_output")


def test_the_fit_loop_can_be_asked_for_its_data_early() -> None:
    module, trainer = make_module("dict_batch"), make_trainer("auto", max_epochs=1, limit_val_batches=0)
    seen: list[int] = []

    class Asks(pl.Callback):
        def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            loaders = private.train_loaders(trainer)
            seen.append(len(loaders.flattened))
            private.forget_loader_states(trainer)

    trainer.callbacks.append(Asks())
    trainer.fit(module, make_loader("dict_batch"))
    assert seen == [1]


def test_the_hook_before_the_transfer_is_skipped_for_stand_ins_only() -> None:
    module = make_module("dict_batch")
    called: list[object] = []
    module.on_before_batch_transfer = lambda batch, dataloader_idx: called.append(batch) or batch  # type: ignore[method-assign]
    module.trainer = make_trainer("auto")
    module.trainer._data_connector.attach_datamodule(module)
    module.trainer.strategy.connect(module)
    private.skip_hook_before_transfer(module, complex)
    for batch in (1j, {"a": [1j]}, 3):
        assert module._on_before_batch_transfer(batch) is batch
    private.call_hook_before_transfer(module)
    module._on_before_batch_transfer(1j)
    assert called == [3, 1j]


@pytest.mark.parametrize("name", [n for n in ("WeightAveraging", "EMAWeightAveraging") if hasattr(callbacks, n)])
def test_a_callback_that_averages_goes_through_weights_in_three_methods(name: str) -> None:
    callback, module = getattr(callbacks, name)(), make_module("dict_batch")
    assert private.keeps_average(callback) and private.average_of(callback) is None
    assert private.device_of_average(callback) is None
    undo = private.copy_on_host(callback, module)
    callback.setup(make_trainer("auto"), module, "fit")
    undo()
    assert type(private.average_of(callback)) is type(module) and "setup" not in vars(callback)
    assert all(callable(getattr(owner, method)) for owner, method in private.averaging_methods(callback))


def test_stochastic_averaging_goes_through_weights_in_two_methods_and_moves_its_copy() -> None:
    callback, module = callbacks.StochasticWeightAveraging(1e-2), make_module("dict_batch")
    callback.setup(make_trainer("auto"), module, "fit")
    assert private.is_lightnings(callback, "StochasticWeightAveraging") and private.function_of_all(callback) is None
    assert private.average_of(callback) is private.averaged_model(callback) is not None
    assert private.device_of_average(callback) == torch.device("cpu")
    assert all(callable(getattr(owner, method)) for owner, method in private.averaging_methods(callback))


def test_every_private_name_is_described() -> None:
    text = private.__doc__ or ""
    for name in ("_AutomaticOptimization", "Closure", "_SubprocessScriptLauncher", "_MultiProcessingLauncher"):
        assert name in text
    source = inspect.getsource(private)
    used = set(re.findall(r"\b_[a-z][a-z_]+\b", source.split('"""', 2)[2]))
    own = {"_holds", "_inside", "_keep", "_with_call"}
    assert {name for name in used - own if name not in text} == set()


def test_a_throughput_monitor_keeps_what_it_measures_with_by_stage() -> None:
    monitor, trainer = ThroughputMonitor(len), make_trainer("auto", max_epochs=1)
    assert private.throughputs(monitor) == []
    trainer.state.stage = RunningStage.VALIDATING
    monitor.setup(trainer, make_module("dict_batch"), "validate")
    (found,) = private.throughputs(monitor)
    assert found.world_size == 1 and hasattr(found, "available_flops")


def test_ranks_are_started_by_the_command_of_a_program_that_is_run() -> None:
    module = importlib.import_module("lightning.pytorch.strategies.launchers.subprocess_script")
    interpreter, *words = module._basic_subprocess_cmd()
    with private.prefixed_commands(("-m", "lightning_pipe", "run")):
        assert module._basic_subprocess_cmd() == [interpreter, "-m", "lightning_pipe", "run", *words]
    assert module._basic_subprocess_cmd() == [interpreter, *words]
