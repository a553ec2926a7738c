"""Loaders with state resume a fit at the batch where one device would, whatever has saved and whatever goes on."""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler

from lightning_pipe.schedule.weights import POLICIES
from ranks.world import World
from slow import slow_but
from strategy.fits import Losses, dapple, make_trainer
from strategy.test_data import alone

SAMPLES, WIDTH = 12, 3


def sample(index: int) -> torch.Tensor:
    return torch.full((WIDTH,), float(index), dtype=torch.float64) + torch.arange(WIDTH) / 7


class Rows(Dataset):
    def __init__(self, number: int = SAMPLES) -> None:
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> torch.Tensor:
        return sample(index)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return map(sample, range(SAMPLES))


class Position:
    """Count batches, and go on after those that the state has."""

    position = start = 0

    def counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        start, self.start = self.start, 0
        for number, batch in enumerate(batches):
            if number >= start:
                self.position = number + 1
                yield batch
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["position"]


class Counting(Position, DataLoader):
    def __iter__(self) -> Iterator[Any]:
        return self.counted(super().__iter__())


class Batches(Position):
    """No DataLoader, and of unknown length: Lightning is one batch ahead."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        rows = [sample(index) for index in range(SAMPLES)]
        return self.counted(torch.stack(rows[start : start + 2]) for start in range(0, SAMPLES, 2))


class Sized(Batches):
    def __len__(self) -> int:
        return SAMPLES // 2


class Itself(Sized):
    """Its own iterator, with a cursor."""

    def __iter__(self) -> Itself:
        self.position, self.start = self.start, 0
        return self

    def __next__(self) -> torch.Tensor:
        if self.position == len(self):
            self.position = 0
            raise StopIteration
        self.position += 1
        return torch.stack([sample(2 * self.position - 2), sample(2 * self.position - 1)])


class LiveState(Sized):
    """Gives the state that it goes on to change, in a tensor."""

    def __init__(self) -> None:
        self.state = {"position": torch.zeros((), dtype=torch.int64)}

    def state_dict(self) -> dict[str, Any]:
        self.state["position"].fill_(self.position)
        return self.state


class LateState(Sized):
    """Has no state before it is iterated."""

    def state_dict(self) -> dict[str, Any]:
        if "position" not in vars(self):
            raise RuntimeError("not iterated yet")
        return super().state_dict()


class Epochs(Counting):
    """Other batches in every epoch, which it counts itself."""

    epoch = 0

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield batch + self.epoch
        self.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.epoch = state["epoch"]


class Shuffled(Counting):
    """Shuffled by a generator of its own, of which it saves the state at the beginning of the epoch."""

    def __init__(self) -> None:
        super().__init__(Rows(), 2, shuffle=True, generator=torch.Generator().manual_seed(3))
        self.drawn = self.generator.get_state()

    def __iter__(self) -> Iterator[Any]:
        if self.start == 0:
            self.drawn = self.generator.get_state()
        self.generator.set_state(self.drawn)
        yield from super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.drawn = state["drawn"]


class Order(Position, Sampler):
    """An order by the epoch, which Lightning tells."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return self.counted((index * 5 + self.epoch) % SAMPLES for index in range(SAMPLES))

    def __len__(self) -> int:
        return SAMPLES


class Delegating(DataLoader):
    """Its state is the state of one of its parts."""

    part = "sampler"

    def state_dict(self) -> dict[str, Any]:
        return getattr(self, self.part).state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        getattr(self, self.part).load_state_dict(state)


class GroupedOrder(Position, BatchSampler):
    def __init__(self) -> None:
        super().__init__(range(SAMPLES), 2, drop_last=False)

    def __iter__(self) -> Iterator[list[int]]:
        return self.counted(super().__iter__())


class Grouped(Delegating):
    part = "batch_sampler"


class ResumableStream(Position, Stream):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return self.counted(super().__iter__())


class Streaming(Delegating):
    part = "dataset"


def torchdatas(**options: Any) -> Any:
    return pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader(Rows(), 2, **options)


