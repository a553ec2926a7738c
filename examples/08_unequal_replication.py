"""Give convolutions two ranks and large linear layers one, and write a report of the run.

    python examples/08_unequal_replication.py

Convolutions take two thirds of the time and have few weights, so two replicas share their samples: little is summed.
The linear layers have nearly all weights, so they stay on one rank, and no gradient of them is sent (Krizhevsky, "One
weird trick", 2014). Look at runs/unequal_replication/report.html afterwards. The same training then runs on one device,
to compare the loss. For real size: leave out `layout`, and the planner decides how many devices each stage gets.
"""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import Strategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipe import DappleStrategy

REPORT = "runs/unequal_replication/report.html"


class Uneven(pl.LightningModule):
    """Convolutions that take long, then linear layers with most of the weights."""

    def __init__(self, channels: int = 16, width: int = 512):
        super().__init__()
        first, *others = (nn.Conv2d(inputs, channels, 3, padding=1) for inputs in (1, channels, channels, channels))
        self.features = nn.Sequential(
            first, nn.ReLU(), others[0], nn.ReLU(), nn.MaxPool2d(2),
            others[1], nn.ReLU(), others[2], nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        )  # fmt: skip
        self.classifier = nn.Sequential(
            nn.Linear(16 * channels, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2)
        )

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = F.cross_entropy(self.classifier(self.features(images)), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def train(strategy: str | Strategy, devices: int) -> pl.Trainer:
    pl.seed_everything(0)
    labels = torch.randint(0, 2, (1280,))
    images = torch.randn(1280, 1, 16, 16, dtype=torch.float64)
    images[:, :, 4:12, 4:12] += labels[:, None, None, None]  # a bright square, or none
    trainer = pl.Trainer(
        strategy=strategy, devices=devices, accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
        precision="64-true",  # so that losses can be compared to the last digits
    )  # fmt: skip
    trainer.fit(Uneven(), DataLoader(TensorDataset(images, labels), batch_size=64))
    return trainer


def main() -> None:
    pipeline = train(DappleStrategy(layout="2-1", microbatches=8, report=REPORT), devices=3)
    if pipeline.is_global_zero:
        print(f"trained {pipeline.global_step} steps, see {REPORT}; now the same on one device")
        losses = [float(trainer.callback_metrics["loss"]) for trainer in (train("auto", devices=1), pipeline)]
        print("one device: {:.7f}, pipeline: {:.7f}".format(*losses))
        if abs(losses[0] - losses[1]) > 1e-6:
            raise SystemExit("The losses differ.")


if __name__ == "__main__":
    main()
