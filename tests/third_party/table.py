"""Projects that train by their own entry points: what pip installs for each, and how two ranks compare with one device.

The code of a project is `entries/NAME.py`. This file imports no torch, since `make projects` reads it without.
"""

from __future__ import annotations

from dataclasses import dataclass

SINGLE, DOUBLE = 1e-4, 1e-6
"""Largest relative difference from one device in float32 and in float64."""

SEEN_ON = "2026-11-29, two cores that other work shares, torch 2.13, Lightning 2.6.6"


@dataclass(frozen=True)
class Seen:
    """How a run on two ranks ended.

    Attributes:
        verdict: `equal`, `differs`, `refused` or `fails`.
        number: largest relative difference of a loss, logged value, weight or result.
        words: what the error or the log says.
        note: what else there is to know.
        first_step_s: seconds from `fit` to the end of the first step.
    """

    verdict: str
    number: str = ""
    words: str = ""
    note: str = ""
    first_step_s: float | None = None

    def __str__(self) -> str:
        verdict = f"{self.verdict}, {self.number}" if self.number else self.verdict
        remarks = [f"“{self.words}”"] * bool(self.words) + [self.note] * bool(self.note)
        return verdict + (f" ({'; '.join(remarks)})" if remarks else "")


@dataclass(frozen=True)
class Project:
    """A project of the package index.

    Attributes:
        release: name and version that were seen.
        packages: what pip installs.
        entry: the entry point.
        tolerance: largest relative difference that counts as equal.
        first_step_s: seconds to the end of the first step on one device.
        default: how two ranks with default options ended.
        split: how two ranks with `layout="1-1"` ended.
    """

    release: str
    packages: str
    entry: str
    tolerance: float
    first_step_s: float
    default: Seen
    split: Seen

    @property
    def package(self) -> str:
        return self.packages.split()[0].partition("[")[0].partition(">")[0]

    @property
    def seen(self) -> dict[str, Seen]:
        return {"default": self.default, "split": self.split}


_TOO_FEW = "can be cut at 0 places between them, too few for 2 stages"
_WHOLE = "training_step takes whole batches, as one micro-batch each"

PROJECTS = {
    "chemprop": Project(
        "chemprop 2.3.1", "chemprop", "`chemprop train`, `chemprop predict`", SINGLE, 0.2,
        default=Seen("equal", "0", words=_WHOLE, first_step_s=10),
        split=Seen("equal", "0", words=_WHOLE, first_step_s=8),
    ),
    "scvi_tools": Project(
        "scvi-tools 1.4.2", "scvi-tools>=1.4", "`SCVI.train`, `SCVI.load`", SINGLE, 0.2,
        default=Seen("differs", "2.4e-2 in the loss", words="draws random numbers", first_step_s=12),
        split=Seen("refused", words=_TOO_FEW),
    ),
    "darts": Project(
        "darts 0.48.1", "darts", "`NBEATSModel.fit`, `predict`, `save`, `load`", DOUBLE, 0.1,
        default=Seen("equal", "2.1e-16", first_step_s=16), split=Seen("equal", "0", first_step_s=8),
    ),
    "pytorch_tabular": Project(
        "pytorch-tabular 1.2.0", "pytorch-tabular requests", "`TabularModel.fit`, `predict`, `load_model`", SINGLE, 0.2,
        default=Seen("equal", "0", first_step_s=10), split=Seen("equal", "0", first_step_s=7),
    ),
    "neuralforecast": Project(
        "neuralforecast 3.3.0", "neuralforecast", "`NeuralForecast.fit`, `predict`, `load`", DOUBLE, 0.4,
        default=Seen("differs", "2.4e-2 in the loss", words="draws random numbers", first_step_s=16),
        split=Seen("differs", "2.4e-2 in the loss", words="draws random numbers", first_step_s=16),
    ),
    "pytorch_forecasting": Project(
        "pytorch-forecasting 1.8.0", "pytorch-forecasting", "`TemporalFusionTransformer.from_dataset`", SINGLE, 0.7,
        default=Seen("equal", "0", first_step_s=11),
        split=Seen(
            "differs", "2.4e-3 in a bias whose gradient is rounding", note="losses by 8.4e-8", first_step_s=11
        ),
    ),
    "gluonts": Project(
        "gluonts 0.17.0", "gluonts[torch] pandas", "`PatchTSTEstimator.train`, `Predictor.deserialize`", DOUBLE, 0.2,
        default=Seen("equal", "7.4e-11", first_step_s=76), split=Seen("equal", "0", first_step_s=75),
    ),
    "nequip": Project(
        "nequip 0.19.1", "nequip", "`nequip-train` with `run: [train, test]`", DOUBLE, 0.3,
        default=Seen(
            "differs", "1.0 in the loss", words="reads world_size = 2", note="its loss is times the ranks, as for DDP",
            first_step_s=10,
        ),
        split=Seen("fails", words=_TOO_FEW, note="in `test`, after training"),
    ),
    "lightly": Project(
        "lightly 1.6.0", "lightly", "SimCLR of its tutorial", DOUBLE, 2.1,
        default=Seen("equal", "0", words=_WHOLE, first_step_s=80),
        split=Seen("equal", "0", words=_WHOLE, first_step_s=91),
    ),
    "finetuning_scheduler": Project(
        "finetuning-scheduler 2.14.1", "finetuning-scheduler", "`FinetuningScheduler`", DOUBLE, 0.1,
        default=Seen("equal", "1.8e-16", first_step_s=24), split=Seen("equal", "0", first_step_s=29),
    ),
    "lightning_cli": Project(
        "lightning 2.6.6", "lightning jsonargparse[signatures]", "`LightningCLI` with a file of options", DOUBLE, 0.1,
        default=Seen("equal", "3.9e-16", first_step_s=38), split=Seen("equal", "0", first_step_s=27),
    ),
    "hydra_template": Project(
        "hydra-core 1.3.8", "hydra-core", "`hydra.main`, as in lightning-hydra-template", DOUBLE, 0.1,
        default=Seen("equal", "4.0e-16", first_step_s=32), split=Seen("equal", "0", first_step_s=22),
    ),
}  # fmt: skip
