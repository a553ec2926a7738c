"""A model with more positions to cut at than a planner's tables have starts with the default options, and trains."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.models import GPT
from lightning_pipe import DappleStrategy
from lightning_pipe.planner.candidates.cut_points import MOST_POSITIONS, cuttable
from planner.test_windows import gpt
from ranks.world import World
from strategy.fits import Losses, make_trainer

DEADLINE_S = 540.0
STEPS = 3


def fit_long(folder: str) -> list[float]:
    """Fit a GPT of 24 layers on all ranks of this world, and return its losses."""
    torch.manual_seed(0)
    module = GPT(vocabulary=50, context=16, width=64, depth=24)
    text = DataLoader(TensorDataset(torch.randint(50, (16 * STEPS, 17))), batch_size=16)
    losses = Losses()
    make_trainer(DappleStrategy(cache=folder), max_epochs=1, callbacks=[losses]).fit(module, text)
    return losses.losses


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S + 30)
def test_a_gpt_of_24_layers_trains_with_the_default_options(tmp_path) -> None:
    """It died of a KeyError in the planner, in about half of the starts."""
    assert len(cuttable(gpt(24), sliced=True)) > MOST_POSITIONS
    for losses in World(2).run(fit_long, str(tmp_path), deadline_s=DEADLINE_S):
        assert len(losses) == STEPS
        assert all(map(math.isfinite, losses)), losses
