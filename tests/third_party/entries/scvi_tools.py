"""scvi-tools: `SCVI.train`, then its latent representation, `save` and `load`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import scvi
from scvi.model import SCVI

from third_party.entry import Way, is_first_rank


def data() -> Any:
    scvi.settings.seed = 0
    cells = scvi.data.synthetic_iid(batch_size=60, n_genes=20, generate_coordinates=False)
    SCVI.setup_anndata(cells, batch_key="batch")
    return cells


def run(way: Way) -> dict[str, Any]:
    cells = data()
    model = SCVI(cells, n_hidden=32, n_latent=5, dropout_rate=0.0)
    model.train(max_epochs=2, batch_size=20, check_val_every_n_epoch=1, **way.trainer)
    if is_first_rank():
        model.save(str(way.folder / "model"))
    return {"latent": model.get_latent_representation()}


def reload(folder: Path) -> dict[str, Any]:
    model = SCVI.load(str(folder / "model"), adata=data(), accelerator="cpu")
    return {"latent": model.get_latent_representation()}
