"""Laws of fits whose pipeline is not flushed (`versions`): weights are those of a recursion, all else is as ever."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_pipe.errors import ConfigError, PipeError
from models.number_chain import MOMENTUM, RATE, SIZE, Drains, Numbers, number, recursion
from ranks.world import World
from strategy.fits import Losses, dapple, make_trainer
from strategy.reading_steps import Reads, fit
from strategy.small import Small, samples

BATCHES = 12


class Pairs(Dataset[Any]):
    """Samples of a chain of numbers: `SIZE` equal ones for every micro-batch."""

    def __init__(self, microbatches: int) -> None:
        self.count = microbatches

    def __len__(self) -> int:
        return self.count * SIZE

    def __getitem__(self, index: int) -> Any:
        return tuple(torch.tensor(x, dtype=torch.float64) for x in number(index // SIZE))


class Stream(IterableDataset[Any]):
    """The same without a length."""

    def __init__(self, microbatches: int) -> None:
        self.pairs = Pairs(microbatches)

    def __iter__(self) -> Any:
        return (self.pairs[i] for i in range(len(self.pairs)))


class Chain(Numbers):
    """A chain of numbers as a module of Lightning."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", super().training_step(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=RATE, momentum=MOMENTUM)


class Saves(pl.Callback):
    """Write checkpoints after some batches."""

    def __init__(self, folder: Path, after: tuple[int, ...]) -> None:
        self.folder, self.after = folder, after

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.fit_loop.total_batch_idx in self.after:
            trainer.save_checkpoint(self.folder / f"{trainer.fit_loop.total_batch_idx}.ckpt")


def plan_of(stages: int, count: int, folder: Path) -> str:
    """Write a plan that cuts a chain between all factors; every rank calls this, so each writes a file of its own."""
    at = "".join(f"- {{at: '{'' if s == 0 else f'mul_{s}'}', ranks: [{s}]}}\n" for s in range(stages))
    (path := folder / f"plan_{os.getpid()}.yaml").write_text(f"stages:\n{at}microbatches: {count}\nschedule: 1f1b\n")
    return str(path)


def fit_chain(
    policy: str,
    stages: int,
    count: int,
    folder: Path,
    after: tuple[int, ...],
    options: dict[str, Any],
    stream: bool,
    module: Chain | None = None,
    version_options: dict[str, float] | None = None,
) -> tuple[list[float], list[float], pl.Trainer]:
    """Fit a chain of numbers."""
    module, losses = module or Chain(stages), Losses()
    folder.mkdir(exist_ok=True)
    strategy = dapple(
        plan=plan_of(stages, count, folder), versions=policy, versions_options=version_options, cache="off"
    )
    trainer = make_trainer(
        strategy, callbacks=[losses, Saves(folder, after)], num_sanity_val_steps=0, **{"max_epochs": 1, **options}
    )
    data = Stream(BATCHES * count) if stream else Pairs(BATCHES * count)
    loader = DataLoader(data, batch_size=SIZE * count)
    trainer.fit(module, loader, DataLoader(Pairs(4), batch_size=SIZE))
    return losses.losses, [float(w.detach()) for w in module.w], trainer


def train(*arguments: Any) -> tuple[list[float], list[float], int]:
    """Fit a chain of numbers, and return its losses, weights and steps; a worker function."""
    losses, weights, trainer = fit_chain(*arguments)
    return losses, weights, trainer.global_step


@pytest.mark.parametrize(
    ("policy", "stages", "count", "after", "options", "stream"),
    [
        pytest.param("pipedream", 2, 2, (), {"val_check_interval": 3}, False, marks=pytest.mark.slow),
        ("pipedream", 3, 1, (4, 7), {"limit_val_batches": 0}, False),
        ("pipedream", 3, 2, (), {"max_epochs": 2, "limit_val_batches": 0}, True),
        ("2bw", 2, 2, (5,), {"limit_val_batches": 0}, True),
        ("2bw", 3, 2, (), {"val_check_interval": 4, "max_steps": 10}, False),
        pytest.param(
            "pipedream", 2, 1, (), {"limit_train_batches": 8, "limit_val_batches": 0}, True, marks=pytest.mark.slow
        ),
        pytest.param("2bw", 4, 4, (3, 6), {"max_epochs": 2}, False, marks=pytest.mark.slow),
        pytest.param("pipedream", 4, 1, (3, 4), {"max_epochs": 2}, True, marks=pytest.mark.slow),
    ],
)
def test_losses_and_weights_are_those_of_the_recursion(
    policy: str, stages: int, count: int, after: tuple[int, ...], options: dict[str, Any], stream: bool, tmp_path: Path
) -> None:
    """Whatever validates in between; a checkpoint gives up what is in flight, an epoch's end is known before."""
    epoch = options.get("limit_train_batches", BATCHES)
    rounds = min(options.get("max_epochs", 1) * epoch, options.get("max_steps", 1 << 10))
    drains: Drains = dict.fromkeys((t for t in after), True) | dict.fromkeys(range(epoch - 1, rounds, epoch), False)
    arguments = (policy, stages, count, tmp_path, after, options, stream)
    for losses, weights, steps in World(stages).run(train, *arguments):
        wanted, last = recursion(policy, stages, count, rounds, drains, repeats=epoch * count)
        assert losses == pytest.approx(wanted, abs=1e-9)
        assert weights == pytest.approx(last, abs=1e-9)
        assert steps == rounds


