"""A checkpoint of a pipeline is that of one device, and each loads the other's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from models.parity import make_loader, make_module
from ranks.world import World
from strategy.fits import Losses, assert_same, dapple, fitted, make_trainer

F64 = {"dtype": torch.float64}


def train(
    name: str,
    options: dict[str, Any] | None,
    *,
    epochs: int,
    save: str | None = None,
    load: str | None = None,
    evaluate: bool = False,
):
    """Fit, from a checkpoint if one is given, and save one afterwards if wanted; a worker function."""
    strategy = "auto" if options is None else dapple(**options)
    module, losses = make_module(name, **F64).train(), Losses()
    trainer = make_trainer(strategy, max_epochs=epochs, callbacks=[losses])
    torch.manual_seed(5)
    loaders = make_loader(name, **F64), make_loader(name, seed=1, **F64)
    trainer.fit(module, *loaders, ckpt_path=load)
    if evaluate:
        trainer.validate(module, loaders[1], verbose=False)
        trainer.predict(module, loaders[1])
    if save is not None:
        trainer.save_checkpoint(save)
    return fitted(trainer, module, losses.losses)


def best_checkpoint(folder: str) -> tuple[str, list[str]]:
    """Fit with a monitored ModelCheckpoint; return the best path and the files that this rank sees."""
    checkpoint = ModelCheckpoint(
        folder, filename="{epoch}-{val_loss:.4f}", monitor="val_loss", save_top_k=2, save_last=True
    )
    trainer = make_trainer(
        dapple(layout="1-1", microbatches=2), max_epochs=3, callbacks=[checkpoint], enable_checkpointing=True
    )
    trainer.fit(
        make_module("dict_batch", **F64), make_loader("dict_batch", **F64), make_loader("dict_batch", seed=1, **F64)
    )
    dist.barrier()
    return checkpoint.best_model_path, sorted(path.name for path in Path(folder).iterdir())


@pytest.mark.parametrize(
    ("name", "layout", "evaluate"),
    [
        pytest.param("parameter_groups", "1-1", False, marks=pytest.mark.slow),
        ("parameter_groups", "1-1", True),
        ("gpt_tied", "2-1", True),
    ],
)
def test_a_checkpoint_holds_what_one_device_would_have_saved(
    name: str, layout: str, evaluate: bool, tmp_path: Path
) -> None:
    theirs, ours = str(tmp_path / "plain.ckpt"), str(tmp_path / "pipeline.ckpt")
    train(name, None, epochs=1, save=theirs, evaluate=evaluate)
    options = {"layout": layout, "microbatches": 2}
    World(sum(map(int, layout.split("-")))).run(train_and_save, name, options, ours, evaluate)
    expected, found = (torch.load(path, weights_only=False) for path in (theirs, ours))
    assert list(found) == list(expected)
    assert list(found["state_dict"]) == list(expected["state_dict"])
    torch.testing.assert_close(found["state_dict"], expected["state_dict"], rtol=1e-9, atol=1e-9)
    for one, two in zip(found["optimizer_states"], expected["optimizer_states"], strict=True):
        assert one["param_groups"] == two["param_groups"]
        assert one["state"].keys() == two["state"].keys()
        torch.testing.assert_close(one["state"], two["state"], rtol=1e-9, atol=1e-9)
    assert found["lr_schedulers"] == expected["lr_schedulers"]
    assert found["loops"]["fit_loop"] == expected["loops"]["fit_loop"]


def train_and_save(name: str, options: dict[str, Any], path: str, evaluate: bool = False) -> None:
    train(name, options, epochs=1, save=path, evaluate=evaluate)


def resume(name: str, options: dict[str, Any], path: str) -> Any:
    return train(name, options, epochs=2, load=path)


@pytest.mark.parametrize("saver", ["plain", "pipeline"])
@pytest.mark.parametrize("loader", ["plain", "pipeline"])
def test_training_goes_on_from_a_checkpoint_whoever_saved_it(saver: str, loader: str, tmp_path: Path) -> None:
    name, path = "parameter_groups", str(tmp_path / "half.ckpt")
    expected = train(name, None, epochs=2)
    expected.losses = expected.losses[3:]
    if saver == "plain":
        train(name, None, epochs=1, save=path)
    else:
        World(2).run(train_and_save, name, {"layout": "1-1", "microbatches": 2}, path)
    if loader == "plain":
        found = [train(name, None, epochs=2, load=path)]
    else:
        found = World(3).run(resume, name, {"layout": "1-1-1", "microbatches": 4, "schedule": "gpipe"}, path)
    for one in found:
        assert_same(one, expected, rtol=1e-9)


def test_all_ranks_agree_on_the_best_checkpoint_and_one_writes_it(tmp_path: Path) -> None:
    (best, files), (other, _) = World(2).run(best_checkpoint, str(tmp_path))
    assert best == other and Path(best).name in files
    assert len(files) == 3 and "last.ckpt" in files


class Averages(pl.LightningModule):
    """Two buffers that the last stage changes: statistics of a BatchNorm, and an average of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.norm, self.three = nn.Linear(6, 16), nn.Linear(16, 16), nn.BatchNorm1d(16), Mean()

    def training_step(self, batch, batch_idx):
        return self.three(self.norm(self.two(torch.tanh(self.one(batch)))))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(16, 1)
        self.register_buffer("average", torch.ones(()))

    def forward(self, x):
        loss = (self.out(x) - 1).square().mean()
        self.average = 0.9 * self.average + 0.1 * loss.detach()
        return loss / self.average


class SavesEachBatch(pl.Callback):
    """Keep the weights of the file that is written after each batch, and the state as it is handed out, on rank 0."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.files: list[Any] = []
        self.states: list[Any] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        trainer.save_checkpoint(self._path)
        state = trainer.strategy.lightning_module_state_dict()
        if trainer.is_global_zero:
            self.files.append(torch.load(self._path, weights_only=False)["state_dict"])
            self.states.append({name: value.clone() for name, value in state.items()})


def save_each_batch(options: dict[str, Any] | None, folder: str) -> tuple[list[Any], list[Any]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module, data = Averages().double(), torch.randn(12, 6, dtype=torch.float64)
    saves = SavesEachBatch(Path(folder) / "now.ckpt")
    strategy = "auto" if options is None else dapple(**options)
    make_trainer(strategy, max_epochs=2, callbacks=[saves]).fit(module, DataLoader(data, batch_size=6))
    return saves.files, saves.states


@pytest.mark.parametrize("capture", ["joint", "replay"])
def test_a_checkpoint_during_training_has_the_buffers_of_all_stages(capture: str, tmp_path: Path) -> None:
    """Buffers were put back to the value of rank 0 before the file was written."""
    expected, _ = save_each_batch(None, str(tmp_path))
    options = {"layout": "1-1", "microbatches": 1, "capture": capture}
    files, states = World(2).run(save_each_batch, options, str(tmp_path))[0]
    assert len(files) == len(states) == len(expected) == 4
    for step, one in enumerate(expected):
        for found in (files[step], states[step]):
            torch.testing.assert_close(found, one, rtol=1e-9, atol=1e-9, check_device=False)
    assert not torch.equal(expected[0]["norm.running_mean"], expected[1]["norm.running_mean"])
