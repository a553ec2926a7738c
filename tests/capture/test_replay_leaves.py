"""Tensors of the batch travel to the stages that read them, and to no other; what none reads yet to the last."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_pipe.capture import Request, flatten
from lightning_pipe.capture.recording.unit_trace import trace_units
from lightning_pipe.capture.replayed.replay import Replay

IMAGES, MASK, LABELS = torch.randn(6, 4), torch.rand(6, 4), torch.randn(6)
BYTES = {"images": 16, "mask": 16, "labels": 4}  # of a sample


class Layers(pl.LightningModule):
    """The second layer has a mask, and the loss labels."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        h = self.b(self.a(batch["images"]) * batch["mask"])
        return F.mse_loss(self.d(self.c(h)).squeeze(-1), batch["labels"])


class Noisy(Layers):
    """Random numbers in the form of the images are drawn before others, on the way to the last stage."""

    def training_step(self, batch, batch_idx):
        h = self.a(batch["images"])
        noise, times = torch.randn_like(batch["images"]), torch.rand(1)
        return F.mse_loss(self.d(self.c(self.b(h * times))).squeeze(-1) + 0 * noise.mean(), batch["labels"])


class Asking(Layers):
    """A value of the mask is read into Python in front of the second layer, and of the images behind the last."""

    def training_step(self, batch, batch_idx):
        h = self.a(batch["images"])
        h = self.b(h if float(batch["mask"].sum()) > 0 else -h)
        loss = F.mse_loss(self.d(self.c(h)).squeeze(-1), batch["labels"])
        return loss if float(batch["images"].sum()) < 1e9 else 2 * loss


def received(module: pl.LightningModule) -> list[set[str]]:
    """Return the leaves that each stage after the first is sent; stages have one layer each."""
    batch = {"images": IMAGES, "mask": MASK, "labels": LABELS}
    tensors, structure = flatten(batch)
    request = Request(module, "training_step", structure, samples=3)
    trace = trace_units(request, tensors, parts=4)
    assert [unit.path for unit in trace.units] == ["a", "b", "c", "d"]
    split = Replay(request, trace).split((1, 2, 3))
    names = {f"leaf{i}": name for i, name in enumerate(batch)}
    assert not any(stage.leaves for stage in split.stages[1:])
    found = [{names[v] for v in stage.receives.get(("F", 0), ()) if v in names} for stage in split.stages[1:]]
    sent = [{names[v] for v in split.stages[0].sends.get(("F", s), ()) if v in names} for s in (1, 2, 3)]
    assert sent == found
    loaded = {names[v] for v in split.stages[0].leaves}
    assert loaded == {"images"}.union(*found), "the first stage loads what any stage reads"
    return found


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Layers, [{"mask"}, set(), {"labels"}]),
        (Noisy, [{"images"}, {"images"}, {"images", "labels", "mask"}]),
        (Asking, [{"mask"}, {"mask"}, {"mask", "images", "labels"}]),
    ],
)
def test_a_stage_is_sent_the_tensors_of_the_batch_that_it_reads(kind, expected):
    assert received(kind()) == expected


def test_messages_are_priced_with_what_they_carry():
    tensors, structure = flatten({"images": IMAGES, "mask": MASK, "labels": LABELS})
    request = Request(Layers(), "training_step", structure, samples=3)
    split = Replay(request, trace_units(request, tensors, parts=4)).split((1, 2, 3))
    priced = {e.target: e.bytes_per_sample for e in split.traffic.edges if e.direction == "F" and e.source == 0}
    assert priced == {1: 16 + BYTES["mask"], 3: BYTES["labels"]}  # output of the first layer, and leaves
