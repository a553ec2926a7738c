"""Batches come in the order of one device, from whatever loader, and ranks that do not need them load nothing."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

from lightning_pipe.runtime.guard.watch import Unwatched
from lightning_pipe.strategy.loading.announcement import checksum
from lightning_pipe.strategy.loading.batch_loading import Feed
from lightning_pipe.strategy.loading.first_batch import look_where_iterated, peek
from lightning_pipe.strategy.ranks.control_plane import ControlPlane
from ranks.world import Raised, World
from strategy.fits import Losses, dapple, make_trainer

SAMPLES, WIDTH = 11, 3
READ: list[int] = []


def sample(index: int) -> torch.Tensor:
    return torch.full((WIDTH,), float(index)) + torch.arange(WIDTH) / 7


class Rows(Dataset):
    """Remember which samples were read in this process."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        READ.append(index)
        return sample(index)


class Stream(IterableDataset):
    """Samples one after another; shuffled by torch's random state if wanted."""

    def __init__(self, shuffle: bool = False) -> None:
        self.shuffle = shuffle

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in torch.randperm(SAMPLES) if self.shuffle else range(SAMPLES):
            READ.append(int(index))
            yield sample(int(index))


class SizedStream(Stream):
    def __len__(self) -> int:
        return SAMPLES


class Batches:
    """An iterable that is no DataLoader."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for start in range(0, SAMPLES - 3, 4):
            yield torch.stack([sample(index) for index in range(start, start + 4)])


class WithoutLength:
    """Batches that are no DataLoader."""

    def __init__(self, batches: list[torch.Tensor]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.batches)


class DrawingRows(Rows):
    """Every sample is disturbed by torch's, NumPy's and Python's random numbers, drawn in this process."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return sample(index) + torch.rand(()) + np.random.rand() + random.random()


def named(rows: list[torch.Tensor]) -> dict[str, Any]:
    return {"x": torch.stack(rows), "names": [f"row {float(row[0])}" for row in rows], "kind": "rows"}


LOADERS = {
    "shuffled": lambda: DataLoader(Rows(), 4, shuffle=True),
    "own sampler": lambda: DataLoader(
        Rows(), 4, sampler=RandomSampler(Rows(), generator=torch.Generator().manual_seed(3))
    ),
    "disturbed": lambda: DataLoader(DrawingRows(), 4, shuffle=True),
    "stream": lambda: DataLoader(Stream(), 4),
    "shuffled stream": lambda: DataLoader(Stream(shuffle=True), 4),
    "sized stream": lambda: DataLoader(SizedStream(shuffle=True), 4),
    "iterable": Batches,
    "names": lambda: DataLoader(Rows(), 4, collate_fn=named),
    "two loaders": lambda: {"x": DataLoader(Rows(), 4, shuffle=True), "other": DataLoader(Rows(), 4)},
    "combined": lambda: CombinedLoader([DataLoader(Rows(), 4), DataLoader(Stream(), 4)], "min_size"),
}


def later(*, other: bool = False, more: bool = False) -> list[torch.Tensor]:
    """Batches of one form that are the same on both ranks at first; then rank 1 has other data, or one more."""
    rank = dist.get_rank()
    batches = [torch.stack([sample(index + i) for i in range(4)]) for index in range(8 + (more and rank))]
    return [batch + rank * (other and index > 4) for index, batch in enumerate(batches)]


MORE = {
    "later different": lambda: DataLoader(later(other=True), batch_size=None),
    "one more": lambda: WithoutLength(later(more=True)),
    "different": lambda: DataLoader(OwnGenerator(), 4),
    "time first": lambda: DataLoader(Rows(), 4, collate_fn=lambda rows: torch.stack([torch.stack(rows)] * 2)),
    "workers": lambda: DataLoader(Rows(), 4, shuffle=True, num_workers=1),
}


