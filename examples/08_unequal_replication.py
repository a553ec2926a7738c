"""Give the slow half of a model two ranks and the fast half one, and write a report of how it went.

    python examples/08_unequal_replication.py

Look at runs/unequal_replication/report.html afterwards: three ranks, the two replicas of stage 0 with half of the
samples each. For real size: leave out `layout`, and the planner decides how many devices each stage gets.
"""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipe import DappleStrategy

REPORT = "runs/unequal_replication/report.html"


class Uneven(pl.LightningModule):
    """Convolutions that take long, then a small classifier."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        )  # fmt: skip
        self.classifier = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 2))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = F.cross_entropy(self.classifier(self.features(images)), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main() -> None:
    pl.seed_everything(0)
    images = torch.randn(512, 1, 16, 16)
    data = DataLoader(TensorDataset(images, (images.mean((1, 2, 3)) > 0).long()), batch_size=32)
    strategy = DappleStrategy(layout="2-1", microbatches=4, report=REPORT)
    trainer = pl.Trainer(
        strategy=strategy, devices=3, accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False
    )
    trainer.fit(Uneven(), data)
    if trainer.is_global_zero:
        print(f"trained {trainer.global_step} steps, loss {trainer.callback_metrics['loss']:.3f}; see {REPORT}")


if __name__ == "__main__":
    main()
