"""Modules in the style of libraries and demos that are not needed to run them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.demos.lstm import LightningLSTM, SimpleLSTM
from lightning.pytorch.demos.transformer import LightningTransformer, Transformer
from scipy.optimize import linear_sum_assignment
from torch import nn

from zoo.entry import Entry, Trained, tokens, vectors
from zoo.vision import BasicBlock, images

VOCABULARY = 29


class SmallTransformerDemo(LightningTransformer):
    """Lightning's demo: masks and positions that are made once and kept on the module."""

    def __init__(self):
        super().__init__(vocab_size=8)
        self.model = Transformer(vocab_size=VOCABULARY, ninp=16, nhid=16, nlayers=1)

    def prepare_data(self):
        """Download nothing."""


class SmallLSTMDemo(LightningLSTM):
    """Lightning's demo: the hidden state of one batch enters the next."""

    def __init__(self):
        super().__init__(vocab_size=8)
        self.model = SimpleLSTM(vocab_size=VOCABULARY, ninp=12, nhid=12, nlayers=2)

    def prepare_data(self):
        """Download nothing."""


def short_texts(samples):
    return tokens(samples, length=3)


def features(samples):
    return torch.randn(samples, 32)


class ResidualUnit(nn.Module):
    def __init__(self, inside, outside, stride):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv3d(inside, outside, 3, stride, 1), nn.InstanceNorm3d(outside), nn.Dropout(0.1), nn.PReLU()
        )
        self.residual = nn.Conv3d(inside, outside, 3 if stride > 1 else 1, stride, 1 if stride > 1 else 0)

    def forward(self, x):
        return self.conv(x) + self.residual(x)


class SkipConnection(nn.Module):
    def __init__(self, submodule):
        super().__init__()
        self.submodule = submodule

    def forward(self, x):
        return torch.cat([x, self.submodule(x)], dim=1)


class SegResUNet(Trained):
    """A residual U-Net nested as MONAI nests it, and a Dice loss that looks at its arguments."""

    def __init__(self):
        super().__init__()
        inner = nn.Sequential(ResidualUnit(4, 8, 2), SkipConnection(ResidualUnit(8, 8, 1)), self.up(16, 4))
        self.net = nn.Sequential(ResidualUnit(1, 4, 2), SkipConnection(inner), self.up(8, 2))

    def up(self, inside, outside):
        return nn.Sequential(
            nn.ConvTranspose3d(inside, outside, 3, 2, 1, output_padding=1),
            nn.InstanceNorm3d(outside),
            nn.PReLU(),
            ResidualUnit(outside, outside, 1),
        )

    def dice(self, logits, target):
        probability = logits.softmax(1)
        if target.shape[1] == 1:
            target = torch.zeros_like(probability).scatter_(1, target.long(), 1)
        if probability.shape != target.shape:
            raise AssertionError("ground truth has another shape than the prediction")
        axes = (2, 3, 4)
        both = (probability * target).sum(axes)
        score = (2 * both + 1e-5) / (probability.sum(axes) + target.sum(axes) + 1e-5)
        if torch.isnan(score).any():
            raise ValueError("the Dice score is no number")
        return (1 - score).mean()

    def training_step(self, batch, batch_idx):
        logits = self.net(batch["image"])
        loss = self.dice(logits, batch["label"]) + F.cross_entropy(logits, batch["label"].squeeze(1).long())
        self.log("train_loss", loss.item())
        return {"loss": loss, "log": {"train_loss": loss.detach()}}


def volumes(samples):
    label = torch.randint(2, (samples, 1, 8, 8, 8)).float()
    return {"image": torch.randn(samples, 1, 8, 8, 8), "label": label}