LOADERS = {
    "counting": lambda: Counting(Rows(), 2),
    "single samples": lambda: Counting([torch.stack([sample(i), sample(i + 1)]) for i in range(6)], batch_size=None),
    "shuffled": Shuffled,
    "no loader": Sized,
    "unknown length": Batches,
    "its own iterator": Itself,
    "live state": LiveState,
    "late state": LateState,
    "epochs": lambda: Epochs(Rows(), 2),
    "order by epoch": lambda: Counting(Rows(), 2, sampler=Order()),
    "sampler": lambda: Delegating(Rows(), 2, sampler=Order()),
    "batch sampler": lambda: Grouped(Rows(), batch_sampler=GroupedOrder()),
    "data set": lambda: Streaming(ResumableStream(), 2),
    "stream": lambda: Counting(Stream(), 2),
    "workers": lambda: Counting(Rows(), 2, num_workers=1),
    "worker of a stream": lambda: Counting(Stream(), 2, num_workers=1),
    "dict": lambda: {"x": Counting(Rows(), 2), "other": DataLoader(Rows(), 2)},
    "list": lambda: [Counting(Rows(), 2), Sized(), Itself()],
    "cycled": lambda: CombinedLoader([Counting(Rows(), 2), Counting(Rows(8), 2)], "max_size_cycle"),
    "shortest": lambda: CombinedLoader({"x": Sized(), "other": Counting(Stream(), 2)}, "min_size"),
    "torchdata": torchdatas,
    "torchdata with workers": lambda: torchdatas(num_workers=1, shuffle=True),
}
WAYS = ("steps", "after the fit", "in validation", "at its end", "before training")
LAYOUTS: dict[str, dict[str, Any] | None] = {
    "one": None,
    "1-1": {"layout": "1-1", "microbatches": 2},
    "2": {"layout": "2", "microbatches": 1},
    "1": {"microbatches": 2},
}


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, 1).double()

    def rows(self, batch: Any) -> torch.Tensor:
        if isinstance(batch, dict):
            return self.rows(list(batch.values()))
        if isinstance(batch, (list, tuple)):
            return torch.cat([self.rows(value)[:2] for value in batch], dim=1).reshape(2, -1, WIDTH).sum(1)
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.second(torch.tanh(self.first(self.rows(batch)))).square().mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val", self.second(torch.tanh(self.first(batch))).mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Saves(pl.Callback):
    """Save once, where the hook of this name runs after so many steps."""

    def __init__(self, path: Path, hook: str, steps: int) -> None:
        def save(trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == steps and not trainer.sanity_checking:
                trainer.save_checkpoint(path)

        setattr(self, hook, save)


def trainer_of(layout: str, **options: Any) -> pl.Trainer:
    chosen = LAYOUTS[layout]
    strategy = "auto" if chosen is None else dapple(**chosen)
    return make_trainer(strategy, enable_checkpointing=True, max_epochs=2, **options)


def save(name: str, layout: str, way: str, steps: int, path: Path) -> None:
    """Train until a checkpoint is saved in some way, after these steps; a worker function."""
    torch.manual_seed(1)
    hooks = {
        "in validation": "on_validation_batch_end",
        "at its end": "on_validation_end",
        "before training": "on_train_start",
    }
    callbacks: list[pl.Callback] = [ModelCheckpoint(save_top_k=0)]
    if way == "steps":
        callbacks = [ModelCheckpoint(path.parent, filename=path.stem, every_n_train_steps=steps, save_top_k=1)]
    elif way in hooks:
        callbacks.append(Saves(path, hooks[way], 0 if way == "before training" else steps))
    trainer = trainer_of(layout, callbacks=callbacks, max_steps=steps, val_check_interval=steps)
    trainer.fit(Net(), LOADERS[name](), DataLoader(Rows(), 4))
    if way == "after the fit":
        trainer.save_checkpoint(path)


def resume(name: str, layout: str, path: Path) -> tuple[list[float], list[float]]:
    """Go on, and return losses and weights; a worker function."""
    torch.manual_seed(2)
    losses, net = Losses(), Net()
    trainer_of(layout, callbacks=[losses, ModelCheckpoint(save_top_k=0)]).fit(net, LOADERS[name](), ckpt_path=path)
    return losses.losses, torch.cat([p.detach().flatten() for p in net.parameters()]).tolist()


def save_and_resume(name: str, layouts: tuple[str, str], way: str, steps: int, path: Path) -> Any:
    """Save by one layout and go on by another; a worker function."""
    save(name, layouts[0], way, steps, path)
    return resume(name, layouts[1], path)


QUICK = ["counting", "sampler", "workers"]


@pytest.mark.parametrize("name", slow_but(QUICK, LOADERS))
def test_a_fit_is_resumed_at_the_batch_where_one_device_resumes_it(name: str, tmp_path: Path) -> None:
    draw = random.Random(zlib.crc32(name.encode()))
    way, steps = draw.choice(WAYS), draw.randint(1, 6)
    case = (name, draw.choice([("1-1", "1-1"), ("1-1", "2"), ("2", "1-1")]), way, steps, tmp_path / "saved.ckpt")
    (tmp_path / "one").mkdir()
    expected = save_and_resume(name, ("one", "one"), way, steps, tmp_path / "one" / "saved.ckpt")
    has_workers = "worker" in name  # which processes of a world may not have
    found = [save_and_resume(name, ("1", "1"), *case[2:])] if has_workers else World(2).run(save_and_resume, *case)
    for losses, weights in [*found, resume(name, "one", case[-1])]:
        assert losses == pytest.approx(expected[0], rel=1e-9), case
        assert weights == pytest.approx(expected[1], rel=1e-9), case


def fit_again() -> list[Any]:
    """Fit twice with one combined loader, and return what its parts are asked for after both; a worker function."""
    loader = CombinedLoader([Counting(Rows(), 2), DataLoader(Rows(), 2)])
    for _ in range(2):
        trainer = trainer_of("1-1", callbacks=[losses := Losses(), ModelCheckpoint(save_top_k=0)])
        trainer.fit(Net(), loader)
    return [losses.losses, trainer.fit_loop.state_dict()["state_dict"]]


def test_a_combined_loader_may_be_fitted_with_again() -> None:
    for losses, state in World(2).run(fit_again):
        assert len(losses) == 2 * SAMPLES // 2
        assert state == {"combined_loader": [{"position": SAMPLES // 2}]}


def interrupted(name: str, takes: list[int], looks: list[bool] | None) -> list[Any]:
    """Take some batches again and again, each time resumed by another loader; return them and the states.

    Args:
        name: of the loader.
        takes: how many batches each time.
        looks: whether the first batch is looked at before, of loaders that are wrapped; None for bare ones.
    """
    torch.manual_seed(1)
    seen, state = list[Any](), None
    for number, take in enumerate(takes):
        loader = LOADERS[name]()
        fed = loader if looks is None else alone().wrap(loader)
        if state is not None:
            fed.load_state_dict(state)
        if looks is not None and looks[number]:
            with contextlib.suppress(StopIteration):
                fed.look()
        batches = iter(fed) if looks is None else fed.feed.iterate(fed)
        taken = (next(batches, None) for _ in range(take))
        seen += [batch.tolist() for batch in itertools.takewhile(lambda batch: batch is not None, taken)]
        if take or name != "late state":
            state = copy.deepcopy(fed.state_dict())
        seen.append({key: torch.as_tensor(value).tolist() for key, value in (state or {}).items()})
    return seen


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, make in LOADERS.items()
        if "torchdata" not in name and "worker" not in name and isinstance(make(), Position | Delegating)
    ],
)
def test_a_wrapped_loader_has_the_states_of_the_bare_one_whether_it_is_looked_at_or_not(name: str) -> None:
    draw = random.Random(name)
    for _ in range(20):
        takes = [draw.randint(0, 7) for _ in range(4)]
        looks = [draw.random() < 0.7 for _ in takes]
        assert interrupted(name, takes, looks) == interrupted(name, takes, None), (takes, looks)


class States(pl.Callback):
    """Keep the states of the loaders after every batch."""

    def __init__(self) -> None:
        self.states: list[Any] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.states.append(copy.deepcopy(trainer.fit_loop._combined_loader._state_dicts()))


def states(names: list[str], depth: int | None) -> list[Any]:
    """Return the states that checkpoints of an epoch would have, batch by batch; a worker function."""
    all_states = []
    deep = replace(POLICIES["pipedream"], depth=lambda behind: behind * (depth or 0))
    for name in names:
        torch.manual_seed(1)
        noted = States()
        options = {"layout": "1-1", "microbatches": 1, "planner": "uniform", "versions": "pipedream"}
        strategy = "auto" if depth is None else dapple(**options)
        with mock.patch.dict(POLICIES, {"pipedream": deep}):
            make_trainer(strategy, callbacks=[noted], max_epochs=2).fit(Net(), LOADERS[name]())
        all_states.append(noted.states)
    return all_states


IN_PROCESS = [name for name in LOADERS if "worker" not in name and "torchdata" not in name]


@pytest.mark.parametrize(
    ("names", "depth"),
    [
        (["counting", "unknown length"], 2),
        pytest.param(IN_PROCESS, 1, marks=pytest.mark.slow),
        pytest.param(IN_PROCESS, 2, marks=pytest.mark.slow),
    ],
)
def test_checkpoints_have_the_state_before_batches_that_were_loaded_ahead(names: list[str], depth: int) -> None:
    """One or two batches ahead: what a checkpoint has is what it has on one device."""
    wanted = states(names, None)
    for of_rank in World(2).run(states, names, depth, deadline_s=300):
        for name, one, other in zip(names, of_rank, wanted, strict=True):
            assert str(one) == str(other), name
