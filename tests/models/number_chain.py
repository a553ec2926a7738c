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

from lightning_pipe.core.program import Layout
from lightning_pipe.schedule.weights import POLICIES

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


def recursion(
    policy: str, stages: int, count: int, rounds: int, drains: Drains, *, repeats: int = 1 << 30
) -> tuple[list[float], list[float]]:
    """Return losses and last weights by the definition of a policy, with momentum; data repeat after some samples."""
    if policy in LATE:
        return late_recursion(LATE[policy], stages, count, rounds, drains, repeats=repeats)
    w, v, losses = [[1 - 0.05 * s] for s in range(stages)], [[0.0] for _ in range(stages)], list[float]()
    ahead = POLICIES[policy].ahead(Layout(tuple((r,) for r in range(stages))), count)
    for b in range(rounds):
        loss, gradients = 0.0, [0.0] * stages
        for i in range(b * count, (b + 1) * count):
            x, y = number(i % repeats)
            began = [round_of_forward(i, depth, count, drains) for depth in ahead]
            if policy == "2bw":  # what was current where its batch began
                began = [round_of_forward(b * count, ahead[0], count, drains)] * stages
            read = [w[s][began[s]] for s in range(stages)]
            if policy == "spectrain":
                read = [w[s][began[s]] - RATE * (stages - 1 - s + s // 2) * v[s][began[s]] for s in range(stages)]
            inputs = [x]
            for factor in read:
                inputs.append(inputs[-1] * factor)
            loss += 0.5 * (inputs[-1] - y) ** 2 / count
            back = {"stale": [w[s][b] for s in range(stages)], "deep": [w[s][b] for s in range(stages)]}.get(
                policy, read
            )
            if policy == "spectrain":
                back = [w[s][b] - RATE * (s // 2) * v[s][b] for s in range(stages)]
            above = (inputs[-1] - y) / count
            for s in reversed(range(stages)):
                gradients[s] += above * inputs[s]
                above *= back[s]
        losses.append(loss)
        for s in range(stages):
            v[s].append(MOMENTUM * v[s][-1] + gradients[s])
            w[s].append(w[s][-1] - RATE * v[s][-1])
    return losses, [row[-1] for row in w]


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
        back = [w[s][b] - min(taus[s], b - empty) * d[s] * (policy.decay > 0) for s in range(stages)]
        loss, gradients = 0.0, [0.0] * stages
        for i in range(b * count, (b + 1) * count):
            x, y = number(i % repeats)
            began = [round_of_forward(i, depth, count, drains) for depth in depths]
            began = [began[0]] * stages if policy.is_vertical else began
            ahead = [RATE * taus[s] * v[s][began[s]] * policy.is_predicted for s in range(stages)]
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