class Asking(Small):
    """It decides by what it computes."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return loss * 2.0 if loss > 0.5 else loss


def fit_small(kind: type[Small], options: dict[str, Any]) -> tuple[list[float], list[torch.Tensor]]:
    """Fit a module of two layers; a worker function."""
    module, losses = kind(), Losses()
    make_trainer(
        dapple(layout="1-1", microbatches=2, planner="uniform", **options), callbacks=[losses], max_epochs=1
    ).fit(module, module.data())
    return losses.losses, [p.detach().clone() for p in module.parameters()]


@pytest.mark.parametrize(("kind", "options"), [(Asking, {}), (Small, {"capture": "replay"})])
def test_what_cannot_run_ahead_is_flushed(kind: type[Small], options: dict[str, Any]) -> None:
    """Such steps train as with versions='sync', and one sentence says so."""
    (wanted, weights), _ = World(2).run(fit_small, kind, options)
    for losses, found in World(2).run(fit_small, kind, {**options, "versions": "pipedream"}):
        assert losses == wanted
        assert all(torch.equal(a, b) for a, b in zip(found, weights, strict=True))


READS = (("dropout", "data"), ("global_step", "between"), ("counter", "loss"))
VALIDATES = (("val_check_interval", 3),)


def test_validation_changes_no_digit(tmp_path: Path) -> None:
    """Forwards in flight stay there while the weights that they have read are validated."""
    policies = ["2bw", "spectrain"]
    trainings = [Reads(READS, policy, 2, trainer) for policy in policies for trainer in ((), VALIDATES)]
    for fits in World(2).run(fit, trainings, [reads.policy for reads in trainings], tmp_path):
        for policy, without, validated in zip(policies, fits[::2], fits[1::2], strict=True):
            assert validated.ahead == without.ahead and any(without.ahead), policy
            assert validated.losses == without.losses, policy
            assert all(torch.equal(x, without.parameters[name]) for name, x in validated.parameters.items()), policy


class Rounded(Small):
    """Its samples have few digits, and the type that they are given."""

    def data(self, dtype: torch.dtype = torch.float32) -> DataLoader[Any]:
        """Return a loader."""
        pairs = [(x.bfloat16().to(dtype), y) for x, y in samples(24)]
        return DataLoader(pairs, batch_size=4)


def fit_rounded(cases: list[tuple[str, torch.dtype]]) -> list[tuple[list[float], list[bool]]]:
    """Fit with precisions on samples of some types, and note what was in flight; a worker function."""
    found = []
    for precision, dtype in cases:
        module, losses, ahead = Rounded(), Losses(), list[bool]()
        strategy = dapple(layout="1-1", microbatches=2, planner="uniform", versions="pipedream")
        trainer = make_trainer(strategy, callbacks=[losses, Flies(ahead)], max_epochs=1, precision=precision)
        trainer.fit(module, module.data(dtype))
        found.append((losses.losses, ahead))
    return found


class Flies(pl.Callback):
    """Note whether forwards are in flight."""

    def __init__(self, ahead: list[bool]) -> None:
        self.ahead = ahead

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.ahead.append(trainer.strategy._session._pipeline.runner.rounds._flying is not None)


def test_a_precision_that_converts_batches_runs_ahead_from_the_first() -> None:
    """Conversion leaves nothing on the module, so that there is nothing to look at before."""
    cases = [("32-true", torch.float64), ("64-true", torch.float32), ("bf16-true", torch.float32)]
    for wanted, double, half in World(2).run(fit_rounded, cases):
        assert double == wanted
        assert half[1] == wanted[1] == [True] * 5 + [False]


HOOKS = (
    "on_train_batch_start on_before_zero_grad on_before_backward on_after_backward on_before_optimizer_step "
    "on_train_batch_end"
).split()


class Noting(Small):
    """Its hooks are noted."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.trainer.calls.append(("transfer", float(batch[0].sum())))
        return batch


