"""Random training steps whose terms mix sizes: constants of k N rows, pairs of samples, slices and pads by `len(x)`."""

from __future__ import annotations

import random
from collections.abc import Callable

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, ROWS = 6, 16  # of an embedding; rows of a bank, which are twice those of a batch of 8


class SizedStep(pl.LightningModule):
    """Sum a cross entropy and some terms of `TERMS`.

    Args:
        terms: their names.
    """

    def __init__(self, *terms: str) -> None:
        super().__init__()
        self.terms = terms
        self.a, self.b = nn.Linear(8, 12), nn.Linear(12, WIDTH)
        self.head, self.project = nn.Linear(WIDTH, 4), nn.Linear(5, WIDTH)
        self.classes = nn.Parameter(torch.randn(24, 5))
        self.input_norm, self.norm = nn.GroupNorm(2, 8), nn.GroupNorm(1, WIDTH)
        self.register_buffer("bank", torch.randn(ROWS, WIDTH))
        self.register_buffer("queue", torch.randn(ROWS, WIDTH))
        self.register_buffer("ema", torch.tensor(1.5))
        self.register_buffer("groups", torch.ones(2))

    def embed(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.loss(*batch)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.log("loss", self.loss(*batch))
        return self.embed(batch[0])

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.input_norm(x) if "input_norm" in self.terms else x
        z = self.embed(x)
        loss = F.cross_entropy(self.head(z), y)
        for name in self.terms:
            loss = loss + TERMS[name](self, x, y, z)
        return loss


Term = Callable[[SizedStep, Tensor, Tensor, Tensor], Tensor]
TERMS: dict[str, Term] = {"input_norm": lambda m, x, y, z: z.square().mean()}


def _term(function: Term) -> Term:
    TERMS[function.__name__] = function
    return function


@_term
def joined_with_a_bank(m: SizedStep, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return torch.cat([z, m.bank]).pow(2).mean()


@_term
def joined_before_a_bank(m: SizedStep, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return torch.cat([m.bank, z, m.bank]).softmax(0)[:4].mean()


@_term
def against_a_bank(m: SizedStep, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return -(z @ m.bank.T).log_softmax(1).diagonal().mean()


@_term
def two_views_against_a_queue(m: SizedStep, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    key = (z + 0.1).detach()
    logits = torch.cat([(z * key).sum(1, keepdim=True), z @ m.queue.T], 1)
    m.queue = torch.cat([key, m.queue])[:ROWS].detach()
    return F.cross_entropy(logits, torch.zeros(len(z), dtype=torch.long))


@_term
def classes_against_the_mean(m: SizedStep, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return -(m.project(m.classes) @ z.mean(0).tanh()).log_softmax(0)[:4].mean()


@_term
def class_embeddings(m: SizedStep, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return -(z @ m.project(m.classes).T).log_softmax(1)[:, 3].mean()


@_term
def repeated_pairs(m: SizedStep, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    n = len(z)
    return F.softplus(-(z.repeat(n, 1) - z.repeat_interleave(n, 0)).pow(2).sum(1)).mean()


@_term
def expanded_pairs(m: SizedStep, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    n = len(z)
    left, right = z.unsqueeze(0).expand(n, n, WIDTH), z.unsqueeze(1).expand(n, n, WIDTH)
    pairs = torch.cat([left, right], 2).reshape(n * n, 2 * WIDTH)
    return pairs.sin().prod(1).mean()


@_term
def pairs_in_a_row(m: SizedStep, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return (z @ z.T).reshape(-1).logsumexp(0) / len(z)


@_term
def masked_pairs(m: SizedStep, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    same = y.unsqueeze(0) == y.unsqueeze(1)
    return torch.where(same & ~torch.eye(len(z), dtype=torch.bool), torch.cdist(z, z.detach() + 1), 0.0).sum() / len(z)


@_term
def bank_expanded(m: SizedStep, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    centre = m.bank.mean(0).expand(len(z), WIDTH)
    return torch.cat([centre, z], 1).cos().mean()


@_term
def bank_reshaped(m: SizedStep, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return (m.bank.reshape(8, 2, WIDTH).mean((0, 1)) * z).sum(1).square().mean()


@_term
def gradient_penalty(m: SizedStep, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    noise = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(m.embed(noise).sum(), noise, create_graph=True)
    return (gradient.norm(dim=1) - 1).square().mean()


@_term
def gradient_of_a_mean(m: SizedStep, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(F.cross_entropy(m.head(z), y), z, create_graph=True)
    return gradient.square().sum()


@_term
def gradient_norms(m: SizedStep, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    losses = [F.cross_entropy(m.head(z), y), m.head(z).square().mean()]
    norms = [torch.autograd.grad(one, m.b.weight, create_graph=True)[0].norm() for one in losses]
    return (norms[0] - norms[1]).abs()


@_term
def balanced_tasks(m: SizedStep, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    losses = torch.stack([F.cross_entropy(m.head(z), y), z.square().mean(), (z - 1).abs().mean()])
    weights = m.classes[:3, 0].softmax(0)
    norms = [torch.autograd.grad(weights[i] * losses[i], m.b.weight, create_graph=True)[0].norm() for i in range(3)]
    goal = (torch.stack(norms).mean() * (losses / losses.sum())).detach()
    return (torch.stack(norms) - goal).abs().sum() + (weights * losses).sum()


@_term
def gradient_of_each_mean(m: SizedStep, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    penalties = [torch.autograd.grad(z[:, i].mean().square(), m.b.weight, create_graph=True)[0] for i in range(2)]
    return sum(one.square().sum() for one in penalties)


@_term
def group_norm(m: SizedStep, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return m.norm(z).pow(3).mean()


@_term
def norm_of_the_bank(m: SizedStep, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return (m.norm(m.bank)[:4].mean(0) * z).mean()


@_term
def over_a_written_buffer(m: SizedStep, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    root = z.square().mean().sqrt()
    m.ema = 0.9 * m.ema + 0.1 * root.detach()
    return root / m.ema


@_term
def robust_groups(m: SizedStep, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    each = F.cross_entropy(m.head(z), y, reduction="none")
    kind = (y % 2).unsqueeze(0) == torch.arange(2).unsqueeze(1)
    losses = (each * kind).sum(1) / kind.sum(1).clamp(min=1)
    m.groups = (m.groups * (0.1 * losses.detach()).exp()) / (m.groups * (0.1 * losses.detach()).exp()).sum()
    return (m.groups * losses).sum()


@_term
def product_over_samples(m: SizedStep, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return -(1 - z[:, 0].sigmoid()).cumprod(0).mean()


@_term
def sum_over_samples(m: SizedStep, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return z.cumsum(0).sin().mean()


@_term
def neighbours(m: SizedStep, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return z.diff(dim=0).square().sum() / len(z)


@_term
def strided_neighbours(m: SizedStep, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    flat = z[:, 0].contiguous()
    return flat.as_strided((len(z) - 1, 2), (1, 1)).prod(1).mean()


@_term
def halves(m: SizedStep, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    half = len(z) // 2
    return (z[:half] - z[half : 2 * half]).square().mean()


@_term
def bank_by_samples(m: SizedStep, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return (m.bank[: len(z)] * z).mean()


@_term
def padded(m: SizedStep, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return F.pad(z, (0, 0, 0, ROWS)).logsumexp(0).mean()


@_term
def positions(m: SizedStep, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return (torch.linspace(0, 1, len(z)).unsqueeze(1) * z).sum(0).square().mean()


@_term
def prior_of_sizes(m: SizedStep, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    prior = torch.distributions.Normal(torch.zeros_like(z), torch.ones_like(z))
    return -prior.log_prob(z).sum(1).mean()


@_term
def sorted_samples(m: SizedStep, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return (z[:, 0].sort().values * torch.arange(len(z))).mean()


@_term
def centred(m: SizedStep, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    centre = z - z.mean(0)
    return (centre.T @ centre / (len(z) - 1)).square().sum()


@_term
def stacked_views(m: SizedStep, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    views = torch.stack([z, z.tanh()]).reshape(2 * len(z), WIDTH)
    return (views @ views.T).fill_diagonal_(-10.0).logsumexp(1).mean()


def random_terms(seed: int) -> tuple[str, ...]:
    """Return the names of one to three terms."""
    chosen = random.Random(seed)
    names = sorted(TERMS)
    return (names[seed % len(names)], *chosen.sample(names, chosen.randint(0, 2)))
