"""Train a byte-level GPT on the source of Python's standard library, as a pipeline under a limit of memory.

    python examples/01_gpt_on_real_text.py                                          # one device
    python examples/01_gpt_on_real_text.py --strategy dapple --devices 2 --memory-limit 24MiB
    python examples/01_gpt_on_real_text.py --strategy dapple --devices 2 --timeline timeline.json

Each process of data parallel training would need 71 MiB, so under 24 MiB the planner makes a pipeline. After it, the
same training runs on one device, to compare the loss. Module and data know nothing of pipelines.
"""

import argparse
import itertools
import statistics
import sysconfig
import time
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import Strategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipe import DappleStrategy


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
        x = x + self.out(attended)
        return x + self.mlp(self.norm2(x))


class GPT(pl.LightningModule):
    """A GPT over bytes; input embedding and output layer share their weight."""

    def __init__(self, context: int = 64, width: int = 128, depth: int = 4, lr: float = 3e-3):
        super().__init__()
        self.save_hyperparameters()
        self.bytes, self.positions = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads=4) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        for embedding in (self.bytes, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        self.head.weight = self.bytes.weight

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.bytes(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        text = batch[0].long()
        return F.cross_entropy(self(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, betas=(0.9, 0.95))
        warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}

    @torch.no_grad()
    def generate(self, prompt: str, length: int) -> str:
        text = torch.tensor([list(prompt.encode())], device=self.device)
        for _ in range(length):
            logits = self(text[:, -self.hparams.context :])[:, -1] / 0.7
            text = torch.cat([text, torch.multinomial(logits.softmax(-1), 1)], dim=1)
        return bytes(text[0].tolist()).decode(errors="replace")


class PythonSource(pl.LightningDataModule):
    """The standard library's own files as windows of `context + 1` bytes; every tenth window is for validation."""

    def __init__(self, context: int = 64, batch_size: int = 16, most_bytes: int = 4_000_000):
        super().__init__()
        self.context, self.batch_size, self.most_bytes = context, batch_size, most_bytes

    def setup(self, stage: str) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        source = b"\n".join(file.read_bytes() for file in files)[: self.most_bytes]
        size = self.context + 1
        windows = torch.frombuffer(bytearray(source), dtype=torch.uint8)[: len(source) // size * size].view(-1, size)
        held_out = torch.arange(len(windows)) % 10 == 0
        self.train, self.val = TensorDataset(windows[~held_out]), TensorDataset(windows[held_out])

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.batch_size)


class StepSeconds(pl.Callback):
    """Measure the seconds from the end of one optimizer step to the end of the next, whatever the strategy is."""

    def __init__(self):
        self.ends: list[float] = []

    def on_train_batch_end(self, *_) -> None:
        self.ends.append(time.perf_counter())

    @property
    def median(self) -> float:
        """Return the median, without the first quarter of the steps."""
        later = itertools.pairwise(self.ends[len(self.ends) // 4 :])
        return statistics.median([end - begin for begin, end in later] or [float("nan")])


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a byte-level GPT on the source of the standard library.")
    parser.add_argument("--strategy", default="auto", help="auto, dapple, or any other of Lightning's")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--layout", help="with dapple: ranks per stage, such as 1-1; otherwise the planner decides")
    parser.add_argument("--memory-limit", help="with dapple: most memory of a rank, such as 24MiB")
    parser.add_argument("--timeline", help="with dapple: file for the recorded timeline (Perfetto JSON)")
    return parser.parse_args()


def train(strategy: str | Strategy, args: argparse.Namespace, devices: int) -> tuple[pl.Trainer, StepSeconds]:
    """Train from the same seed; return the trainer and the times of its steps."""
    pl.seed_everything(0)
    seconds = StepSeconds()
    trainer = pl.Trainer(
        strategy=strategy,
        devices=devices,
        accelerator=args.accelerator,
        max_steps=args.steps,
        val_check_interval=args.steps,
        check_val_every_n_epoch=None,
        limit_val_batches=20,
        gradient_clip_val=1.0,
        precision="64-true",  # so that losses can be compared to the last digits
        log_every_n_steps=10,
        logger=CSVLogger("runs/gpt_on_real_text"),
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(monitor="val_loss"), seconds],
    )
    trainer.fit(GPT(), PythonSource(batch_size=args.batch_size))
    return trainer, seconds


def main() -> None:
    args = options()
    strategy = args.strategy
    if strategy == "dapple":
        strategy = DappleStrategy(layout=args.layout, memory_limit=args.memory_limit, trace=args.timeline)
    trainer, seconds = train(strategy, args, args.devices)
    if not trainer.is_global_zero:
        return
    losses = {name: f"{trainer.callback_metrics[name]:.3f}" for name in ("train_loss", "val_loss")}
    print(f"\nafter {trainer.global_step} steps of {seconds.median * 1e3:.0f} ms, nats per byte: {losses}")
    checkpoint = trainer.checkpoint_callback.best_model_path
    print(f"a sample from {checkpoint}:\n")
    print(GPT.load_from_checkpoint(checkpoint, map_location="cpu").eval().generate("def read(self, ", 200))
    if args.strategy == "dapple":
        one_device, _ = train("auto", args, devices=1)
        alone, pipeline = (float(t.callback_metrics["train_loss"]) for t in (one_device, trainer))
        print(f"one device: {alone:.7f}, pipeline: {pipeline:.7f}")
        if abs(alone - pipeline) > 1e-6:
            raise SystemExit("The losses differ.")


if __name__ == "__main__":
    main()
