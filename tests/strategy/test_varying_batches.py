"""Batches whose insides vary: flat texts, point clouds, graphs in a class of their own, nested lists.

The number of samples tells nothing of the sizes inside. Stages tell each other (`runtime.exchanges.sized_messages`).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from strategy.small import Small, assert_as_on_one_device, run


class Part:
    """A sample: rows of numbers, a different number for each, and a class."""

    def __init__(self, index: int) -> None:
        generator = torch.Generator().manual_seed(index)
        self.rows = torch.randn(2 + index * 7 % 5, 4, generator=generator, dtype=torch.float64)
        self.target = torch.tensor(index % 3)


class Bag:
    """A batch whose tensors lie in stores behind attributes, as PyTorch Geometric keeps them."""

    def __init__(self, **stored: Any) -> None:
        self.__dict__["_store"] = {"mapping": stored}

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_store"]["mapping"][name]
        except KeyError as error:
            raise AttributeError(name) from error

    def to(self, device: torch.device, **_: Any) -> Bag:
        return Bag(**{name: one.to(device) for name, one in self.__dict__["_store"]["mapping"].items()})


class Nothing:
    """A batch without a tensor at its top: samples in lists of lists."""

    def __init__(self, parts: list[Part]) -> None:
        self.groups = [{"parts": parts[:2]}, {"parts": parts[2:]}]


def numbers(parts: list[Part]) -> torch.Tensor:
    return torch.arange(len(parts)).repeat_interleave(torch.tensor([len(part.rows) for part in parts]))


def targets(parts: list[Part]) -> torch.Tensor:
    return torch.stack([part.target for part in parts])


class Varying(Small):
    """Rows of the batch join those of a layer, on whatever stage."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(8, 8).double()

    @classmethod
    def collated(cls, parts: list[Part]) -> Any:
        raise NotImplementedError

    def taken(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return rows, the sample of every row, and targets."""
        raise NotImplementedError

    @classmethod
    def data(cls) -> DataLoader[Any]:
        return DataLoader([Part(index) for index in range(14)], 4, collate_fn=cls.collated)

    validation = data

    def loss(self, batch: Any) -> torch.Tensor:
        rows, of, y = self.taken(batch)
        hidden = torch.tanh(self.first(rows))
        hidden = self.middle(hidden * (1 + rows.mean(1, keepdim=True)))
        pooled = hidden.new_zeros(int(of.max()) + 1, 8).index_add(0, of, hidden)
        outputs = self.last(pooled)
        self.log("spread", outputs.std(), batch_size=len(y))
        return F.cross_entropy(outputs, y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=4)


class JaggedText(Varying):
    """Tokens of all texts in one tensor, and where each text begins."""

    @classmethod
    def collated(cls, parts: list[Part]) -> Any:
        counts = torch.tensor([len(part.rows) for part in parts])
        return {"rows": torch.cat([p.rows for p in parts]), "offsets": counts.cumsum(0) - counts, "y": targets(parts)}

    def taken(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        places = torch.arange(len(batch["rows"]))
        return batch["rows"], torch.searchsorted(batch["offsets"], places, right=True) - 1, batch["y"]


class PointClouds(Varying):
    """A list of clouds beside a tensor with a row per sample."""

    @classmethod
    def collated(cls, parts: list[Part]) -> Any:
        return [part.rows for part in parts], targets(parts)

    def taken(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        clouds, y = batch
        of = torch.cat([torch.full((len(cloud),), i) for i, cloud in enumerate(clouds)])
        return torch.cat(clouds), of, y


class GraphBags(Varying):
    """An object with stores, beside the targets."""

    @classmethod
    def collated(cls, parts: list[Part]) -> Any:
        return Bag(x=torch.cat([part.rows for part in parts]), of=numbers(parts)), targets(parts)

    def taken(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        bag, y = batch
        return bag.x, bag.of, y


class NestedLists(Varying):
    """Lists of lists of numbers: no tensor at all."""

    @classmethod
    def collated(cls, parts: list[Part]) -> Any:
        return [[part.rows.tolist() for part in parts], [int(part.target) for part in parts]]

    def taken(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        lists, y = batch
        of = torch.tensor([i for i, rows in enumerate(lists) for _ in rows])
        rows = torch.tensor([row for rows in lists for row in rows], dtype=torch.float64)
        return rows, of, torch.tensor(y)


class OwnClass(Varying):
    """An object that holds samples in collections."""

    @classmethod
    def collated(cls, parts: list[Part]) -> Any:
        return Nothing(parts)

    def taken(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        parts = [part for group in batch.groups for part in group["parts"]]
        return torch.cat([part.rows for part in parts]), numbers(parts), targets(parts)


class MeansOfParts(GraphBags):
    """A loss that parts of the targets would give too, with another value; no value is read into Python."""

    def loss(self, batch: Any) -> torch.Tensor:
        rows, _, y = self.taken(batch)
        scores = self.last(torch.tanh(self.first(rows)))
        return (scores.mean() - y.double().mean()).square()


KINDS = {one.__name__: one for one in (JaggedText, PointClouds, GraphBags, NestedLists, OwnClass, MeansOfParts)}
PLANS = [(kind, options) for kind in KINDS for options in ({"layout": "1-1"}, {})]
PLANS += [("GraphBags", {"layout": "1-1-1"}), ("GraphBags", {"layout": "2"})]
PLANS += [("MeansOfParts", {"layout": layout, "capture": "replay"}) for layout in ("1-1", "2")]


def fit(kind: str, options: dict[str, Any] | None) -> tuple[Any, ...]:
    """Fit one of them; a worker function."""
    return run(KINDS[kind], options)


@pytest.mark.parametrize(("kind", "options"), PLANS, ids=str)
def test_they_train_as_on_one_device(kind: str, options: dict[str, Any]) -> None:
    assert_as_on_one_device(fit, kind, options)
