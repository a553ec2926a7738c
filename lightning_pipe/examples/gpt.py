"""Build GPTs of the published sizes (Brown et al., Language Models are Few-Shot Learners, 2020, Table 2.1).

They are plain LightningModules, to be planned or trained. Embedding and output layer share their weight. As there is no
data set, `train_dataloader` gives a random batch of the context's length; only its shape matters for a plan.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_pipe.lightning_names import pl

VOCABULARY, CONTEXT = 50_304, 2048  # tokens; the vocabulary of GPT-2, filled up to a multiple of 128


class Block(nn.Module):
    """A transformer block, normalised before attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what x (samples, tokens, width) becomes."""
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
        x = x + self.out(attended)
        y: torch.Tensor = x + self.mlp(self.norm2(x))
        return y


class GPT(pl.LightningModule):
    """A GPT.

    Args:
        depth: number of blocks.
        width: of the residual stream.
        heads: of every attention.
        context: tokens of a sample.
        vocabulary: number of tokens.
    """

    def __init__(
        self, depth: int, width: int, heads: int, context: int = CONTEXT, vocabulary: int = VOCABULARY
    ) -> None:
        super().__init__()
        self.context, self.vocabulary = context, vocabulary
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    @property
    def tokens_per_sample(self) -> int:
        """Return the tokens of a sample, by which `lightning-pipe plan` gives tokens per second."""
        return self.context

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return logits (samples, tokens, vocabulary) of the next tokens."""
        x = self.tokens(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Return the cross entropy of the next tokens; `batch` has one token more than the context."""
        loss = F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=3e-4)

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        """Return random batches of two samples."""
        text = torch.randint(0, self.vocabulary, (8, self.context + 1))
        return DataLoader(text, batch_size=2)  # type: ignore[arg-type]  # a tensor has items and a length


def gpt_125m() -> GPT:
    """Return GPT-3 Small."""
    return GPT(depth=12, width=768, heads=12)


def gpt_1b3() -> GPT:
    """Return GPT-3 XL."""
    return GPT(depth=24, width=2048, heads=16)


def gpt_13b() -> GPT:
    """Return GPT-3 13B."""
    return GPT(depth=40, width=5120, heads=40)


def gpt_175b() -> GPT:
    """Return GPT-3."""
    return GPT(depth=96, width=12288, heads=96)
