"""Stages on one rank see state that both change as stages on two ranks do: each micro-batch changes it once."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ranks.world import World
from strategy.small import Small, assert_alike, loader, run

PLAN = """\
stages:
- {{at: '', ranks: [0]}}
- {{at: last, ranks: [{second}]}}
microbatches: 1
"""


class Codebook(Small):
    """Buffers that the step changes between its layers, and reads before."""

    data = staticmethod(lambda: loader(16, 4))

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 4).double()
        self.register_buffer("codes", torch.randn(5, 8).double())
        self.register_buffer("counts", torch.ones(5).double())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        z = self.first(batch[0])
        nearest = torch.cdist(z, self.codes).argmin(-1)
        chosen = F.embedding(nearest, self.codes)
        with torch.no_grad():
            used = F.one_hot(nearest, 5).type_as(z)
            self.counts.mul_(0.9).add_(used.sum(0), alpha=0.1)
            self.codes.mul_(0.9).add_(used.t() @ z / self.counts[:, None], alpha=0.1)
        return F.mse_loss(self.last(z + (chosen - z).detach()), batch[0]) + F.mse_loss(z, chosen)

    def on_train_batch_end(self, *_: Any) -> None:
        self.noted.append((self.codes.clone(), self.counts.clone()))


class Teacher(Small):
    """A parameter without gradient that the step moves."""

    data = staticmethod(lambda: loader(16, 4))

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(8).double(), requires_grad=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.first(batch[0])
        with torch.no_grad():
            self.shift.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
        return F.cross_entropy(self.last(hidden - self.shift), batch[1])

    def on_train_batch_end(self, *_: Any) -> None:
        self.noted.append(copy.copy(self.trainer.global_step))


KINDS = {cls.__name__: cls for cls in (Codebook, Teacher)}


def fitted(name: str, options: dict[str, Any] | None) -> tuple[Any, ...]:
    """Fit one of them; a worker function."""
    return run(KINDS[name], options)


@pytest.mark.parametrize("second", [0, 1])
@pytest.mark.parametrize("capture", ["joint", "replay"])
@pytest.mark.parametrize("name", KINDS)
def test_state_changes_once_per_micro_batch(name: str, capture: str, second: int, tmp_path: Path) -> None:
    """Two stages of a rank that replayed the same lines changed it twice, and the second read what the first left."""
    (tmp_path / "plan.yaml").write_text(PLAN.format(second=second))
    options = {"plan": str(tmp_path / "plan.yaml"), "capture": capture}
    for found in World(2).run(fitted, name, options) if second else [fitted(name, options)]:
        assert_alike(found, fitted(name, None))
