"""Data for projects, made by seed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import torch
from torch.utils.data import DataLoader, TensorDataset


def series(rows: int = 400) -> pd.DataFrame:
    """Return four noisy sine waves, one after the other."""
    draw = np.random.default_rng(0)
    time = np.tile(np.arange(rows // 4), 4)
    values = np.sin(time / 5) + draw.normal(scale=0.1, size=rows)
    return pd.DataFrame({"time": time, "group": np.repeat(list("abcd"), rows // 4), "value": values})


def tensors(*shapes: tuple[int, ...], batch_size: int = 8) -> DataLoader[Any]:
    """Return a loader of normally distributed samples."""
    random = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(*(torch.randn(*shape, generator=random) for shape in shapes)), batch_size)
