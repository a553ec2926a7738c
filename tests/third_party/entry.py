"""Run a project by its own entry point in one way, and write its losses, weights and results.

THIRD_PARTY="NAME WAY FOLDER" python -m third_party.entry     (in tests, with the project's own Python)

The names stand in the environment: the commands of projects read `sys.argv`, and other ranks are started with it.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WAYS = ("one", "default", "split")
"""One device; two ranks with default options; two ranks with `layout="1-1"`."""

RELOAD = "reload"  # in a process of its own: one device reads what the run has written

OPTIONS = "LIGHTNING_PIPE"  # options for projects that take the strategy's name only
TRAINERS = ("lightning.pytorch", "pytorch_lightning")


@dataclass(frozen=True)
class Way:
    """Where a run writes, and the arguments of the Trainer that differ between runs."""

    name: str
    folder: Path

    @property
    def devices(self) -> int:
        return 1 if self.name == "one" else 2

    @property
    def strategy_name(self) -> str:
        """Return the strategy for a project that takes a name; options come from the environment."""
        import lightning_pipe  # noqa: F401 - registers the name

        if self.name == "split":
            os.environ[OPTIONS] = "layout=1-1"
        return "auto" if self.name == "one" else "dapple"

    @property
    def strategy(self) -> Any:
        if self.name != "split":
            return self.strategy_name
        from lightning_pipe import DappleStrategy

        return DappleStrategy(layout="1-1")

    @property
    def trainer(self) -> dict[str, Any]:
        return {"accelerator": "cpu", "devices": self.devices, "strategy": self.strategy}

    @property
    def trainer_by_name(self) -> dict[str, Any]:
        """Return the same for a project that makes several Trainers of them: Lightning takes a strategy object once."""
        return {"accelerator": "cpu", "devices": self.devices, "strategy": self.strategy_name}


def is_first_rank() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


class Record:
    """What every Trainer of this process has computed: losses of steps, logged values, weights."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.metrics: dict[str, float] = {}
        self.layout: str | None = None
        self.module: Any = None
        self.started_s = self.first_step_s = 0.0

    def watch(self, package: Any) -> None:
        """Add a callback to every fit with this package."""
        fit, record = package.Trainer.fit, self

        class Recorder(package.Callback):  # type: ignore[misc, name-defined]
            def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *rest: Any) -> None:
                record.first_step_s = record.first_step_s or time.perf_counter() - record.started_s
                loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
                record.losses += [] if loss is None else [float(loss)]

        def recorded_fit(trainer: Any, *args: Any, **options: Any) -> Any:
            record.started_s = record.started_s or time.perf_counter()
            trainer.callbacks.append(Recorder())
            fitted = fit(trainer, *args, **options)
            record.module = trainer.lightning_module
            record.layout = getattr(getattr(trainer.strategy, "config", None), "layout", None)
            record.metrics |= {name: float(value) for name, value in trainer.callback_metrics.items()}
            return fitted

        package.Trainer.fit = recorded_fit

    def weights(self) -> dict[str, Any]:
        return {name: value.detach().clone() for name, value in self.module.named_parameters()}


def failure(error: BaseException, steps: int) -> dict[str, Any]:
    """Return an error as data: its class and text, and the last lines of this package and of all files."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if "lightning_pipe/" in frame.filename]
    places = [f"{'/'.join(Path(f.filename).parts[-3:])}:{f.lineno} {f.name}" for f in (*inside[-1:], *frames[-1:])]
    kinds = {kind.__name__ for kind in type(error).__mro__}
    refused = "PipeError" in kinds and "PipelineError" not in kinds and not steps
    return {"type": type(error).__name__, "text": str(error), "places": places, "refused": refused, "steps": steps}


def main() -> None:
    name, way_name, folder = os.environ["THIRD_PARTY"].split()
    way, record = Way(way_name, Path(folder)), Record()
    import torch

    import third_party.torchvision_operators  # noqa: F401 - before a project imports torchvision

    torch.set_num_threads(1)
    rank = os.environ.get("LOCAL_RANK", "0")
    entry = importlib.import_module(f"third_party.entries.{name}")
    for package in TRAINERS:
        if package in sys.modules:
            record.watch(sys.modules[package])
    try:
        if way_name == RELOAD:
            torch.save(entry.reload(way.folder), way.folder / "reload.pt")
            return
        results = entry.run(way)
        torch.save(
            {
                "losses": record.losses, "metrics": record.metrics, "weights": record.weights(), "results": results,
                "first_step_s": record.first_step_s, "layout": record.layout,
            },
            way.folder / f"{rank}.pt",
        )  # fmt: skip
    except BaseException as error:
        (way.folder / f"{rank}.json").write_text(json.dumps(failure(error, len(record.losses))))
        raise


if __name__ == "__main__":
    main()