class Net(pl.LightningModule):
    """Two layers; whatever the batch is, its tensors are added up."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, 1).double()

    def rows(self, batch: Any) -> torch.Tensor:
        if isinstance(batch, dict):
            return sum(self.rows(value) for value in batch.values() if isinstance(value, (torch.Tensor, dict)))
        if isinstance(batch, (list, tuple)):
            return sum(self.rows(value) for value in batch)
        return batch.double()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.second(torch.tanh(self.first(self.rows(batch)))).square().mean()
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val", self.second(torch.tanh(self.first(self.rows(batch)))).mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(loader: str, options: dict[str, Any] | None, *, seed: int = 1, module: type[Net] = Net) -> tuple[Any, ...]:
    """Fit two epochs; return losses, weights, metrics, and what this process has read."""
    READ.clear()
    pl.seed_everything(seed, verbose=False)
    losses, net = Losses(), module()
    trainer = make_trainer("auto" if options is None else dapple(**options), max_epochs=2, callbacks=[losses])
    trainer.fit(net, {**LOADERS, **MORE}[loader](), [DataLoader(Rows(), 5), DataLoader(Rows(), 4)])
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return losses.losses, [p.detach().sum().item() for p in net.parameters()], metrics, list(READ)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("loader", LOADERS)
def test_batches_are_those_of_one_device(loader: str) -> None:
    expected = fit(loader, None)
    results = World(2).run(fit, loader, {"layout": "1-1", "microbatches": 2})
    for losses, weights, metrics, _ in results:
        assert losses == pytest.approx(expected[0], rel=1e-12)
        assert weights == pytest.approx(expected[1], rel=1e-12)
        assert metrics == pytest.approx(expected[2], rel=1e-12)


def test_batches_of_worker_processes_are_those_of_one_device() -> None:
    losses, weights, *_ = fit("workers", {"microbatches": 2})
    expected = fit("workers", None)
    assert losses == pytest.approx(expected[0], rel=1e-12)
    assert weights == pytest.approx(expected[1], rel=1e-12)


def test_ranks_that_follow_read_no_samples() -> None:
    loading, following = (result[3] for result in World(2).run(fit, "shuffled", {"layout": "1-1"}))
    assert sorted(set(loading)) == list(range(SAMPLES))
    assert following == []


def fit_unseeded(loader: str) -> tuple[Any, ...]:
    return fit(loader, {"layout": "2-1", "microbatches": 2}, seed=torch.distributed.get_rank())


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("loader", ["shuffled", "shuffled stream", "sized stream", "disturbed"])
def test_replicas_load_the_same_without_the_same_seed(loader: str) -> None:
    expected = fit(loader, None, seed=0)
    for losses, weights, *_ in World(3).run(fit_unseeded, loader):
        assert losses == pytest.approx(expected[0], rel=1e-12)
        assert weights == pytest.approx(expected[1], rel=1e-12)


class OwnGenerator(Rows):
    """Draw from a generator that differs from process to process."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return sample(index) + os.getpid() % 1000


def test_replicas_that_load_other_data_are_an_error() -> None:
    results = World(3).results(fit, "different", {"layout": "2-1", "microbatches": 2}, deadline_s=30)
    assert all(isinstance(result, Raised) for result in results)
    assert "loaded other data than rank 0" in results[1].text


@pytest.mark.parametrize(("loader", "found"), [("later different", "other data"), ("one more", "another number")])
def test_replicas_that_come_to_differ_are_an_error_before_they_step(loader: str, found: str) -> None:
    results = World(2).results(fit, loader, {"layout": "2", "microbatches": 1}, deadline_s=30)
    assert all(isinstance(result, Raised) for result in results)
    assert any(f"loaded {found}" in result.text for result in results)


class Transferring(Net):
    """Batches are changed on their way to the device, with random numbers."""

    def on_before_batch_transfer(self, batch: torch.Tensor, dataloader_idx: int) -> torch.Tensor:
        assert not batch.is_meta
        return batch.double() + torch.rand(())

    def on_after_batch_transfer(self, batch: torch.Tensor, dataloader_idx: int) -> Any:
        return {"x": batch.reshape(-1, 1, WIDTH)[:, 0], "more": batch * batch.tolist()[0][0]}


def fit_transferring(options: dict[str, Any] | None) -> tuple[Any, ...]:
    return fit("shuffled", options, module=Transferring)


def test_transfer_hooks_see_real_batches_and_may_change_their_structure() -> None:
    expected = fit_transferring(None)
    for losses, weights, *_ in World(2).run(fit_transferring, {"layout": "1-1", "microbatches": 2}):
        assert losses == pytest.approx(expected[0], rel=1e-12)
        assert weights == pytest.approx(expected[1], rel=1e-12)


