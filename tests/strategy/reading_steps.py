"""Training steps that read what changes from batch to batch, and their training by delayed gradients on one device.

A step is a choice of reads: where a factor of the data, of what crosses stages, or of the loss comes from. The training
that it is compared with runs on one device, in plain torch: it is told which batches found a forward in flight, and
lets that micro-batch read older weights, and the numbers of its own batch.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from torch.nn.utils import stateless

from lightning_pipe.strategy.steps.rounds import Rounds
from strategy.fits import Losses, dapple, make_trainer
from strategy.small import Small, loader

PLAN = "stages:\n- {{at: '', ranks: [0]}}\n- {{at: last, ranks: [1]}}\nmicrobatches: {}\nschedule: 1f1b\n"
COUNTERS = ("batch_idx", "global_step", "epoch", "counter", "state")  # are foreseen
LEFT = ("left", "seen", "drawn")  # by hooks of the transfer
CHANGING = ("start", "end", "buffer", "rate", "reset")  # by hooks of every batch
SELDOM = ("seldom", "seldom_buffer", "flag")  # by hooks of some batches
RANDOM = ("rand", "dropout", "drawn")


@dataclass(frozen=True)
class Reads:
    """What a step reads, and where: pairs of a read and "data", "between" or "loss"."""

    places: tuple[tuple[str, str], ...]
    policy: str = "pipedream"
    microbatches: int = 2
    trainer: tuple[tuple[str, Any], ...] = ()
    rate: float = 0.1

    @property
    def names(self) -> set[str]:
        """Return what it reads."""
        return {name for name, _ in self.places}

    def __str__(self) -> str:
        """Return it in short."""
        return "+".join(f"{name}@{place}" for name, place in self.places) + f"-{self.policy}-{self.microbatches}"


def any_reads(number: int) -> Reads:
    """Return reads that a generator chooses."""
    chosen = random.Random(number)
    kinds = [*COUNTERS, *COUNTERS, *LEFT, *CHANGING, *SELDOM, *SELDOM, *RANDOM]
    places = {(chosen.choice(kinds), chosen.choice(("data", "between", "loss"))) for _ in range(chosen.randint(1, 3))}
    options: list[tuple[tuple[str, Any], ...]] = [(), (("val_check_interval", 3),), (("accumulate_grad_batches", 2),)]
    policy = chosen.choice(("pipedream", "2bw"))
    trainer = chosen.choice(options[:2] if policy == "2bw" else options)
    if any(name == "drawn" for name, _ in places):  # after which a validation would draw other numbers
        trainer = ()
    rate = 0.0 if any(name in RANDOM for name, _ in places) else 0.1
    return Reads(tuple(sorted(places)), policy, chosen.choice((1, 2)), trainer, rate)


class Reading(Small):
    """A step that reads."""

    data = staticmethod(lambda: loader(28))
    validation = staticmethod(lambda: loader(8))

    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self.reads, self.names = reads, reads.names
        self.kl, self.kl_end, self.kl_seldom, self.flag = 1.0, 1.0, 1.0, False
        self.share, self.seen = 1.0, 0
        for name in ("counter_buffer", "level", "level_seldom"):
            self.register_buffer(name, torch.tensor(1.0, dtype=torch.float64))

    def factor(self, name: str, batch_idx: int, like: torch.Tensor) -> Any:
        """Return the value of a read."""
        match name:
            case "batch_idx":
                return 1 + 0.1 * batch_idx
            case "global_step":
                return 1 / (1 + 0.2 * self.global_step)
            case "epoch":
                return 1 + 0.3 * self.current_epoch
            case "counter":
                return 1 + 0.1 * self.counter_buffer
            case "state":
                return 1 + 0.05 * self.trainer.global_step
            case "seen":
                return 1 + 0.1 * self.seen
            case "left" | "drawn" | "reset" | "always":
                return self.share
            case "start":
                return self.kl
            case "end":
                return self.kl_end
            case "seldom":
                return self.kl_seldom
            case "buffer":
                return self.level
            case "seldom_buffer":
                return self.level_seldom
            case "rate":
                return 1 + self.trainer.optimizers[0].param_groups[0]["momentum"]
            case "flag":
                return 2.0 if self.flag else 1.0
            case "rand":
                return torch.rand_like(like)
            case "dropout":
                return torch.dropout(torch.ones_like(like), 0.5, True)
        raise AssertionError(name)

    def scaled(self, value: torch.Tensor, place: str, batch_idx: int) -> torch.Tensor:
        """Return a value times all that is read at a place."""
        for name, where in self.reads.places:
            if where == place:
                value = value * self.factor(name, batch_idx, value)
        return value

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        if "counter" in self.names:
            self.counter_buffer += 1
        hidden = self.scaled(torch.tanh(self.first(self.scaled(x, "data", batch_idx))), "between", batch_idx)
        loss = self.scaled(torch.nn.functional.cross_entropy(self.last(hidden), y), "loss", batch_idx)
        self.log("said", loss, on_step=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.kl = 1.0 / (1 + batch_idx)
        self.flag = batch_idx % 3 == 1
        if "buffer" in self.names:
            self.level.fill_(1 + 0.2 * batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.kl_end *= 0.9
        if "reset" in self.names:
            self.share = 1.0
        if batch_idx % 4 == 2:
            self.kl_seldom *= 1.3
            if "seldom_buffer" in self.names:
                self.level_seldom.mul_(1.2)
        if "rate" in self.names:
            self.trainer.optimizers[0].param_groups[0]["momentum"] *= 0.95

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.reads.rate, momentum=0.5)


class Leaving(Reading):
    """A hook of the transfer leaves a number for the step of its batch."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.training or "always" in self.names:
            self.seen += 1
            self.share = float(torch.rand(())) if "drawn" in self.names else float(batch[0].abs().mean())
        return batch


