"""Entry of the zoo: a module in the style of real projects, a batch, and what capture makes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch


@dataclass(frozen=True)
class Entry:
    """One module.

    Attributes:
        make_module: builds it, from torch's random state.
        make_batch: makes a batch with this number of samples, from torch's random state.
        expected: "joint" if one graph holds its training step; "manual optimization"; or words of the refusal.
    """

    make_module: Callable[[], pl.LightningModule]
    make_batch: Callable[[int], Any]
    expected: str = "joint"


class Trained(pl.LightningModule):
    """A module with the optimizer that most projects begin with."""

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def images(samples: int, *, channels: int = 3, size: int = 8, classes: int = 5):
    return torch.randn(samples, channels, size, size), torch.randint(classes, (samples,))


def tokens(samples: int, *, length: int = 6, vocabulary: int = 29):
    text = torch.randint(vocabulary, (samples, length + 1))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def vectors(samples: int, *, features: int = 6, classes: int = 4):
    return torch.randn(samples, features), torch.randint(classes, (samples,))


def numbers(samples: int, *, features: int = 6):
    return torch.randn(samples, features), torch.randn(samples)
