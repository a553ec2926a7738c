"""A checkpoint of a pipeline is that of one device, and each loads the other's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from models.parity import make_loader, make_module
from ranks.world import World
from strategy.fits import Losses, assert_same, dapple, fitted, make_trainer

F64 = {"dtype": torch.float64}


def train(name: str, options: dict[str, Any] | None, *, epochs: int, save: str | None = None, load: str | None = None):
    """Fit, from a checkpoint if one is given, and save one afterwards if wanted; a worker function."""
    strategy = "auto" if options is None else dapple(**options)
    module, losses = make_module(name, **F64).train(), Losses()
    trainer = make_trainer(strategy, max_epochs=epochs, callbacks=[losses])
    torch.manual_seed(5)
    loaders = make_loader(name, **F64), make_loader(name, seed=1, **F64)
    trainer.fit(module, *loaders, ckpt_path=load)
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


@pytest.mark.parametrize(("name", "layout"), [("parameter_groups", "1-1"), ("gpt_tied", "2-1")])
def test_a_checkpoint_holds_what_one_device_would_have_saved(name: str, layout: str, tmp_path: Path) -> None:
    theirs, ours = str(tmp_path / "plain.ckpt"), str(tmp_path / "pipeline.ckpt")
    train(name, None, epochs=1, save=theirs)
    World(sum(map(int, layout.split("-")))).run(train_and_save, name, {"layout": layout, "microbatches": 2}, ours)
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


def train_and_save(name: str, options: dict[str, Any], path: str) -> None:
    train(name, options, epochs=1, save=path)


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