def noting(hook: str) -> Any:
    """Return a hook that is noted."""

    def note(self: Noting, *_: Any) -> None:
        self.trainer.calls.append((hook, self.trainer.global_step))

    return note


for noted in HOOKS:
    setattr(Noting, noted, noting(noted))


def calls(options: dict[str, Any] | None) -> list[tuple[str, float]]:
    """Fit, and return which hooks have run; a worker function."""
    module = Noting()
    trainer = make_trainer("auto" if options is None else dapple(**options), max_epochs=2)
    trainer.calls = []  # which no snapshot of the module looks at
    trainer.fit(module, module.data())
    return trainer.calls


def test_hooks_run_as_on_one_device_but_for_transfers() -> None:
    """Those of a batch run once, in the order of batches: between the start and the end of the batch two before it."""
    wanted = calls(None)
    options = {"layout": "1-1", "microbatches": 2, "planner": "uniform", "versions": "pipedream"}
    first, second = World(2).run(calls, options)
    for found in (first, second):
        assert [call for call in found if call[0] != "transfer"] == [call for call in wanted if call[0] != "transfer"]
    transfers = [call for call in first if call[0] == "transfer"]
    looks = len(transfers) - 10  # at the first batch, before the training
    assert transfers[looks:] == [call for call in wanted if call[0] == "transfer"]
    early = first[first.index(("on_train_batch_start", 2)) : first.index(("on_before_zero_grad", 3))]
    assert [hook for hook, _ in early if hook in ("transfer", "on_train_batch_end")] == [
        "transfer",
        "on_train_batch_end",
    ]


class Waiting(pl.Callback):
    """Count the batches that wait for their turn."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.counts.append(len(trainer.fit_loop._data_fetcher.batches))


def waiting(options: dict[str, Any]) -> list[int]:
    """Fit, and return how many batches waited at the end of each step; a worker function."""
    module, callback = Noting(), Waiting()
    trainer = make_trainer(dapple(**options), max_epochs=1, callbacks=[callback])
    trainer.calls = []
    trainer.fit(module, DataLoader(module.data().dataset, module.data().batch_size, shuffle=True))
    return callback.counts


def test_ranks_that_load_tell_of_a_batch_a_round_before_others_need_it() -> None:
    """The last stage is the first to end a round; it would wait for the first one to load what the next round needs.

    A loader that shuffles draws one random number, with the first batch.
    """
    options = {"layout": "1-1", "microbatches": 2, "planner": "uniform", "versions": "pipedream"}
    first, last = World(2).run(waiting, options)
    assert (first, last) == ([0, 2, 2, 1, 0], [0, 1, 1, 1, 0])


TIED = "stages:\n- {at: '', ranks: [0]}\n- {at: last, ranks: [1]}\nmicrobatches: 2\nschedule: 1f1b\n"


class Tied(Small):
    """Both layers have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        self.last.weight = self.first.weight


def refused(kind: type[Small], options: dict[str, Any]) -> str:
    """Return the refusal of a fit; a worker function."""
    try:
        module = kind()
        make_trainer(dapple(**options), max_epochs=1).fit(module, module.data())
    except PipeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (Small, {"layout": "2", "microbatches": 1, "planner": "uniform"}, "data parallel training"),
        (Tied, {"plan": TIED}, "trained by several stages"),
    ],
)
def test_plans_that_cannot_run_ahead_are_refused(
    kind: type[Small], options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """On every rank, with the way out."""
    if "plan" in options:
        (path := tmp_path / "plan.yaml").write_text(options["plan"])
        options = {"plan": str(path)}
    for error in World(2).run(refused, kind, {**options, "versions": "pipedream"}):
        assert words in error and "versions='" in error


@pytest.mark.parametrize(
    "other", [{"schedule": "gpipe"}, {"post_validation": True}, {"stages_per_device": 2}, {"cuda_graphs": True}]
)
def test_options_that_rounds_do_not_have_are_refused(other: dict[str, Any]) -> None:
    """Before anything starts."""
    with pytest.raises(ConfigError, match="versions='2bw' and"):
        dapple(versions="2bw", planner="dapple", **other)
