"""Habits of authors: what they log, count, guess, branch on and differentiate inside a step."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from zoo.entry import Entry, Trained, numbers, vectors


class Classifier(Trained):
    """What most modules below have in common."""

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))

    def loss(self, batch):
        x, y = batch
        return F.cross_entropy(self.model(x), y)


class ItemLogging(Classifier):
    """Numbers read into Python for the log."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss.item())
        self.log("norm", sum(p.detach().norm() for p in self.parameters()).item(), on_epoch=True)
        return loss


class NanGuard(Classifier):
    """A batch is skipped if its loss is no number."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if torch.isnan(loss):
            return None
        return loss


class CheckedInputs(Classifier):
    """Assertions about the data."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        assert x.ndim == 2, "expected vectors"
        assert torch.isfinite(x).all(), "the batch holds numbers that are not finite"
        assert y.max() < 4
        return self.loss(batch)


class Curriculum(Classifier):
    """A weight that grows with the step."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * min(1.0, (self.global_step + 1) / 100)


class EpochTemperature(Classifier):
    """A temperature that falls with the epoch."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.model(x) / 0.9**self.current_epoch, y)


class Annealing(Classifier):
    """A penalty that depends on the index of the batch."""

    def training_step(self, batch, batch_idx):
        penalty = sum(p.square().sum() for p in self.parameters())
        return self.loss(batch) + 1e-3 * min(1.0, batch_idx / 50) * penalty


class LayerDrop(Trained):
    """Layers left out by Python's dice."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 4)

    def training_step(self, batch, batch_idx):
        x, y = batch
        for layer in self.layers:
            if random.random() > 0.3:
                x = x + torch.tanh(layer(x))
        return F.cross_entropy(self.head(x), y)


class StepCounter(Classifier):
    """A counter of its own, read in the step."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def training_step(self, batch, batch_idx):
        self.seen += 1
        return self.loss(batch) * (1.0 if self.seen > 10 else 0.1)


class ValueOfCallback(Classifier):
    """A plain attribute that a callback may set between steps."""

    def __init__(self, smoothing=0.1):
        super().__init__()
        self.smoothing = smoothing

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.model(x), y, label_smoothing=self.smoothing)


class RunningAverage(Classifier):
    """An average of the loss kept as a buffer and replaced by a new tensor."""

    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.average = 0.9 * self.average + 0.1 * loss.detach()
        self.log("average", self.average)
        return loss


class AutocastInside(Classifier):
    """Half precision for a part of the step only."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            logits = self.model(x)
        return F.cross_entropy(logits.float(), y)


class GradientPenalty(Trained):
    """Derivatives by the input inside the loss, as for physics-informed networks."""

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        x = x.detach().requires_grad_(True)
        u = self.model(x).squeeze(-1)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        physics = (slope.norm(dim=-1) - 1).square().mean()
        self.log_dict({"data": F.mse_loss(u, y), "physics": physics})
        return F.mse_loss(u, y) + 0.1 * physics


class Normed(Trained):
    """Parametrised weights: a power iteration in buffers, a direction and a length."""

    def __init__(self):
        super().__init__()
        self.first, self.second = spectral_norm(nn.Linear(6, 16)), weight_norm(nn.Linear(16, 4))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.second(F.leaky_relu(self.first(x))), y)


class ReverseGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.strength * gradient, None


class DomainAdversarial(Trained):
    """A backward written by hand."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(6, 16), nn.ReLU())
        self.label, self.domain = nn.Linear(16, 4), nn.Linear(16, 4)

    def training_step(self, batch, batch_idx):
        x, y = batch
        h = self.features(x)
        return F.cross_entropy(self.label(h), y) + F.cross_entropy(self.domain(ReverseGradient.apply(h, 0.3)), 3 - y)


