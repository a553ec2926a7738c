"""Data modules, data sets, samplers and hooks that keep state or draw random numbers train as on one device."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torchmetrics
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, random_split

from strategy.small import LAYOUTS, Named, Small, assert_as_on_one_device, loader, run, samples


class WritesToBatch(Small):
    """A hook that writes numbers and texts into the batch, others in every batch."""

    data = staticmethod(lambda: DataLoader(Named(), 4))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        batch["weight"], batch["kind"] = 1.0 + batch_idx % 3, "odd" if batch_idx % 2 else "even"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scale = {"odd": 0.5, "even": 1.0}.get(batch.get("kind"), 9.0)
        return batch.get("weight", 7.0) * scale * self.loss((batch["x"], batch["y"]))


class Data(pl.LightningDataModule):
    """Hooks of the transfer that draw from a generator, count and remember."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.seen = np.random.default_rng(1), 0
        self.means: list[float] = []

    def train_dataloader(self) -> Any:
        return loader()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.note(batch)
        return batch[0] * self.generator.random(), batch[1]

    def note(self, batch: Any) -> None:
        self.seen += 1
        self.means.append(float(batch[0].mean()))
        self.largest = float(batch[0].max())


class DataHooks(Small):
    data = Data

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        data = self.trainer.datamodule
        self.noted.append((data.seen, list(data.means), data.largest, data.generator.bit_generator.state["state"]))
        for group in self.optimizers().param_groups:
            group["lr"] = 0.1 / (1 + data.seen)


GENERATOR = np.random.default_rng(5)


class Noisy(Dataset[Any]):
    """Samples with noise from generators of its own and of this file, whose strength depends on how many there were."""

    asked = 0

    def __init__(self) -> None:
        self.x, self.y = samples().tensors
        self.helpers = [(np.random.RandomState(2), torch.Generator().manual_seed(3)), {"python": random.Random(4)}]
        self.counts = [0]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        (numpys, torchs), others = self.helpers
        self.counts[0] += 1
        Noisy.asked += 1
        noise = numpys.rand() + others["python"].random() + GENERATOR.random()
        noise += float(torch.rand((), generator=torchs)) + self.counts[0] / 10 + Noisy.asked / 10
        return self.x[index] + 0.1 * noise, self.y[index]


def noisy() -> Any:
    GENERATOR.bit_generator.state = np.random.default_rng(5).bit_generator.state
    Noisy.asked = 0
    return DataLoader(Noisy(), 4)


class NoisyData(Small):
    data = staticmethod(noisy)


class Buckets(Sampler[Any]):
    """Batches in an order that NumPy draws, within one that this sampler shuffles in place."""

    def __init__(self) -> None:
        self.order, self.epochs, self.places = list(range(20)), 0, np.arange(20)

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[Any]:
        self.epochs += 1
        random.Random(self.epochs).shuffle(self.order)
        np.random.RandomState(self.epochs).shuffle(self.places)
        for i in np.random.permutation(5):
            yield [self.order[self.places[k]] for k in range(4 * i, 4 * i + 4)]


class StartOfFit(Small):
    """Hooks before the first batch that draw numbers, as the order of batches does."""

    data = staticmethod(lambda: DataLoader(samples(), batch_sampler=Buckets()))
    scale = 1.0

    def draw(self) -> None:
        self.scale = 1 + float(np.random.rand())
        self.noted.append(self.scale)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * self.scale

    def on_fit_start(self) -> None:
        self.draw()

    def on_train_epoch_start(self) -> None:
        self.draw()


class Splits(Small):
    """Loaders that split the data at random: training and validation share samples if they see other numbers."""

    data = None

    def train_dataloader(self) -> Any:
        return DataLoader(random_split(samples(), [12, 8])[0], 4)

    def val_dataloader(self) -> Any:
        split = random_split(samples(), [12, 8])[1]
        self.noted.append(list(split.indices))
        return DataLoader(split, 4)

    def on_train_start(self) -> None:
        self.noted.append(list(self.trainer.train_dataloader.dataset.indices))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))


class Stream(IterableDataset[Any]):
    """A stream that launchers' variables divide."""

    def __iter__(self) -> Iterator[Any]:
        rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        yield from itertools.islice(samples(), rank, None, ranks)


class DividedByLauncher(Small):
    data = staticmethod(lambda: DataLoader(Stream(), 4))


class Once:
    """Batches of a stream that is opened once, and goes on where it was."""

    def __init__(self) -> None:
        self.batches = iter(list(loader(40)))

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self.batches, 5)

    def __len__(self) -> int:
        return 5


class Estimates(Small):
    """Code that asks for the number of steps while optimizers are made, which makes the loaders."""

    data = Once

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        steps = int(self.trainer.estimated_stepping_batches)
        self.noted.append(steps)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Tracked(Small):
    """A metric of every epoch, in an object that copies it."""

    validation = staticmethod(lambda: loader(15, 5, seed=2))

    def __init__(self) -> None:
        super().__init__()
        self.tracker = torchmetrics.MetricTracker(torchmetrics.classification.MulticlassAccuracy(3))

    def on_validation_epoch_start(self) -> None:
        self.tracker.increment()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.tracker.update(self(batch[0]), batch[1])

    def on_validation_epoch_end(self) -> None:
        self.log("accuracy", self.tracker.compute())
        self.noted.append(float(self.tracker.compute()))


KINDS = {
    cls.__name__: cls
    for cls in (WritesToBatch, DataHooks, NoisyData, StartOfFit, Splits, DividedByLauncher, Estimates, Tracked)
}


