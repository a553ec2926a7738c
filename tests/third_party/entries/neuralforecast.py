"""neuralforecast: `NeuralForecast.fit` of NHITS, whose step draws windows of series; then `predict` and `load`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from neuralforecast import NeuralForecast
from neuralforecast.models import NHITS

from third_party.data import series
from third_party.entry import Way, is_first_rank


def run(way: Way) -> dict[str, Any]:
    frame = series().rename(columns={"group": "unique_id", "time": "ds", "value": "y"})
    model = NHITS(
        h=4, input_size=16, max_steps=10, mlp_units=3 * [[16, 16]], batch_size=4, random_seed=0, val_check_steps=5,
        enable_progress_bar=False, precision="64-true", **way.trainer_by_name,
    )  # fmt: skip
    forecasts = NeuralForecast([model], freq=1)
    forecasts.fit(frame, val_size=8)
    if is_first_rank():
        forecasts.save(str(way.folder / "model"), overwrite=True)
    return {"forecast": forecasts.predict()["NHITS"].to_numpy()}


def reload(folder: Path) -> dict[str, Any]:
    forecasts = NeuralForecast.load(str(folder / "model"))
    forecasts.models[0].trainer_kwargs["devices"] = 1  # it keeps the number, and not the strategy
    return {"forecast": forecasts.predict()["NHITS"].to_numpy()}
