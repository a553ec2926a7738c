"""nequip: its command `nequip-train`, a Hydra application, on molecules with energies and forces; then its own test."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning  # noqa: F401 - nequip's configurations name its Trainer
import numpy as np
import yaml
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import write

from third_party.entry import Way

ELEMENTS = ["C", "H", "O"]


def molecules(path: str) -> None:
    draw = np.random.default_rng(0)
    frames = []
    for _ in range(32):
        places = np.array([[0, 0, 0], [1.1, 0, 0], [0, 1.1, 0], [0, 0, 1.2]]) + draw.normal(scale=0.1, size=(4, 3))
        atoms = Atoms("CHHO", positions=places)
        atoms.calc = SinglePointCalculator(atoms, energy=float((places**2).sum()), forces=-2 * places)
        frames.append(atoms)
    write(path, frames)


def run(way: Way) -> dict[str, Any]:
    folder = way.folder
    strategies = {
        "one": "auto", "default": {"_target_": "lightning_pipe.DappleStrategy"},
        "split": {"_target_": "lightning_pipe.DappleStrategy", "layout": "1-1"},
    }  # fmt: skip
    loader = {"_target_": "torch.utils.data.DataLoader", "batch_size": 4}
    coefficients = {"total_energy": 1.0, "forces": 1.0}
    metrics = {"_target_": "nequip.train.EnergyForceMetrics", "coeffs": {"total_energy_mae": 1.0, "forces_mae": 1.0}}
    options = {
        "run": ["train", "test"],
        "hydra": {"run": {"dir": str(folder / "run")}},
        "data": {
            "_target_": "nequip.data.datamodule.ASEDataModule", "seed": 1,
            "split_dataset": {"file_path": str(folder / "molecules.xyz"), "train": 20, "val": 6, "test": 6},
            "transforms": [
                {"_target_": "nequip.data.transforms.ChemicalSpeciesToAtomTypeMapper", "model_type_names": ELEMENTS},
                {"_target_": "nequip.data.transforms.NeighborListTransform", "r_max": 4.0},
            ],
            "train_dataloader": {**loader, "shuffle": True}, "val_dataloader": loader, "test_dataloader": loader,
            "stats_manager": {"_target_": "nequip.data.CommonDataStatisticsManager", "type_names": ELEMENTS},
        },
        "trainer": {
            "_target_": "lightning.Trainer", "accelerator": "cpu", "devices": way.devices,
            "strategy": strategies[way.name], "max_epochs": 2, "default_root_dir": str(folder),
        },
        "training_module": {
            "_target_": "nequip.train.NequIPLightningModule",
            "loss": {"_target_": "nequip.train.EnergyForceLoss", "per_atom_energy": True, "coeffs": coefficients},
            "val_metrics": metrics, "test_metrics": metrics,
            "optimizer": {"_target_": "torch.optim.Adam", "lr": 0.01},
            "model": {
                "_target_": "nequip.model.NequIPGNNModel", "seed": 1, "model_dtype": "float64", "compile_mode": "eager",
                "type_names": ELEMENTS, "r_max": 4.0, "num_layers": 2, "l_max": 1, "num_features": 8, "parity": True,
                "per_type_energy_scales": 1.0, "per_type_energy_shifts": 0.0, "avg_num_neighbors": 3.0,
            },
        },
    }  # fmt: skip
    if len(sys.argv) == 1:  # other ranks are started with the arguments that Hydra had
        molecules(str(folder / "molecules.xyz"))
        (folder / "config.yaml").write_text(yaml.safe_dump(options))
        sys.argv += ["--config-dir", str(folder), "--config-name", "config"]
    from nequip.scripts.train import main

    main()
    return {}


def reload(folder: Path) -> dict[str, Any]:
    from nequip.model.saved_models.load_utils import load_saved_model
    from nequip.utils.global_state import set_global_state

    set_global_state()
    checkpoint = next((folder / "lightning_logs" / "version_0" / "checkpoints").glob("*.ckpt"))
    model = load_saved_model(str(checkpoint))
    return {"weights": [value.detach() for value in model.parameters()]}
