"""Modules that benchmarks train: a GPT, a residual CNN, an encoder-decoder transformer; plain LightningModules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
        x = x + self.out(attended)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Trained(pl.LightningModule):
    """A module with a loss, trained by AdamW."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.loss(batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class GPT(Trained):
    """Predict the next token."""

    def __init__(self, *, vocabulary: int = 1000, context: int = 64, width: int = 256, depth: int = 6) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads=max(1, width // 64)) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        text = batch[0]
        x = self.tokens(text[:, :-1]) + self.positions(torch.arange(text.shape[1] - 1, device=text.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), text[:, 1:].flatten())


class Residual(nn.Module):
    """Two convolutions around a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(8, outputs), nn.GroupNorm(8, outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride) if inputs != outputs else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class CNN(Trained):
    """Classify images."""

    def __init__(self, *, widths: tuple[int, ...] = (32, 64, 128), blocks: int = 2) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 3, 1, 1)]
        for i, width in enumerate(widths):
            before = widths[max(0, i - 1)]
            layers += [Residual(before if b == 0 else width, width, 2 if b == 0 and i else 1) for b in range(blocks)]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(widths[-1], 10)

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        return F.cross_entropy(self.head(self.body(images).mean((2, 3))), labels)


class Seq2Seq(Trained):
    """Translate: a transformer with encoder, decoder and masks."""

    def __init__(self, *, vocabulary: int = 1000, width: int = 192, depth: int = 3) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(128, width)
        self.transformer = nn.Transformer(width, 4, depth, depth, 4 * width, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def embed(self, text: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.tokens(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        return embedded

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        source, target = batch
        inputs, wanted = target[:, :-1], target[:, 1:]
        mask = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1], device=self.device)
        out = self.transformer(self.embed(source), self.embed(inputs), tgt_mask=mask, tgt_is_causal=True)
        return F.cross_entropy(self.head(out).flatten(0, 1), wanted.flatten())


class SimCLR(Trained):
    """Tell two views of a sample from those of all others of its batch."""

    def __init__(self, *, width: int = 512, depth: int = 8) -> None:
        super().__init__()
        layers = (layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()))
        self.encoder, self.projection = nn.Sequential(*layers), nn.Linear(width, 128)

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        one, two = (F.normalize(self.projection(self.encoder(view)), dim=1) for view in batch)
        scores = one.flatten(1) @ two.flatten(1).T / 0.1
        own = torch.arange(len(scores), device=scores.device)
        return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2


class Written(Trained):
    """Predict the next token by blocks of a Llama whose norms, rotations, attention and gates are written out."""

    def __init__(self, *, vocabulary: int = 1000, width: int = 128, depth: int = 4) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.scales = nn.Parameter(torch.ones(depth, 2, width))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(depth))
        self.gates = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(depth))
        self.outs = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(depth))

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        text = batch[0]
        x = self.tokens(text[:, :-1])
        angles = torch.outer(torch.arange(x.shape[1], device=x.device), 1e-4 ** torch.linspace(0, 1, 16))
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        for scale, qkv, gate, out in zip(self.scales, self.qkv, self.gates, self.outs, strict=True):
            q, k, v = qkv(_normed(x) * scale[0]).unflatten(-1, (3, -1, 32)).permute(2, 0, 3, 1, 4)
            scores = _turned(q, angles) @ _turned(k, angles).transpose(-2, -1) / 32**0.5
            x = x + (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(1, 2).flatten(2)
            up, by = gate(_normed(x) * scale[1]).chunk(2, -1)
            x = x + out(up * by * by.sigmoid())
        return F.cross_entropy(self.head(_normed(x)).flatten(0, 1), text[:, 1:].flatten())


def _normed(x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def _turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    one, two = x.chunk(2, -1)
    return torch.cat((one * angles.cos() - two * angles.sin(), two * angles.cos() + one * angles.sin()), -1)


@dataclass(frozen=True)
class Model:
    """How a benchmark makes a module, and one batch of so many samples."""

    make: Callable[[], pl.LightningModule]
    batch: Callable[[int], tuple[torch.Tensor, ...]]


MODELS = {
    "gpt": Model(GPT, lambda n: (torch.randint(1000, (n, 65)),)),
    "cnn": Model(CNN, lambda n: (torch.randn(n, 3, 32, 32), torch.randint(10, (n,)))),
    "seq2seq": Model(Seq2Seq, lambda n: (torch.randint(1000, (n, 48)), torch.randint(1000, (n, 49)))),
}
ALL = {
    **MODELS,
    "simclr": Model(SimCLR, lambda n: (torch.randn(n, 32, 512), torch.randn(n, 32, 512))),
    "written": Model(Written, lambda n: (torch.randint(1000, (n, 65)),)),
}


def loader(model: Model, *, batch_size: int, batches: int) -> DataLoader[Any]:
    """Return batches of seeded random samples."""
    torch.manual_seed(0)
    return DataLoader(TensorDataset(*model.batch(batch_size * batches)), batch_size)