class EncoderUNet(Trained):
    """A U-Net on a ResNet encoder: normalised inputs, features of every level, counts of true and false pixels."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1))
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.levels = nn.ModuleList([BasicBlock(4, 8, stride=2), BasicBlock(8, 8, stride=2)])
        self.decoder = nn.ModuleList(
            nn.Sequential(nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True))
            for i, o in ((16, 8), (12, 4))
        )
        self.head = nn.Conv2d(4, 1, 1)

    def encode(self, x):
        height, width = x.shape[-2:]
        if height % 4 != 0 or width % 4 != 0:
            raise RuntimeError(f"Wrong input shape height={height}, width={width}: divide by 4.")
        found = [self.stem(x)]
        for level in self.levels:
            found.append(level(found[-1]))
        return found

    def forward(self, image):
        *skips, x = self.encode((image - self.mean) / self.std)
        for block, skip in zip(self.decoder, reversed(skips), strict=True):
            x = block(torch.cat([F.interpolate(x, scale_factor=2, mode="nearest"), skip], dim=1))
        return self.head(x)

    def training_step(self, batch, batch_idx):
        image, mask = batch["image"], batch["mask"]
        assert image.ndim == 4
        assert mask.max() <= 1.0 and mask.min() >= 0
        logits = self.forward(image)
        shares = F.logsigmoid(logits).exp().view(-1), mask.view(-1)
        loss = 1 - 2 * (shares[0] * shares[1]).sum() / (shares[0] + shares[1]).sum().clamp_min(1e-7)
        found = (logits.sigmoid() > 0.5).long()
        true = (found * mask.long()).sum((1, 2, 3))
        self.log("iou", (true / (found.sum((1, 2, 3)) + mask.sum((1, 2, 3)) - true + 1e-7)).mean(), prog_bar=True)
        return loss


def masks(samples):
    return {"image": images(samples)[0], "mask": torch.randint(2, (samples, 1, 8, 8)).float()}


class GraphConvolution(nn.Module):
    """Self-loops removed by a mask and added again, symmetric normalisation, messages summed by index."""

    def __init__(self, inside, outside):
        super().__init__()
        self.lin = nn.Linear(inside, outside, bias=False)
        self.bias = nn.Parameter(torch.zeros(outside))

    def forward(self, x, edges):
        edges = edges[:, edges[0] != edges[1]]
        loops = torch.arange(x.size(0), device=x.device)
        source, target = torch.cat([edges, torch.stack([loops, loops])], dim=1)
        degree = torch.zeros(x.size(0), device=x.device).scatter_add_(0, target, torch.ones_like(target, dtype=x.dtype))
        inverse = degree.pow_(-0.5)
        inverse.masked_fill_(inverse == float("inf"), 0)
        messages = (inverse[source] * inverse[target])[:, None] * self.lin(x).index_select(0, source)
        return torch.zeros(x.size(0), messages.size(1), device=x.device).index_add(0, target, messages) + self.bias


class GraphClassifier(Trained):
    """Nodes of one graph, trained where a mask says so."""

    def __init__(self):
        super().__init__()
        self.first, self.second = GraphConvolution(5, 8), GraphConvolution(8, 3)

    def training_step(self, batch, batch_idx):
        x = F.dropout(self.first(batch["x"], batch["edge_index"]).relu(), p=0.5, training=self.training)
        logits, known = self.second(x, batch["edge_index"]), batch["train_mask"]
        return F.cross_entropy(logits[known], batch["y"][known])


def masked_graph(samples):
    return {
        "x": torch.randn(samples, 5),
        "edge_index": torch.randint(samples, (2, 12)),
        "y": torch.randint(3, (samples,)),
        "train_mask": torch.arange(samples) % 3 > 0,
    }


class CapacityMoE(Trained):
    """Every expert takes so many tokens and no more: the capacity follows from the size of the batch."""

    def __init__(self, width=16, experts=3):
        super().__init__()
        self.count = experts
        self.embed, self.gate = nn.Embedding(VOCABULARY, width), nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))
        self.head = nn.Linear(width, VOCABULARY)

    def training_step(self, batch, batch_idx):
        x, y = batch
        h = self.embed(x)
        rows = h.reshape(-1, h.size(-1))
        capacity = int(1.5 * rows.size(0) / self.count)
        scores = self.gate(rows).softmax(-1)
        weight, chosen = scores.max(-1)
        wanted = F.one_hot(chosen, self.count).to(h.dtype)
        place = (wanted.cumsum(0) - 1) * wanted
        taken = wanted * (place < capacity)
        slot = F.one_hot(place.sum(-1).long().clamp(max=capacity - 1), capacity).to(h.dtype)
        dispatch = taken[:, :, None] * slot[:, None, :]
        inputs = torch.einsum("tec,td->ecd", dispatch, rows)
        outputs = torch.stack([F.gelu(expert(part)) for expert, part in zip(self.experts, inputs, strict=True)])
        h = rows + torch.einsum("tec,ecd->td", dispatch * weight[:, None, None], outputs)
        balance = self.count * (scores.mean(0) * wanted.mean(0)).sum()
        return F.cross_entropy(self.head(h), y.reshape(-1)) + 0.01 * balance


class HungarianDETR(Trained):
    """Predictions matched to objects by scipy, in Python."""

    def __init__(self, queries=4, width=16):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, width, 4, 4), nn.ReLU())
        self.transformer = nn.TransformerDecoderLayer(width, 2, 32, dropout=0.1, batch_first=True)
        self.queries = nn.Embedding(queries, width)
        self.boxes, self.classes = nn.Linear(width, 4), nn.Linear(width, 6)

    @torch.no_grad()
    def match(self, logits, boxes, targets):
        cost = torch.cdist(boxes, targets["boxes"], p=1) - logits.softmax(-1)[:, targets["labels"]]
        return linear_sum_assignment(cost.cpu().numpy())

    def training_step(self, batch, batch_idx):
        image, targets = batch
        memory = self.backbone(image).flatten(2).transpose(1, 2)
        h = self.transformer(self.queries.weight.expand(image.size(0), -1, -1), memory)
        logits, boxes = self.classes(h), self.boxes(h).sigmoid()
        loss = torch.zeros((), device=self.device)
        for i in range(image.size(0)):
            target = {name: value[i] for name, value in targets.items()}
            rows, columns = (
                torch.as_tensor(part, device=self.device) for part in self.match(logits[i], boxes[i], target)
            )
            labels = torch.full((logits.size(1),), 5, device=self.device)
            labels[rows] = target["labels"][columns]
            loss = loss + F.l1_loss(boxes[i][rows], target["boxes"][columns]) + F.cross_entropy(logits[i], labels)
        return loss / image.size(0)


def objects(samples):
    return torch.randn(samples, 3, 8, 8), {
        "boxes": torch.rand(samples, 2, 4),
        "labels": torch.randint(5, (samples, 2)),
    }


class PrintingHook(Trained):
    """A forward hook that prints what passes, and a progress bar's text."""

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
        self.model[0].register_forward_hook(self.look)

    def look(self, module, inputs, output):
        print(f"{type(module).__name__}: {tuple(output.shape)}", end="\r")  # noqa: T201

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.model(x), y)
        print(f"loss {loss.detach():.3f}", end="\r")  # noqa: T201
        return loss


