"""Holders of the same parameters share their optimizer state: half each, and the same training to the last bit."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipe.core.sharding import owners
from lightning_pipe.errors import ConfigError
from ranks.world import World
from slow import slow_but
from strategy.fits import dapple, make_trainer

WIDTH = 8


class Tied(pl.LightningModule):
    """An embedding that is also the last layer, blocks between them, and one frozen parameter.

    Args:
        optimizer: name of an optimizer of torch.
        settings: its options.
        reads: whether a hook changes every gradient by itself.
    """

    def __init__(self, optimizer: str = "AdamW", reads: bool = False, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(13, WIDTH)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
        self.head = nn.Linear(WIDTH, 13)
        self.head.weight = self.embed.weight
        self.blocks[1][0].bias.requires_grad = False
        self._optimizer, self._settings, self._reads = optimizer, settings, reads

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        tokens, wanted = batch
        return F.cross_entropy(self.head(self.blocks(self.embed(tokens)).mean(1)), wanted)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._reads:
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)

    def configure_optimizers(self) -> Any:
        blocks = [*self.blocks.parameters()]
        rest = [p for p in self.parameters() if all(p is not other for other in blocks)]
        groups = [{"params": blocks, "lr": 0.02}, {"params": rest, "weight_decay": 0.1}]
        optimizer = getattr(torch.optim, self._optimizer)(groups, lr=0.1, **self._settings)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Unhooked(Tied):
    """The same without a hook that looks at gradients."""

    on_before_optimizer_step = pl.LightningModule.on_before_optimizer_step


@dataclass(frozen=True)
class Case:
    """A fit with and without shared state."""

    layout: str
    options: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    module: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Left:
    """What is left of a fit: on every rank, and in the checkpoint of rank 0."""

    parameters: dict[str, torch.Tensor]
    state_bytes: int
    states: dict[int, dict[str, Any]]
    states_after_the_fit: dict[int, dict[str, Any]]


class Watching(pl.Callback):
    """Keep what is there after the last batch: bytes of optimizer state here, and the state as a checkpoint has it."""

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        optimizer = trainer.optimizers[0]
        tensors = [x for s in optimizer.state.values() for x in s.values() if isinstance(x, torch.Tensor) and x.ndim]
        self.state_bytes = sum(tensor.nbytes for tensor in tensors)
        self.states = trainer.strategy.optimizer_state(optimizer)["state"]


def trained(case: Case, sharded: str) -> Left:
    """Fit on all ranks of this world."""
    kind = Tied if case.module.get("reads") else Unhooked
    module, watching = kind(**case.module), Watching()
    torch.manual_seed(1)
    data = TensorDataset(torch.randint(13, (30, 6)), torch.randint(13, (30,)))
    strategy = dapple(layout=case.layout, shard_optimizer=sharded, microbatches=2, **case.options)
    trainer = make_trainer(strategy, max_epochs=1, callbacks=[watching], **case.trainer)
    trainer.fit(module, DataLoader(data, 6))
    parameters = {name: p.detach().clone() for name, p in module.named_parameters()}
    later = trainer.strategy.optimizer_state(trainer.optimizers[0])["state"]
    return Left(parameters, watching.state_bytes, watching.states, later)


def both(case: Case) -> tuple[Left, Left]:
    """Fit without shared state, and with it."""
    return trained(case, "off"), trained(case, "on")


CASES = {
    "2-1": Case("2-1"),
    "1-2, clipped": Case("1-2", trainer={"gradient_clip_val": 0.1}),
    "3": Case("3", trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}),
    "1-1, exact ties": Case("1-1", {"exact_ties": True}, {"accumulate_grad_batches": 2}),
    "2, foreach": Case("2", module={"foreach": True}, trainer={"gradient_clip_val": 0.1}),
    "2, fused": Case("2", module={"fused": True}),
    "2, Adafactor": Case("2", module={"optimizer": "Adafactor"}),
    "2, bf16": Case("2", trainer={"precision": "bf16-true"}, module={"optimizer": "RMSprop", "momentum": 0.9}),
    "2-1, a hook that scales": Case("2-1", module={"reads": True}, trainer={"gradient_clip_val": 0.1}),
    "2-1, a replayed step": Case("2-1", {"capture": "replay"}, {"accumulate_grad_batches": 2}),
}


IN_THE_SUITE = ("1-2, clipped", "1-1, exact ties", "2-1, a replayed step")


@pytest.mark.parametrize("name", slow_but(IN_THE_SUITE, CASES))
def test_training_and_checkpoints_are_those_of_unshared_state_to_the_last_bit(name):
    case = CASES[name]
    ranks = sum(map(int, case.layout.split("-")))
    found = World(ranks).run(both, case)
    for plain, shared in found:
        for parameter, value in plain.parameters.items():
            assert torch.equal(shared.parameters[parameter], value), parameter
    plain, shared = found[0]
    assert shared.states.keys() == plain.states.keys()
    for index, state in plain.states.items():
        assert state.keys() == shared.states[index].keys()
        for found_in in (shared.states, shared.states_after_the_fit, plain.states_after_the_fit):
            assert all(torch.equal(torch.as_tensor(x), torch.as_tensor(found_in[index][n])) for n, x in state.items())


class Keeping(Unhooked):
    """Gradients of every second batch stay, and those of the next are added to them."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


