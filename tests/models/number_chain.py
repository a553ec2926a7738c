"""A chain of factors, one for each stage, and its training by the definition of a policy of weight versions.

The recursion knows nothing of programs: it says which weights every micro-batch reads, and when pipelines are empty.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

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
    if policy in LATE:
        return late_recursion(LATE[policy], stages, count, rounds, drains, repeats=repeats)
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


@dataclass(frozen=True)
class Late:
    """A policy whose gradients are late, by its definition.

    Attributes:
        depth: how many micro-batches the forward of stage s of p is ahead of its backward.
        anneal: K of PipeMare's T1; 0 without it.
        decay: D of its T2; 0 without it.
        is_spiky: whether spikes are compensated.
        is_predicted: whether forwards read weights that the velocity has predicted.
        is_vertical: whether all passes of a micro-batch read the version of stage 0 at its entry.
        warmup: batches at the beginning that are synchronous.
    """

    depth: Callable[[int, int], int]
    anneal: int = 0
    decay: float = 0.0
    is_spiky: bool = False
    is_predicted: bool = False
    is_vertical: bool = False
    warmup: int = 0


LATE = {
    "pipedream_vertical": Late(lambda s, p: p - 1 - s, is_vertical=True),
    "pipemare": Late(lambda s, p: 2 * (p - 1 - s) + 1, decay=math.exp(-2)),
    "pb_sc": Late(lambda s, p: 2 * (p - 1 - s), is_spiky=True),
    "pb_lwpv_sc": Late(lambda s, p: 2 * (p - 1 - s), is_spiky=True, is_predicted=True),
    "timeprest": Late(lambda s, p: p - 1 - s),
}


def late_recursion(
    policy: Late, stages: int, count: int, rounds: int, drains: Drains, *, repeats: int = 1 << 30
) -> tuple[list[float], list[float]]:
    """Return losses and last weights; arguments as of `recursion`."""
    w, v, d = [[1 - 0.05 * s] for s in range(stages)], [[0.0] for _ in range(stages)], [0.0] * stages
    losses = list[float]()
    depths = [policy.depth(s, stages) for s in range(stages)]
    taus = [depth / count for depth in depths]
    drains = dict.fromkeys(range(policy.warmup), False) | drains
    for b in range(rounds):
        empty = max((t + 1 for t in drains if t + 1 <= b), default=0)
        is_late = b >= policy.warmup
        is_alone = empty == b and (drains.get(b) is False or b == rounds - 1)  # nothing is ahead: a plain step
        is_predicted = policy.is_predicted and not is_alone
        back = [w[s][b] - min(taus[s], b - empty) * d[s] * (policy.decay > 0) for s in range(stages)]
        loss, gradients = 0.0, [0.0] * stages
        for i in range(b * count, (b + 1) * count):
            x, y = number(i % repeats)
            began = [round_of_forward(i, depth, count, drains) for depth in depths]
            began = [began[0]] * stages if policy.is_vertical else began
            ahead = [RATE * math.ceil(tau) * v[s][began[s]] * is_predicted for s, tau in enumerate(taus)]
            inputs = [x]
            for s in range(stages):
                inputs.append(inputs[-1] * (w[s][began[s]] - ahead[s]))
            loss += 0.5 * (inputs[-1] - y) ** 2 / count
            above = (inputs[-1] - y) / count
            for s in reversed(range(stages)):
                gradients[s] += above * inputs[s]
                above *= w[s][began[s]] if policy.is_vertical else back[s]
        losses.append(loss)
        for s, g in enumerate(gradients):
            v[s].append(MOMENTUM * v[s][-1] + g)
            step = v[s][-1]
            if policy.is_spiky and is_late:
                a = MOMENTUM ** taus[s]
                step = a * v[s][-1] + (1 - a) / (1 - MOMENTUM) * g
            k = b - policy.warmup
            is_slow = policy.anneal and is_late
            rate = RATE / max(1.0, taus[s]) ** (1 - min(k / policy.anneal, 1)) if is_slow else RATE
            w[s].append(w[s][-1] - rate * step)
            if policy.decay:
                gamma = policy.decay ** (1 / taus[s])
                d[s] = gamma * d[s] + (1 - gamma) * (w[s][-1] - w[s][-2])
    return losses, [row[-1] for row in w]