class CollectedOutputs(Trained):
    """What every step found is kept in a list until the epoch ends."""

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
        self.outputs = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.model(x)
        self.outputs.append((logits.argmax(-1) == y).float().mean().detach())
        return F.cross_entropy(logits, y)

    def on_train_epoch_end(self):
        self.log("accuracy", torch.stack(self.outputs).mean())
        self.outputs.clear()


KEPT: list[torch.Tensor] = []


class KeptByHook(Trained):
    """Features that hooks keep enter the loss: what a block returns goes two ways, of which one is not seen."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6)) for _ in range(3))
        self.head = nn.Linear(6, 4)
        for block in self.blocks:
            block[2].register_forward_hook(lambda module, inputs, output: KEPT.append(output))

    def training_step(self, batch, batch_idx):
        KEPT.clear()
        x, y = batch
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x), y) + 0.1 * sum(kept.square().mean() for kept in KEPT)


class MaskedSpans(Trained):
    """What a layer returned is overwritten in places, as wav2vec 2.0 hides spans of a sound."""

    def __init__(self, width=8):
        super().__init__()
        self.project = nn.Linear(1, width)
        self.hidden = nn.Parameter(torch.rand(width))
        self.layers = nn.ModuleList(nn.Conv1d(width, width, 3, padding=1) for _ in range(2))
        self.head = nn.Linear(width, 4)

    def training_step(self, batch, batch_idx):
        sound, y = batch
        x = self.project(sound[..., None])
        x[:, 2:4] = self.hidden
        x = x.transpose(1, 2)
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return F.cross_entropy(self.head(x.mean(-1)), y)


def short_sounds(samples):
    return torch.randn(samples, 8), torch.randint(4, (samples,))


ENTRIES = {
    "demo_boring": Entry(BoringModel, features),
    "demo_transformer": Entry(SmallTransformerDemo, short_texts, expected="state"),
    "demo_lstm_tbptt": Entry(SmallLSTMDemo, short_texts, expected="state"),
    "unet_residual_volumes": Entry(SegResUNet, volumes),
    "unet_resnet_encoder": Entry(EncoderUNet, masks),
    "gcn_self_loops": Entry(GraphClassifier, masked_graph, expected="data-dependent"),
    "moe_capacity": Entry(CapacityMoE, short_texts),
    "detr_hungarian": Entry(HungarianDETR, objects, expected="read into Python"),
    "hook_prints": Entry(PrintingHook, vectors),
    "kept_by_hook": Entry(KeptByHook, vectors),
    "masked_spans": Entry(MaskedSpans, short_sounds),
    "outputs_in_a_list": Entry(CollectedOutputs, vectors),
}
