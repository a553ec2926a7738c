"""Images: classification, segmentation, detection."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from zoo.entry import Entry, Trained, images, vectors


class MLPClassifier(Trained):
    """A metric in the step, logged per step and epoch."""

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 5))
        self.accuracy = MulticlassAccuracy(num_classes=5)

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.accuracy(logits, y)
        self.log("train/loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("train/acc", self.accuracy, on_step=False, on_epoch=True)
        return loss


class BasicBlock(nn.Module):
    def __init__(self, channels_in, channels, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(nn.Conv2d(channels_in, channels, 1, stride), nn.BatchNorm2d(channels))

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return self.relu(out)


class ResNet(Trained):
    """Batch statistics, activations in place, residuals."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.layers = nn.Sequential(BasicBlock(8, 8), BasicBlock(8, 16, stride=2))
        self.head = nn.Linear(16, 5)
        self.metrics = MetricCollection({"acc": MulticlassAccuracy(5), "f1": MulticlassF1Score(5)}, prefix="train/")

    def training_step(self, batch, batch_idx):
        x, y = batch
        features = F.adaptive_avg_pool2d(self.layers(self.stem(x)), 1).flatten(1)
        logits = self.head(features)
        self.metrics.update(logits, y)
        loss = F.cross_entropy(logits, y, label_smoothing=0.1)
        self.log_dict({"train/loss": loss, "train/confidence": logits.softmax(-1).amax(-1).mean()})
        return loss

    def on_train_epoch_end(self):
        self.log_dict(self.metrics.compute())
        self.metrics.reset()


class UNet(Trained):
    """Values produced early and used late."""

    def __init__(self):
        super().__init__()

        def block(i, o):
            return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(2, o), nn.SiLU())

        self.down1, self.down2, self.middle = block(3, 8), block(8, 16), block(16, 16)
        self.up = nn.ConvTranspose2d(16, 16, 2, 2)
        self.up2, self.up1, self.head = block(32, 8), block(16, 8), nn.Conv2d(8, 4, 1)

    def training_step(self, batch, batch_idx):
        image, mask = batch["image"], batch["mask"]
        one = self.down1(image)
        two = self.down2(F.max_pool2d(one, 2))
        bottom = self.up(self.middle(F.max_pool2d(two, 2)))
        two = self.up2(torch.cat([bottom, two], dim=1))
        one = self.up1(torch.cat([F.interpolate(two, scale_factor=2, mode="nearest"), one], dim=1))
        logits = self.head(one)
        dice = 1 - 2 * (logits.softmax(1)[:, 1] * (mask == 1)).mean()
        loss = F.cross_entropy(logits, mask) + 0.5 * dice
        self.log("loss", loss, batch_size=image.shape[0])
        return loss


def segmentation(samples):
    return {"image": torch.randn(samples, 3, 8, 8), "mask": torch.randint(4, (samples, 8, 8))}


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)

    def forward(self, x, bias=None):
        b, t, c = x.shape
        q, k, v = self.qkv(x).reshape(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.project(attended.transpose(1, 2).reshape(b, t, c))


class ViT(Trained):
    """A class token expanded over the batch, learned positions, drop path."""

    def __init__(self, width=16):
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, 5, width) * 0.02)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = nn.ModuleList(Attention(width, 2) for _ in range(2))
        self.head = nn.Linear(width, 5)

    def drop_path(self, x, rate=0.2):
        if not self.training:
            return x
        keep = x.new_empty((x.shape[0], 1, 1)).bernoulli_(1 - rate)
        return x * keep / (1 - rate)

    def training_step(self, batch, batch_idx):
        x, y = batch
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.position
        for norm, attention in zip(self.norms, self.attention, strict=True):
            x = x + self.drop_path(attention(norm(x)))
        loss = F.cross_entropy(self.head(x[:, 0]), y)
        self.log("loss", loss)
        return loss


