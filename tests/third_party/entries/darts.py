"""darts: `fit` of N-BEATS, which takes the Trainer's arguments as a dictionary; then `predict`, `save` and `load`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from darts import TimeSeries
from darts.models import NBEATSModel

from third_party.entry import Way


def run(way: Way) -> dict[str, Any]:
    values = np.sin(np.arange(100) / 5) + np.random.default_rng(0).normal(scale=0.1, size=100)
    series = TimeSeries.from_values(values)
    model = NBEATSModel(
        16, 4, num_stacks=2, num_blocks=1, num_layers=2, layer_widths=32, batch_size=16, n_epochs=2, random_state=0,
        pl_trainer_kwargs=way.trainer_by_name,
    )  # fmt: skip
    model.fit(series)
    model.save(str(way.folder / "model.pt"))  # on every rank, since it has the Trainer save a checkpoint
    return {"forecast": model.predict(4).values()}


def reload(folder: Path) -> dict[str, Any]:
    model = NBEATSModel.load(str(folder / "model.pt"), pl_trainer_kwargs={"accelerator": "cpu"})
    return {"forecast": model.predict(4).values()}
