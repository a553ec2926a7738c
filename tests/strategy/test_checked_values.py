"""What a step catches is what it would catch on one device: errors of operations, and nothing that a capture raises."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from ranks.world import World
from strategy.fits import Losses, dapple, make_trainer, on_host
from strategy.small import Small, assert_as_on_one_device, loader, run

pytestmark = on_host("what fails on a GPU ends all use of it by its process")

ROUNDING = 1e-9
Check = Callable[[torch.Tensor], torch.Tensor]


class Net(pl.LightningModule):
    """It finds another number where an operation does not take the labels of a batch."""

    def __init__(self, check: Check) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.check = nn.Linear(4, 3), check

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, labels = batch
        try:
            wanted = self.check(labels)
        except (RuntimeError, ValueError, AssertionError):
            wanted = torch.full((len(labels), 3), 0.5)
        return (self.net(x) - wanted).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def of_one_hot(labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.one_hot(labels, 3).float()


def of_one_hot_by_name(labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.one_hot(input=labels, num_classes=3).float()


def of_an_assertion(labels: torch.Tensor) -> torch.Tensor:
    torch._assert_async((labels < 3).all(), "a label is too large")
    return labels[:, None].expand(-1, 3).float()


def of_a_condition(labels: torch.Tensor) -> torch.Tensor:
    torch._assert((labels < 3).all(), "a label is too large")
    return labels[:, None].expand(-1, 3).float()


def of_a_distribution(labels: torch.Tensor) -> torch.Tensor:
    return torch.distributions.Normal(torch.zeros(()), 2.5 - labels[:, None], validate_args=True).log_prob(
        torch.ones(3)
    )


def of_a_decomposition(labels: torch.Tensor) -> torch.Tensor:
    positive = torch.eye(3) * (2.5 - labels.max())
    return torch.linalg.cholesky(positive).sum(0).expand(len(labels), 3)


CHECKS = [of_one_hot, of_one_hot_by_name, of_an_assertion, of_a_condition, of_a_distribution, of_a_decomposition]


def losses(check: Check, options: dict[str, Any] | None) -> list[float]:
    """Return the losses of four batches; a label of the third is out of range."""
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([0, 1, 2, 1, 0, 3, 2, 0])
    seen = Losses()
    strategy = "auto" if options is None else dapple(cache="off", microbatches=1, **options)
    trainer = make_trainer(strategy, max_epochs=1, callbacks=[seen])
    trainer.fit(Net(check), DataLoader(list(zip(x, labels, strict=True)), batch_size=2))
    return seen.losses


@pytest.mark.parametrize("check", CHECKS)
def test_a_check_that_fails_in_a_later_batch_does_what_it_does_on_one_device(check: Check) -> None:
    """A graph of `one_hot` made rows of zeros of labels that one device refuses."""
    assert losses(check, {}) == pytest.approx(losses(check, None), rel=ROUNDING)


class Decomposing(Small):
    """Decompose matrices made of samples, of parameters and of nothing but numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.utils.parametrizations.orthogonal(nn.Linear(8, 8).double(), orthogonal_map="cayley")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        h = self.turned(torch.tanh(self.first(batch[0])))
        positive = h[:, :, None] * h[:, None, :] + torch.eye(8, dtype=h.dtype)
        found = torch.linalg.solve(positive, h[:, :, None]).squeeze(-1) + torch.linalg.inv(positive).sum(1)
        found = found + torch.linalg.cholesky(positive, upper=True).sum(1) + positive.inverse().sum(2)
        spread = torch.eye(4, dtype=h.dtype) + 0.1 * torch.diag_embed(h[:, :4].square())
        likely = torch.distributions.MultivariateNormal(h[:, :4], covariance_matrix=spread).log_prob(batch[0])
        return F.cross_entropy(self.last(found), batch[1]) - likely.mean()


