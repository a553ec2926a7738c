"""Modules and loaders that a pipeline has to train exactly as one device does; equal for equal seeds.

    module = make_module("gpt_tied", dropout=0.1)
    pl.Trainer(strategy=..., max_epochs=2).fit(module, make_loader("gpt_tied"), make_loader("gpt_tied", seed=1))

The last batch is smaller than the others. All modules train with SGD and log a loss per step and per epoch and an
accuracy by torchmetrics; validation and prediction work too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

CLASSES, LENGTH, WIDTH = 7, 6, 12


class Parity(NamedTuple):
    """A module, and a function that makes one sample from torch's random state."""

    module: Callable[..., pl.LightningModule]
    sample: Callable[[], Any]


def make_module(name: str, *, seed: int = 0, dropout: float = 0.0, dtype: torch.dtype = torch.float32):
    """Build the module with parameters that depend on the seed only."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return PARITY[name].module(dropout=dropout).to(dtype)


def make_loader(
    name: str,
    *,
    seed: int = 0,
    samples: int = 22,
    batch_size: int = 8,
    shuffle: bool = False,
    dtype: torch.dtype = torch.float32,
) -> DataLoader:
    """Make a loader over samples that depend on the seed only; shuffled by torch's random state where wanted."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        data = [_cast(PARITY[name].sample(), dtype) for _ in range(samples)]
    return DataLoader(data, batch_size=batch_size, shuffle=shuffle)


def _cast(sample: Any, dtype: torch.dtype) -> Any:
    if isinstance(sample, dict):
        return {key: _cast(value, dtype) for key, value in sample.items()}
    if isinstance(sample, tuple):
        return tuple(_cast(value, dtype) for value in sample)
    return sample.to(dtype) if sample.is_floating_point() else sample


class ParityModule(pl.LightningModule):
    """A classifier: `forward(batch)` returns logits `[samples, classes, ...]`, `target(batch)` the right classes."""

    classes = CLASSES

    def __init__(self, *, dropout: float = 0.0):
        super().__init__()
        self.dropout = dropout
        self.train_accuracy = MulticlassAccuracy(self.classes, average="micro")
        self.val_accuracy = MulticlassAccuracy(self.classes, average="micro")

    def target(self, batch):
        return batch[1]

    def training_step(self, batch, batch_idx):
        logits, target = self(batch), self.target(batch)
        loss = F.cross_entropy(logits, target)
        self.train_accuracy(logits, target)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("train_acc", self.train_accuracy, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        logits, target = self(batch), self.target(batch)
        self.val_accuracy.update(logits, target)
        self.log("val_loss", F.cross_entropy(logits, target))
        self.log("val_acc", self.val_accuracy)

    def predict_step(self, batch, batch_idx):
        return self(batch).argmax(1)

    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=0.05, momentum=0.9)


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).reshape(b, t, WIDTH)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(ParityModule):
    """The embedding of the first stage is the output layer of the last."""

    def __init__(self, **options):
        super().__init__(**options)
        self.embed, self.position = nn.Embedding(CLASSES, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block(self.dropout) for _ in range(3)))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, batch):
        ids = batch[0]
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.blocks(x)).transpose(1, 2)


def text(length=LENGTH):
    ids = torch.randint(CLASSES, (length + 1,))
    return ids[:-1], ids[1:]


def phrase():
    return text(3)  # a recurrent network is captured word by word


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.conv2, self.bn2 = nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.relu(x + self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))))


