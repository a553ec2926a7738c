"""Train an encoder-decoder transformer to reverse sequences; its encoder's output is needed by every decoder layer.

    python examples/04_seq2seq.py

What the encoder makes is sent to each stage of the decoder straight from where it was made. For real size: your own
tokens and `nn.Transformer` of 6 + 6 layers or more, `accelerator="gpu"`, and more micro-batches, as sequences are long.
"""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_pipe  # noqa: F401  # makes strategy="dapple" known

BEGIN, TOKENS, LENGTH = 0, 16, 8


class Reverser(pl.LightningModule):
    def __init__(self, width: int = 48):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(TOKENS, width), nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.transformer = nn.Transformer(width, 4, 2, 2, 2 * width, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, TOKENS)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        embedded = self.tokens(source) + self.positions, self.tokens(target) + self.positions
        return self.head(self.transformer(*embedded, tgt_mask=mask, tgt_is_causal=True))

    def training_step(self, batch, batch_idx):
        source, target = batch
        shifted = F.pad(target[:, :-1], (1, 0), value=BEGIN)
        loss = F.cross_entropy(self(source, shifted).flatten(0, 1), target.flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def main() -> None:
    pl.seed_everything(0)
    source = torch.randint(1, TOKENS, (1024, LENGTH))
    data = DataLoader(TensorDataset(source, source.flip(1)), batch_size=32, shuffle=True)
    trainer = pl.Trainer(
        strategy="dapple", devices=2, accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False
    )
    trainer.fit(Reverser(), data)
    if trainer.is_global_zero:
        print(f"trained {trainer.global_step} steps, loss {trainer.callback_metrics['loss']:.3f}")


if __name__ == "__main__":
    main()