class Singular(Small):
    """The third batch has a matrix without an inverse."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        scale = batch[1].double() - 1 if batch_idx == 2 else torch.ones(len(batch[1]), dtype=torch.float64)
        inverse = torch.linalg.inv(torch.eye(3, dtype=torch.float64) * scale[:, None, None])
        return F.cross_entropy((self(batch[0])[:, None] @ inverse).squeeze(1), batch[1])


def decomposed(_: str, options: dict[str, Any] | None) -> tuple[Any, ...]:
    """Fit; a worker function."""
    return run(Decomposing, options)


def test_decompositions_that_check_their_matrices_are_part_of_a_graph() -> None:
    assert_as_on_one_device(decomposed, "", {"layout": "1-1", "microbatches": 2, "capture": "joint"})


def test_a_matrix_without_an_inverse_is_what_it_is_on_one_device() -> None:
    trainer = make_trainer(dapple(layout="1", microbatches=2), max_epochs=1)
    with pytest.raises(torch.linalg.LinAlgError, match="inversion could not be completed"):
        trainer.fit(Singular(), loader())


class Catching(pl.LightningModule):
    """What it reads of a buffer changes in the second epoch; it catches what that may raise."""

    def __init__(self, read: Callable[[torch.Tensor], float]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.read = nn.Linear(4, 3), read
        self.register_buffer("number", torch.zeros(()))

    def on_train_epoch_start(self) -> None:
        self.number.fill_(self.current_epoch)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        try:
            factor = self.read(self.number)
        except:  # noqa: E722 - whatever it is
            factor = 1.0
        return factor * self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def by_a_question(number: torch.Tensor) -> float:
    return 0.5 if number > 0.5 else 1.0


def by_an_item(number: torch.Tensor) -> float:
    return 1.0 - int(number.item()) / 2


def by_a_text(number: torch.Tensor) -> float:
    return {"1": 0.5}.get(f"{number:.0f}", 1.0)


def by_a_list(number: torch.Tensor) -> float:
    return 1.0 - number.reshape(1).tolist()[0] / 2


def by_an_array(number: torch.Tensor) -> float:
    with contextlib.suppress(Exception):
        return 1.0 - float(number.numpy()) / 2
    return 1.0


def by_a_shape(number: torch.Tensor) -> float:
    return 1.0 - len(torch.nonzero(number.reshape(1))) / 2


def by_an_index(number: torch.Tensor) -> float:
    return [1.0, 0.5][number.long()]


def by_a_condition(number: torch.Tensor) -> float:
    torch._assert(number > 0.5, "it is too small")
    return 0.5


def by_random_numbers(number: torch.Tensor) -> float:
    return 0.5 if random.random() < float(number) else 1.0


READS = [
    *(by_a_question, by_an_item, by_a_text, by_a_list, by_an_array, by_a_shape, by_an_index, by_a_condition),
    by_random_numbers,
]


def losses_of_catching(read: Callable[[torch.Tensor], float], options: dict[str, Any] | None) -> list[float]:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    seen = Losses()
    random.seed(0)
    strategy = "auto" if options is None else dapple(cache="off", microbatches=1, **options)
    make_trainer(strategy, max_epochs=2, callbacks=[seen]).fit(Catching(read), DataLoader(x, batch_size=2))
    return seen.losses


@pytest.mark.parametrize("read", READS)
def test_a_step_that_catches_everything_trains_as_on_one_device(read: Callable[[torch.Tensor], float]) -> None:
    """It caught the refusals and questions of a capture, too, and was captured as if what it tries had failed."""
    assert losses_of_catching(read, {}) == pytest.approx(losses_of_catching(read, None), rel=ROUNDING)


class Later(pl.LightningModule):
    """It reads its labels from the third batch on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(4, 3), nn.Linear(3, 3)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, labels = batch
        out = self.two(torch.tanh(self.one(x)))
        if batch_idx < 2:
            return out.square().mean()
        self.log("labels", labels.double().mean())
        return (out - labels[:, None].to(out.dtype)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def losses_of_later(options: dict[str, Any] | None) -> tuple[list[float], float]:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    seen = Losses()
    trainer = make_trainer("auto" if options is None else dapple(**options), max_epochs=1, callbacks=[seen])
    trainer.fit(Later(), DataLoader(list(zip(x, torch.arange(8), strict=True)), batch_size=2))
    return seen.losses, float(trainer.callback_metrics["labels"])


@pytest.mark.parametrize("layout", ["1-1", "1"])
def test_what_a_replayed_step_reads_of_later_batches_only_is_there(layout: str) -> None:
    """It was computed from tensors without content: the loss was zero, without a word."""
    expected = losses_of_later(None)
    options = {"layout": layout, "capture": "replay", "microbatches": 2}
    for found in World(len(layout) // 2 + 1).run(losses_of_later, options):
        assert found[0] == pytest.approx(expected[0], rel=1e-5)
        assert found[1] == pytest.approx(expected[1])