class Swin(Trained):
    """Shifted windows: roll, window partition, a table of relative positions."""

    def __init__(self, width=16, window=4):
        super().__init__()
        self.window = window
        self.embed = nn.Conv2d(3, width, 1)
        self.attention = Attention(width, 2)
        self.table = nn.Parameter(torch.zeros((2 * window - 1) ** 2, 2))
        grid = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        relative = (grid[:, :, None] - grid[:, None, :] + window - 1).permute(1, 2, 0)
        self.register_buffer("index", relative[..., 0] * (2 * window - 1) + relative[..., 1], persistent=False)
        self.head = nn.Linear(width, 5)

    def training_step(self, batch, batch_idx):
        x, y = batch
        x = self.embed(x).permute(0, 2, 3, 1)
        b, h, w, c = x.shape
        n = self.window
        shifted = torch.roll(x, shifts=(-n // 2, -n // 2), dims=(1, 2))
        windows = shifted.view(b, h // n, n, w // n, n, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, n * n, c)
        bias = self.table[self.index.view(-1)].view(n * n, n * n, -1).permute(2, 0, 1)
        windows = self.attention(windows, bias[None])
        back = windows.view(b, h // n, w // n, n, n, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
        x = x + torch.roll(back, shifts=(n // 2, n // 2), dims=(1, 2))
        return F.cross_entropy(self.head(x.mean((1, 2))), y)


class ConvNeXt(Trained):
    """Depthwise convolutions, channels last, layer scale."""

    def __init__(self, width=8, depth=2):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 2, 2)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "depthwise": nn.Conv2d(width, width, 3, padding=1, groups=width),
                    "norm": nn.LayerNorm(width, eps=1e-6),
                    "mlp": nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)),
                }
            )
            for _ in range(depth)
        )
        self.scales = nn.ParameterList(nn.Parameter(1e-2 * torch.ones(width)) for _ in range(depth))
        self.head = nn.Linear(width, 5)

    def training_step(self, batch, batch_idx):
        x, y = batch
        x = self.stem(x)
        for block, scale in zip(self.blocks, self.scales, strict=True):
            out = block["mlp"](block["norm"](block["depthwise"](x).permute(0, 2, 3, 1)))
            x = x + (scale * out).permute(0, 3, 1, 2)
        return {"loss": F.cross_entropy(self.head(x.mean([-2, -1])), y)}


class TiedConvolutions(Trained):
    """One convolution used at every scale of a pyramid."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.shared = nn.Conv2d(8, 8, 3, padding=1)
        self.heads = nn.ModuleList(nn.Linear(8, 5) for _ in range(3))

    def training_step(self, batch, batch_idx):
        x, y = batch
        x = torch.tanh(self.stem(x))
        loss = 0.0
        for level, head in enumerate(self.heads):
            x = torch.tanh(self.shared(x))
            level_loss = F.cross_entropy(head(x.mean((2, 3))), y)
            self.log(f"loss/{level}", level_loss)
            loss = loss + level_loss * 0.5**level
            x = F.avg_pool2d(x, 2)
        return loss


class GreedyDETR(Trained):
    """Predictions matched to objects by Python: which ones changes with every batch."""

    def __init__(self, queries=4, width=16):
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(192, width), nn.ReLU())
        self.queries = nn.Parameter(torch.randn(queries, width))
        self.boxes, self.classes = nn.Linear(width, 4), nn.Linear(width, 6)

    @torch.no_grad()
    def match(self, cost):
        free, pairs = set(range(len(cost))), []
        for target, column in enumerate(cost.t().tolist()):
            query = min(free, key=lambda q: column[q])
            free.remove(query)
            pairs.append((query, target))
        return pairs

    def training_step(self, batch, batch_idx):
        image, boxes, labels = batch
        hidden = self.encoder(image)[:, None] + self.queries
        predicted, logits = self.boxes(hidden).sigmoid(), self.classes(hidden)
        loss = torch.zeros((), device=self.device)
        for i in range(len(image)):
            for query, target in self.match(torch.cdist(predicted[i], boxes[i], p=1)):
                loss = loss + F.l1_loss(predicted[i, query], boxes[i, target])
                loss = loss + F.cross_entropy(logits[i, query], labels[i, target])
        return loss / len(image)


def detection(samples):
    return torch.randn(samples, 3, 8, 8), torch.rand(samples, 2, 4), torch.randint(5, (samples, 2))


class Mixup(Trained):
    """The share of the mixture drawn by NumPy."""

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))

    def training_step(self, batch, batch_idx):
        x, y = batch
        share = np.random.beta(0.4, 0.4)
        other = torch.randperm(x.size(0), device=x.device)
        logits = self.model(share * x + (1 - share) * x[other])
        return share * F.cross_entropy(logits, y) + (1 - share) * F.cross_entropy(logits, y[other])


class VolumeOfOne(Trained):
    """A batch of one large sample, as for medical volumes."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.InstanceNorm3d(4, affine=True), nn.LeakyReLU(0.01))
        self.head = nn.Conv3d(4, 2, 1)

    def training_step(self, batch, batch_idx):
        logits = self.head(self.net(batch["image"]))
        loss = F.cross_entropy(logits, batch["label"].squeeze(1).long())
        self.log("loss", loss, batch_size=1)
        return {"loss": loss, "logits": logits.detach()}


def volume(samples):
    return {"image": torch.randn(1, 1, 4, 4, 4), "label": torch.randint(2, (1, 1, 4, 4, 4)).float(), "path": "scan.nii"}


ENTRIES = {
    "mlp_classifier": Entry(MLPClassifier, images),
    "resnet_batchnorm": Entry(ResNet, images),
    "unet_skips": Entry(UNet, segmentation),
    "vit": Entry(ViT, images),
    "swin_windows": Entry(Swin, images),
    "convnext": Entry(ConvNeXt, images),
    "tied_convolutions": Entry(TiedConvolutions, images),
    "detr_matching": Entry(GreedyDETR, detection, expected="read into Python"),
    "mixup_numpy": Entry(Mixup, vectors, expected="NumPy random numbers"),
    "volume_of_one": Entry(VolumeOfOne, volume),
}
