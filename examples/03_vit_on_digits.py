"""Train a vision transformer on scikit-learn's handwritten digits, with validation and a checkpoint.

    python examples/03_vit_on_digits.py

Two stages of two blocks each. Afterwards the same training runs on one device, to compare the loss. Needs
`pip install scikit-learn`. For real size: take `timm.create_model("vit_base_patch16_224")` and your own images,
`accelerator="gpu"`, and give the first stage more devices with `layout` if images come in faster than it can work.
"""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import Strategy
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipe import DappleStrategy


class ViT(pl.LightningModule):
    """Patches of 2 x 2 pixels, a class token, transformer blocks, a linear head."""

    def __init__(self, width: int = 64, depth: int = 4, classes: int = 10):
        super().__init__()
        self.patches = nn.Conv2d(1, width, kernel_size=2, stride=2)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 17, width))
        self.blocks = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True, norm_first=True)
                for _ in range(depth)
            )
        )
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions
        return self.head(self.blocks(x)[:, 0])

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.log("accuracy", (self(images).argmax(-1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def train(strategy: str | Strategy, devices: int) -> pl.Trainer:
    pl.seed_everything(0)
    digits = load_digits()
    images = torch.tensor(digits.images)[:, None] / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    train, val = torch.utils.data.random_split(data, [1500, len(data) - 1500])
    trainer = pl.Trainer(
        strategy=strategy, devices=devices, accelerator="cpu", max_epochs=6, logger=False,
        precision="64-true",  # so that losses can be compared to the last digits
        callbacks=[ModelCheckpoint("runs/vit_on_digits", monitor="accuracy", mode="max")],
    )  # fmt: skip
    trainer.fit(ViT(), DataLoader(train, 50, shuffle=True), DataLoader(val, 99))
    return trainer


def main() -> None:
    pipeline = train(DappleStrategy(layout="1-1"), devices=2)
    if pipeline.is_global_zero:
        accuracy = pipeline.callback_metrics["accuracy"]
        print(f"trained {pipeline.global_step} steps, accuracy {accuracy:.2f}; now the same on one device")
        losses = [float(trainer.callback_metrics["loss"]) for trainer in (train("auto", devices=1), pipeline)]
        print("one device: {:.7f}, pipeline: {:.7f}".format(*losses))
        if abs(losses[0] - losses[1]) > 1e-6:
            raise SystemExit("The losses differ.")


if __name__ == "__main__":
    main()
