"""`squeeze()` of a micro-batch with one sample leaves the dimension of the samples, as that of the batch does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from strategy.small import LAYOUTS, Small, assert_as_on_one_device, run, samples

LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "both": lambda outputs, y: F.mse_loss(outputs.squeeze(), y.squeeze()),
    "logits": lambda outputs, y: F.binary_cross_entropy_with_logits(outputs.squeeze(), (y > 0).double().squeeze()),
    "features": lambda outputs, y: F.mse_loss(outputs[:, :, None].squeeze().sum(-1), y.squeeze()),
}


def numbers(count: int) -> DataLoader[Any]:
    x = samples(count).tensors[0]
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8)


class Net(Small):
    def __init__(self, loss: str, count: int) -> None:
        super().__init__()
        self.kind, self.data = LOSSES[loss], lambda: numbers(count)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self(batch[0])
        loss = self.kind(outputs if self.kind is LOSSES["features"] else outputs[:, :1], batch[1])
        self.log("loss", loss)
        return loss


def fitted(name: str, options: dict[str, Any] | None) -> tuple[Any, ...]:
    """Fit one of them; a worker function."""
    loss, _, count = name.partition(" ")
    return run(lambda: Net(loss, int(count)), options)


@pytest.mark.sampled
@pytest.mark.parametrize("options", LAYOUTS, ids=lambda options: "-".join(map(str, options.values())))
@pytest.mark.parametrize("count", [17, 18, 19])
@pytest.mark.parametrize("loss", LOSSES)
def test_micro_batches_of_one_sample_train_as_on_one_device(loss: str, count: int, options: dict[str, Any]) -> None:
    """They ended in "Dimension out of range" in the middle of an epoch."""
    assert_as_on_one_device(fitted, f"{loss} {count}", options)