class ResNet(ParityModule):
    """Batch statistics: slices of a batch have others than the batch."""

    def __init__(self, **options):
        super().__init__(**options)
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True))
        self.body = nn.Sequential(Residual(), Residual(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Sequential(nn.Dropout(self.dropout), nn.Linear(6, CLASSES))

    def forward(self, batch):
        return self.head(self.body(self.stem(batch[0])))


def image():
    return torch.randn(3, 6, 6), torch.randint(CLASSES, ())


class UNet(ParityModule):
    """Activations of the first stages are read by the last."""

    def __init__(self, **options):
        super().__init__(**options)

        def block(i, o):
            return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(2, o), nn.SiLU())

        self.down1, self.down2, self.middle = block(3, 4), block(4, 8), block(8, 8)
        self.up2, self.up1, self.head = block(16, 4), block(8, 4), nn.Conv2d(4, CLASSES, 1)
        self.drop = nn.Dropout2d(self.dropout)

    def forward(self, batch):
        one = self.down1(batch["image"])
        two = self.down2(F.max_pool2d(one, 2))
        x = self.drop(self.middle(two))
        x = F.interpolate(self.up2(torch.cat([x, two], 1)), scale_factor=2)
        return self.head(self.up1(torch.cat([x, one], 1)))

    def target(self, batch):
        return batch["mask"]


def picture():
    return {"image": torch.randn(3, 4, 4), "mask": torch.randint(CLASSES, (4, 4))}


class Seq2Seq(ParityModule):
    """Every layer of the decoder reads the encoder's output; padding differs from sample to sample."""

    def __init__(self, **options):
        super().__init__(**options)
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 2, 1, 2, 16, dropout=self.dropout, batch_first=True)
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, batch):
        source, target = batch["source"], batch["target"][:, :-1]
        causal = nn.Transformer.generate_square_subsequent_mask(
            target.size(1), device=target.device, dtype=self.out.weight.dtype
        )
        padding = torch.zeros_like(source, dtype=causal.dtype).masked_fill(source == 0, float("-inf"))
        hidden = self.transformer(
            self.embed(source),
            self.embed(target),
            tgt_mask=causal,
            tgt_is_causal=True,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return self.out(hidden).transpose(1, 2)

    def target(self, batch):
        return batch["target"][:, 1:]


def translation():
    source = torch.randint(1, CLASSES, (LENGTH,))
    source[int(torch.randint(2, LENGTH, ())) :] = 0
    return {"source": source, "target": torch.randint(CLASSES, (LENGTH,))}


class DictBatch(ParityModule):
    """Fields of a dict are read at different places of the network."""

    def __init__(self, **options):
        super().__init__(**options)
        self.category, self.first = nn.Embedding(5, WIDTH), nn.Linear(4, WIDTH)
        self.second = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(self.dropout))
        self.late, self.head = nn.Linear(3, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, batch):
        x = torch.tanh(self.first(batch["numbers"]) + self.category(batch["category"]))
        x = self.second(x) * batch["weight"][:, None]
        return self.head(x + self.late(batch["late"]))

    def target(self, batch):
        return batch["label"]


def row():
    return {
        "numbers": torch.randn(4),
        "category": torch.randint(5, ()),
        "weight": torch.rand(()),
        "late": torch.randn(3),
        "label": torch.randint(CLASSES, ()),
    }


class Frozen(ParityModule):
    """A frozen part in eval mode, called without gradients, and a frozen layer that passes gradients on."""

    def __init__(self, **options):
        super().__init__(**options)
        self.backbone = nn.Sequential(nn.Linear(4, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()).requires_grad_(False)
        self.adapter = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(self.dropout))
        self.bridge = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def train(self, mode: bool = True):
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, batch):
        with torch.no_grad():
            x = self.backbone(batch[0])
        return self.head(torch.tanh(self.bridge(x + self.adapter(x))))


def vector():
    return torch.randn(4), torch.randint(CLASSES, ())


class LSTM(ParityModule):
    """Dropout between the layers of a recurrent network."""

    def __init__(self, **options):
        super().__init__(**options)
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=self.dropout, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, batch):
        return self.head(self.rnn(self.embed(batch[0]))[0]).transpose(1, 2)


class ClippedExponential(torch.autograd.Function):
    """An exponential whose gradient is not the derivative of what it returns."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(max=1.0).exp()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x.clamp(max=2.0).exp()


class CustomFunction(ParityModule):
    """A backward written by hand, which differs from what autograd would derive."""

    def __init__(self, **options):
        super().__init__(**options)
        self.layers = nn.ModuleList([nn.Linear(4, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, batch):
        x = batch[0]
        for layer in self.layers:
            x = F.dropout(ClippedExponential.apply(layer(x)) / 3, self.dropout, self.training)
        return self.head(x)


class ParameterGroups(ParityModule):
    """Weight decay for matrices only, a warm-up that steps with every batch."""

    def __init__(self, **options):
        super().__init__(**options)
        sizes = [(4, WIDTH), (WIDTH, WIDTH), (WIDTH, WIDTH)]
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(*s), nn.LayerNorm(WIDTH), nn.GELU()) for s in sizes))
        self.head = nn.Sequential(nn.Dropout(self.dropout), nn.Linear(WIDTH, CLASSES))

    def forward(self, batch):
        return self.head(self.body(batch[0]))

    def configure_optimizers(self):
        groups = [
            {"params": [p for p in self.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in self.parameters() if p.ndim <= 1], "lr": 0.02},
        ]
        optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


PARITY: dict[str, Parity] = {
    "gpt_tied": Parity(GPT, text),
    "resnet_batchnorm": Parity(ResNet, image),
    "unet_skips": Parity(UNet, picture),
    "seq2seq": Parity(Seq2Seq, translation),
    "dict_batch": Parity(DictBatch, row),
    "frozen": Parity(Frozen, vector),
    "lstm": Parity(LSTM, phrase),
    "custom_function": Parity(CustomFunction, vector),
    "parameter_groups": Parity(ParameterGroups, vector),
}
