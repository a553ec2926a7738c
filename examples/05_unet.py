"""Train a U-Net with skip connections to find discs in noisy images.

    python examples/05_unet.py

The cut crosses both skip connections, which go from the first layers to the last ones: each is sent straight to the
layer that needs it, and the planner counts the bytes. Afterwards the same training runs on one device, to compare the
loss. For real size: more channels and levels, your own images, `accelerator="gpu"`. If skips dominate, data parallel
training may be faster: read what the plan says.
"""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import Strategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipe import DappleStrategy


def convolutions(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU(),
    )  # fmt: skip


class UNet(pl.LightningModule):
    def __init__(self, width: int = 8):
        super().__init__()
        self.down = nn.ModuleList([convolutions(1, width), convolutions(width, 2 * width)])
        self.bottom = convolutions(2 * width, 4 * width)
        self.up = nn.ModuleList([convolutions(6 * width, 2 * width), convolutions(3 * width, width)])
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), skips.pop()], dim=1))
        return self.head(x)

    def training_step(self, batch, batch_idx):
        images, masks = batch
        loss = F.binary_cross_entropy_with_logits(self(images), masks)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def discs(count: int, size: int = 16) -> TensorDataset:
    """Return images (count, 1, size, size) with a disc each, and where it is."""
    grid = torch.stack(torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij"))
    centres, radii = torch.randint(4, size - 4, (count, 2, 1, 1)), torch.randint(2, 5, (count, 1, 1))
    masks = ((grid - centres).square().sum(1) <= radii**2).float()[:, None]
    return TensorDataset((masks + 0.5 * torch.randn_like(masks)).double(), masks.double())


def train(strategy: str | Strategy, devices: int) -> pl.Trainer:
    pl.seed_everything(0)
    trainer = pl.Trainer(
        strategy=strategy, devices=devices, accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
        precision="64-true",  # so that losses can be compared to the last digits
    )  # fmt: skip
    trainer.fit(UNet(), DataLoader(discs(1024), batch_size=16, shuffle=True))
    return trainer


def main() -> None:
    pipeline = train(DappleStrategy(layout="1-1"), devices=2)
    if pipeline.is_global_zero:
        print(f"trained {pipeline.global_step} steps; now the same on one device")
        losses = [float(trainer.callback_metrics["loss"]) for trainer in (train("auto", devices=1), pipeline)]
        print("one device: {:.7f}, pipeline: {:.7f}".format(*losses))
        if abs(losses[0] - losses[1]) > 1e-6:
            raise SystemExit("The losses differ.")


if __name__ == "__main__":
    main()
