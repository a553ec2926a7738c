"""The fingerprint of a graph is the same in every process: nothing of it tells where an object lies in memory."""

from __future__ import annotations

import functools
import operator

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_pipe.capture import Capture, Request, capture_step, flatten
from lightning_pipe.capture.graphs.fingerprint import spelled
from ranks.world import World
from strategy.fits import dapple, make_trainer

WIDTH = 6


class Padded(pl.LightningModule):
    """Pads to a size that is the larger of two, as shifted windows of a vision transformer do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch, batch_idx):
        x = self.first(batch[0])
        rows = torch.sym_max(x.shape[0], 3)
        return self.last(torch.tanh(F.pad(x, (0, 0, 0, rows - x.shape[0])))).square().sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def captured() -> Capture:
    torch.manual_seed(0)
    return capture_step(Request(Padded(), "training_step", flatten((torch.randn(4, WIDTH),))[1], samples=4))


def captured_fingerprint() -> str:
    """Return the fingerprint in this process; a worker function."""
    return captured().graph.fingerprint


def fitted() -> list[torch.Tensor]:
    """Fit on all ranks of this world; a worker function."""
    torch.manual_seed(0)
    module = Padded().double()
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, WIDTH).double()), batch_size=4)
    make_trainer(dapple(layout="1-1", microbatches=1), max_epochs=1).fit(module, batches)
    return [p.detach().clone() for p in module.parameters()]


@pytest.mark.slow
def test_a_graph_that_calls_python_functions_has_one_fingerprint_in_all_processes() -> None:
    assert any("sym_max" in str(node.target) for node in captured().joint.module.graph.nodes)
    assert set(World(2).run(captured_fingerprint)) == {captured_fingerprint()}


def test_a_graph_that_calls_python_functions_trains() -> None:
    one, two = World(2).run(fitted)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_nothing_in_a_graph_tells_an_address() -> None:
    graph = captured().graph
    assert "0x" not in repr(graph)


@pytest.mark.parametrize(
    "value",
    [
        torch.sym_max,
        operator.getitem,
        torch.ops.aten.add.Tensor,
        torch.ops.higher_order.cond,
        functools.partial(torch.sym_max, 3),
        lambda x: x,
        object(),
        [torch.float32, {"memory_format": torch.channels_last}, torch.device("cpu"), torch.strided, slice(0, None)],
        nn.Linear(2, 2),
        nn.Linear(2, 2).forward,
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_operator_or_argument_is_spelled_without_its_address(value) -> None:
    assert "0x" not in spelled(value)
    assert spelled(value)
