"""Learning of representations: contrastive losses, teachers, students."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from zoo.entry import Entry, Trained, vectors


def views(samples):
    x = torch.randn(samples, 6)
    return (x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)), torch.zeros(samples)


def network(output=8):
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, output))


class SimCLR(Trained):
    """Every sample is compared with all others of its batch."""

    def __init__(self):
        super().__init__()
        self.encoder = network()

    def training_step(self, batch, batch_idx):
        (one, two), _ = batch
        z = F.normalize(self.encoder(torch.cat([one, two], dim=0)), dim=-1)
        similarity = z @ z.t() / 0.5
        itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
        positive = torch.arange(len(z), device=z.device).roll(len(one))
        loss = F.cross_entropy(similarity.masked_fill(itself, -1e9), positive)
        self.log("nll", loss, batch_size=len(one))
        return loss


class BYOL(Trained):
    """The target network follows the online one inside the step."""

    def __init__(self):
        super().__init__()
        self.online = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8))
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.predictor = nn.Linear(8, 8)

    @torch.no_grad()
    def follow(self, momentum=0.99):
        for slow, fast in zip(self.target.parameters(), self.online.parameters(), strict=True):
            slow.data = slow.data * momentum + fast.data * (1 - momentum)

    def training_step(self, batch, batch_idx):
        (one, two), _ = batch
        self.follow()
        with torch.no_grad():
            goal_one, goal_two = self.target(one), self.target(two)
        first = F.cosine_similarity(self.predictor(self.online(one)), goal_two, dim=-1)
        second = F.cosine_similarity(self.predictor(self.online(two)), goal_one, dim=-1)
        return 2 - (first + second).mean()


class BufferBYOL(BYOL):
    """The same with the target's weights as buffers, updated in place."""

    def __init__(self):
        super().__init__()
        del self.target
        for name, parameter in self.online.named_parameters():
            self.register_buffer("target_" + name.replace(".", "_"), parameter.detach().clone())

    @torch.no_grad()
    def follow(self, momentum=0.99):
        for name, fast in self.online.named_parameters():
            self.get_buffer("target_" + name.replace(".", "_")).lerp_(fast, 1 - momentum)

    def target(self, x):
        hidden = F.relu(F.linear(x, self.target_0_weight, self.target_0_bias))
        return F.linear(hidden, self.target_2_weight, self.target_2_bias)


class Distillation(Trained):
    """A frozen teacher in eval mode, called without gradients."""

    def __init__(self, temperature=2.0):
        super().__init__()
        self.temperature = temperature
        self.student, self.teacher = network(4), network(4).requires_grad_(False)

    def on_train_epoch_start(self):
        self.teacher.eval()

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.teacher.eval()
        with torch.no_grad():
            goal = F.softmax(self.teacher(x) / self.temperature, dim=-1)
        logits = self.student(x)
        hard = F.cross_entropy(logits, y)
        soft = F.kl_div(F.log_softmax(logits / self.temperature, dim=-1), goal, reduction="batchmean")
        self.log("soft", soft, on_epoch=True, on_step=False)
        self.log("hard", hard, on_epoch=True, on_step=False)
        return 0.5 * hard + 0.5 * self.temperature**2 * soft


class TripletNet(Trained):
    """Three inputs through one network; a margin that samples may have reached already."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(6, 16), nn.PReLU(), nn.Linear(16, 8))

    def training_step(self, batch, batch_idx):
        anchor, positive, negative = (F.normalize(self.embed(x), dim=-1) for x in batch)
        loss = F.triplet_margin_loss(anchor, positive, negative, margin=0.5)
        self.log("distance", (anchor - positive).norm(dim=-1).mean())
        return loss


def triplets(samples):
    return [torch.randn(samples, 6) for _ in range(3)]


ENTRIES = {
    "simclr": Entry(SimCLR, views),
    "byol_parameters": Entry(BYOL, views),
    "byol_buffers": Entry(BufferBYOL, views),
    "distillation_frozen_teacher": Entry(Distillation, vectors),
    "triplets": Entry(TripletNet, triplets),
}
