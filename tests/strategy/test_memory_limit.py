"""A limit is kept: plans are made for it, a rank that is held to it trains, and where it cannot it says so."""

from __future__ import annotations

import contextlib
import resource
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipe.errors import PlanError
from lightning_pipe.runtime.memory import held_to, is_out_of_memory, private_bytes
from ranks.world import Raised, World, forking
from strategy.fits import dapple, make_trainer, on_host

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA holds private memory on Linux only")

WIDTH, DEPTH = 2560, 8  # 210 MB: five per cent of the peak are more than what the process takes (stacks of threads)
NARROW = 64
CPU = torch.device("cpu")


def alone(check: Callable[[], None]) -> None:
    """Run it in a process of its own: memory that others have freed in this one serves new tensors, too."""
    with ProcessPoolExecutor(1, mp_context=forking()) as pool:
        pool.submit(check).result()


def beyond_a_limit() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with held_to(CPU, 200 << 20):
        first = torch.zeros(100 << 20, dtype=torch.uint8)
        with pytest.raises(RuntimeError) as caught:
            torch.zeros(150 << 20, dtype=torch.uint8)
        assert is_out_of_memory(caught.value)
        del first
        torch.zeros(150 << 20, dtype=torch.uint8)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_what_is_beyond_a_limit_is_refused_and_what_is_freed_can_be_had_again():
    alone(beyond_a_limit)
    assert not is_out_of_memory(RuntimeError("shapes do not match"))


class Wide(pl.LightningModule):
    """Layers with many parameters and few samples, so that the optimizer's state is most of what there is."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(DEPTH)))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-4)


class Hungry(torch.optim.SGD):
    """An optimizer whose step does not find the memory that it needs, in training; trials have small parameters."""

    is_training = False

    def step(self, closure=None):
        loss = super().step(closure)
        if Hungry.is_training:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return loss


class Starved(Wide):
    """Needs too much memory in the optimizer's step of one rank."""

    def on_train_start(self) -> None:
        Hungry.is_training = True

    def configure_optimizers(self) -> torch.optim.Optimizer:
        kind = torch.optim.SGD if torch.distributed.get_rank() else Hungry
        return kind(self.parameters(), lr=1e-4)


def starved() -> None:
    data = DataLoader(TensorDataset(torch.randn(2, NARROW)), 2)
    make_trainer(dapple(layout="1-1", microbatches=1, check=False), max_epochs=1).fit(Starved(NARROW), data)


def test_a_step_of_the_optimizer_without_memory_says_so_on_every_rank():
    """The others heard of torch's error once, which says nothing of what was foreseen and what would help."""
    first, second = World(2).results(starved)
    assert (first.kind, second.kind) == ("OutOfMemoryError", "PeerFailure")
    for result in (first, second):
        assert "Rank 0 failed in the optimizer's step: out of memory (CUDA out of memory. Tried" in result.text
        assert "memory_limit" in result.text and "The plan foresees" in result.text


class Held(pl.Callback):
    """Hold a rank to a limit from the first batch on, in which there are parameters and nothing else yet."""

    def __init__(self, limit: int, stack: contextlib.ExitStack) -> None:
        self._limit, self._stack = limit, stack

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        there = sum(parameter.nbytes for parameter in module.parameters())
        self._stack.enter_context(held_to(CPU, self._limit, there_bytes=there))


def trained(width: int, limit: int | None, shard_optimizer: str, steps: int = 1) -> int:
    """Fit on two replicas that are held to a limit; return the peak that was foreseen here."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(2 * steps, width))
    options = {"layout": "2", "microbatches": 1, "check": False, "shard_optimizer": shard_optimizer}
    strategy = dapple(**options, keep_freed_memory=False)  # a limit that comes in the middle is not foreseen
    with contextlib.ExitStack() as stack:
        callbacks = [] if limit is None else [Held(limit, stack)]
        make_trainer(strategy, max_epochs=1, callbacks=callbacks).fit(Wide(width), DataLoader(data, 2))
    return strategy.foreseen[torch.distributed.get_rank()].peak_bytes


@pytest.mark.slow
def test_shared_optimizer_state_trains_under_a_limit_that_unshared_state_exceeds():
    world = World(2)
    whole = max(world.run(trained, WIDTH, None, "off"))
    peaks = world.run(trained, WIDTH, None, "on")
    limit = round(1.05 * max(peaks))
    assert limit < whole
    assert world.run(trained, WIDTH, limit, "on", 20) == peaks
    for result in world.results(trained, WIDTH, limit, "off", 4):  # there is state from the second step on
        assert isinstance(result, Raised)
        assert result.kind in ("OutOfMemoryError", "PeerFailure"), result.traceback
        assert "out of memory" in result.text, result.text


def planned(limit: str, shard_optimizer: str = "auto") -> bool:
    """Fit one step under a limit that plans keep to; return whether they share optimizer state."""
    torch.manual_seed(0)
    strategy = dapple(layout="2", microbatches=1, check=False, memory_limit=limit, shard_optimizer=shard_optimizer)
    data = DataLoader(TensorDataset(torch.randn(2, NARROW)), 2)
    make_trainer(strategy, max_epochs=1).fit(Wide(NARROW), data)
    return strategy.plan.shard_optimizer


@on_host("limits are to the byte, which allocators of GPUs round up")
def test_plans_share_optimizer_state_where_they_do_not_fit_otherwise():
    world = World(2)
    whole = max(world.run(trained, NARROW, None, "off"))
    shared = max(world.run(trained, NARROW, None, "on"))
    assert world.run(planned, f"{whole}B") == [False, False]
    assert world.run(planned, f"{shared}B") == [True, True]
    for result in world.results(planned, f"{shared}B", "off"):
        assert isinstance(result, Raised) and result.kind == PlanError.__name__
        assert "too little" in result.text and "shard_optimizer" in result.text


def bytes_of_a_tensor() -> None:
    before = private_bytes()
    tensor = torch.zeros(64 << 20, dtype=torch.uint8)
    assert private_bytes() - before == pytest.approx(tensor.nbytes, rel=0.01)


def test_private_bytes_are_those_that_tensors_take():
    alone(bytes_of_a_tensor)
