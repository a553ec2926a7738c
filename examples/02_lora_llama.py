"""Fine-tune a LLaMA-like model of transformers with LoRA, as a pipeline.

    python examples/02_lora_llama.py

The base learns to count forwards on one device, which takes seconds; then LoRA teaches it to count backwards. Only the
small matrices of LoRA are trained: frozen weights have no gradients, which replicas would have to sum, and no optimizer
state. Needs `pip install transformers`. For real size: take a base from `LlamaForCausalLM.from_pretrained`, your own
text, set `accelerator="gpu"`, `precision="bf16-mixed"`, and as many devices as the plan asks for.
"""

import os
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import Strategy
from torch import nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_pipe import DappleStrategy


class LoRA(nn.Module):
    """A frozen linear layer and a trained correction of low rank (Hu et al., 2021)."""

    def __init__(self, linear: nn.Linear, rank: int = 8, alpha: float = 16.0):
        super().__init__()
        self.linear, self.scale = linear.requires_grad_(False), alpha / rank
        self.down = nn.Parameter(torch.randn(rank, linear.in_features) / linear.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.scale * (x @ self.down.T @ self.up.T)


class Counter(pl.LightningModule):
    """A LLaMA that learns sentences of consecutive numbers, with all its weights or by LoRA."""

    def __init__(self, width: int = 64, depth: int = 4, vocabulary: int = 64):
        super().__init__()
        config = LlamaConfig(
            vocab_size=vocabulary, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=depth,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, use_cache=False,
        )  # fmt: skip
        self.model, self.lr = LlamaForCausalLM(config), 3e-3

    def add_lora(self) -> None:
        self.model.requires_grad_(False)
        for layer in self.model.model.layers:
            for part, name in ((layer.self_attn, "q_proj"), (layer.self_attn, "v_proj"), (layer.mlp, "down_proj")):
                setattr(part, name, LoRA(getattr(part, name)))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)


def train(module: Counter, strategy: str | Strategy, *, devices: int, step: int, max_steps: int) -> pl.Trainer:
    pl.seed_everything(0)
    sentences = (torch.randint(0, 64, (256, 1)) + step * torch.arange(32)) % 64
    trainer = pl.Trainer(
        strategy=strategy, devices=devices, accelerator="cpu", max_steps=max_steps, logger=False,
        enable_checkpointing=False, precision="64-true",  # so that losses can be compared to the last digits
    )  # fmt: skip
    trainer.fit(module, DataLoader(sentences, batch_size=16))
    return trainer


def main() -> None:
    base = Path("runs/lora_llama/base.pt")
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:  # rank 0 starts the other, which runs this script from the top
        pl.seed_everything(0)
        module = Counter()
        train(module, "auto", devices=1, step=1, max_steps=60)
        base.parent.mkdir(parents=True, exist_ok=True)
        torch.save(module.state_dict(), base)

    def fine_tune(strategy: str | Strategy, devices: int) -> tuple[pl.Trainer, Counter]:
        pl.seed_everything(0)
        module = Counter()
        module.load_state_dict(torch.load(base))
        module.add_lora()
        module.lr = 1e-2
        return train(module, strategy, devices=devices, step=-1, max_steps=48), module

    pipeline, module = fine_tune(DappleStrategy(layout="1-1"), devices=2)
    if pipeline.is_global_zero:
        frozen = sum(8 * parameter.numel() for parameter in module.parameters() if not parameter.requires_grad)
        print(f"trained {pipeline.global_step} steps; now the same on one device")
        one_device, _ = fine_tune("auto", devices=1)
        losses = [float(trainer.callback_metrics["loss"]) for trainer in (one_device, pipeline)]
        print(f"Frozen weights save {frozen:,} bytes of gradients, and {2 * frozen:,} of AdamW's state.")
        print("one device: {:.7f}, pipeline: {:.7f}".format(*losses))
        if abs(losses[0] - losses[1]) > 1e-6:
            raise SystemExit("The losses differ.")


if __name__ == "__main__":
    main()
