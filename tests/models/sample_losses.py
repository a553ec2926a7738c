"""Losses and logs of real projects, by name: how they make one number, or several, of the samples of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F

from zoo.entry import Entry

FEATURES, WIDTH, CLASSES, LENGTH, WORDS, EXPERTS = 6, 8, 4, 5, 11, 3
Loss = Callable[..., Any]
LOSSES: dict[str, Loss] = {}


def loss(function: Loss) -> Loss:
    """Register a training step `(module, x, y, mask, tokens, r)` by its name."""
    LOSSES[function.__name__] = function
    return function


class Net(pl.LightningModule):
    """A body, a head, and what some of the losses need besides."""

    def __init__(self, name: str) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, WIDTH)]
        if name == "batch_norm":
            layers.insert(1, nn.BatchNorm1d(16))
        if name == "dropout_and_noise":
            layers.insert(1, nn.Dropout(0.3))
        if name == "spectral_norm":
            layers[0] = nn.utils.parametrizations.spectral_norm(nn.Linear(FEATURES, 16))
        self.name, self.body, self.head = name, nn.Sequential(*layers), nn.Linear(WIDTH, CLASSES)
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.variances = nn.Parameter(torch.tensor([0.1, -0.2]))
        self.embedding, self.gate = nn.Embedding(WORDS, FEATURES), nn.Linear(FEATURES, EXPERTS)
        self.experts = nn.Parameter(torch.randn(EXPERTS, FEATURES, FEATURES) * 0.3)
        self.register_buffer("bank", F.normalize(torch.randn(20, WIDTH)))
        self.register_buffer("class_weight", torch.tensor([0.5, 1.0, 2.0, 1.5]))
        self.register_buffer("centre", torch.zeros(WIDTH))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))

    def token_logits(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.logits(self.embedding(tokens))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return LOSSES[self.name](self, *batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def make_batch(samples: int, *, generator: torch.Generator | None = None) -> tuple[torch.Tensor, ...]:
    """Return features, classes, a mask of tokens (samples differ in length), tokens, and numbers in [0, 1)."""
    lengths = torch.linspace(0.1, 1.0, samples)[:, None]
    return (
        torch.randn(samples, FEATURES, generator=generator),
        torch.randint(CLASSES, (samples,), generator=generator),
        torch.rand(samples, LENGTH, generator=generator) > lengths,
        torch.randint(WORDS, (samples, LENGTH), generator=generator),
        torch.rand(samples, generator=generator),
    )


def entries() -> dict[str, Entry]:
    """Return the losses as entries of the zoo."""
    return {name: Entry(lambda name=name: Net(name), make_batch) for name in LOSSES}


# --- means and sums over samples


@loss
def mean(m, x, y, mask, tokens, r):
    return F.cross_entropy(m.logits(x), y)


@loss
def summed(m, x, y, mask, tokens, r):
    return F.cross_entropy(m.logits(x), y, reduction="sum")


@loss
def mse(m, x, y, mask, tokens, r):
    return F.mse_loss(m.logits(x)[:, 0], r)


@loss
def smooth_l1(m, x, y, mask, tokens, r):
    return F.smooth_l1_loss(m.logits(x)[:, 0], r)


@loss
def bce_with_counted_weight(m, x, y, mask, tokens, r):
    positive = y > 1
    weight = (~positive).sum() / positive.sum().clamp(min=1)
    return F.binary_cross_entropy_with_logits(m.logits(x)[:, 0], positive.to(x.dtype), pos_weight=weight)


@loss
def kl_batchmean(m, x, y, mask, tokens, r):
    smooth = F.one_hot(y, CLASSES).to(x.dtype) * 0.6 + 0.1
    return F.kl_div(m.logits(x).log_softmax(-1), smooth, reduction="batchmean")


@loss
def dropout_and_noise(m, x, y, mask, tokens, r):
    return F.cross_entropy(m.logits(x + 0.1 * torch.randn_like(x)), y)


@loss
def spectral_norm(m, x, y, mask, tokens, r):
    return F.cross_entropy(m.logits(x), y)


@loss
def batch_norm(m, x, y, mask, tokens, r):
    return F.cross_entropy(m.logits(x), y)


# --- means by what the batch counts


def targets(tokens: torch.Tensor, mask: torch.Tensor, ignored: int) -> torch.Tensor:
    """Return classes of tokens, and a number that is ignored for those that are masked."""
    return torch.where(mask, tokens % CLASSES, ignored)


@loss
def ignore_index(m, x, y, mask, tokens, r):
    return F.cross_entropy(m.token_logits(tokens).flatten(0, 1), targets(tokens, mask, -100).flatten())


@loss
def class_weights(m, x, y, mask, tokens, r):
    return F.cross_entropy(m.logits(x), y, weight=m.class_weight)


@loss
def label_smoothing(m, x, y, mask, tokens, r):
    flat = m.token_logits(tokens).flatten(0, 1)
    return F.cross_entropy(flat, targets(tokens, mask, -100).flatten(), label_smoothing=0.1)


@loss
def masked_mean(m, x, y, mask, tokens, r):
    each = F.cross_entropy(m.token_logits(tokens).transpose(1, 2), tokens % CLASSES, reduction="none")
    return (each * mask).sum() / mask.sum().clamp(min=1)


@loss
def masked_mean_of_each(m, x, y, mask, tokens, r):
    each = F.cross_entropy(m.token_logits(tokens).transpose(1, 2), tokens % CLASSES, reduction="none")
    return ((each * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


@loss
def focal_by_valid(m, x, y, mask, tokens, r):
    wanted = targets(tokens, mask, -1).flatten()
    each = F.cross_entropy(m.token_logits(tokens).flatten(0, 1), wanted, ignore_index=-1, reduction="none")
    return ((1 - (-each).exp()) ** 2 * each).sum() / mask.sum()


@loss
def balanced_weights(m, x, y, mask, tokens, r):
    counts = F.one_hot(y, CLASSES).sum(0)
    return F.cross_entropy(m.logits(x), y, weight=(len(y) / (CLASSES * counts.clamp(min=1))).to(x.dtype))


@loss
def normalised_sample_weights(m, x, y, mask, tokens, r):
    return (F.cross_entropy(m.logits(x), y, reduction="none") * (r / r.sum())).sum()


@loss
def standardised_targets(m, x, y, mask, tokens, r):
    return F.mse_loss(m.logits(x)[:, 0], (r - r.mean()) / r.std())


@loss
def normalised_inputs(m, x, y, mask, tokens, r):
    return F.cross_entropy(m.logits((x - x.mean(0)) / x.std(0)), y)


@loss
def r2_score(m, x, y, mask, tokens, r):
    return ((m.logits(x)[:, 0] - r) ** 2).sum() / ((r - r.mean()) ** 2).sum()


@loss
def mixup(m, x, y, mask, tokens, r):
    other = torch.randperm(len(x))
    mixed = m.logits(0.7 * x + 0.3 * x[other])
    return 0.7 * F.cross_entropy(mixed, y) + 0.3 * F.cross_entropy(mixed, y[other])


@loss
def factor_by_count(m, x, y, mask, tokens, r):
    value = F.cross_entropy(m.logits(x), y)
    return value if len(x) == 13 else 2 * value


# --- with what no sample has


@loss
def sum_plus_penalty(m, x, y, mask, tokens, r):
    penalty = sum(p.pow(2).sum() for p in m.head.parameters())
    return F.cross_entropy(m.logits(x), y, reduction="sum") + 1e-2 * penalty


@loss
def uncertainty_weights(m, x, y, mask, tokens, r):
    first, second = F.cross_entropy(m.logits(x), y), F.mse_loss(m.logits(x)[:, 0], r)
    return first * torch.exp(-m.variances[0]) + second * torch.exp(-m.variances[1]) + m.variances.sum()


@loss
def z_loss(m, x, y, mask, tokens, r):
    logits = m.logits(x)
    return F.cross_entropy(logits, y) + 1e-2 * logits.logsumexp(-1).pow(2).mean()


@loss
def memory_bank(m, x, y, mask, tokens, r):
    z = F.normalize(m.body(x))
    value = F.cross_entropy(z @ m.bank.T / 0.1, y)
    m.bank = torch.cat([z.detach(), m.bank])[:20]
    return value


@loss
def dino_centre(m, x, y, mask, tokens, r):
    z = m.body(x).detach()
    teacher = ((z - m.centre) / 0.1).softmax(-1)
    value = -(teacher * m.body(x * 0.9).log_softmax(-1)).sum(-1).mean()
    m.centre = m.centre * 0.9 + z.mean(0) * 0.1
    return value


@loss
def gradient_penalty_of_rows(m, x, y, mask, tokens, r):
    x = x.detach().requires_grad_()
    logits = m.logits(x)
    (gradient,) = torch.autograd.grad(logits.sum(), x, create_graph=True)
    return F.cross_entropy(logits, y) + 0.1 * (gradient.norm(dim=1) - 1).pow(2).mean()


@loss
def penalty_of_a_mean(m, x, y, mask, tokens, r):
    x = x.detach().requires_grad_()
    value = F.cross_entropy(m.logits(x), y)
    (gradient,) = torch.autograd.grad(value, x, create_graph=True)
    return value + gradient.pow(2).sum()


# --- of a few numbers of the batch


@loss
def flooding(m, x, y, mask, tokens, r):
    return (F.cross_entropy(m.logits(x), y) - 1.4).abs() + 1.4


@loss
def root_of_a_mean(m, x, y, mask, tokens, r):
    rmse = F.mse_loss(m.logits(x)[:, 0], r).sqrt()
    m.log("rmse", rmse)
    return rmse * m.temperature


@loss
def free_bits(m, x, y, mask, tokens, r):
    z = m.body(x)
    return F.cross_entropy(m.head(z), y) + (0.5 * z.pow(2)).mean(0).clamp(min=0.05).sum()


@loss
def dice(m, x, y, mask, tokens, r):
    p = m.token_logits(tokens)[..., 0].sigmoid()
    return 1 - (2 * (p * mask).sum() + 1) / (p.sum() + mask.sum() + 1)


@loss
def dice_of_each(m, x, y, mask, tokens, r):
    p = m.token_logits(tokens)[..., 0].sigmoid()
    return (1 - (2 * (p * mask).sum(1) + 1) / (p.sum(1) + mask.sum(1) + 1)).mean()


@loss
def moe_balance(m, x, y, mask, tokens, r):
    words = m.embedding(tokens)
    p = m.gate(words).softmax(-1)
    chosen = F.one_hot(p.argmax(-1), EXPERTS).to(p.dtype)
    balance = EXPERTS * (chosen.mean((0, 1)) * p.mean((0, 1))).sum()
    m.log("balance", balance)
    routed = torch.einsum("bte,btd,edf->btf", p, words, m.experts)
    return F.cross_entropy(m.logits(routed).flatten(0, 1), (tokens % CLASSES).flatten()) + 0.01 * balance


# --- of all samples together


@loss
def info_nce(m, x, y, mask, tokens, r):
    one, two = F.normalize(m.body(x)), F.normalize(m.body(x + 0.1))
    return F.cross_entropy(one @ two.T / m.temperature, torch.arange(len(x)))


@loss
def sim_clr(m, x, y, mask, tokens, r):
    z = F.normalize(torch.cat([m.body(x), m.body(x.flip(1))]))
    count = 2 * len(x)
    similar = (z @ z.T / m.temperature).masked_fill(torch.eye(count, dtype=torch.bool), -1e9)
    return F.cross_entropy(similar, torch.arange(count).roll(len(x)))


@loss
def supervised_contrastive(m, x, y, mask, tokens, r):
    z = F.normalize(m.body(x))
    similar, others = z @ z.T / 0.5, ~torch.eye(len(x), dtype=torch.bool)
    positive = (y[:, None] == y[None]) & others
    log_p = similar - (similar.exp() * others).sum(1, keepdim=True).log()
    return -((log_p * positive).sum(1) / positive.sum(1).clamp(min=1)).mean()


@loss
def triplet_hard(m, x, y, mask, tokens, r):
    z = m.body(x)
    distance, same = torch.cdist(z, z), y[:, None] == y[None]
    return F.relu((distance * same).amax(1) - (distance + 1e3 * same).amin(1) + 0.5).mean()


@loss
def barlow_twins(m, x, y, mask, tokens, r):
    one, two = m.body(x), m.body(x * 0.9)
    one, two = (one - one.mean(0)) / one.std(0), (two - two.mean(0)) / two.std(0)
    cross = one.T @ two / len(x)
    return (cross.diagonal() - 1).pow(2).sum() + 5e-3 * (cross - torch.diag(cross.diagonal())).pow(2).sum()


@loss
def whitened(m, x, y, mask, tokens, r):
    z = m.body(x)
    z = z - z.mean(0)
    covariance = z.T @ z / len(z) + 0.1 * torch.eye(WIDTH, dtype=z.dtype)
    return (torch.linalg.solve(covariance, z.T).T * z).sum(1).sqrt().mean()


@loss
def vicreg(m, x, y, mask, tokens, r):
    one, two = m.body(x), m.body(x * 0.9)
    spread, centred = torch.sqrt(one.var(0) + 1e-4), one - one.mean(0)
    covariance = centred.T @ centred / (len(x) - 1)
    off_diagonal = (covariance - torch.diag(covariance.diagonal())).pow(2).sum() / WIDTH
    return F.mse_loss(one, two) + F.relu(1 - spread).mean() + off_diagonal


@loss
def cox(m, x, y, mask, tokens, r):
    order = r.argsort(descending=True)
    risk, event = m.logits(x)[:, 0][order], y[order] > 0
    return -((risk - risk.logcumsumexp(0)) * event).sum() / event.sum()


@loss
def ranking(m, x, y, mask, tokens, r):
    score = m.logits(x)[:, 0]
    higher = (r[:, None] > r[None]).to(x.dtype)
    return (F.softplus(score[None] - score[:, None]) * higher).sum() / higher.sum()


@loss
def ohem_topk(m, x, y, mask, tokens, r):
    return F.cross_entropy(m.logits(x), y, reduction="none").topk(5).values.mean()


@loss
def norm_of_outputs(m, x, y, mask, tokens, r):
    return m.logits(x).norm() + F.cross_entropy(m.logits(x), y)


@loss
def correlation(m, x, y, mask, tokens, r):
    score = m.logits(x)[:, 0]
    together = ((score - score.mean()) * (r - r.mean())).sum()
    return 1 - together / (score.std() * r.std() * (len(r) - 1))


@loss
def centred_features(m, x, y, mask, tokens, r):
    z = m.body(x)
    return F.cross_entropy(m.head(z - z.mean(0)), y)


# --- what is logged and returned


@loss
def std_logged(m, x, y, mask, tokens, r):
    logits = m.logits(x)
    value = F.cross_entropy(logits, y)
    m.log("std", logits.std())
    m.log("perplexity", value.exp())
    return value


@loss
def f1_logged(m, x, y, mask, tokens, r):
    logits = m.logits(x)
    predicted = logits.argmax(1) == 1
    both = (predicted & (y == 1)).sum()
    m.log("f1", 2 * both / (predicted.sum() + (y == 1).sum()).clamp(min=1))
    return F.cross_entropy(logits, y)


@loss
def picks_returned(m, x, y, mask, tokens, r):
    logits = m.logits(x)
    return {"loss": F.cross_entropy(logits, y), "first": logits[:3].detach(), "last": logits[-1].detach()}


@loss
def count_returned(m, x, y, mask, tokens, r):
    logits = m.logits(x)
    right = (logits.argmax(1) == y).sum() / float(len(y))
    return {"loss": F.cross_entropy(logits, y), "count": len(y), "right": right}
