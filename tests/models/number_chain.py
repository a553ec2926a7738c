"""A chain of factors, one for each stage, and its training by the definition of a policy of weight versions.

The recursion knows nothing of programs: it says which weights every micro-batch reads, and when pipelines are empty.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import lightning.pytorch as pl
import torch
from torch import nn

SIZE, RATE, MOMENTUM = 2, 0.01, 0.9
Batch = tuple[torch.Tensor, torch.Tensor]
Drains = dict[int, bool]  # by round behind which none are in flight: whether they are given up (else none ran ahead)


class Numbers(pl.LightningModule):
    """A chain of factors."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        first = [torch.tensor(1 - 0.05 * s, dtype=torch.float64) for s in range(stages)]
        self.w = nn.ParameterList(map(nn.Parameter, first))

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        h, y = batch
        for w in self.w:
            h = w * h
        return (0.5 * (h - y) ** 2).mean()


class Gates(Numbers):
    """A chain of gates: what is multiplied with is made of a parameter alone, and the backward reads it."""

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        h, y = batch
        for w in self.w:
            h = torch.sigmoid(w) * h
        return (0.5 * (h - y) ** 2).mean()


def number(i: int) -> tuple[float, float]:
    """Return input and target of micro-batch i."""
    x = 1 + 0.1 * ((7 * i) % 5)
    return x, 0.5 * x


def numbers(t: int, count: int) -> Batch:
    """Return a batch of a chain of factors, whose micro-batches have equal samples."""
    rows = [number(t * count + m) for m in range(count) for _ in range(SIZE)]
    x, y = torch.tensor(rows, dtype=torch.float64).T
    return x.contiguous(), y.contiguous()


def round_of_forward(i: int, ahead: int, count: int, drains: Drains) -> int:
    """Return in which round the forward of micro-batch i runs for good, where the pipeline was empty now and then."""
    own = i // count
    empty = max((t + 1 for t in drains if t + 1 <= own), default=0)
    return max(max(0, i - ahead) // count, empty)


def depth_of(policy: str, stages: int, stage: int, count: int) -> int:
    """Return how many micro-batches forwards of a stage are ahead."""
    depth = (2 if policy.startswith("pb") else 1) * (stages - 1 - stage)
    return min(depth, count) if policy == "2bw" else depth


def horizons_of(policy: str, stages: int, stage: int, count: int) -> tuple[int, int]:
    """Return by how many updates F, and I and W, read predicted weights, as the papers have it."""
    if policy in (
        "spectrain",
        "xpipe",
    ):  # Guan et al. (2019), Chen et al. (2018) for T = 1
        return math.floor((count + stages - stage / 2 - 2) / count), (count + stage // 2 - 1) // count
    return (math.ceil(2 * (stages - 1 - stage) / count), 0) if policy.startswith("pb_lwp") else (0, 0)


class Updates:
    """The updates of one number, by momentum or Adam, and what it is predicted to be."""

    def __init__(self, first: float, rate: Callable[[int], float], *, adam: bool = False) -> None:
        self.w, self.way, self.v, self.q = [first], [0.0], 0.0, 0.0
        self._rate, self._adam = rate, adam

    def update(self, gradient: float) -> None:
        """Make an update."""
        count = len(self.w)
        if self._adam:
            self.v, self.q = 0.9 * self.v + 0.1 * gradient, 0.999 * self.q + 0.001 * gradient**2
            way = self.v / (1 - 0.9**count) / (math.sqrt(self.q / (1 - 0.999**count)) + 1e-8)
        else:
            self.v = way = MOMENTUM * self.v + gradient
        self.way.append(way)
        self.w.append(self.w[-1] - self._rate(count - 1) * way)

    def predicted(self, version: int, horizon: int, *, by_difference: bool, is_first: bool) -> float:
        """Return what the number of a version is predicted to be, `horizon` updates later."""
        if by_difference:
            return self.w[version] + (0.0 if is_first else horizon * (self.w[version] - self.w[version - 1]))
        return self.w[version] - sum(self._rate(version + k) for k in range(horizon)) * self.way[version]


def recursion(
    policy: str,
    stages: int,
    count: int,
    rounds: int,
    drains: Drains,
    *,
    repeats: int = 1 << 30,
    adam: bool = False,
    rate: Callable[[int], float] = lambda t: RATE,
    by_difference: bool = False,
    factor: Callable[[float], float] = lambda w: w,
    slope: Callable[[float], float] = lambda w: 1.0,
) -> tuple[list[float], list[float]]:
    """Return losses and last weights by the definition of a policy.

    Args:
        policy: its name.
        stages: of the chain.
        count: micro-batches of a batch.
        rounds: batches.
        drains: when the pipeline is emptied.
        repeats: micro-batches after which data repeat.
        adam: whether Adam updates, without decay; else momentum.
        rate: of an update, by its number.
        by_difference: whether predictions take the difference of weights.
        factor: what a stage multiplies with, by its number.
        slope: the derivative of that.
    """
    chain = [Updates(1 - 0.05 * s, rate, adam=adam) for s in range(stages)]
    losses = list[float]()
    depths = [depth_of(policy, stages, s, count) for s in range(stages)]

    def is_first(t: int) -> bool:
        return t == 0 or t - 1 in drains

    for b in range(rounds):
        is_alone = is_first(b) and (drains.get(b) is False or b == rounds - 1)  # nothing is ahead: a plain step

        def read(s: int, version: int, way: int, is_alone: bool = is_alone) -> float:
            horizon = 0 if is_alone else horizons_of(policy, stages, s, count)[way]
            differs = by_difference or policy == "pb_lwpd"
            return chain[s].predicted(version, horizon, by_difference=differs, is_first=is_first(version))

        loss, gradients = 0.0, [0.0] * stages
        for i in range(b * count, (b + 1) * count):
            x, y = number(i % repeats)
            first = b * count if policy in ("2bw", "xpipe") else i  # whose forward decides what is read
            began = [round_of_forward(first, depth, count, drains) for depth in depths]
            if policy == "2bw":  # what was current where its batch began
                began = began[:1] * stages
            inputs = [x]
            for s in range(stages):
                inputs.append(inputs[-1] * factor(read(s, began[s], 0)))
            loss += 0.5 * (inputs[-1] - y) ** 2 / count
            above = (inputs[-1] - y) / count
            for s in reversed(range(stages)):
                w = chain[s].w[began[s]] if policy in ("pipedream", "2bw") else read(s, b, 1)
                gradients[s] += above * inputs[s] * slope(w)
                above *= factor(w)
        losses.append(loss)
        for updates, gradient in zip(chain, gradients, strict=True):
            updates.update(gradient)
    return losses, [updates.w[-1] for updates in chain]
