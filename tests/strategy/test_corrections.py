"""Laws of fits that correct late gradients: weights are those of a recursion, and users see their own rates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader

from lightning_pipe.errors import ConfigError, PipeError
from models.number_chain import LATE, RATE, SIZE, Drains, late_recursion
from ranks.world import World
from strategy.fits import dapple, make_trainer
from strategy.small import Small
from strategy.test_versions import BATCHES, Chain, Pairs, fit_chain, plan_of


class Scheduled(Chain):
    """A chain whose rate falls; hooks note the rates that they see, and the delays."""

    def __init__(self, stages: int, gamma: float) -> None:
        super().__init__(stages)
        self.gamma, self.seen, self.delays = gamma, list[float](), list[Any]()

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, self.gamma)]

    def on_fit_start(self) -> None:
        strategy = self.trainer.strategy
        names = [strategy.delay_of(name) for name, _ in self.named_parameters()]
        assert names == [strategy.delay_of(w) for w in self.w]
        self.delays += [strategy.delays, tuple(names)]

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.seen.append(optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(self.trainer.optimizers[0].param_groups[0]["lr"])


def train(
    policy: str,
    stages: int,
    count: int,
    folder: Path,
    after: tuple[int, ...],
    version_options: dict[str, float] | None,
    epochs: int,
) -> tuple[list[float], list[float], list[float], list[Any], list[Any]]:
    """Fit a chain of numbers; a worker function."""
    module, options = Scheduled(stages, 1.0), {"max_epochs": epochs, "limit_val_batches": 0}
    losses, weights, trainer = fit_chain(policy, stages, count, folder, after, options, False, module, version_options)
    kept = [sorted(state) for state in trainer.optimizers[0].state.values()]
    return losses, weights, module.seen, module.delays, kept


PIPEMARE = {"anneal": 6, "warmup_epochs": 1}
CASES: list[Any] = [
    ("pipemare", 2, 2, (5, 16), PIPEMARE),
    ("pipemare", 3, 1, (), {"decay": 0, "anneal": 10}),
    ("pb_lwpv_sc", 2, 1, (), None),
    ("pipedream_vertical", 3, 1, (4,), None),
    ("timeprest", 2, 4, (), None),
]
TABLE = [
    pytest.param(policy, stages, count, (3,), options, marks=pytest.mark.slow)
    for policy, options in (
        ("pipedream_vertical", None),
        ("pb_sc", None),
        ("pb_lwpv_sc", None),
        ("timeprest", None),
        ("pipemare", {"decay": 0}),
        ("pipemare", {"decay": 0, "anneal": 8}),
        ("pipemare", {"anneal": 8}),
    )
    for stages in (2, 3, 4)
    for count in (1, 2, 4)
]
DELAYS = {
    "pipemare": lambda p, t: [-(-(2 * (p - 1 - s) + 1) // t) for s in range(p)],
    "pb_sc": lambda p, t: [-(-2 * (p - 1 - s) // t) for s in range(p)],
    "pb_lwpv_sc": lambda p, t: [-(-2 * (p - 1 - s) // t) for s in range(p)],
    "pipedream_vertical": lambda p, t: [-(-(p - 1) // t)] * p,
    "timeprest": lambda p, t: [-(-(p - 1 - s) // t) for s in range(p)],
}


@pytest.mark.parametrize(("policy", "stages", "count", "after", "options"), [*CASES, *TABLE])
def test_losses_and_weights_are_those_of_the_recursion(
    policy: str, stages: int, count: int, after: tuple[int, ...], options: dict[str, float] | None, tmp_path: Path
) -> None:
    """Checkpoints give up what is in flight. Rates are those of the user wherever somebody looks."""
    epochs, given = 2 if options == PIPEMARE else 1, options or {}
    drains: Drains = dict.fromkeys(after, True) | {BATCHES - 1: False}
    late = replace(
        LATE[policy],
        anneal=int(given.get("anneal", 0)),
        decay=given.get("decay", LATE[policy].decay),
        warmup=int(given.get("warmup_epochs", 0)) * BATCHES,
    )
    wanted, last = late_recursion(late, stages, count, epochs * BATCHES, drains, repeats=BATCHES * count)
    for rank, ran in enumerate(World(stages).run(train, policy, stages, count, tmp_path, after, options, epochs)):
        losses, weights, seen, delays, kept = ran
        assert losses == pytest.approx(wanted, abs=1e-9)
        assert weights == pytest.approx(last, abs=1e-9)
        assert seen == [RATE] * len(seen) and len(seen) == 2 * epochs * BATCHES
        assert delays == [tuple(DELAYS[policy](stages, count))] * 2
        assert kept == [["discrepancy"] * (late.decay > 0) + ["momentum_buffer"]], rank  # one buffer, of its stage


def resumed(folder: Path) -> tuple[list[float], list[float], Any]:
    """Fit with a falling rate, go on from a checkpoint, and synchronously from the same; a worker function."""
    strategies = {"plan": plan_of(2, 2, folder), "cache": "off"}
    last: list[list[float]] = []
    for versions, load in (("pipemare", None), ("pipemare", "0.ckpt"), ("sync", "0.ckpt")):
        options = {} if versions == "sync" else {"versions_options": {"anneal": 40}}
        module, logger = Scheduled(2, 0.5), CSVLogger(folder, name=f"{versions} {load}")
        saves = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, auto_insert_metric_name=False)
        callbacks = [saves, LearningRateMonitor("step")] if load is None else [ModelCheckpoint(save_top_k=0)]
        trainer = make_trainer(
            dapple(versions=versions, **strategies, **options),
            callbacks=callbacks,
            logger=logger if load is None else False,
            log_every_n_steps=1,
            max_epochs=2,
            limit_val_batches=0,
            enable_checkpointing=True,
        )
        path = None if load is None else folder / load
        trainer.fit(module, DataLoader(Pairs(BATCHES * 2), batch_size=SIZE * 2), ckpt_path=path)
        last.append([float(w.detach()) for w in module.w])
        if load is None and trainer.is_global_zero:
            rates = [row["lr-SGD"] for row in logger.experiment.metrics if "lr-SGD" in row]
    return last[0], last[1], rates if trainer.is_global_zero else None


def test_a_resumed_fit_is_that_which_was_saved_to_the_last_bit(tmp_path: Path) -> None:
    """Discrepancy and annealing go on; monitor and checkpoint have the user's rates; a synchronous fit loads it too."""
    (without, again, rates), _ = World(2).run(resumed, tmp_path)
    assert without == again
    assert {*rates} <= {RATE, RATE / 2}
    saved = torch.load(tmp_path / "0.ckpt", weights_only=False)
    (states,) = saved["optimizer_states"]
    assert states["param_groups"][0]["lr"] == RATE / 2
    assert all(float(state["discrepancy"]) != 0.0 for state in states["state"].values())