class Checkpointed(Trained):
    """Activations dropped and computed again, dropout included."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Dropout(0.1), nn.Linear(12, 6)) for _ in range(3)
        )
        self.head = nn.Linear(6, 4)

    def training_step(self, batch, batch_idx):
        x, y = batch
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return F.cross_entropy(self.head(x), y)


class MaskedSelect(Trained):
    """A loss over those samples that have a target."""

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        known = y > -1.3
        return F.mse_loss(self.model(x).squeeze(-1)[known], y[known])


class WeightedMask(MaskedSelect):
    """The same with weights instead of selection: micro-batches have unequal shares."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        known = (y > -1.3).float()
        return ((self.model(x).squeeze(-1) - y).square() * known).sum() / known.sum().clamp(min=1)


class SumLoss(Classifier):
    """A loss that is a sum over samples."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.model(x), y, reduction="sum")
        self.log("sum", loss, reduce_fx="sum", on_step=False, on_epoch=True)
        return loss


class ManyLogs(Classifier):
    """All the ways to log one value."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("both", loss, on_step=True, on_epoch=True)
        self.log("epoch", loss.detach() * 2, on_step=False, on_epoch=True, sync_dist=True)
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.log("samples", float(batch[0].shape[0]), reduce_fx="sum", on_step=False, on_epoch=True)
        self.log_dict({"weights/" + n: p.detach().abs().mean() for n, p in self.named_parameters()}, logger=True)
        return {"loss": loss, "predictions": self.model(batch[0]).detach()}


class BranchOnLoss(Classifier):
    """Python asks for the loss and acts on it."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return loss * 0.5 if loss > 100 else loss


class ScaledByValue(Classifier):
    """A number read from a tensor goes back into the loss."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return loss / max(1.0, loss.item())


class ManualGAN(Trained):
    """Two optimizers, stepped by hand."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = nn.Linear(3, 6), nn.Linear(6, 1)

    def training_step(self, batch, batch_idx):
        x, _ = batch
        first, second = self.optimizers()
        made = self.generator(torch.randn(x.size(0), 3, device=self.device))
        loss = F.softplus(-self.discriminator(made)).mean()
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        loss = (F.softplus(self.discriminator(made.detach())) + F.softplus(-self.discriminator(x))).mean()
        second.zero_grad()
        self.manual_backward(loss)
        second.step()

    def configure_optimizers(self):
        return torch.optim.Adam(self.generator.parameters()), torch.optim.Adam(self.discriminator.parameters())


ENTRIES = {
    "item_logging": Entry(ItemLogging, vectors),
    "nan_guard": Entry(NanGuard, vectors),
    "checked_inputs": Entry(CheckedInputs, vectors),
    "curriculum_global_step": Entry(Curriculum, vectors),
    "temperature_by_epoch": Entry(EpochTemperature, vectors),
    "annealing_by_batch_idx": Entry(Annealing, vectors),
    "layerdrop_python_random": Entry(LayerDrop, vectors, expected="Python or NumPy random numbers"),
    "step_counter": Entry(StepCounter, vectors, expected="state"),
    "value_of_callback": Entry(ValueOfCallback, vectors),
    "running_average": Entry(RunningAverage, vectors),
    "autocast_inside": Entry(AutocastInside, vectors),
    "gradient_penalty": Entry(GradientPenalty, numbers),
    "spectral_and_weight_norm": Entry(Normed, vectors),
    "custom_autograd_function": Entry(DomainAdversarial, vectors),
    "checkpoint_nonreentrant": Entry(Checkpointed, vectors),
    "masked_select_loss": Entry(MaskedSelect, numbers, expected="data-dependent"),
    "masked_mean_loss": Entry(WeightedMask, numbers),
    "sum_loss": Entry(SumLoss, vectors),
    "many_logs": Entry(ManyLogs, vectors),
    "branch_on_loss": Entry(BranchOnLoss, vectors),
    "scaled_by_value": Entry(ScaledByValue, vectors, expected=r"\.item\(\)"),
    "manual_gan": Entry(ManualGAN, vectors, expected="manual optimization"),
}
