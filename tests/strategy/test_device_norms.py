"""Norms of gradients that are added up on a device are those that are added up on the host, and the host reads none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_pipe.runtime.guard.watch import Unwatched
from lightning_pipe.runtime.transport.gloo import GlooTransport
from lightning_pipe.runtime.transport.local import Hub, LocalTransport
from lightning_pipe.runtime.transport.protocol import Group
from lightning_pipe.runtime.waiting import Done, Handle, Wait
from lightning_pipe.strategy.gradients.clipping import Clipper
from lightning_pipe.strategy.gradients.grad_norm import DeviceNorms, Norms
from lightning_pipe.strategy.ranks.connections import Connections
from lightning_pipe.strategy.ranks.control_plane import ControlPlane
from ranks.world import World
from strategy.fits import Case, Fitted, fit_as_pipeline

CPU = torch.device("cpu")
THERE = Wait(Done(), "norms")


@pytest.mark.parametrize(
    "types",
    [(torch.float32,) * 40, (torch.float64,) * 40, (torch.bfloat16,) * 3, (torch.float32, torch.bfloat16) * 20, ()],
    ids=["float32", "float64", "bfloat16", "mixed", "none"],
)
def test_a_norm_on_a_device_is_the_very_norm_that_the_host_makes(types: tuple[torch.dtype, ...]) -> None:
    norms = torch.rand(len(types), dtype=torch.float64) * 10
    table = torch.stack([norms, torch.ones_like(norms)])
    expected = Norms(table, types, CPU, THERE).total()
    assert float(DeviceNorms(norms, types, THERE).total()) == float(expected)


class Meta(LocalTransport):
    """Adds up on a device of which nothing can be read."""

    device = torch.device("meta")

    def __init__(self) -> None:
        super().__init__(Hub(), 0)
        self.sums: list[tuple[torch.device, Group]] = []

    def all_reduce(self, tensor: torch.Tensor, *, group: Group) -> Handle:
        self.sums.append((tensor.device, group))
        return Done()


def test_clipping_reads_nothing_of_a_device() -> None:
    """Each step waited for the device, for a sum over sockets, and for a copy of each norm back to the device."""
    parameters = [nn.Parameter(torch.ones(3, device="meta")) for _ in range(3)]
    for parameter in parameters[:2]:
        parameter.grad = torch.ones_like(parameter)
    beside, host = Meta(), LocalTransport(Hub(), 0)
    control = ControlPlane(host, rank=0, ranks=2, wait=Unwatched().wait)
    weights: Any = SimpleNamespace(
        name_of=lambda parameter: "name", owner=lambda name: 0, sharing=dict, is_everywhere=lambda name: False
    )
    groups: Any = SimpleNamespace(parameters=lambda: parameters)
    links = Connections(beside, control, Unwatched())
    clipper = Clipper(groups, weights=weights, links=links, device=Meta.device)
    clipper.clip_grad_by_norm(torch.optim.SGD(parameters, lr=1.0), 0.5)
    assert beside.sums == [(Meta.device, (0, 1))]


def fit_on_device(case: Case) -> Fitted:
    """Fit on all ranks of this world, whose transport takes the CPU for a device that carries out what is posted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GlooTransport, "device", CPU)
        patch.setattr(Clipper, "post_norms", None)  # over the host
        return fit_as_pipeline(case)


def test_a_fit_clips_by_norms_on_a_device_as_by_norms_on_the_host() -> None:
    options = {"layout": "1-1", "microbatches": 2}
    trainer = {"gradient_clip_val": 0.05, "limit_val_batches": 0}
    case = Case("parameter_groups", options, trainer, epochs=1, dtype=torch.float32)
    for found, expected in zip(World(2).run(fit_on_device, case), World(2).run(fit_as_pipeline, case), strict=True):
        assert found.losses == expected.losses
        assert all(torch.equal(found.parameters[n], value) for n, value in expected.parameters.items())
