"""pytorch-forecasting: a temporal fusion transformer whose loss is a metric; then reload and predict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet
from pytorch_forecasting.metrics import QuantileLoss

from third_party.data import series
from third_party.entry import Way


def run(way: Way) -> dict[str, Any]:
    pl.seed_everything(0)
    training, validation = data()
    model = TemporalFusionTransformer.from_dataset(
        training, hidden_size=8, attention_head_size=2, hidden_continuous_size=4, dropout=0.0, loss=QuantileLoss()
    )
    trainer = pl.Trainer(
        max_epochs=2, limit_train_batches=5, gradient_clip_val=0.1, default_root_dir=way.folder, **way.trainer
    )
    trainer.fit(
        model,
        training.to_dataloader(train=True, batch_size=16, num_workers=0),
        validation.to_dataloader(train=False, batch_size=16, num_workers=0),
    )
    return {}


def reload(folder: Path) -> dict[str, Any]:
    checkpoint = next((folder / "lightning_logs" / "version_0" / "checkpoints").glob("*.ckpt"))
    best = TemporalFusionTransformer.load_from_checkpoint(checkpoint, weights_only=False)
    loader = data()[1].to_dataloader(train=False, batch_size=16, num_workers=0)
    return {"forecast": best.predict(loader, trainer_kwargs={"accelerator": "cpu", "logger": False})}


def data() -> tuple[TimeSeriesDataSet, TimeSeriesDataSet]:
    options = {
        "time_idx": "time", "target": "value", "group_ids": ["group"], "max_encoder_length": 16,
        "max_prediction_length": 4, "time_varying_known_reals": ["time"], "time_varying_unknown_reals": ["value"],
    }  # fmt: skip
    frame = series()
    training = TimeSeriesDataSet(frame[frame.time < 60], **options)
    return training, TimeSeriesDataSet.from_dataset(training, frame, predict=True, stop_randomization=True)
