"""Hooks that iterate loaders, or draw random numbers of the shapes of gradients, do what they do on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

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
