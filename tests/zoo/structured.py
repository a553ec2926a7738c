"""Structured data: tables, bags, graphs, nested batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from zoo.entry import Entry, Trained


class Tabular(Trained):
    """A dict of numbers and categories; an embedding per column; a loss per task."""

    def __init__(self):
        super().__init__()
        self.embeddings = nn.ModuleDict({"city": nn.Embedding(7, 3), "day": nn.Embedding(5, 3)})
        self.norm = nn.BatchNorm1d(4)
        self.trunk = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Dropout(0.2))
        self.tasks = nn.ModuleDict({"price": nn.Linear(16, 1), "sold": nn.Linear(16, 1)})

    def training_step(self, batch, batch_idx):
        columns = [table(batch["categories"][name]) for name, table in self.embeddings.items()]
        h = self.trunk(torch.cat([self.norm(batch["numbers"]), *columns], dim=1))
        price = F.huber_loss(self.tasks["price"](h).squeeze(1), batch["targets"]["price"])
        sold = F.binary_cross_entropy_with_logits(self.tasks["sold"](h)[:, 0], batch["targets"]["sold"])
        self.log_dict({"price": price, "sold": sold}, on_step=False, on_epoch=True)
        return price + sold


def table(samples):
    return {
        "numbers": torch.randn(samples, 4),
        "categories": {"city": torch.randint(7, (samples,)), "day": torch.randint(5, (samples,))},
        "targets": {"price": torch.randn(samples), "sold": torch.randint(2, (samples,)).float()},
        "source": "shop",
    }


class Bags(Trained):
    """Bags of unequal length, as flat indices and offsets: the tensors have no common dimension."""

    def __init__(self):
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(20, 8, mode="mean"), nn.Linear(8, 3)

    def training_step(self, batch, batch_idx):
        indices, offsets, y = batch
        return F.cross_entropy(self.head(self.bag(indices, offsets)), y)


def bags(samples):
    return torch.randint(20, (3 * samples,)), torch.arange(samples) * 3, torch.randint(3, (samples,))


class GCN(Trained):
    """One graph per batch: messages along edges, summed by index."""

    def __init__(self, width=8):
        super().__init__()
        self.first, self.second = nn.Linear(5, width), nn.Linear(width, 3)

    def propagate(self, x, edges):
        source, target = edges
        degree = torch.ones(x.size(0), device=x.device).index_add(0, target, torch.ones_like(target, dtype=x.dtype))
        return x + torch.zeros_like(x).index_add(0, target, x[source]) / degree[:, None]

    def training_step(self, batch, batch_idx):
        x = F.relu(self.propagate(self.first(batch["x"]), batch["edges"]))
        logits = self.propagate(self.second(x), batch["edges"])
        return F.cross_entropy(logits, batch["y"])


def graph(samples):
    return {"x": torch.randn(samples, 5), "edges": torch.randint(samples, (2, 12)), "y": torch.randint(3, (samples,))}


class DenseGraphs(Trained):
    """One small graph per sample, as adjacency matrices."""

    def __init__(self, width=8):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, width), nn.Linear(width, width)])
        self.head = nn.Linear(width, 1)

    def training_step(self, batch, batch_idx):
        x, adjacency, y = batch
        adjacency = adjacency + torch.eye(adjacency.size(-1), device=self.device)
        normal = adjacency / adjacency.sum(-1, keepdim=True)
        for layer in self.layers:
            x = F.elu(torch.bmm(normal, layer(x)))
        return F.l1_loss(self.head(x.amax(1)).squeeze(-1), y)


def molecules(samples):
    return torch.randn(samples, 6, 5), torch.randint(2, (samples, 6, 6)).float(), torch.randn(samples)


@dataclass
class Ratings:
    user: torch.Tensor
    item: torch.Tensor
    stars: torch.Tensor


class Recommender(Trained):
    """A dataclass as batch; dot products of embeddings plus biases."""

    def __init__(self):
        super().__init__()
        self.users, self.items = nn.Embedding(11, 6), nn.Embedding(13, 6)
        self.user_bias, self.item_bias = nn.Embedding(11, 1), nn.Embedding(13, 1)
        self.offset = nn.Parameter(torch.zeros(1))

    def training_step(self, batch, batch_idx):
        dot = (self.users(batch.user) * self.items(batch.item)).sum(-1)
        bias = (self.user_bias(batch.user) + self.item_bias(batch.item)).squeeze(-1)
        loss = F.mse_loss(dot + bias + self.offset, batch.stars)
        self.log("rmse", loss.sqrt(), prog_bar=True)
        return loss


def ratings(samples):
    return Ratings(torch.randint(11, (samples,)), torch.randint(13, (samples,)), torch.rand(samples) * 5)


class Pair(NamedTuple):
    left: torch.Tensor
    right: list[torch.Tensor]


class NestedBatch(Trained):
    """Tuples in lists in dicts, with things that are no tensors."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 8), nn.Bilinear(3, 3, 8)

    def training_step(self, batch, batch_idx):
        pair, (target, weight) = batch["inputs"], batch["extra"]["targets"]
        h = torch.tanh(self.left(pair.left) + self.right(*pair.right))
        return (weight * (h.sum(-1) - target).square()).mean()


def nested(samples):
    pair = Pair(torch.randn(samples, 4), [torch.randn(samples, 3), torch.randn(samples, 3)])
    return {"inputs": pair, "extra": {"targets": (torch.randn(samples), torch.rand(samples)), "names": ["a", "b"]}}


ENTRIES = {
    "tabular_mixed": Entry(Tabular, table),
    "embedding_bag_offsets": Entry(Bags, bags),
    "gcn_index_add": Entry(GCN, graph),
    "dense_graphs": Entry(DenseGraphs, molecules),
    "recommender_dataclass": Entry(Recommender, ratings),
    "nested_batch": Entry(NestedBatch, nested),
}