def fitted(name: str, options: dict[str, Any] | None) -> tuple[Any, ...]:
    """Fit one of them; a worker function."""
    before = {key: os.environ.pop(key, None) for key in ("RANK", "WORLD_SIZE")}
    if options is not None:
        os.environ |= {"RANK": str(torch.distributed.get_rank()), "WORLD_SIZE": str(torch.distributed.get_world_size())}
    try:
        return run(KINDS[name], options)
    finally:
        os.environ |= {key: value for key, value in before.items() if value is not None}


@pytest.mark.sampled
@pytest.mark.parametrize("options", LAYOUTS, ids=lambda options: "-".join(map(str, options.values())))
@pytest.mark.parametrize("name", KINDS)
def test_it_trains_as_on_one_device(name: str, options: dict[str, Any]) -> None:
    """Each had trained on other numbers, or other samples, without a word."""
    assert_as_on_one_device(fitted, name, options)


class StartOfValidation(Small):
    """A number that is drawn when validation starts, behind the numbers that its loader draws."""

    def on_validation_start(self) -> None:
        self.noted.append(float(torch.rand(())))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))


def validated(name: str, options: dict[str, Any] | None) -> tuple[Any, ...]:
    """Validate without a fit; a worker function."""
    return run(StartOfValidation, options, function="validate")


def test_validation_opens_its_loader_before_its_hooks() -> None:
    """Hooks drew what the loader draws on one device."""
    assert_as_on_one_device(validated, "", LAYOUTS[0])


class SetLate(Small):
    """The size of batches is set when the fit starts, and by what validation finds; another depends on neither."""

    validation = staticmethod(lambda: loader(12, 4, 2))
    data = None

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.size, self.asked = way, 4, 0

    def on_fit_start(self) -> None:
        if self.way == "size":
            self.size = 2
        elif self.way == "limit":
            self.trainer.limit_train_batches = 2

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validated", self.loss(batch))
        if self.way == "found":
            self.size = 5

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.noted.append(len(batch[0]))

    def train_dataloader(self) -> Any:
        return self.made()

    def made(self) -> Any:
        return loader(20, self.size)


class LateData(pl.LightningDataModule):
    """A data module whose batch size a callback sets."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 4

    def train_dataloader(self) -> Any:
        return loader(20, self.size)


class SetsSize(pl.Callback):
    def on_fit_start(self, trainer: Any, module: Any) -> None:
        trainer.datamodule.size = 10


class WithData(SetLate):
    data = LateData
    validation = None
    train_dataloader = pl.LightningModule.train_dataloader

    def configure_callbacks(self) -> list[Any]:
        return [SetsSize()]


def set_late(way: str, options: dict[str, Any] | None) -> tuple[Any, ...]:
    return run(lambda: WithData(way) if way == "data" else SetLate(way), options, num_sanity_val_steps=1)


@pytest.mark.sampled
@pytest.mark.parametrize("options", LAYOUTS, ids=lambda options: "-".join(map(str, options.values())))
@pytest.mark.parametrize("way", ["size", "limit", "found", "data"])
def test_what_loaders_are_made_of_may_be_set_before_the_fit_begins(way: str, options: dict[str, Any]) -> None:
    """Loaders are asked for earlier, to plan for the first batch, and kept what they were made of."""
    assert_as_on_one_device(set_late, way, options)


SHARED = np.random.default_rng(11)


def drawn_rows(counts: list[int]) -> Any:
    """Return rows that a generator of this file chooses, and count the call in a list of the caller's."""
    counts.append(len(counts))
    return SHARED.permutation(20)[:8]


class Advances(Small):
    """Making loaders for training or validation advances generators and counters that both share."""

    data = None
    asked = 0

    def __init__(self) -> None:
        super().__init__()
        global SHARED
        SHARED, Advances.asked = np.random.default_rng(11), 0
        self.numpys, self.torchs, self.pythons = np.random.default_rng(1), torch.Generator(), random.Random(1)
        self.calls, self.counts, self.table = 0, [], {"all": {}}

    def made(self, method: str) -> DataLoader[Any]:
        self.calls += 1
        Advances.asked += 1
        self.table["all"][method] = self.calls
        rows = [*drawn_rows(self.counts), *self.numpys.permutation(20)[:4], self.pythons.randrange(20)]
        rows += torch.randperm(20, generator=self.torchs)[: 3 + self.calls].tolist()
        self.rows = rows
        self.noted.append(
            [method, self.calls, Advances.asked, *self.table["all"].items(), *self.counts, *map(int, rows)]
        )
        return DataLoader([samples()[int(row)] for row in rows], 4)

    def on_fit_start(self) -> None:
        self.noted.append([self.calls, hasattr(self, "rows"), len(self.counts), *self.table["all"]])

    def train_dataloader(self) -> Any:
        return self.made("train")


class AdvancesInValidation(Advances):
    """Validation comes first."""

    def val_dataloader(self) -> Any:
        return self.made("validate")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validated", self.loss(batch))


@pytest.mark.parametrize("kind", [Advances, AdvancesInValidation])
def test_a_loader_that_is_made_for_the_plan_leaves_no_trace(kind: type[Advances]) -> None:
    """The next loader was made of what the first call had left."""
    losses, noted, metrics, parameters = run(kind, None)
    found = run(kind, {"layout": "1", "microbatches": 2})
    assert found[1] == noted
    assert found[0] == pytest.approx(losses, rel=1e-9) and found[2] == pytest.approx(metrics, rel=1e-6)
    torch.testing.assert_close(found[3], parameters, rtol=1e-9, atol=1e-9)
