"""Generative models: autoencoders, diffusion, masked images, forecasts."""

from __future__ import annotations

import torch
import torch.distributions as D
import torch.nn.functional as F
from torch import nn

from zoo.entry import Entry, Trained


def flat(samples):
    return torch.rand(samples, 12), torch.zeros(samples, dtype=torch.long)


class VAE(Trained):
    """Reparametrisation; a weight of the loss is logged as a Python number."""

    def __init__(self, beta=0.5):
        super().__init__()
        self.beta = beta
        self.encoder, self.decoder = nn.Linear(12, 8), nn.Linear(4, 12)

    def training_step(self, batch, batch_idx):
        x, _ = batch
        mean, log_variance = self.encoder(x).chunk(2, dim=-1)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        reconstruction = F.binary_cross_entropy_with_logits(self.decoder(z), x, reduction="none").sum(-1).mean()
        kl = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum(-1).mean()
        self.log_dict({"reconstruction": reconstruction, "kl": kl, "beta": self.beta})
        return reconstruction + self.beta * kl


class DistributionsVAE(Trained):
    """The same with `torch.distributions`, whose arguments are checked by reading them."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(12, 8), nn.Linear(4, 12)

    def training_step(self, batch, batch_idx):
        x, _ = batch
        mean, scale = self.encoder(x).chunk(2, dim=-1)
        posterior = D.Independent(D.Normal(mean, F.softplus(scale) + 1e-3), 1)
        prior = D.Independent(D.Normal(torch.zeros_like(mean), torch.ones_like(mean)), 1)
        z = posterior.rsample()
        likelihood = D.Independent(D.Bernoulli(logits=self.decoder(z)), 1).log_prob((x > 0.5).float())
        loss = (D.kl_divergence(posterior, prior) - likelihood).mean()
        self.log("elbo", -loss, prog_bar=True)
        return loss


class DDPM(Trained):
    """Noise and times drawn in the step, schedules as buffers, a time embedding at every layer."""

    def __init__(self, steps=50, width=16):
        super().__init__()
        beta = torch.linspace(1e-4, 0.02, steps)
        self.steps = steps
        self.register_buffer("alpha", torch.cumprod(1 - beta, 0))
        self.time = nn.Embedding(steps, width)
        self.inside, self.outside = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, 1, 3, padding=1)
        self.middle = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(2))

    def training_step(self, batch, batch_idx):
        x = batch[0]
        t = torch.randint(0, self.steps, (x.shape[0],), device=self.device)
        noise = torch.randn_like(x)
        alpha = self.alpha[t][:, None, None, None]
        h = self.inside(alpha.sqrt() * x + (1 - alpha).sqrt() * noise)
        embedding = self.time(t)[:, :, None, None]
        for layer in self.middle:
            h = h + F.silu(layer(h + embedding))
        loss = F.mse_loss(self.outside(h), noise)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss


def pictures(samples):
    return (torch.randn(samples, 1, 6, 6),)


class MAE(Trained):
    """A random subset of patches is encoded: argsort of noise, gather, restore."""

    def __init__(self, width=16, keep=4):
        super().__init__()
        self.keep = keep
        self.embed, self.decode = nn.Linear(4, width), nn.Linear(width, 4)
        self.position = nn.Parameter(torch.randn(1, 9, width) * 0.02)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, width))
        self.encoder = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True)

    def training_step(self, batch, batch_idx):
        patches = F.unfold(batch[0], 2, stride=2).transpose(1, 2)
        x = self.embed(patches) + self.position
        order = torch.rand(x.shape[:2], device=x.device).argsort(dim=1)
        restore = order.argsort(dim=1)
        shown = torch.gather(x, 1, order[:, : self.keep, None].expand(-1, -1, x.shape[-1]))
        encoded = self.encoder(shown)
        hidden = self.mask_token.expand(x.shape[0], x.shape[1] - self.keep, -1)
        full = torch.cat([encoded, hidden], dim=1).gather(1, restore[..., None].expand(-1, -1, x.shape[-1]))
        masked = (restore >= self.keep).float()
        error = (self.decode(full + self.position) - patches).pow(2).mean(-1)
        return (error * masked).sum() / masked.sum()


class VQVAE(Trained):
    """A codebook kept as buffers and moved in the step; gradients pass straight through."""

    def __init__(self, codes=8, width=4):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(12, width), nn.Linear(width, 12)
        self.register_buffer("codebook", torch.randn(codes, width))
        self.register_buffer("counts", torch.ones(codes))

    def training_step(self, batch, batch_idx):
        x, _ = batch
        z = self.encoder(x)
        nearest = torch.cdist(z, self.codebook).argmin(-1)
        quantized = F.embedding(nearest, self.codebook)
        with torch.no_grad():
            used = F.one_hot(nearest, len(self.counts)).type_as(z)
            self.counts.mul_(0.9).add_(used.sum(0), alpha=0.1)
            self.codebook.mul_(0.9).add_(used.t() @ z / self.counts[:, None], alpha=0.1)
        loss = F.mse_loss(self.decoder(z + (quantized - z).detach()), x) + 0.25 * F.mse_loss(z, quantized.detach())
        self.log("perplexity", torch.exp(-(used.mean(0) * torch.log(used.mean(0) + 1e-10)).sum()))
        return loss


class DeepAR(Trained):
    """A forecast as a distribution; series scaled by their own mean; one LSTM cell stepped in Python."""

    def __init__(self, width=10):
        super().__init__()
        self.cell = nn.LSTMCell(2, width)
        self.location, self.scale = nn.Linear(width, 1), nn.Linear(width, 1)

    def training_step(self, batch, batch_idx):
        series, covariates = batch["target"], batch["covariates"]
        scale = series.abs().mean(dim=1, keepdim=True).clamp(min=1e-3)
        series = series / scale
        h = c = series.new_zeros(series.size(0), self.cell.hidden_size)
        loss = 0.0
        for t in range(series.size(1) - 1):
            h, c = self.cell(torch.stack([series[:, t], covariates[:, t]], dim=-1), (h, c))
            predicted = D.StudentT(4.0, self.location(h).squeeze(-1), F.softplus(self.scale(h)).squeeze(-1) + 1e-3)
            loss = loss - predicted.log_prob(series[:, t + 1]).mean()
        return loss / (series.size(1) - 1)


def series(samples):
    return {"target": torch.randn(samples, 6).cumsum(1), "covariates": torch.randn(samples, 6)}


ENTRIES = {
    "vae": Entry(VAE, flat),
    "vae_distributions": Entry(DistributionsVAE, flat),
    "ddpm": Entry(DDPM, pictures),
    "mae": Entry(MAE, pictures),
    "vqvae_ema": Entry(VQVAE, flat),
    "deepar": Entry(DeepAR, series),
}
