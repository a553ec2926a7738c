"""Modules that are built in `configure_model`, and what is left of their initial values on a rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_pipe.strategy.parameters.pending import Pending


class Late(pl.LightningModule):
    """A module of the parity tests that is built in configure_model."""

    def __init__(self, make: Callable[[], pl.LightningModule]) -> None:
        super().__init__()
        self.make, self.inner = make, None

    def configure_model(self) -> None:
        if self.inner is None:
            self.inner = self.make()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.inner.training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.inner.validation_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Start(pl.Callback):
    """Keep the parameters of this rank as training begins, and how many bytes had no values before."""

    def __init__(self) -> None:
        self.values: dict[str, torch.Tensor] = {}
        self.pending = 0

    def setup(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        make = trainer.strategy.setup

        def counting(trainer: pl.Trainer) -> None:
            self.pending = sum(p.nbytes for p in module.parameters() if isinstance(p, Pending))
            make(trainer)

        trainer.strategy.setup = counting

    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        assert trainer.global_rank >= 0, "who asks for its rank gets nothing from others"
        here = {name: p for name, p in module.named_parameters() if type(p) is nn.Parameter}
        self.values = {name: p.detach().clone() for name, p in here.items()}


class Construction(nn.Module):
    """Whatever constructors do: they initialise, copy, tie, index, read values and keep tensors where nobody looks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 30)
        nn.init.orthogonal_(self.first.weight)
        nn.init.trunc_normal_(self.first.bias)
        self.recurrent, self.attention = nn.LSTM(5, 7, 2), nn.MultiheadAttention(8, 2)
        self.normed = nn.utils.parametrizations.spectral_norm(nn.Linear(20, 30))
        self.weighed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
        self.rotation = nn.utils.parametrizations.orthogonal(nn.Linear(6, 6))
        self.tied, self.copied = nn.Linear(20, 30), copy.deepcopy(self.first)
        self.tied.weight = self.first.weight
        self.embedding = nn.Embedding(30, 20, padding_idx=0)
        with torch.no_grad():
            self.embedding.weight[3:5] = 1.0
            self.embedding.weight[7].normal_()
        self.register_buffer("mask", torch.ones(5, 5).tril())
        self.tables = [torch.arange(4.0) * 2, (torch.rand(3), {"in": torch.eye(2)})]
        self.scaled = nn.Parameter(torch.randn(4, 4) * torch.rand(1).item())
        self.drawn = nn.Parameter(torch.bernoulli(torch.full((30,), 0.3)))
        self.shuffled = nn.Parameter(torch.randn(10)[torch.randperm(10)])
        self.chosen = nn.Parameter(torch.randn(10)[torch.randn(10) > 0])
        self.real = nn.Parameter(torch.eye(3) + torch.tensor([1.0, 2.0, 3.0]))
        self.like = nn.Parameter(torch.randn_like(self.real))
        self.apply(self._initialise)
        self.by_numpy = nn.Parameter(torch.from_numpy(self.first.weight.detach().numpy().copy()))
        self.rates = torch.linspace(0, 0.1, 4).tolist()
        self.seen = nn.Parameter(torch.randn(4, 4))
        self.view = self.seen.data

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            module.weight.data.normal_(0, 0.02)
