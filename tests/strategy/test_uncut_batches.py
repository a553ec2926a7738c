"""Batches that cannot be cut are left whole where nobody asks for more, and train and evaluate as on one device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from lightning_pipe.capture import flatten
from lightning_pipe.config import DappleConfig
from lightning_pipe.core.plan import Plan, StagePlan
from lightning_pipe.strategy import plan_maker
from lightning_pipe.strategy.plans.batch_cuts import BatchCuts
from strategy.small import Small, assert_as_on_one_device, run, samples

Batch = dict[str, torch.Tensor]


class Graphs:
    """A batch of graphs, as an object whose tensors nobody finds."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def to(self, device: torch.device, **_: Any) -> Graphs:
        return Graphs({name: one.to(device) for name, one in self.batch.items()})


def graph(index: int) -> Batch:
    generator = torch.Generator().manual_seed(index)
    nodes = 3 + index % 4
    edges = torch.randint(nodes, (2, 2 * nodes), generator=generator)
    x = torch.randn(nodes, 4, generator=generator, dtype=torch.float64)
    return {"x": x, "edges": edges, "y": torch.tensor(index % 3)}


def together(graphs: list[Batch]) -> Batch:
    counts = torch.tensor([len(one["x"]) for one in graphs])
    firsts = counts.cumsum(0) - counts
    return {
        "x": torch.cat([one["x"] for one in graphs]),
        "edges": torch.cat([one["edges"] + first for one, first in zip(graphs, firsts, strict=True)], 1),
        "of": torch.arange(len(graphs)).repeat_interleave(counts),
        "y": torch.stack([one["y"] for one in graphs]),
    }


class OfGraphs(Small):
    @staticmethod
    def data() -> DataLoader[Any]:
        return DataLoader([graph(index) for index in range(12)], 4, collate_fn=together)

    validation = data

    def loss(self, batch: Any) -> torch.Tensor:
        nodes = torch.tanh(self.first(batch["x"]))
        source, target = batch["edges"]
        nodes = nodes + 0.1 * torch.zeros_like(nodes).index_add(0, target, nodes[source])
        zeros = torch.zeros(len(batch["y"]), nodes.shape[1], dtype=nodes.dtype)
        outputs = self.last(zeros.index_add(0, batch["of"], nodes))
        self.log("spread", outputs.std(), batch_size=len(batch["y"]))
        return F.cross_entropy(outputs, batch["y"])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=4)


class OfObjects(OfGraphs):
    @staticmethod
    def data() -> DataLoader[Any]:
        return DataLoader([graph(index) for index in range(12)], 4, collate_fn=lambda found: Graphs(together(found)))

    validation = data

    def loss(self, batch: Graphs) -> torch.Tensor:
        return super().loss(batch.batch)


class Boxes(Small):
    """Lists of images, and of boxes of which images have unequal numbers."""

    @staticmethod
    def data() -> DataLoader[Any]:
        def collated(found: list[Any]) -> dict[str, list[torch.Tensor]]:
            return {"x": [x for x, _ in found], "boxes": [x[: 1 + int(y)] for x, y in found]}

        return DataLoader(samples(), 4, collate_fn=collated)

    def loss(self, batch: dict[str, list[torch.Tensor]]) -> torch.Tensor:
        found = self(torch.stack(batch["x"])).sum(1)
        terms = [(found[k] - boxes).square().sum() for k, boxes in enumerate(batch["boxes"])]
        return torch.stack(terms).sum() / len(terms)


class OnlyInValidation(OfGraphs):
    data = staticmethod(Small.data)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return Small.loss(self, batch)


class Later(Small):
    """Some batches have a tensor of another length."""

    @staticmethod
    def data() -> DataLoader[Any]:
        def collated(found: list[Any]) -> Batch:
            x, y = (torch.stack(one) for one in zip(*found, strict=True))
            return {"x": x, "y": y, "others": torch.ones(4 + int(x.sum() > 0), dtype=torch.float64)}

        return DataLoader(samples(), 4, collate_fn=collated)

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self(batch["x"]), batch["y"]) * batch["others"].mean()


KINDS = {one.__name__: one for one in (OfGraphs, OfObjects, Boxes, OnlyInValidation, Later)}


def fit(kind: str, options: dict[str, Any] | None) -> tuple[Any, ...]:
    """Fit one of them; a worker function."""
    return run(KINDS[kind], options)


@pytest.mark.parametrize("capture", ["auto", "replay"])
@pytest.mark.parametrize("kind", KINDS)
def test_they_are_left_whole(kind: str, capture: str) -> None:
    assert_as_on_one_device(fit, kind, {"layout": "1-1", "capture": capture})


def fit_with_planned(kind: str, options: dict[str, Any] | None) -> tuple[Any, ...]:
    """Fit one of them with a layout that the planner chooses, and up to 4 micro-batches; a worker function."""
    if options is None:
        return fit(kind, None)
    propose, (layout, others) = plan_maker.propose, (options["layout"], {**options, "layout": None})

    def chosen(problem: Any, config: DappleConfig, **given: Any) -> Any:
        return propose(problem, replace(config, layout=layout, microbatches=config.microbatches or 4), **given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_maker, "propose", chosen)
        return fit(kind, others)


@pytest.mark.parametrize("capture", ["auto", "replay"])
@pytest.mark.parametrize("layout", ["2", "1-1"])
@pytest.mark.parametrize("kind", ["Boxes", "Later"])
def test_they_train_by_whatever_plan_is_made(kind: str, layout: str, capture: str) -> None:
    assert_as_on_one_device(fit_with_planned, kind, {"layout": layout, "check": True, "capture": capture})


@pytest.mark.parametrize(
    ("options", "stages", "is_whole"),
    [
        ({}, None, True),
        ({"microbatches": 1}, None, True),
        ({"microbatches": 2}, None, False),
        ({"layout": "2"}, None, True),
        ({}, [1, 1], True),
        ({}, [2, 1], True),
        ({"microbatches": 4}, [1, 1], False),
    ],
)
def test_they_are_not_where_the_user_wants_parts(
    options: dict[str, Any], stages: list[int] | None, is_whole: bool
) -> None:
    cuts = BatchCuts(DappleConfig(**options))
    if stages is not None:
        ranks = iter(range(sum(stages)))
        cuts.plan = Plan(
            tuple(StagePlan(str(k), tuple(next(ranks) for _ in range(n))) for k, n in enumerate(stages)), 4
        )
    _, structure = flatten(together([graph(0), graph(1)]))
    assert cuts.can_cut(structure) is not is_whole
    assert cuts.can_cut(flatten(samples().tensors)[1])
