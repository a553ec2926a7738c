"""Hooks that iterate loaders, or draw random numbers of the shapes of gradients, do what they do on one device."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, TensorDataset, random_split

from lightning_pipe.strategy.lightning_private import unwrap_loader_classes
from ranks.world import World
from strategy.small import LAYOUTS, Small, assert_as_on_one_device, loader, run, samples


def trainers_loader(net: Net) -> None:
    """A bank of what the module makes of the data that it trains on."""
    net.noted += [net(x).mean(0).detach() for x, _ in net.trainer.train_dataloader]
    net.noted.append(next(iter(net.trainer.val_dataloaders))[1])
    loaders = net.trainer.train_dataloader, net.trainer.val_dataloaders
    net.noted += [len(each.dataset) for each in loaders if isinstance(each, DataLoader)]


def own_loader(net: Net) -> None:
    for x, _ in DataLoader(samples(8), 4):
        net.noted.append(net(x).detach())


def noise(net: Net) -> None:
    for parameter in net.parameters():
        if parameter.grad is not None:
            parameter.grad.add_(torch.randn_like(parameter.grad) * 0.01)


def dropped(net: Net) -> None:
    for parameter in net.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(torch.bernoulli(torch.full_like(parameter.grad, 0.8)))
            parameter.grad = torch.nn.functional.dropout(parameter.grad, 0.2)


AT_END = {one.__name__: one for one in (trainers_loader, own_loader)}
ON_GRADIENTS = {one.__name__: one for one in (noise, dropped)}


class Net(Small):
    """Shuffles, so that generators of ranks which have drawn unlike numbers are found out."""

    data = staticmethod(lambda: DataLoader(samples(), 4, shuffle=True))
    validation = staticmethod(loader)

    def __init__(self, way: str) -> None:
        super().__init__()
        self.at_end: Callable[[Net], None] = AT_END.get(way, lambda net: None)
        self.on_gradients: Callable[[Net], None] = ON_GRADIENTS.get(way, lambda net: None)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validated", self.loss(batch))

    def on_after_backward(self) -> None:
        self.on_gradients(self)

    def on_train_epoch_end(self) -> None:
        self.at_end(self)
        self.noted.append(torch.rand(2))


def fitted(way: str, options: dict[str, Any] | None) -> tuple[Any, ...]:
    """Fit one of them; a worker function."""
    return run(lambda: Net(way), options)


@pytest.mark.sampled
@pytest.mark.parametrize("options", LAYOUTS, ids=lambda options: "-".join(map(str, options.values())))
@pytest.mark.parametrize("way", [*AT_END, *ON_GRADIENTS])
def test_hooks_do_what_they_do_on_one_device(way: str, options: dict[str, Any]) -> None:
    """Loaders gave what is no batch, or kept ranks from the weights; what was drawn depended on the layout."""
    assert_as_on_one_device(fitted, way, options)


class Late(Net):
    """Its loader needs what is set after it was first asked for."""

    data = None
    validation = None

    def __init__(self, way: str) -> None:
        super().__init__(way)
        self.way = way

    def on_fit_start(self) -> None:
        if self.way == "on_fit_start":
            self.rows = samples()

    def val_dataloader(self) -> DataLoader[Any]:
        if self.way == "val_dataloader":
            self.rows = samples()
        return loader()

    def on_validation_end(self) -> None:
        if self.way == "on_validation_end":
            self.rows = samples()

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.rows, 4, shuffle=True)


def fitted_late(way: str, options: dict[str, Any] | None) -> tuple[Any, ...]:
    """Fit a module whose loader has to wait; a worker function."""
    return run(lambda: Late(way), options)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("options", LAYOUTS, ids=lambda options: "-".join(map(str, options.values())))
@pytest.mark.parametrize("way", ["on_fit_start", "val_dataloader", "on_validation_end"])
def test_a_loader_is_asked_for_again_if_it_needs_what_hooks_set(way: str, options: dict[str, Any]) -> None:
    """It ended in an AttributeError, as a plan needs the first batch before these hooks run."""
    assert_as_on_one_device(fitted_late, way, options)


def ends(way: str) -> str:
    with pytest.raises(Exception) as raised:  # noqa: PT011  # whatever the module raises
        run(lambda: Late(way), {"layout": "1-1", "microbatches": 2})
    unwrap_loader_classes()  # as this process goes on, which Lightning does not expect
    return str(raised.value)


def test_what_an_error_in_a_hook_leaves_on_the_classes_of_loaders_can_be_taken_off() -> None:
    """Lightning wraps them meanwhile: loaders that were made later could not be made again, for `predict`."""
    before = [vars(cls)["__init__"] for cls in (DataLoader, BatchSampler)]
    with pytest.raises(AttributeError, match="rows"):
        run(lambda: Late("never"), None)
    unwrap_loader_classes()
    assert [vars(cls)["__init__"] for cls in (DataLoader, BatchSampler)] == before


def test_a_loader_that_nothing_helps_ends_in_its_own_error_on_every_rank() -> None:
    assert all("no attribute 'rows'" in text for text in World(2).run(ends, "never", deadline_s=60))


class Game:
    """What an agent plays, and what it remembers of that."""

    def __init__(self) -> None:
        self.state, self.seen, self.dice = torch.zeros(2), deque[float](maxlen=9), random.Random(0)

    def play(self) -> None:
        self.state = self.state + 1
        self.seen.append(self.dice.random())


class Plays(Net):
    """Its loader is made of random numbers, and leaves something on the module each time."""

    data = None
    validation = None

    def __init__(self, way: str) -> None:
        super().__init__(way)
        self.calls, self.game, self.way = 0, Game(), way

    @torch.no_grad()
    def rollout(self) -> torch.Tensor:
        self.game.play()
        return torch.randn(8, 4, dtype=torch.float64)

    def train_dataloader(self) -> DataLoader[Any]:
        self.calls += 1
        rows = self.rollout()
        self.noted += [self.calls, self.game.state.clone(), list(self.game.seen), rows.sum()]
        return DataLoader(TensorDataset(rows, torch.arange(8) % 3), 4)


def played(way: str, options: dict[str, Any] | None) -> tuple[Any, ...]:
    """Fit a module whose loader is drawn; a worker function."""
    return run(lambda: Plays(way), options, reload_dataloaders_every_n_epochs=1)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("options", LAYOUTS, ids=lambda options: "-".join(map(str, options.values())))
def test_a_loader_that_is_drawn_leaves_what_one_call_leaves(options: dict[str, Any]) -> None:
    """It is asked for twice, with the same random numbers; what the first call had left was there in the second."""
    assert_as_on_one_device(played, "drawn", options)


class Divides(Net):
    """Divides its samples, which are a long list, by random numbers, some of which a hook draws before."""

    data = None
    validation = None

    def __init__(self, way: str) -> None:
        super().__init__(way)
        x, y = samples(8).tensors
        self.rows = [(x[index % 8], y[index % 8]) for index in range(6_000)]
        self.seen: list[int] = []

    def on_fit_start(self) -> None:
        torch.rand(3)

    def train_dataloader(self) -> DataLoader[Any]:
        chosen, _ = random_split(self.rows, [12, len(self.rows) - 12])
        self.seen += chosen.indices
        self.noted.append(list(self.seen))
        return DataLoader(chosen, 4, shuffle=True)


def divided(way: str, options: dict[str, Any] | None) -> tuple[Any, ...]:
    """Fit a module whose loader is of a part of its samples; a worker function."""
    return run(lambda: Divides(way), options)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("options", LAYOUTS, ids=lambda options: "-".join(map(str, options.values())))
def test_a_loader_of_many_samples_is_drawn_as_on_one_device(options: dict[str, Any]) -> None:
    """With more samples than are looked through, it was not asked for again."""
    assert_as_on_one_device(divided, "", options)
