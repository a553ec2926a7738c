"""lightly: SimCLR of its tutorial: its transform, projection head and NT-Xent loss; then the embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightly.data import LightlyDataset
from lightly.loss import NTXentLoss
from lightly.models.modules import SimCLRProjectionHead
from lightly.transforms import SimCLRTransform
from PIL import Image
from pytorch_lightning import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader
from torchvision.models import resnet18

from third_party.entry import Way, is_first_rank


class SimCLR(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        resnet = resnet18()
        self.backbone = nn.Sequential(*list(resnet.children())[:-1])
        self.projection_head = SimCLRProjectionHead(input_dim=512, hidden_dim=64, output_dim=16)
        self.criterion = NTXentLoss()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.projection_head(self.backbone(x).flatten(start_dim=1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (first, second), _, _ = batch
        loss = self.criterion(self(first), self(second))
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def run(way: Way) -> dict[str, Any]:
    images = way.folder / "images"
    images.mkdir(exist_ok=True)
    draw = np.random.default_rng(0)
    if is_first_rank():
        for number in range(40):
            Image.fromarray(draw.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(images / f"{number:02}.png")
    seed_everything(0)
    data = LightlyDataset(str(images), transform=SimCLRTransform(input_size=32))
    model = SimCLR()
    trainer = Trainer(max_epochs=2, precision="64-true", default_root_dir=way.folder, **way.trainer)
    trainer.fit(model, DataLoader(data, batch_size=8, shuffle=True, drop_last=True))
    return {}


def reload(folder: Path) -> dict[str, Any]:
    checkpoint = next((folder / "lightning_logs" / "version_0" / "checkpoints").glob("*.ckpt"))
    model = SimCLR.load_from_checkpoint(checkpoint, weights_only=True).double().eval()
    images = torch.linspace(-1, 1, 2 * 3 * 32 * 32, dtype=torch.float64).view(2, 3, 32, 32)
    with torch.no_grad():
        return {"embeddings": model(images)}
