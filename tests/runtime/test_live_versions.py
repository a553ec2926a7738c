"""Laws of what ranks hold of versions of their weights: by storage, at every instruction, as it is priced."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_pipe.capture import Capture, Request, capture_step
from lightning_pipe.capture.stages.split import Split
from lightning_pipe.capture.steps.batch import flatten
from lightning_pipe.core.plan import Plan, StagePlan
from lightning_pipe.core.program import Instruction
from lightning_pipe.planner.evaluation.evaluate import judge
from lightning_pipe.planner.problem import counted_problem
from lightning_pipe.runtime.executor import Executor
from lightning_pipe.runtime.guard.watch import Unwatched
from lightning_pipe.runtime.stage import Stage
from lightning_pipe.runtime.weights.corrections import Correction
from lightning_pipe.runtime.weights.prediction import Prediction
from lightning_pipe.schedule.weights import POLICIES
from runtime.test_versions import Fit, fit_of

WIDTH, ROWS, STAGES = 8, 2, 4


class Tower(pl.LightningModule):
    """Layers with biases, which no backward reads; one of them is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(STAGES))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def training_step(self, batch: Sequence[torch.Tensor], batch_idx: int) -> torch.Tensor:
        value, wanted = batch
        for number, layer in enumerate(self.layers):
            value = torch.tanh(layer(value))
            value = self.frozen(value) if number == 1 else value
        return nn.functional.mse_loss(value, wanted)


def rows(t: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(t)
    x, y = (torch.randn(ROWS * count, WIDTH, generator=generator) for _ in range(2))
    return x, y


@cache
def captured() -> tuple[Capture, Split, tuple[int, ...]]:
    request = Request(Tower(), "training_step", flatten(rows(0, 1))[1], arguments=(0,), samples=ROWS)
    capture = capture_step(request)
    cuts = tuple(capture.graph.position(f"layers.{stage}") for stage in range(1, STAGES))
    return capture, capture.split(cuts), cuts


class Held(Unwatched):
    """Count, at every instruction, the storages that a rank holds of its parameters beside those of now."""

    def __init__(self, executor: Executor) -> None:
        self.executor, self.bytes, self.versions = executor, 0, 1

    def at(self, instruction: Instruction, *, pending: bool = False) -> None:
        (stage,) = self.executor.stages.values()
        copies = copies_of(stage, self.executor)
        self.bytes = max(self.bytes, sum(sum(sizes.values()) for sizes in copies.values()))
        self.versions = max(self.versions, *(1 + len(sizes) for sizes in copies.values()))


def copies_of(stage: Stage, executor: Executor) -> dict[str, dict[int, int]]:
    """Return the bytes of other storages than the parameter's, by the name of each."""
    found: dict[str, dict[int, int]] = {}
    for name, now in stage.parameters_now().items():
        held = [values[name] for values in stage._held.values() if name in values]
        buffers = [x for buffers in executor.versions._buffers.values() for x in buffers.get(name, ())]
        sizes = {x.data_ptr(): x.nbytes for x in (*held, *buffers)}
        found[name] = {pointer: size for pointer, size in sizes.items() if pointer != now.data_ptr()}
    return found


def watched(fit: Fit, rounds: int) -> list[Held]:
    """Run rounds, and return what ranks held in them."""
    fit.watches = watches = [Held(executor) for executor in fit.executors]
    fit.run(rounds, {})
    return watches


def counted_passes(patch: pytest.MonkeyPatch) -> dict[int, list[int]]:
    """Return lists that will have, by the identity of an optimizer, the bytes of weights that each round passes over.

    Only passes beside the optimizer's step are meant.
    """
    passed = defaultdict[int, list[int]](lambda: [0])
    before_step, note, compensate = Prediction.before_step, Correction._note_weights, Correction._compensate
    end, attribute = Correction.end, {Prediction: "_optimizer", Correction: "optimizer"}

    def counting(kind):
        predict = kind.predict

        def predicts(self, parameters, horizon, *, into):
            def taken(name):
                passed[id(getattr(self, attribute[kind]))][-1] += parameters[name].nbytes
                return into(name)

            return predict(self, parameters, horizon, into=taken)

        return predicts

    def keeps(prediction, parameters):
        before_step(prediction, parameters)
        passed[id(prediction._optimizer)][-1] += sum(x.nbytes for x in prediction._last.values())

    def notes(correction):
        note(correction)
        passed[id(correction.optimizer)][-1] += sum(x.nbytes for x in correction._deltas.values())

    def compensates(correction, group):
        compensate(correction, group)
        passed[id(correction.optimizer)][-1] += sum(x.nbytes for x in group["params"] if x.grad is not None)

    def ends(correction):
        end(correction)
        passed[id(correction.optimizer)].append(0)

    for kind in (Prediction, Correction):
        patch.setattr(kind, "predict", counting(kind))
    patch.setattr(Prediction, "before_step", keeps)
    patch.setattr(Correction, "_note_weights", notes)
    patch.setattr(Correction, "_compensate", compensates)
    patch.setattr(Correction, "end", ends)
    return passed


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("name", POLICIES)
def test_versions_are_held_and_made_as_they_are_priced(name: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No storage more than the policy says, none of what no backward reads, none of what is never changed.

    Predictions and corrections pass over the weights as often as they are priced, in rounds in the middle.
    """
    passed = counted_passes(monkeypatch)
    capture, split, cuts = captured()
    plan = Plan(tuple(StagePlan(f"layers.{s}" if s else "", (s,)) for s in range(STAGES)), count)
    problem = counted_problem(capture.graph, ranks=STAGES, samples=ROWS * count).with_versions(name)
    judged, policy = judge(plan, problem), POLICIES[name]
    assert judged.cuts == cuts
    modules = [Tower() for _ in range(STAGES)]
    sgd = lambda m: torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.01, momentum=0.9)  # noqa: E731
    fit = fit_of(capture, split, plan.layout, modules, sgd, name, lambda t: rows(t, count), count)
    lives = policy.lives(plan.layout, count)
    for rank, watch in enumerate(watched(fit, 12)):
        copies = sum(held.copies for held in judged.prices.version_bytes(rank))
        scratch = sum(held.scratch for held in judged.prices.version_bytes(rank))
        kept = trained(rank) if name in ("pipemare", "pb_lwpd") and scratch else 0  # by optimizer and prediction
        assert watch.bytes == copies + scratch - kept, rank
        assert watch.versions <= lives[rank]
        priced = sum(held.passed for held in judged.prices.version_bytes(rank))
        assert passed[id(fit.steps[rank])][3:5] == [priced] * 2, rank
        assert copies == copied_bytes(name, rank, count, copies=lives[rank] - 1 - policy.predicted)


def copied_bytes(name: str, rank: int, count: int, *, copies: int) -> int:
    """Return the bytes of copies: weights, but the first's, whose input has no gradient; and what forwards read."""
    weight, bias = 4 * WIDTH * WIDTH, 4 * WIDTH
    entered = min(copies, -(-rank // count)) if name == "pipedream_vertical" else 0  # not yet run on this rank
    forwards = copies if name == "2bw" else entered
    return (weight + bias) * forwards + weight * (rank > 0) * (copies - forwards)


def trained(rank: int) -> int:
    """Return the bytes of the layer that a rank trains."""
    return 4 * WIDTH * (WIDTH + 1)
