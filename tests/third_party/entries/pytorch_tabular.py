"""pytorch-tabular: `TabularModel.fit`, whose options are an OmegaConf tree, so that the strategy is a name there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pytorch_tabular import TabularModel
from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
from pytorch_tabular.models import CategoryEmbeddingModelConfig

from third_party.entry import Way


def data() -> pd.DataFrame:
    draw = np.random.default_rng(0)
    table = pd.DataFrame({"a": draw.normal(size=96), "b": draw.normal(size=96), "kind": draw.choice(list("xyz"), 96)})
    table["target"] = table.a - 2 * table.b + (table.kind == "x")
    return table


def run(way: Way) -> dict[str, Any]:
    table = data()
    model = TabularModel(
        data_config=DataConfig(target=["target"], continuous_cols=["a", "b"], categorical_cols=["kind"]),
        model_config=CategoryEmbeddingModelConfig(task="regression", layers="32-16", seed=0),
        optimizer_config=OptimizerConfig(),
        trainer_config=TrainerConfig(
            batch_size=16, max_epochs=2, accelerator="cpu", devices=way.devices, early_stopping=None, checkpoints=None,
            load_best=False, progress_bar="none", trainer_kwargs={"strategy": way.strategy_name},
        ),
    )  # fmt: skip
    model.fit(train=table[:80], validation=table[80:], seed=0)
    model.save_model(str(way.folder / "model"))  # on every rank, since it has the Trainer save a checkpoint
    return {"predictions": model.predict(table[80:])["target_prediction"].to_numpy()}


def reload(folder: Path) -> dict[str, Any]:
    import lightning_pipe  # noqa: F401 - the model has the strategy's name in its options

    model = TabularModel.load_model(str(folder / "model"), map_location="cpu")
    return {"predictions": model.predict(data()[80:])["target_prediction"].to_numpy()}
