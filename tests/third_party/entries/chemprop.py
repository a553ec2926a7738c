"""chemprop: its commands `train` and `predict`, on random molecules."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

import pandas as pd
from chemprop.cli.main import main

from third_party.entry import Way


def command(*words: str) -> None:
    sys.argv = ["chemprop", *words]
    main()


def run(way: Way) -> dict[str, Any]:
    draw = random.Random(0)
    smiles = [
        "".join(draw.choice(["C", "N", "O", "c1ccccc1", "C(=O)"]) for _ in range(draw.randint(3, 9))) for _ in range(50)
    ]
    data, model = way.folder / "molecules.csv", way.folder / "model"
    pd.DataFrame({"smiles": smiles, "y": [text.count("C") + 0.5 * text.count("N") for text in smiles]}).to_csv(
        data, index=False
    )
    if way.name != "one":
        os.environ["PL_TRAINER_STRATEGY"] = (
            way.strategy_name
        )  # Lightning's own variable: the command has no such option
    command(
        "train", "--data-path", str(data), "--output-dir", str(model), "--epochs", "2", "--warmup-epochs", "1",
        "--batch-size", "8", "--accelerator", "cpu", "--devices", str(way.devices), "--num-workers", "0",
        "--pytorch-seed", "0", "--message-hidden-dim", "32", "--ffn-hidden-dim", "32",
    )  # fmt: skip
    return {}


def reload(folder: Path) -> dict[str, Any]:
    command(
        "predict", "--test-path", str(folder / "molecules.csv"),
        "--model-paths", str(folder / "model" / "model_0" / "best.pt"),
        "--preds-path", str(folder / "predictions.csv"), "--accelerator", "cpu", "--devices", "1",
    )  # fmt: skip
    return {"predictions": pd.read_csv(folder / "predictions.csv")["y"].to_numpy()}
