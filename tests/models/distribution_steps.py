"""Random steps with `torch.distributions`, whose arguments are made of sizes, the batch, parameters or layers."""

from __future__ import annotations

import random
from collections.abc import Callable

import lightning.pytorch as pl
import torch
import torch.distributions as D
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 4


class DistributionStep(pl.LightningModule):
    """Sum terms of distributions to a squared error.

    Args:
        seed: chooses the terms.
        validates: whether distributions check their arguments.
    """

    def __init__(self, seed: int, *, validates: bool) -> None:
        super().__init__()
        chance = random.Random(seed)
        self.validates = validates
        self.terms = chance.sample([*TERMS], k=chance.randint(1, 3))
        self.origins = [(chance.choice([*ORIGINS]), chance.choice([*ORIGINS])) for _ in self.terms]
        self.a, self.b = nn.Linear(8, 6), nn.Linear(6, WIDTH)
        self.c, self.d = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)
        self.prior = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("scale", torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.b(self.a(x).tanh())
        total = (self.d(z.tanh()) - x).square().mean()
        for name, (one, two) in zip(self.terms, self.origins, strict=True):
            term = TERMS[name](ORIGINS[one](self, x, z), ORIGINS[two](self, x, z), z, self.validates)
            total = total + term.mean()
        return total, z

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss, _ = self(batch)
        self.log("train", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self(batch)[0])

    def test_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        total, z = self(batch)
        self.log_dict({"test": total, "size": z.abs().mean()})
        return total

    def predict_step(self, batch: Tensor, batch_idx: int) -> tuple[Tensor, Tensor]:
        return self(batch)


Origin = Callable[[DistributionStep, Tensor, Tensor], Tensor]
ORIGINS: dict[str, Origin] = {
    "layers": lambda m, x, z: m.c(z),
    "latent": lambda m, x, z: z,
    "batch": lambda m, x, z: x[:, :WIDTH],
    "zeros like": lambda m, x, z: torch.zeros_like(z),
    "ones like": lambda m, x, z: torch.ones_like(z),
    "rows": lambda m, x, z: torch.full((len(x), WIDTH), 0.3, dtype=x.dtype),
    "new": lambda m, x, z: x.new_full((x.shape[0], 1), 0.5).expand(-1, WIDTH),
    "parameter": lambda m, x, z: m.prior,
    "buffer": lambda m, x, z: m.scale,
    "constant": lambda m, x, z: torch.tensor(0.7, dtype=x.dtype).expand(WIDTH),
    "of all": lambda m, x, z: z.mean(0),
    "spread": lambda m, x, z: z.std(0),
}


def _positive(value: Tensor) -> Tensor:
    return F.softplus(value) + 0.1


Term = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
TERMS: dict[str, Term] = {
    "normal": lambda a, b, z, v: -D.Normal(a, _positive(b), validate_args=v).log_prob(z),
    "prior": lambda a, b, z, v: D.kl_divergence(
        D.Normal(z, _positive(a), validate_args=v),
        D.Normal(torch.zeros_like(z), torch.ones_like(z), validate_args=v),
    ),
    "raw scale": lambda a, b, z, v: D.kl_divergence(
        D.Normal(a, torch.exp(b), validate_args=v), D.Normal(0.0, 1.0, validate_args=v)
    ),
    "independent": lambda a, b, z, v: (
        -D.Independent(D.Laplace(a, _positive(b), validate_args=v), 1).log_prob(
            z.expand(torch.broadcast_shapes(z.shape, a.shape))
        )
    ),
    "log-normal": lambda a, b, z, v: D.LogNormal(a, _positive(b), validate_args=v).entropy(),
    "bernoulli": lambda a, b, z, v: -D.Bernoulli(logits=a + b, validate_args=v).log_prob((z > 0).to(z)),
    "categorical": lambda a, b, z, v: D.Categorical(logits=a + b, validate_args=v).entropy(),
    "one of": lambda a, b, z, v: -D.Categorical(logits=z + a, validate_args=v).log_prob(z.argmax(-1)),
    "gamma": lambda a, b, z, v: D.kl_divergence(
        D.Gamma(_positive(a), _positive(b), validate_args=v),
        D.Gamma(torch.ones_like(a), torch.ones_like(a), validate_args=v),
    ),
    "beta": lambda a, b, z, v: -D.Beta(_positive(a), _positive(b), validate_args=v).log_prob(z.sigmoid()),
    "dirichlet": lambda a, b, z, v: D.Dirichlet(_positive(a + b), validate_args=v).entropy(),
    "poisson": lambda a, b, z, v: -D.Poisson(_positive(a + b), validate_args=v).log_prob(z.abs().round()),
    "counts": lambda a, b, z, v: -D.NegativeBinomial(_positive(a), logits=b, validate_args=v).log_prob(z.abs().round()),
    "student": lambda a, b, z, v: -D.StudentT(3.0, a, _positive(b), validate_args=v).log_prob(z),
    "covariance": lambda a, b, z, v: (
        -D.MultivariateNormal(a, torch.eye(WIDTH, dtype=z.dtype) * _positive(b.mean()), validate_args=v).log_prob(z)
    ),
    "low rank": lambda a, b, z, v: (
        -D.LowRankMultivariateNormal(
            a, _positive(b).unsqueeze(-1).expand(*b.shape, 2), _positive(b), validate_args=v
        ).log_prob(z)
    ),
    "mixture": lambda a, b, z, v: (
        -D.MixtureSameFamily(
            D.Categorical(logits=b, validate_args=v), D.Normal(a, _positive(b), validate_args=v), validate_args=v
        ).log_prob(z.mean(-1))
    ),
    "squashed": lambda a, b, z, v: (
        -D.TransformedDistribution(
            D.Normal(a, _positive(b), validate_args=v), [D.SigmoidTransform()], validate_args=v
        ).log_prob(z.sigmoid())
    ),
    "sampled": lambda a, b, z, v: D.Normal(a, _positive(b), validate_args=v).rsample().square(),
    "sampled classes": lambda a, b, z, v: z * D.Categorical(logits=a + b, validate_args=v).sample().unsqueeze(-1),
}