class TimeFirst(Net):
    """Samples lie along the second dimension."""

    def rows(self, batch: torch.Tensor) -> torch.Tensor:
        return batch[0].double() + batch[1].double()


def fit_time_first(options: dict[str, Any] | None) -> tuple[Any, ...]:
    READ.clear()
    losses, net = Losses(), TimeFirst()
    trainer = make_trainer("auto" if options is None else dapple(**options), max_epochs=1, callbacks=[losses])
    trainer.fit(net, MORE["time first"]())
    return losses.losses, [p.detach().sum().item() for p in net.parameters()]


@pytest.mark.parametrize("layout", ["1-1", "2-1"])
def test_samples_may_lie_along_another_dimension(layout: str) -> None:
    expected = fit_time_first(None)
    options = {"layout": layout, "microbatches": 2, "batch_dim": 1}
    for losses, weights in World(sum(map(int, layout.split("-")))).run(fit_time_first, options):
        assert losses == pytest.approx(expected[0], rel=1e-12)
        assert weights == pytest.approx(expected[1], rel=1e-12)


def exchanges(loader: str, layout: str, module: type[Net]) -> list[str]:
    """Fit, and return what this rank was told beside programs, or has told."""
    told: list[str] = []
    hear = ControlPlane.hear

    def heard(self: ControlPlane, tensor: torch.Tensor, *, source: int, what: str) -> Any:
        told.append(what)
        return hear(self, tensor, source=source, what=what)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ControlPlane, "hear", heard)
        fit(loader, {"layout": layout}, module=module)
    return told


class Moving(Net):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


@pytest.mark.parametrize(("layout", "module", "again"), [("1-1", Net, False), ("2", Net, False), ("1-1", Moving, True)])
def test_the_structure_of_a_batch_is_told_with_its_announcement(layout: str, module: type[Net], again: bool) -> None:
    for told in World(2).run(exchanges, "shuffled", layout, module):
        announced, structures = (told.count(f"the {what} batch") for what in ("next", "structure of a"))
        shapes = 6  # of whole and last batches: of training, and of the two loaders for validation
        assert announced > 3 * shapes
        messages = structures / 2  # of each its size, and what it is
        assert (messages > announced / 2) if again else (0 < messages <= shapes)


def alone() -> Feed:
    return Feed(ControlPlane(None, rank=0, ranks=1, wait=Unwatched().wait))


@pytest.mark.parametrize("loader", ["shuffled", "own sampler", "disturbed", "stream", "sized stream", "iterable"])
def test_a_look_at_the_first_batch_changes_neither_stream_nor_random_numbers(loader: str) -> None:
    def batches(look: bool) -> tuple[list[torch.Tensor], torch.Tensor]:
        pl.seed_everything(1, verbose=False)
        feed = alone()
        loaders = CombinedLoader(feed.wrap(LOADERS[loader]()), "max_size_cycle")
        first = None
        if look:
            look_where_iterated(make_trainer("auto"), loaders)
            first = peek(loaders)
        feed.assign((0,))
        iter(loaders)
        found = [next(loaders)[0] for _ in range(2)]
        if first is not None and loader != "disturbed":
            assert torch.equal(first, found[0])
        return found, torch.rand(3)

    (plain, numbers), (looked, same_numbers) = batches(False), batches(True)
    assert all(torch.equal(one, two) for one, two in zip(plain, looked, strict=True))
    assert torch.equal(numbers, same_numbers)


def test_other_data_has_another_checksum() -> None:
    batch = [torch.arange(100.0), torch.tensor(3)]
    assert checksum(batch) == checksum([torch.arange(100.0), torch.tensor(3)])
    assert checksum(batch) != checksum([torch.arange(100.0) + 1, torch.tensor(3)])
    assert checksum(batch) != checksum([torch.arange(100.0).reshape(10, 10), torch.tensor(3)])


def test_a_wrapped_loader_is_the_loader_in_everything_else() -> None:
    loader = LOADERS["shuffled"]()
    fed = alone().wrap(loader)
    assert len(fed) == len(loader) and fed.dataset is loader.dataset and fed.batch_size == 4
    fed.worker_init_fn = print
    assert loader.worker_init_fn is print
    with pytest.raises(TypeError):
        len(alone().wrap(Batches()))
