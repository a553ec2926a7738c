"""Habits of libraries: dicts that act where they are asked, and hooks that a model installs in its first call."""

from __future__ import annotations

import collections
import contextvars
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ranks.world import World
from strategy.fits import dapple, make_trainer


class Instantier(collections.OrderedDict[str, Any]):
    """Make an object of the class that is asked for, as `ACT2FN` of transformers does."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()


class Recent(collections.OrderedDict[Any, Any]):
    """Keep what was asked for last at the end."""

    def __getitem__(self, key: Any) -> Any:
        value = super().__getitem__(key)
        self.move_to_end(key)
        return value


class Called(dict[str, Any]):
    def __getitem__(self, key: str) -> Any:
        return dict.__getitem__(self, key)()


ACTIVATIONS = Instantier(relu=nn.ReLU, tanh=nn.Tanh)
RECENT = Recent(scale=0.5, other=2.0)
STATES: contextvars.ContextVar[Any] = contextvars.ContextVar("states", default=None)
CALLED = Called(weights=lambda: torch.ones(8, dtype=torch.float64))


class Net(pl.LightningModule):
    """Layers for two stages."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.double()

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.first(x))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self.last(torch.tanh(self.middle(self.hidden(x)))), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Instantiates(Net):
    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return ACTIVATIONS["tanh"](self.first(x))


class AsksRecent(Net):
    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.first(x)) * RECENT["scale"] * RECENT["other"]


class Calls(Net):
    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.first(x)) * CALLED["weights"]


class Collects(Net):
    """Hooks that are installed once, in the first call, and see what layers return, as transformers collects states."""

    installed = False

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if not self.installed:
            for layer in (self.first, self.middle):
                layer.register_forward_hook(lambda _, __, output: STATES.get().append(output))
            self.installed = True
        states: list[torch.Tensor] = []
        token = STATES.set(states)
        loss = super().training_step(batch, batch_idx)
        STATES.reset(token)
        return loss + 0.1 * sum(state.square().mean() for state in states)


class Measures(Net):
    """A hook that leaves a number of Python, by which the loss is weighed."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[float] = []
        self.middle.register_forward_hook(lambda _, __, output: self.sizes.append(output.detach().abs().mean().item()))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.sizes.clear()
        return super().training_step(batch, batch_idx).sqrt() * (1 + self.sizes[-1])


KINDS = {kind.__name__: kind for kind in (Instantiates, AsksRecent, Calls, Collects, Measures)}


def fitted(kind: str, options: dict[str, Any] | None) -> tuple[dict[str, torch.Tensor], int]:
    """Return parameters, and how many hooks a layer has; a worker function."""
    module = KINDS[kind]()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, 4, generator=generator, dtype=torch.float64)
    data = TensorDataset(x, torch.randint(3, (16,), generator=generator))
    trainer = make_trainer("auto" if options is None else dapple(**options), max_epochs=2)
    trainer.fit(module, DataLoader(data, 4))
    return {name: p.detach().clone() for name, p in module.named_parameters()}, len(module.middle._forward_hooks)


@pytest.mark.parametrize("options", [{}, {"capture": "replay"}], ids=str)
@pytest.mark.parametrize("kind", ["Instantiates", "AsksRecent", "Calls"])
def test_a_dict_is_looked_at_as_it_is(kind: str, options: dict[str, Any]) -> None:
    """Such dicts were asked through their own methods, which raised errors or changed them."""
    expected, _ = fitted(kind, None)
    for parameters, _ in World(2).run(fitted, kind, {"layout": "1-1", "microbatches": 2, **options}):
        torch.testing.assert_close(parameters, expected, rtol=1e-9, atol=1e-9)


def test_a_number_that_a_hook_leaves_is_there_for_the_rest_of_the_step() -> None:
    """A head, which calls no sub-module, had none."""
    expected, _ = fitted("Measures", None)
    parameters, _ = fitted("Measures", {"layout": "1", "microbatches": 1, "capture": "replay"})
    torch.testing.assert_close(parameters, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_hooks_of_a_first_call_are_installed_once(microbatches: int) -> None:
    """Every play of the first batch installed them, so that each state was there several times from then on."""
    expected, hooks = fitted("Collects", None)
    found = fitted("Collects", {"layout": "1", "microbatches": microbatches, "capture": "replay"})
    torch.testing.assert_close(found[0], expected, rtol=1e-9, atol=1e-9)
    assert found[1] == hooks
