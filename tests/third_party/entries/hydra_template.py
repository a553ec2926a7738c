"""A Hydra application as lightning-hydra-template has it: `_target_` of data, model and Trainer; then predictions."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import hydra
import yaml
from lightning.pytorch import seed_everything
from omegaconf import DictConfig

from third_party.entries.lightning_cli import Net
from third_party.entry import Way

OPTIONS = {
    "seed": 0,
    "data": {"_target_": "third_party.entries.lightning_cli.Data", "batch_size": 8},
    "model": {"_target_": "third_party.entries.lightning_cli.Net", "width": 16},
    "callbacks": {"checkpoint": {"_target_": "lightning.pytorch.callbacks.ModelCheckpoint", "monitor": "val_loss"}},
    "trainer": {
        "_target_": "lightning.pytorch.Trainer", "accelerator": "cpu", "devices": 1, "max_epochs": 2,
        "limit_train_batches": 5, "precision": "64-true", "default_root_dir": "${hydra:runtime.output_dir}",
    },
}  # fmt: skip


def run(way: Way) -> dict[str, Any]:
    way.strategy_name  # noqa: B018 - the name is registered by an import
    overrides = {
        "one": [], "default": ["+trainer.strategy=dapple"],
        "split": ["+trainer.strategy._target_=lightning_pipe.DappleStrategy", "+trainer.strategy.layout=1-1"],
    }  # fmt: skip
    results: dict[str, Any] = {}

    @hydra.main(version_base="1.3", config_path=str(way.folder), config_name="train")
    def train(options: DictConfig) -> None:
        seed_everything(options.seed, workers=True)
        data, model = hydra.utils.instantiate(options.data), hydra.utils.instantiate(options.model)
        callbacks = [hydra.utils.instantiate(callback) for callback in options.callbacks.values()]
        trainer = hydra.utils.instantiate(options.trainer, callbacks=callbacks)
        trainer.fit(model, datamodule=data)
        results["predictions"] = trainer.predict(model, datamodule=data, ckpt_path="best")

    if len(sys.argv) == 1:  # other ranks are started with the arguments that Hydra had
        (way.folder / "train.yaml").write_text(yaml.safe_dump(OPTIONS))
        sys.argv += [f"hydra.run.dir={way.folder}/run", f"trainer.devices={way.devices}", *overrides[way.name]]
    train()
    return results


def reload(folder: Path) -> dict[str, Any]:
    checkpoint = next((folder / "run" / "lightning_logs" / "version_0" / "checkpoints").glob("*.ckpt"))
    return {"weights": Net.load_from_checkpoint(checkpoint, weights_only=True).state_dict()}
