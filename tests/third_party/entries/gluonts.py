"""gluonts: `PatchTSTEstimator.train`, which builds the Trainer from a dictionary; then its predictor and the reload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
from gluonts.dataset.common import ListDataset
from gluonts.model.predictor import Predictor
from gluonts.torch.model.patch_tst import PatchTSTEstimator

from third_party.entry import Way, is_first_rank


def data() -> ListDataset:
    draw = np.random.default_rng(0)
    rows = [{"start": "2020-01-01", "target": np.sin(np.arange(80) / 5) + draw.normal(size=80)} for _ in range(4)]
    return ListDataset(rows, freq="D")


def run(way: Way) -> dict[str, Any]:
    pl.seed_everything(0)
    estimator = PatchTSTEstimator(
        prediction_length=4, context_length=16, patch_len=4, d_model=8, nhead=2, dim_feedforward=16, dropout=0.0,
        batch_size=16, num_batches_per_epoch=5,
        trainer_kwargs={**way.trainer, "max_epochs": 2, "precision": "64-true", "default_root_dir": str(way.folder)},
    )  # fmt: skip
    predictor = estimator.train(data())
    if is_first_rank():
        (way.folder / "model").mkdir()
        predictor.serialize(way.folder / "model")
    return {}


def reload(folder: Path) -> dict[str, Any]:
    predictor = Predictor.deserialize(folder / "model")
    predictor.prediction_net.float()  # its data are float32 where no Trainer converts them
    return {"forecast": [forecast.mean for forecast in predictor.predict(data())]}