class Adam(Small):
    """Its momentum is another."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


class Gated(Small):
    """What it makes of parameters alone is made again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(8, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)) * torch.sigmoid(self.gate))


class Asking(Small):
    """It asks for delays before there is a plan."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        assert self.trainer.strategy.delays
        return super().configure_optimizers()


class Lazy(torch.optim.SGD):
    """It divides the rate of each parameter by its delay, which it asks for in its step."""

    delay_of: Any = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            parameter.sub_(parameter.grad * 0.1 / max(1, self.delay_of(parameter)))
        return loss


class Dividing(Small):
    """Its optimizer asks for delays."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = Lazy(self.parameters(), lr=0.1)
        optimizer.delay_of = self.trainer.strategy.delay_of
        return optimizer

    def on_train_end(self) -> None:
        strategy = self.trainer.strategy
        assert strategy.delays == (2, 1) and strategy.delay_of("first.weight") == 2


class Misnamed(Small):
    """It asks for the delay of what is no parameter."""

    def on_train_start(self) -> None:
        self.trainer.strategy.delay_of("weights")


def refused(cases: list[tuple[type[Small], str]]) -> list[str]:
    """Return the refusals of fits; a worker function."""
    found: list[str] = []
    for kind, versions in cases:
        module = kind()
        strategy = dapple(layout="1-1", microbatches=2, planner="uniform", versions=versions)
        try:
            make_trainer(strategy, max_epochs=1).fit(module, module.data())
            found.append("")
        except PipeError as error:
            found.append(str(error))
    return found


def test_what_has_no_definition_is_refused_with_the_way_out() -> None:
    """On every rank, in words."""
    cases = {
        (Adam, "pb_sc"): "found Adam; spike compensation is defined for torch.optim.SGD",
        (Small, "pb_sc"): "with a momentum",
        (Asking, "pipemare"): "Delays are known when there is a plan",
        (Misnamed, "pipemare"): "expected a parameter of Misnamed, or its name, such as 'first.weight'",
        (Gated, "pipemare"): "",
        (Dividing, "pipemare"): "",
    }
    for errors in World(2).run(refused, [*cases]):
        for error, words in zip(errors, cases.values(), strict=True):
            assert words in error and bool(words) == bool(error)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"versions_options": {"anneal": 5}}, "in which anneal changes nothing"),
        ({"versions_options": {"anneel": 5}, "versions": "pipemare"}, "expected options such as"),
        ({"versions_options": "decay: 1", "versions": "pipemare"}, "a decay from 0 to less than 1"),
        ({"versions": "pb_sc", "shard_optimizer": "on"}, "shard_optimizer='on'"),
    ],
)
def test_options_without_effect_are_refused(options: dict[str, Any], words: str) -> None:
    """Before anything starts."""
    with pytest.raises(ConfigError, match=words):
        dapple(planner="dapple", **options)
