"""Lightning's own demos train as on one device, or end before training with one error that says why."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import (
    BoringDataModule,
    BoringDataModuleNoLen,
    BoringModel,
    DemoModel,
    ManualOptimBoringModel,
    RandomDataset,
)
from lightning.pytorch.demos.lstm import LightningLSTM, SequenceSampler, SimpleLSTM
from lightning.pytorch.demos.transformer import LightningTransformer, Transformer
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ranks.world import Raised, World
from slow import slow_but
from strategy.fits import Losses, dapple, make_trainer

VOCABULARY, LENGTH = 20, 6
SINGLE = 1e-5  # rounding in float32, over a few steps


class Tokens(Dataset):
    """Sequences of random tokens with their successors."""

    def __init__(self, sequences: int) -> None:
        self.data = torch.randint(VOCABULARY, (sequences * LENGTH + 1,), generator=torch.Generator().manual_seed(2))

    def __len__(self) -> int:
        return len(self.data) // LENGTH

    def __getitem__(self, index: int):
        start = index * LENGTH
        return self.data[start : start + LENGTH], self.data[start + 1 : start + LENGTH + 1]


class SmallTransformer(LightningTransformer):
    """The demo with few numbers, of tokens that need not be loaded."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY)
        self.model = Transformer(VOCABULARY, ninp=16, nhead=2, nhid=16, nlayers=2, dropout=0.0)

    def prepare_data(self) -> None:
        pass


class SmallLSTM(LightningLSTM):
    """The demo with few numbers, of tokens that need not be loaded."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY)
        self.model = SimpleLSTM(VOCABULARY, ninp=16, nhid=16, nlayers=2, dropout=0.0)

    def prepare_data(self) -> None:
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def boring() -> tuple[pl.LightningModule, Any]:
    return BoringModel(), DataLoader(RandomDataset(32, 24), batch_size=4)


def boring_data() -> tuple[pl.LightningModule, Any]:
    return BoringModel(), BoringDataModule()


def boring_data_without_length() -> tuple[pl.LightningModule, Any]:
    return BoringModel(), BoringDataModuleNoLen()


def demo() -> tuple[pl.LightningModule, Any]:
    return DemoModel(), DataLoader(RandomDataset(32, 24), batch_size=4)


def transformer() -> tuple[pl.LightningModule, Any]:
    return SmallTransformer(), DataLoader(Tokens(24), batch_size=4)


def lstm() -> tuple[pl.LightningModule, Any]:
    tokens = Tokens(24)
    return SmallLSTM(), DataLoader(tokens, batch_sampler=SequenceSampler(tokens, batch_size=4))


def manual() -> tuple[pl.LightningModule, Any]:
    return ManualOptimBoringModel(), DataLoader(RandomDataset(32, 24), batch_size=4)


DEMOS = {f.__name__: f for f in (boring, boring_data, boring_data_without_length, demo, transformer, lstm, manual)}


def fitted(name: str, options: dict[str, Any] | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Fit for six batches on all ranks of this world, or plainly; a worker function."""
    torch.manual_seed(0)
    module, data = DEMOS[name]()
    for part in module.modules():
        if isinstance(part, nn.MultiheadAttention | nn.LSTM):
            part.dropout = 0.0
    losses = Losses()
    torch.manual_seed(1)
    strategy = "auto" if options is None else dapple(witness=True, **options)
    limits = {"limit_train_batches": 6, "limit_val_batches": 2, "max_epochs": 1, "num_sanity_val_steps": 0}
    trainer = make_trainer(strategy, callbacks=[losses], **limits)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, data)
    return losses.losses, {key: value.detach().clone() for key, value in module.state_dict().items()}


def check_like_one_device(name: str, microbatches: int) -> None:
    losses, state = fitted(name, None)
    for found_losses, found in World(2).run(fitted, name, {"layout": "1-1", "microbatches": microbatches}):
        assert found_losses == pytest.approx(losses, rel=SINGLE)
        for key, value in state.items():
            torch.testing.assert_close(found[key], value, rtol=SINGLE, atol=SINGLE, msg=lambda m, k=key: f"{k}: {m}")


CASES = [(name, microbatches) for name in ("boring", "demo", "transformer") for microbatches in (1, 2)]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(("name", "microbatches"), slow_but({*CASES} - {("demo", 1), ("transformer", 1)}, CASES))
def test_a_demo_trains_as_on_one_device(name: str, microbatches: int) -> None:
    check_like_one_device(name, microbatches)


@pytest.mark.parametrize("name", ["boring_data", "boring_data_without_length"])
def test_a_demo_with_batches_of_one_sample_trains_as_on_one_device(name: str) -> None:
    check_like_one_device(name, 1)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_hidden_state_is_handed_on_as_on_one_device(microbatches: int) -> None:
    check_like_one_device("lstm", microbatches)


def test_a_demo_that_optimizes_by_hand_is_refused_before_training() -> None:
    for result in World(2).results(fitted, "manual", {"layout": "1-1"}):
        assert isinstance(result, Raised)
        assert "manual" in result.text.lower()