def kept(options: dict[str, Any] | None) -> dict[str, torch.Tensor]:
    """Fit on all ranks of this world, or plainly; return parameters."""
    module = Keeping().double()
    torch.manual_seed(1)
    data = TensorDataset(torch.randint(13, (30, 6)), torch.randint(13, (30,)))
    trainer = make_trainer("auto" if options is None else dapple(microbatches=2, **options), max_epochs=1)
    trainer.fit(module, DataLoader(data, 6))
    return {name: p.detach().clone() for name, p in module.named_parameters()}


@pytest.mark.parametrize("sharded", ["off", "on"])
def test_gradients_that_are_kept_over_a_step_are_added_once(sharded: str) -> None:
    """With shared state, owners that are not the first of their group lost what they had kept."""
    expected = kept(None)
    for found in World(3).run(kept, {"layout": "2-1", "shard_optimizer": sharded}):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_two_replicas_have_half_of_the_state_each():
    found = World(2).run(both, CASES["2, foreach"])
    whole = found[0][0].state_bytes
    halves = [shared.state_bytes for _, shared in found]
    assert sum(halves) == whole
    largest = 2 * 4 * 13 * WIDTH  # of both moments of the embedding
    assert max(halves) <= whole / 2 + largest / 2


def resumed(content: bytes, sharded: str) -> dict[str, torch.Tensor]:
    """Load the state of an optimizer, train on, and return the parameters."""
    module = Unhooked()
    module_state, optimizer_state = torch.load(io.BytesIO(content), weights_only=False)
    module.load_state_dict(module_state)
    torch.manual_seed(2)
    data = TensorDataset(torch.randint(13, (12, 6)), torch.randint(13, (12,)))

    class Loading(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            trainer.strategy.load_optimizer_state_dict({"optimizer_states": [optimizer_state]})

    strategy = dapple(layout="2-1", shard_optimizer=sharded, microbatches=2)
    trainer = make_trainer(strategy, max_epochs=1, callbacks=[Loading()])
    trainer.fit(module, DataLoader(data, 6))
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def test_a_plain_checkpoint_goes_on_with_shared_state_as_without():
    module = Unhooked()
    optimizer = module.configure_optimizers()["optimizer"]
    for _ in range(2):
        module.training_step([torch.randint(13, (6, 6)), torch.randint(13, (6,))], 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    content = io.BytesIO()
    torch.save((module.state_dict(), optimizer.state_dict()), content)
    plain, shared = (World(3).run(resumed, content.getvalue(), how) for how in ("off", "on"))
    for one, other in zip(plain, shared, strict=True):
        assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_a_rank_that_undoes_steps_cannot_share_them():
    with pytest.raises(ConfigError, match="post_validation"):
        dapple(shard_optimizer="on", post_validation=True)


def test_owners_are_holders_with_nearly_equal_loads():
    sizes = {f"p{k}": size for k, size in enumerate((7, 7, 5, 3, 3, 2, 1, 1))}
    holders = dict.fromkeys(sizes, (0, 1, 2)) | {"p1": (2,)}
    found = owners(sizes, holders)
    assert found["p1"] == 2
    loads = [sum(size for name, size in sizes.items() if found[name] == rank) for rank in range(3)]
    assert max(loads) - min(loads) <= max(sizes.values())
    assert owners(dict(reversed(sizes.items())), holders).keys() == sizes.keys()
