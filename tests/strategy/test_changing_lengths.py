"""Batches whose sequences have other lengths every time: trained as on one device, and traced twice at most."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_pipe.capture import sliced_capture
from ranks.world import World
from strategy.fits import Losses, dapple, make_trainer

LENGTHS, WORDS, WIDTH = (9, 12, 17, 5, 9, 21, 3, 12, 30), 13, 8
ROUNDING = 1e-9


class Net(pl.LightningModule):
    """Predicts the next word from the mean of those before; `counts` keeps a trace from holding for other lengths."""

    def __init__(self, counts: bool = False) -> None:
        super().__init__()
        self.words, self.dense, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)
        self.counts, self.lengths = counts, []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        h = torch.tanh(self.dense(self.words(batch[:, :-1]).cumsum(1) / batch.shape[1]))
        if self.counts:
            h = h * sum(1 for _ in range(batch.shape[1]))
        self.lengths.append(batch.shape[1])
        loss = nn.functional.cross_entropy(self.head(h).flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def fitted(options: dict[str, Any] | None, counts: bool = False) -> tuple[list[float], list[int], int]:
    """Return losses, lengths that the step has noted, and how often it was traced; a worker function."""
    torch.manual_seed(0)
    module, losses, traced = Net(counts).double(), Losses(), []
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(WORDS, (4, length), generator=generator) for length in LENGTHS]
    trainer = make_trainer("auto" if options is None else dapple(**options), max_epochs=1, callbacks=[losses])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            sliced_capture, "trace", lambda request, trace=sliced_capture.trace: traced.append(1) or trace(request)
        )
        trainer.fit(module, DataLoader(batches, batch_size=None))
    return losses.losses, module.lengths, len(traced)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("options", [{"capture": "joint"}, {}, {"capture": "replay"}])
def test_lengths_that_change_train_as_on_one_device(options: dict[str, Any]) -> None:
    expected, lengths, _ = fitted(None)
    for found, noted, traced in World(2).run(fitted, {"layout": "1-1", "microbatches": 2, **options}):
        assert found == pytest.approx(expected, rel=ROUNDING)
        assert noted == lengths == [*LENGTHS]
        assert traced <= 2


def test_a_step_that_counts_its_words_in_python_is_traced_for_every_length() -> None:
    expected, lengths, _ = fitted(None, True)
    found, noted, traced = fitted({"microbatches": 2, "capture": "joint", "cache": "off"}, True)
    assert found == pytest.approx(expected, rel=ROUNDING)
    assert noted == lengths
    assert len({*LENGTHS}) <= traced <= 2 * len({*LENGTHS})


class Image(pl.LightningModule):
    """Divides by the height of its images, which a trace for other widths has as a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 1, 3, padding=1)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(batch))).square().mean() / batch.shape[2]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def image_losses(strategy: Any) -> list[float]:
    torch.manual_seed(0)
    module, losses, generator = Image().double(), Losses(), torch.Generator().manual_seed(1)
    sizes = ((8, 8), (8, 12), (12, 8), (12, 12), (8, 10))
    batches = [torch.randn(4, 1, *size, generator=generator, dtype=torch.float64) for size in sizes]
    make_trainer(strategy, max_epochs=1, callbacks=[losses]).fit(module, DataLoader(batches, batch_size=None))
    return losses.losses


def test_a_trace_for_other_widths_is_not_taken_for_other_heights() -> None:
    found = image_losses(dapple(microbatches=2, capture="joint", cache="off"))
    assert found == pytest.approx(image_losses("auto"), rel=ROUNDING)


class Trims(Net):
    """Cuts the padding off, by a length that values say."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        batch = batch[:, : int((batch > 0).sum(1).max())]
        h = torch.tanh(self.dense(self.words(batch[:, :-1])))
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), batch[:, 1:].flatten(), ignore_index=0)


def trimmed(options: dict[str, Any] | None) -> tuple[list[float], list[float]]:
    """Return losses, and sums of parameters; a worker function."""
    torch.manual_seed(0)
    module, losses = Trims().double(), Losses()
    lengths = [*range(4, 12)] * 3
    rows = [torch.cat([torch.arange(1, n + 1) % 11 + 1, torch.zeros(12 - n, dtype=torch.long)]) for n in lengths]
    trainer = make_trainer("auto" if options is None else dapple(**options), max_epochs=1, callbacks=[losses])
    trainer.fit(module, DataLoader(rows, batch_size=8))
    return losses.losses, [float(p.sum()) for p in module.parameters()]


def test_a_step_that_trims_padding_by_values_trains_by_a_plan_whose_stages_exchange_nothing_of_it() -> None:
    """It was refused, since the shapes that crossed stages were those of the longest sequence of the batch."""
    losses, sums = trimmed(None)
    for found in World(2).run(trimmed, {"planner": "auto", "check": True}):
        assert found[0] == pytest.approx(losses, rel=ROUNDING)
        assert found[1] == pytest.approx(sums, rel=ROUNDING)
