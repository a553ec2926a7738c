"""Modules of third-party projects that users train by a Trainer of their own, each with a loader, small.

Every function imports its project, so that one that is not installed costs nothing. Dropout is off: its random numbers
are keyed by micro-batch here, and drawn in one stream on one device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

Made = tuple[Any, Any]  # a LightningModule and a loader


def _tensors(*shapes: tuple[int, ...], classes: int | None = None, batch_size: int = 8) -> DataLoader:
    random = torch.Generator().manual_seed(1)
    data = [torch.randn(*shape, generator=random) for shape in shapes]
    if classes is not None:
        data.append(torch.randint(classes, (len(data[0]),), generator=random))
    return DataLoader(TensorDataset(*data), batch_size)


def _user_module(model: nn.Module, step: Callable[[nn.Module, Any], torch.Tensor], package: str = "lightning") -> Any:
    """Return the module that a user writes around a model of a library."""
    import importlib

    pl = importlib.import_module({"lightning": "lightning.pytorch"}.get(package, package))

    class Users(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = step(self.model, batch)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    return Users()


def litgpt() -> Made:
    from litgpt import GPT, Config

    model = GPT(Config(n_layer=2, n_head=2, n_embd=32, block_size=16, padded_vocab_size=64, vocab_size=64))
    ids = torch.randint(64, (64, 17), generator=torch.Generator().manual_seed(1))

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        logits = model(batch[0][:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten())

    return _user_module(model, step), DataLoader(TensorDataset(ids), 8)


def pytorch_lifestream() -> Made:
    from ptls.frames.supervised import SequenceToTarget
    from torchmetrics.classification import MulticlassAccuracy

    encoder = nn.Sequential(nn.Linear(8, 16), nn.Tanh())
    encoder.embedding_size, encoder.is_reduce_sequence = 16, True
    module = SequenceToTarget(
        encoder, nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3), nn.LogSoftmax(dim=1)), nn.NLLLoss(),
        metric_list=MulticlassAccuracy(3),
        optimizer_partial=partial(torch.optim.Adam, lr=1e-3),
        lr_scheduler_partial=partial(torch.optim.lr_scheduler.StepLR, step_size=5),
    )  # fmt: skip
    return module, _tensors((64, 8), classes=3)


def torch_geometric() -> Made:
    from torch_geometric.nn import DenseGCNConv

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.out = DenseGCNConv(4, 16), DenseGCNConv(16, 16), nn.Linear(16, 3)

        def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
            return self.out(torch.relu(self.second(torch.relu(self.first(x, adjacency)), adjacency)).mean(1))

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0], (batch[1] > 0).to(batch[0].dtype)), batch[2])

    return _user_module(Net(), step, "pytorch_lightning"), _tensors((64, 6, 4), (64, 6, 6), classes=3)


def monai() -> Made:
    from monai.losses import DiceLoss
    from monai.networks.nets import UNETR

    model = UNETR(1, 2, (16, 16, 16), feature_size=4, hidden_size=24, mlp_dim=32, num_heads=2)
    loss = DiceLoss(to_onehot_y=True, softmax=True)
    data = _tensors((8, 1, 16, 16, 16), batch_size=2)
    return _user_module(
        model, lambda model, batch: loss(model(batch[0]), (batch[0] > 0).float()), "pytorch_lightning"
    ), data


def x_transformers() -> Made:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    model = AutoregressiveWrapper(
        TransformerWrapper(num_tokens=64, max_seq_len=32, attn_layers=Decoder(dim=32, depth=3, heads=2))
    )
    ids = torch.randint(64, (64, 17), generator=torch.Generator().manual_seed(1))
    return _user_module(model, lambda model, batch: model(batch[0])), DataLoader(TensorDataset(ids), 8)


def pytorch_tcn() -> Made:
    from pytorch_tcn import TCN

    model = nn.Sequential(TCN(3, [8, 8, 8], dropout=0.0, use_norm=None), nn.Flatten(), nn.Linear(8 * 12, 2))
    step = lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1])  # noqa: E731
    return _user_module(model, step, "pytorch_lightning"), _tensors((64, 3, 12), (64, 2))


def pytorch_metric_learning() -> Made:
    from pytorch_metric_learning.losses import ArcFaceLoss

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 16))
            self.loss = ArcFaceLoss(4, 16)

    return _user_module(Net(), lambda m, batch: m.loss(m.net(batch[0]), batch[1])), _tensors((64, 8), classes=4)


def mlp_mixer_pytorch() -> Made:
    from mlp_mixer_pytorch import MLPMixer

    model = MLPMixer(image_size=16, channels=1, patch_size=4, dim=16, depth=3, num_classes=3)
    step = lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1])  # noqa: E731
    return _user_module(model, step, "pytorch_lightning"), _tensors((64, 1, 16, 16), classes=3)


def tab_transformer_pytorch() -> Made:
    from tab_transformer_pytorch import FTTransformer

    options = {"num_residual_streams": 1}  # several are computed in float32
    model = FTTransformer(categories=(5, 7), num_continuous=4, dim=16, dim_out=3, depth=3, heads=2, **options)
    random = torch.Generator().manual_seed(1)
    kinds, numbers = torch.randint(5, (64, 2), generator=random), torch.randn(64, 4, generator=random)
    labels = torch.randint(3, (64,), generator=random)
    step = lambda model, batch: nn.functional.cross_entropy(model(*batch[:2]), batch[2])  # noqa: E731
    return _user_module(model, step), DataLoader(TensorDataset(kinds, numbers, labels), 8)


PROJECTS: dict[str, Callable[[], Made]] = {
    make.__name__: make
    for make in (
        litgpt, pytorch_lifestream, torch_geometric, monai, x_transformers, pytorch_tcn, pytorch_metric_learning,
        mlp_mixer_pytorch, tab_transformer_pytorch,
    )
}  # fmt: skip

SEEN = {
    "pytorch_lifestream": ("pytorch-lifestream 0.7.0", "sequences of events", "1.1e-16"),
    "litgpt": ("litgpt 0.5.13", "language", "1.9e-12"),
    "x_transformers": ("x-transformers 2.31.10", "language", "2.0e-14"),
    "torch_geometric": ("torch-geometric 2.8.1", "graphs", "2.0e-16"),
    "monai": ("monai 1.6.1", "medical images", "6.8e-13"),
    "mlp_mixer_pytorch": ("mlp-mixer-pytorch 0.3.1", "images", "5.1e-11"),
    "pytorch_tcn": ("pytorch-tcn 1.2.3", "series", "1.6e-16"),
    "pytorch_metric_learning": ("pytorch-metric-learning 2.9.0", "embeddings", "3.0e-16"),
    "tab_transformer_pytorch": ("tab-transformer-pytorch 0.6.1", "tables", "1.3e-15"),
}
"""Release, field, and the largest relative difference that was seen (2026-11-22, 2-core CPU, torch 2.13)."""
