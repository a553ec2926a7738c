"""What a step gives to a logger itself, and does on rank 0 alone, happens once per batch, as on one device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only

from ranks.world import World
from strategy.small import LAYOUTS, Small, assert_alike, loader, run


class Experiment:
    """What a library of loggers gives rank 0, with more inside."""

    def __init__(self, said: list[Any]) -> None:
        self.said, self.client = said, self

    def __getattr__(self, name: str) -> Any:
        def note(*args: Any, **kwargs: Any) -> None:
            found = [arg.detach().clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
            self.said.append((name, found, kwargs))

        if name.startswith("_"):
            raise AttributeError(name)
        return note


class Noting(Logger):
    """Keep what it is given, on rank 0."""

    name, version, log_dir = "noting", 0, "somewhere"

    def __init__(self) -> None:
        super().__init__()
        self.said: list[Any] = []

    @property
    @rank_zero_experiment
    def experiment(self) -> Experiment:
        return Experiment(self.said)

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.said.append(("metrics", dict(metrics), step))

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


class Picture:
    """What a library draws from numbers."""

    def __init__(self, numbers: Any) -> None:
        self.numbers = np.array(numbers)

    def __eq__(self, other: Any) -> bool:
        return bool(np.allclose(self.numbers, other.numbers))


class Net(Small):
    data = staticmethod(lambda: loader(16, 8))
    validation = staticmethod(lambda: loader(12, 6, seed=2))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def on_fit_end(self) -> None:
        self.noted.extend(said for one in self.loggers for said in one.said)


class Scalars(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.logger.experiment.add_scalar("loss", loss, self.global_step)
        self.logger.experiment.add_scalars(
            "both", {"twice": 2 * loss, "epoch": self.current_epoch}, global_step=batch_idx
        )
        self.loggers[1].log_metrics({"loss": loss.item(), "constant": 3.0}, step=self.global_step)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.trainer.logger.experiment.add_scalar("val", self.loss(batch), batch_idx)


class Pictures(Net):
    """Single samples, all of them, and parameters of a stage."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self(batch[0])
        if batch_idx % 2 == 0 and isinstance(self.logger, Noting) and self.logger.log_dir == "somewhere":
            self.logger.experiment.add_image("first", outputs[0], self.global_step)
            self.logger.experiment.add_images("all", images=1, step=outputs.sigmoid())
            self.logger.experiment.client.add_histogram("weights", self.first.weight)
        return torch.nn.functional.cross_entropy(outputs, batch[1])


class Drawn(Net):
    """Something that Python makes of the values of tensors."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        outputs = self(batch[0])
        if batch_idx == 0:
            self.logger.experiment.add_figure("drawn", Picture(self.last.bias.detach().numpy()))
        self.log("val", outputs.mean())


class OnRankZero(Net):
    """Reads of numbers, logs and state that rank 0 alone is asked for."""

    @rank_zero_only
    def tell(self, loss: torch.Tensor, batch_idx: int) -> None:
        self.log("told", loss * (1 + batch_idx), rank_zero_only=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if self.global_rank == 0:
            self.print("batch", batch_idx)
        if self.trainer.is_global_zero and batch_idx % 2 == 0:
            self.log("even", loss, rank_zero_only=True)
        if not dist.is_initialized() or dist.get_rank() == 0:
            self.latest = batch_idx
        self.tell(loss, batch_idx)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.noted.append(self.latest)


KINDS = {cls.__name__: cls for cls in (Scalars, Pictures, Drawn, OnRankZero)}


def fitted(name: str, options: dict[str, Any] | None) -> tuple[Any, ...]:
    """Fit one of them; a worker function."""
    checked = options and {**options, "check": True}
    return run(KINDS[name], checked, logger=[Noting(), Noting()], log_every_n_steps=1)


@pytest.mark.sampled
@pytest.mark.parametrize("options", LAYOUTS, ids=lambda options: "-".join(map(str, options.values())))
@pytest.mark.parametrize("name", KINDS)
def test_loggers_get_what_they_get_on_one_device(name: str, options: dict[str, Any]) -> None:
    """A step wrote to them while it was profiled and traced, once per micro-batch and rank, and of parts of batches."""
    losses, noted, metrics, parameters = fitted(name, None)
    first, *_ = found = World(sum(map(int, options["layout"].split("-")))).run(fitted, name, options)
    assert_alike(first[1], noted)
    for each in found:
        assert each[0] == pytest.approx(losses, rel=1e-9)
        assert each[2] == pytest.approx(metrics, rel=1e-6)
        torch.testing.assert_close(each[3], parameters, rtol=1e-9, atol=1e-9)