def module_of(reads: Reads, kind: type[Reading] = Reading) -> Reading:
    """Return a module with these reads."""
    return (Leaving if reads.names & {*LEFT, "reset", "always"} and kind is Reading else kind)(reads)


@dataclass
class Trained:
    """What is left of a fit: losses, parameters, and for every batch whether forwards of it had run before."""

    losses: list[float]
    parameters: dict[str, torch.Tensor]
    ahead: list[bool]
    warnings: list[str]


def fit(all_reads: Sequence[Reads], versions: Sequence[str], folder: Path) -> list[Trained]:
    """Fit modules with these reads by these policies; a worker function."""
    return [train(reads, policy, folder) for reads, policy in zip(all_reads, versions, strict=True)]


def train(reads: Reads, versions: str, folder: Path) -> Trained:
    """Fit one module."""
    path = folder / f"plan-{reads.microbatches}-{os.getpid()}.yaml"  # ranks do not wait for each other here
    path.write_text(PLAN.format(reads.microbatches))
    ahead, told = list[bool](), list[str]()
    end = Rounds.end

    def noting(self: Rounds, step: Any, *, has_entered: bool, is_outdated: bool) -> None:
        if not is_outdated:  # else the batch begins again
            ahead.append(has_entered)
        end(self, step, has_entered=has_entered, is_outdated=is_outdated)

    pl.seed_everything(3, verbose=False)
    module, losses = module_of(reads), Losses()
    options = {"max_epochs": 2, "limit_val_batches": 0, **dict(reads.trainer)}
    if "val_check_interval" in options:
        options["limit_val_batches"] = 1.0
    strategy = dapple(plan=str(path), versions=versions, cache="off")
    warn = "lightning_pipe.strategy.steps.rounds.rank_zero_warn"
    with mock.patch.object(Rounds, "end", noting), mock.patch(warn, told.append):
        make_trainer(strategy, callbacks=[losses], **options).fit(module, module.data(), module.validation())
    return Trained(losses.losses, {n: p.detach().clone() for n, p in module.named_parameters()}, ahead, told)


def delayed(reads: Reads, ahead: Sequence[bool]) -> Trained:
    """Fit on one device; the first micro-batch of batches that were begun ahead reads older weights.

    Args:
        reads: of the step.
        ahead: for every batch, whether a forward of it had run in the round before.
    """

    class Delayed(module_of(reads).__class__):  # type: ignore[misc]
        older: dict[str, torch.Tensor]
        batches = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            now = {name: p.detach().clone() for name, p in self.named_parameters()}
            is_ahead, self.batches = ahead[self.batches], self.batches + 1
            counter, losses, surrogate = self.counter_buffer.clone(), [], 0.0
            count = reads.microbatches
            for m, part in enumerate(zip(*(leaf.chunk(count) for leaf in batch), strict=True)):
                self.counter_buffer.copy_(counter)
                read = {n: self.older[n] if self._is_older(n, m, is_ahead) else now[n] for n in now}
                leaves = {name: value.clone().requires_grad_() for name, value in read.items()}
                with mock.patch.object(self, "log"), stateless._reparametrize_module(self, leaves):
                    loss = super().training_step(part, batch_idx)
                gradients = torch.autograd.grad(loss, list(leaves.values()))
                losses.append(loss.detach())
                for p, gradient in zip(self.parameters(), gradients, strict=True):
                    surrogate = surrogate + (p * gradient).sum() / count
            self.older = now
            return surrogate - surrogate.detach() + torch.stack(losses).mean()

        def _is_older(self, name: str, microbatch: int, is_ahead: bool) -> bool:
            if not is_ahead:
                return False
            return reads.policy == "2bw" or (microbatch == 0 and name.startswith("first"))

    pl.seed_everything(3, verbose=False)
    module, losses = module_of(reads, Delayed), Losses()
    options = {"max_epochs": 2, **dict(reads.trainer), "limit_val_batches": 0}
    options.pop("val_check_interval", None)
    make_trainer("auto", callbacks=[losses], **options).fit(module, module.data())
    return Trained(losses.losses, {n: p.detach().clone() for n, p in module.named_parameters()}, list(ahead), [])
