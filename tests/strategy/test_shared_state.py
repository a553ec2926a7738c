"""What hangs in several places of a module, or is used in several, is one: in graph, stages and checkpoint."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_pipe.capture import Request, capture_step, flatten
from lightning_pipe.errors import CaptureError
from ranks.world import World
from strategy.fits import Losses, dapple, make_trainer

WIDTH, CLASSES, SAMPLES = 8, 5, 24
ROUNDING = 1e-9


class Classifier(pl.LightningModule):
    """What all modules here do."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


class LastUnderTwoNames(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(block(), block(), nn.Linear(WIDTH, CLASSES))
        self.last = self.net[-1]

    def forward(self, x):
        return self.net(x) + 0.01 * self.last.weight.sum()


class PartsOfAModel(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Sequential(block(), nn.BatchNorm1d(WIDTH), block()), nn.Linear(WIDTH, CLASSES)
        self.model = nn.Sequential(self.encoder, self.head)

    def forward(self, x):
        return self.model(x)


class BlockThreeTimes(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.first, shared = block(), block()
        self.blocks = nn.ModuleList([shared, shared, shared])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.first(x)
        for shared in self.blocks:
            x = x + shared(x)
        return self.head(x)


class TiedWeight(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.two.weight = self.one.weight

    def forward(self, x):
        return self.head(torch.tanh(self.two(torch.tanh(self.one(x)))))


class TiedBuffer(TiedWeight):
    """A buffer under two names: written by one, read by the other."""

    def __init__(self) -> None:
        super().__init__()
        scale = torch.ones(WIDTH)
        self.one.register_buffer("scale", scale)
        self.two.register_buffer("scale", scale)

    def forward(self, x):
        if self.training:
            self.one.scale.mul_(1.1)
        return self.head(torch.tanh(self.two(torch.tanh(self.one(x)) * self.two.scale)))


class AssignedBuffer(TiedWeight):
    """A buffer that the step replaces by another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.count = self.count + 1
        return self.head(torch.tanh(self.two(torch.tanh(self.one(x))))) * (1 + 0.1 * self.count)


class NormTwice(Classifier):
    """One BatchNorm that is called before and behind a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one, self.two = block(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.tail, self.head = nn.BatchNorm1d(WIDTH), block(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = torch.tanh(self.norm(self.one(self.stem(x))))
        x = torch.tanh(self.norm(self.two(x)))
        return self.head(self.tail(x))


class NormInTiedBlock(Classifier):
    def __init__(self) -> None:
        super().__init__()
        shared = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())
        self.stem, self.blocks = block(), nn.ModuleList([shared, block(), shared])
        self.tail, self.head = block(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.blocks:
            x = layer(x)
        return self.head(self.tail(x))


MODULES = {
    cls.__name__: cls
    for cls in (
        LastUnderTwoNames,
        PartsOfAModel,
        BlockThreeTimes,
        TiedWeight,
        TiedBuffer,
        AssignedBuffer,
        NormTwice,
        NormInTiedBlock,
    )
}


def loader(batch_size: int) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    y = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    return DataLoader(list(zip(x, y, strict=True)), batch_size=batch_size)


class MeanStatistics(pl.Callback):
    """Two micro-batches begin with the same running statistics, whose mean over both is what they leave."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx % 2 == 0:
            self.old = [buffer.clone() for buffer in module.buffers()]
            return
        self.first = [buffer.clone() for buffer in module.buffers()]
        for buffer, old in zip(module.buffers(), self.old, strict=True):
            buffer.copy_(old)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        for buffer, first in zip(module.buffers(), self.first if batch_idx % 2 else (), strict=batch_idx % 2 == 1):
            buffer.copy_((buffer + first) / 2)


ONCE_PER_BATCH = ("TiedBuffer", "AssignedBuffer")  # what is written depends on no sample, as by one device


def trained(name: str, options: dict[str, Any] | None) -> tuple[list[float], float, dict[str, torch.Tensor]]:
    """Train for two epochs of six micro-batches, on all ranks of this world or plainly; a worker function."""
    torch.manual_seed(0)
    module, losses = MODULES[name]().double(), Losses()
    if options is None and name in ONCE_PER_BATCH:
        trainer = make_trainer("auto", max_epochs=2, callbacks=[losses])
        trainer.fit(module, loader(8), loader(8))
    elif options is None:
        trainer = make_trainer("auto", max_epochs=2, accumulate_grad_batches=2, callbacks=[losses, MeanStatistics()])
        trainer.fit(module, loader(4), loader(8))
        pairs = zip(losses.losses[::2], losses.losses[1::2], strict=True)
        losses.losses = [sum(pair) for pair in pairs]  # Lightning has divided each by two
    else:
        trainer = make_trainer(dapple(**options), max_epochs=2, callbacks=[losses])
        trainer.fit(module, loader(8), loader(8))
    state = {key: value.detach().clone() for key, value in module.state_dict().items()}
    return losses.losses, float(trainer.callback_metrics["val_loss"]), state


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("route", ["joint", "replay"])
@pytest.mark.parametrize("name", MODULES)
def test_what_is_shared_trains_as_on_one_device(name: str, route: str) -> None:
    """Losses, weights and buffers under all names, with batch statistics of micro-batches, whose means are kept."""
    expected = trained(name, None)
    options = {"layout": "1-1", "microbatches": 2, "capture": route}
    for losses, val_loss, state in World(2).run(trained, name, options):
        assert losses == pytest.approx(expected[0], rel=ROUNDING)
        assert val_loss == pytest.approx(expected[1], rel=ROUNDING)
        assert state.keys() == expected[2].keys()
        for key, value in expected[2].items():
            torch.testing.assert_close(
                state[key], value, rtol=ROUNDING, atol=ROUNDING, msg=lambda m, k=key: f"{k}: {m}"
            )


class Failing(PartsOfAModel):
    """Ends in the step, in a way of its own."""

    kind = ""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        match self.kind:
            case "raise":
                raise ZeroDivisionError
            case "interrupt":
                raise KeyboardInterrupt
            case "read":
                return loss * loss.detach().numpy()
            case "register":
                self.register_buffer("late", loss.detach())
            case "replace":
                self.head.weight = nn.Parameter(self.head.weight * 2)
        return loss


@pytest.mark.parametrize("kind", ["raise", "interrupt", "read", "register", "replace"])
def test_a_trace_that_fails_leaves_the_module_its_own_tensors(kind: str) -> None:
    module = Failing().train()
    module.kind = kind
    before = dict(module.state_dict(keep_vars=True))
    structure = flatten((torch.randn(4, WIDTH), torch.zeros(4, dtype=torch.long)))[1]
    with pytest.raises((CaptureError, KeyboardInterrupt)):
        capture_step(Request(module, "training_step", structure, samples=4))
    after = dict(module.state_dict(keep_vars=True))
    assert after.keys() == before.keys()
    assert all(after[name] is tensor for name, tensor in before.items())


class ClampsATiedWeight(TiedWeight):
    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.one.weight.clamp_(-0.1, 0.1)
        return super().training_step(batch, batch_idx)


def test_a_step_that_writes_to_a_tied_weight_is_no_graph() -> None:
    structure = flatten((torch.randn(4, WIDTH), torch.zeros(4, dtype=torch.long)))[1]
    with pytest.raises(CaptureError, match=r"writes to the parameter one\.weight, which hangs in several modules"):
        capture_step(Request(ClampsATiedWeight().train(), "training_step", structure, samples=4))
