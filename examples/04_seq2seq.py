"""Train an encoder-decoder transformer to reverse sequences; its encoder's output is needed by every decoder layer.

    python examples/04_seq2seq.py

Three stages: the encoder, and two of the decoder. The encoder sends its output straight to both of them. Afterwards the
same training runs on one device, to compare the loss. For real size: your own
tokens and `nn.Transformer` of 6 + 6 layers or more, `accelerator="gpu"`, and more micro-batches, as sequences are long.
"""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import Strategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipe import DappleStrategy

BEGIN, TOKENS, LENGTH = 0, 16, 8


class Reverser(pl.LightningModule):
    def __init__(self, width: int = 48):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(TOKENS, width), nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.transformer = nn.Transformer(width, 4, 2, 4, 2 * width, dropout=0.0, batch_first=True)
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


def train(strategy: str | Strategy, devices: int) -> pl.Trainer:
    pl.seed_everything(0)
    source = torch.randint(1, TOKENS, (1280, LENGTH))
    trainer = pl.Trainer(
        strategy=strategy, devices=devices, accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
        precision="64-true",  # so that losses can be compared to the last digits
    )  # fmt: skip
    trainer.fit(Reverser(), DataLoader(TensorDataset(source, source.flip(1)), batch_size=32, shuffle=True))
    return trainer


def main() -> None:
    pipeline = train(DappleStrategy(layout="1-1-1", microbatches=4), devices=3)
    if pipeline.is_global_zero:
        print(f"trained {pipeline.global_step} steps; now the same on one device")
        losses = [float(trainer.callback_metrics["loss"]) for trainer in (train("auto", devices=1), pipeline)]
        print("one device: {:.7f}, pipeline: {:.7f}".format(*losses))
        if abs(losses[0] - losses[1]) > 1e-6:
            raise SystemExit("The losses differ.")


if __name__ == "__main__":
    main()
