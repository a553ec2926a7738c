"""Train from configurations of Hydra: the strategy and its presets are found without a change of the project.

    python examples/06_hydra_project/train.py
    python examples/06_hydra_project/train.py strategy@trainer.strategy=dapple_report model.depth=6
    python examples/06_hydra_project/train.py trainer.strategy.layout=null

Two stages, by `trainer.strategy.layout` in `conf/train.yaml`; `null` leaves the choice to the planner. Afterwards the
same training runs on one device, to compare the loss.

For real size: `trainer.accelerator=gpu trainer.devices=8`, and a preset of your own in `conf/strategy/`.
"""

import hydra
import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class MLP(pl.LightningModule):
    def __init__(self, width: int, depth: int, lr: float):
        super().__init__()
        self.lr = lr
        layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU())]
        self.net = nn.Sequential(*layers, nn.Linear(width, 1))

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def train(config: DictConfig, trainer_config: DictConfig | dict) -> pl.Trainer:
    pl.seed_everything(config.seed)
    x = torch.randn(2048, config.model.width, dtype=torch.float64)
    y = torch.tanh(x[:, :8].sum(1, keepdim=True))
    trainer = hydra.utils.instantiate(trainer_config)
    trainer.fit(MLP(**config.model), DataLoader(TensorDataset(x, y), batch_size=config.batch_size))
    return trainer


@hydra.main(version_base=None, config_path="conf", config_name="train")
def main(config: DictConfig) -> None:
    pipeline = train(config, config.trainer)
    if pipeline.is_global_zero:
        print(f"trained {pipeline.global_step} steps; now the same on one device")
        one_device = train(config, {**config.trainer, "strategy": "auto", "devices": 1})
        losses = [float(trainer.callback_metrics["loss"]) for trainer in (one_device, pipeline)]
        print("one device: {:.7f}, pipeline: {:.7f}".format(*losses))
        if abs(losses[0] - losses[1]) > 1e-6:
            raise SystemExit("The losses differ.")


if __name__ == "__main__":
    main()
