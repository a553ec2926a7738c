"""Fine-tune a LLaMA-like model of transformers with LoRA, as a pipeline.

    python examples/02_lora_llama.py

Only the small matrices of LoRA are trained; the frozen weights are never sent, summed or given optimizer state. Needs
`pip install transformers`. For real size: load weights with `LlamaForCausalLM.from_pretrained`, train on your own text,
set `accelerator="gpu"`, `precision="bf16-mixed"`, and as many devices as the plan asks for.
"""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import lightning_pipe  # noqa: F401  # makes strategy="dapple" known


class LoRA(nn.Module):
    """A frozen linear layer and a trained correction of low rank (Hu et al., 2021)."""

    def __init__(self, linear: nn.Linear, rank: int = 8, alpha: float = 16.0):
        super().__init__()
        self.linear, self.scale = linear.requires_grad_(False), alpha / rank
        self.down = nn.Parameter(torch.randn(rank, linear.in_features) / linear.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.scale * (x @ self.down.T @ self.up.T)


class FineTuned(pl.LightningModule):
    def __init__(self, width: int = 64, depth: int = 4, vocabulary: int = 64):
        super().__init__()
        config = LlamaConfig(
            vocab_size=vocabulary, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=depth,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, use_cache=False,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config).requires_grad_(False)
        for layer in self.model.model.layers:
            layer.self_attn.q_proj, layer.self_attn.v_proj = LoRA(layer.self_attn.q_proj), LoRA(layer.self_attn.v_proj)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def main() -> None:
    pl.seed_everything(0)
    text = (torch.arange(32) + torch.randint(0, 32, (256, 1))) % 64  # sentences that count
    trainer = pl.Trainer(
        strategy="dapple", devices=2, accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False
    )
    trainer.fit(FineTuned(), DataLoader(text, batch_size=16))
    if trainer.is_global_zero:
        print(f"trained {trainer.global_step} steps, loss {trainer.callback_metrics['loss']:.3f}")


if __name__ == "__main__":
    main()
