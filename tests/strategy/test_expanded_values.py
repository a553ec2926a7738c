"""A value that lies several times in the same place (stride 0) comes to another rank as kernels may read it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_pipe.capture.graphs import sample_flow
from lightning_pipe.capture.steps.stage_program import memory_order
from lightning_pipe.errors import CaptureError
from ranks.world import World
from strategy.fits import Losses, checked, dapple, make_trainer


@pytest.mark.parametrize(
    ("strides", "order"),
    [((16, 4, 1), ()), ((1, 8), (1, 0)), ((0, 1), ()), ((16, 4, 0, 1), (2, 0, 1, 3)), ((4, 1, 0), (2, 0, 1)), ((), ())],
)
def test_dimensions_that_lie_nowhere_are_the_slowest(strides: tuple[int, ...], order: tuple[int, ...]) -> None:
    assert memory_order(strides) == order


class MultiQuery(pl.LightningModule):
    """Attention whose heads share keys and values, which are expanded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 16).double(), nn.Linear(16, 16).double()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        keys = torch.tanh(self.a(batch)).view(-1, 4, 1, 4).transpose(1, 2)
        heads = keys[:, :, None].expand(-1, 1, 4, 4, 4).reshape(-1, 4, 4, 4)
        found = F.scaled_dot_product_attention(heads, heads, heads)
        return self.b(found.flatten(1)[:, :16]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fitted(plan: str | None) -> list[float]:
    """Return losses; a worker function."""
    losses, x = Losses(), torch.randn(16, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    trainer = make_trainer("auto" if plan is None else dapple(plan=plan), max_epochs=1, callbacks=[losses])
    trainer.fit(MultiQuery(), DataLoader(x, 8))
    return losses.losses


PLAN = """\
stages:
- {at: '', ranks: [0]}
- {at: _scaled_dot_product_flash_attention_for_cpu, ranks: [1]}
microbatches: 2
"""


def test_attention_reads_expanded_keys_of_another_rank(tmp_path: Path) -> None:
    """Keys came with their fastest dimension elsewhere, and the kernel read other numbers, or beyond the end."""
    (tmp_path / "plan.yaml").write_text(PLAN)
    expected = fitted(None)
    for losses in World(2).run(fitted, str(tmp_path / "plan.yaml")):
        assert losses == pytest.approx(expected, rel=1e-9)


def by_strides(strides: Sequence[int]) -> tuple[int, ...]:
    """Return an order of dimensions that takes one without strides for the fastest."""
    order = tuple(sorted(range(len(strides)), key=lambda dim: -strides[dim]))
    return () if order == tuple(range(len(strides))) else order


def test_what_does_not_survive_a_message_is_seen_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """The captured step ran as one stage in the check, so that no value travelled."""
    monkeypatch.setattr(sample_flow, "memory_order", by_strides)
    with pytest.raises(CaptureError, match="captured"):
        make_trainer(checked(capture="joint"), max_epochs=1).fit(MultiQuery(), DataLoader(torch.ones(8, 8).double(), 8))
