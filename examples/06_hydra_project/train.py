"""Train from configurations of Hydra: the strategy and its presets are found without a change of the project.

    python examples/06_hydra_project/train.py
    python examples/06_hydra_project/train.py trainer.strategy=auto trainer.devices=1
    python examples/06_hydra_project/train.py +strategy@trainer.strategy=dapple_report model.depth=6

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


@hydra.main(version_base=None, config_path="conf", config_name="train")
def main(config: DictConfig) -> None:
    pl.seed_everything(config.seed)
    x = torch.randn(1024, config.model.width)
    data = DataLoader(TensorDataset(x, x.square().mean(1, keepdim=True)), batch_size=config.batch_size)
    trainer = hydra.utils.instantiate(config.trainer)
    trainer.fit(MLP(**config.model), data)
    if trainer.is_global_zero:
        print(f"trained {trainer.global_step} steps, loss {trainer.callback_metrics['loss']:.3f}")


if __name__ == "__main__":
    main()
