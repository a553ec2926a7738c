"""Random modules under every policy of weight versions: they train as autograd does with the weights that stages read.

Autograd knows nothing of programs. Every micro-batch runs through the plain module with, for each parameter, the
weights that its stage reads in F. Where I and W read others, saved tensors that are weights are exchanged for those
before the backward. Executors of all ranks run in one thread; some modules are trained by `Trainer.fit`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from capture.recorders import Again
from lightning_pipe.capture import Capture, Request, capture_step
from lightning_pipe.capture.stages import recorded_pieces
from lightning_pipe.capture.stages.compiled_stages import CompiledStages
from lightning_pipe.capture.steps.batch import flatten
from lightning_pipe.capture.steps.stage_program import RandomKey, Split
from lightning_pipe.core.plan import Plan, StagePlan
from lightning_pipe.core.program import Layout
from lightning_pipe.planner.memory.policies import policies_of
from lightning_pipe.schedule.weights import POLICIES
from models.number_chain import LATE, SIZE, Batch, horizons_of, round_of_forward
from ranks.world import World
from runtime.test_versions import Fit, fit_of
from strategy.fits import Losses, dapple, make_trainer

WIDTH, WORDS, ROUNDS = 4, 7, 8
NAMES = ("pipedream", "2bw", "stale", "pb", "spectrain", "pb_lwpv", "xpipe", "pipemare")
FROZEN = ("pipedream", "2bw")  # F, I and W of a micro-batch read the same weights
BLOCKS = ("linear", "wide", "norm", "layer_norm", "dropout", "gate", "skip", "again")


class Block(nn.Module):
    """One block of a random module; `again` is a checkpoint, whose stage recomputes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.is_oracle = kind, False
        self.linear = nn.Linear(WIDTH, WIDTH)
        match kind:
            case "wide":
                self.out = nn.Linear(WIDTH, WIDTH, bias=False)
            case "norm":
                self.norm = nn.BatchNorm1d(WIDTH)
            case "layer_norm":
                self.norm = nn.LayerNorm(WIDTH)
            case "gate":
                self.gate = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor, early: torch.Tensor) -> torch.Tensor:
        match self.kind:
            case "wide":
                return x + self.out(torch.relu(self.linear(x)))
            case "norm" | "layer_norm":
                return torch.tanh(self.norm(self.linear(x)))
            case "dropout":
                return nn.functional.dropout(torch.tanh(self.linear(x)), 0.4, self.training)
            case "gate":
                return torch.tanh(self.linear(x)) * torch.sigmoid(self.gate)
            case "skip":
                return torch.tanh(self.linear(x)) * early
            case "again":
                run = lambda value: torch.sigmoid(self.linear(value)) * 2  # noqa: E731
                return run(x) if self.is_oracle else checkpoint(run, x, use_reentrant=False)
        return torch.tanh(self.linear(x))


class Blocks(pl.LightningModule):
    """Blocks behind each other, first an embedding where asked for, which may be tied to the last layer."""

    def __init__(self, kinds: Sequence[str], *, embeds: bool, ties: bool) -> None:
        super().__init__()
        self.first = nn.Embedding(WORDS, WIDTH) if embeds else nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(map(Block, kinds))
        self.last = nn.Linear(WIDTH, WORDS if embeds else WIDTH, bias=False)
        if ties:
            self.last.weight = self.first.weight

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        x, y = batch
        early = x = self.first(x)
        for block in self.blocks:
            x = block(x, early)
        return nn.functional.mse_loss(self.last(x), y)


@dataclass(frozen=True)
class Case:
    """A random module, its plan and its training."""

    policy: str
    kinds: tuple[str, ...]
    embeds: bool
    ties: bool
    stages: tuple[tuple[int, ...], ...]
    cuts: tuple[str, ...]
    count: int
    adam: bool
    rate: float
    in_parts: bool
    join: int
    drains: tuple[tuple[int, bool], ...]

    @property
    def layout(self) -> Layout:
        """Return the layout; replicas take micro-batches in turn where batch statistics are those of a micro-batch."""
        turns = [s for s, ranks in enumerate(self.stages) if len(ranks) > 1 and "norm" in self.kinds]
        return Layout(self.stages, whole=frozenset(turns))

    def module(self) -> Blocks:
        """Return the module, the same on every call."""
        torch.manual_seed(0)
        return Blocks(self.kinds, embeds=self.embeds, ties=self.ties).double()

    def optimizer(self, module: pl.LightningModule) -> torch.optim.Optimizer:
        """Return AdamW, or SGD with momentum."""
        if self.adam:
            return torch.optim.AdamW(module.parameters(), lr=self.rate, eps=1e-4)  # noise of zero gradients stays noise
        return torch.optim.SGD(module.parameters(), lr=self.rate, momentum=0.5)

    def batch(self, t: int) -> Batch:
        """Return a batch."""
        generator, rows = torch.Generator().manual_seed(t), SIZE * self.count
        words = torch.randint(0, WORDS, (rows,), generator=generator)
        x, y = (torch.randn(rows, n, generator=generator, dtype=torch.float64) for n in (WIDTH, self.outputs))
        return words if self.embeds else x, y

    @property
    def outputs(self) -> int:
        """Return the width of what the last layer makes."""
        return WORDS if self.embeds else WIDTH


def case_of(policy: str, seed: int) -> Case:
    """Return a random case; only what a policy refuses in `Trainer.fit` is left out."""
    draw = random.Random(f"{policy} {seed}")
    is_frozen, embeds, number = policy in FROZEN, draw.random() < 0.4, draw.choice([1, 2, 2, 3, 3, 4])
    replicas = [2 if draw.random() < 0.25 else 1 for _ in range(number)]
    kinds = [kind for kind in BLOCKS if is_frozen or kind not in ("again", "gate")]
    kinds = [kind for kind in kinds if max(replicas) == 1 or kind != "dropout"]  # drawn for the samples of a replica
    blocks = [draw.choice(kinds) for _ in range(draw.randint(number, 5))]
    starts = sorted(draw.sample(range(len(blocks)), number - 1))
    ranks = iter(range(sum(replicas)))
    turns = 2 if "norm" in blocks and max(replicas) > 1 else 1
    return Case(
        policy,
        tuple(blocks),
        embeds,
        ties=draw.random() < 0.5 and (policy == "2bw" or number == 1),
        stages=tuple(tuple(next(ranks) for _ in range(count)) for count in replicas),
        cuts=tuple(f"blocks.{start}" for start in starts),
        count=draw.choice([1, 2, 3, 4]) * turns,
        adam=draw.random() < 0.5 and POLICIES[policy].horizons is None,
        rate=draw.choice([0.02, 0.05]),
        in_parts=draw.random() < 0.3 and not POLICIES[policy].is_corrected,
        join=draw.choice([1, 1, 2, 3]),
        drains=tuple((t, draw.random() < 0.5) for t in range(ROUNDS) if draw.random() < 0.2),
    )


@dataclass(frozen=True)
class Reads:
    """After how many updates the weights are that a policy reads.

    Args:
        case: whose training it is.
        stage_of: the stage of every parameter.
    """

    case: Case
    stage_of: dict[str, int]

    def of(self, name: str, batch: int, place: int) -> tuple[int, int]:
        """Return that of F, and that of I and W, of a micro-batch by its place in its batch."""
        policy, count, drains = self.case.policy, self.case.count, dict(self.case.drains)
        ahead = POLICIES[policy].ahead(self.case.layout, count)
        stage = 0 if policy == "2bw" else self.stage_of[name]
        if policy in ("2bw", "xpipe"):  # one for the batch: as of its first micro-batch, that of a replica on its turns
            whole = policy == "xpipe" and stage in self.case.layout.whole
            place %= len(self.case.stages[stage]) if whole else 1
        forward = round_of_forward(batch * count + place, ahead[stage], count, drains)
        return forward, forward if policy in FROZEN else batch

    def horizons(self, name: str, batch: int) -> tuple[int, int]:
        """Return how many updates ahead F, and I and W, read predicted weights."""
        drains, case = dict(self.case.drains), self.case
        is_alone = (batch == 0 or batch - 1 in drains) and (drains.get(batch) is False or batch == ROUNDS - 1)
        return (0, 0) if is_alone else horizons_of(case.policy, len(case.stages), self.stage_of[name], case.count)

    def delay(self, name: str) -> float:
        """Return PipeMare's delay in updates; 0 for other policies."""
        if self.case.policy != "pipemare":
            return 0.0
        return LATE["pipemare"].depth(self.stage_of[name], len(self.case.stages)) / self.case.count

    def drifted(self, name: str, batch: int) -> float:
        """Return how often I and W take PipeMare's discrepancy off the weights of now."""
        empty = max((t + 1 for t, _ in self.case.drains if t < batch), default=0)
        return min(self.delay(name), batch - empty)


class Later:
    """Saved tensors of autograd that are weights, exchanged for other weights before the backward."""

    def __init__(self, forward: dict[str, torch.Tensor], backward: dict[str, torch.Tensor]) -> None:
        self._names = {content.untyped_storage().data_ptr(): name for name, content in forward.items()}
        self._backward = backward

    def pack(self, saved: torch.Tensor) -> Any:
        name = self._names.get(saved.untyped_storage().data_ptr())
        return saved if name is None else (name, saved.shape, saved.stride(), saved.storage_offset())

    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        name, *form = packed
        return self._backward[name].detach().as_strided(*form)


@dataclass(frozen=True)
class Reference:
    """What autograd makes of a case: loss and gradients of every batch, and the module at the end."""

    losses: list[float]
    gradients: list[dict[str, torch.Tensor]]
    module: Blocks


RUNNING = ("running_mean", "running_var", "num_batches_tracked")


def by_autograd(case: Case, capture: Capture, reads: Reads) -> Reference:
    """Train by autograd."""
    found = Reference([], [], case.module())
    module = found.module
    for block in module.blocks:
        block.is_oracle = True  # a checkpoint would compute again with the weights of the module
    step, versions, ways = case.optimizer(module), list[dict[str, torch.Tensor]](), list[dict[str, torch.Tensor]]()

    drifts = {name: torch.zeros_like(x) for name, x in module.named_parameters()}  # PipeMare's delta

    def read(name: str, version: int, horizon: int) -> torch.Tensor:
        return (
            versions[version][name] - horizon * case.rate * ways[version][name] if horizon else versions[version][name]
        )

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.m = module

        def forward(self, x: Batch) -> torch.Tensor:
            return self.m.training_step(x, 0)

    whole = Whole()
    for t in range(ROUNDS):
        versions.append({name: x.detach().clone() for name, x in module.named_parameters()})
        known = {name: step.state.get(x, {}).get("momentum_buffer") for name, x in module.named_parameters()}
        ways.append({n: torch.zeros_like(versions[t][n]) if way is None else way.clone() for n, way in known.items()})
        total, batch = 0.0, case.batch(t)
        statistics = {name: x for name, x in module.named_buffers() if name.endswith(RUNNING)}
        old = {name: x.clone() for name, x in statistics.items()}
        means = {name: torch.zeros_like(x) for name, x in statistics.items()}
        for place in range(case.count):
            part = tuple(x[SIZE * place : SIZE * (place + 1)] for x in batch)
            chosen = {name: reads.of(name, t, place) for name in versions[t]}
            ahead = {name: reads.horizons(name, t) for name in chosen}
            forward = {name: read(name, f, ahead[name][0]).clone().requires_grad_() for name, (f, _) in chosen.items()}
            back = {name: read(name, b, ahead[name][1]) for name, (_, b) in chosen.items()}
            later = Later(forward, {name: x - reads.drifted(name, t) * drifts[name] for name, x in back.items()})
            given = {f"m.{name}": x for name, x in {**forward, **dict(module.named_buffers())}.items()}
            with ExitStack() as stack:
                key = RandomKey(0, t, place)
                unmatched = stack.enter_context(capture.matched_draws(capture_request(case), key))
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(later.pack, later.unpack))
                loss = functional_call(whole, given, (part,))
            assert not unmatched()
            total += float(loss.detach()) / case.count
            for name, x in statistics.items():
                means[name] = means[name] + x / case.count if x.is_floating_point() else x.clone()
                x.copy_(old[name])
            gradients = torch.autograd.grad(loss / case.count, [*forward.values()], allow_unused=True)
            for name, gradient in zip(forward, gradients, strict=True):
                parameter = module.get_parameter(name)
                if gradient is not None:
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        for name, x in statistics.items():  # once per batch, by the mean over micro-batches
            x.copy_(means[name])
        found.losses.append(total)
        found.gradients.append({n: x.grad.clone() for n, x in module.named_parameters() if x.grad is not None})
        step.step()
        step.zero_grad()
        for name, x in module.named_parameters():
            gamma = LATE["pipemare"].decay ** (1 / delay) if (delay := reads.delay(name)) else 0.0
            drifts[name] = gamma * drifts[name] + (1 - gamma) * (x.detach() - versions[t][name])
    return found


def capture_request(case: Case) -> Request:
    """Return what is captured."""
    return Request(case.module(), "training_step", flatten(case.batch(0))[1], arguments=(0,), samples=SIZE)


def fit_case(case: Case, recorder: Again | None = None) -> tuple[Capture, Split, Sequence[Blocks], Fit]:
    """Return the executors of a case, whose stages are recorded where there is a recorder."""
    first = replace(case, count=1)
    capture = capture_step(capture_request(first))
    places = tuple(capture.graph.position(at) for at in case.cuts)
    plan = Plan(tuple(StagePlan(at, r) for at, r in zip(("", *case.cuts), case.stages, strict=True)), case.count)
    split = capture.split(places, policies=policies_of(plan, capture.graph, places))
    if recorder is not None:
        split = recorded(split, recorder)
    modules = [case.module() for _ in range(case.layout.ranks)]
    fit = fit_of(capture, split, case.layout, modules, case.optimizer, case.policy, case.batch, case.count)
    for executor in fit.executors:
        executor._gradients._piece_bytes = 1 if case.in_parts else executor._gradients._piece_bytes
    return capture, split, modules, replace(fit, in_parts=case.in_parts, join=case.join)


def recorded(split: Split, recorder: Again) -> Split:
    """Return stages whose launches are recorded."""
    stages = CompiledStages(split, torch.device("cpu"), trials=False, kernels=False, recorder=recorder)
    for program in split.stages:
        for kind in ("F", "I", "W"):
            stages.compile(program.stage, kind, SIZE)
    return stages.split


def noted(modules: Sequence[Blocks], fit: Fit) -> list[list[dict[str, torch.Tensor]]]:
    """Return lists that will have, by rank and step, the gradients of parameters."""
    lists: list[list[dict[str, torch.Tensor]]] = [[] for _ in modules]
    for module, step, made in zip(modules, fit.steps, lists, strict=True):

        def note(*_: Any, module: Blocks = module, made: list[dict[str, torch.Tensor]] = made) -> None:
            made.append({n: x.grad.clone() for n, x in module.named_parameters() if x.grad is not None})

        step.register_step_pre_hook(note)
    return lists


def check(case: Case, recorder: Again | None = None) -> None:
    """Train a case on executors and by autograd, and compare."""
    capture, split, modules, fit = fit_case(case, recorder)
    steps = noted(modules, fit)
    stage_of = {name: part.stage for part in split.stages for name in part.parameters.values()}
    losses = fit.run(ROUNDS, dict(case.drains))
    wanted = by_autograd(case, capture, Reads(case, stage_of))
    assert losses == pytest.approx(wanted.losses, abs=1e-9)
    for name, stage in stage_of.items():
        for rank in case.stages[stage]:
            for t in range(0 if case.in_parts else ROUNDS):  # else parameters step one after another
                close(steps[rank][t].get(name), wanted.gradients[t].get(name), f"gradient of {name}, batch {t}")
            close(modules[rank].get_parameter(name), wanted.module.get_parameter(name), name)
    for part in split.stages:
        for name in part.mutations if len(case.stages[part.stage]) == 1 else ():
            found = modules[case.stages[part.stage][0]].get_buffer(name)
            close(found, wanted.module.get_buffer(name), name)


def close(found: torch.Tensor | None, wanted: torch.Tensor | None, name: str) -> None:
    """Compare what was trained with what autograd gives."""
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9, msg=lambda text: f"{name}: {text}")


PLAIN = Case(
    policy="pipedream",
    kinds=("skip", "dropout", "norm"),
    embeds=True,
    ties=False,
    stages=((0,), (1,)),
    cuts=("blocks.1",),
    count=2,
    adam=True,
    rate=0.02,
    in_parts=False,
    join=1,
    drains=(),
)
FAST = {  # three stages or more, few T
    "pipedream": (34, 47),
    "2bw": (24, 46),
    "stale": (3, 31),
    "pb": (34, 37),
    "xpipe": (10, 24),
    "pipemare": (7, 26),
}
SEEDS = [
    pytest.param(policy, seed, marks=() if seed in FAST.get(policy, (0, 1)) else pytest.mark.slow)
    for policy in NAMES
    for seed in range(50)
]


@pytest.mark.parametrize(("policy", "seed"), SEEDS)
def test_a_random_module_trains_with_the_weights_that_its_stages_read(policy: str, seed: int) -> None:
    """Gradients of every micro-batch are those of autograd, running statistics those of the order of forwards."""
    case = case_of(policy, seed)
    try:
        check(case)
    except Exception as error:
        error.add_note(str(case))
        raise


@pytest.mark.parametrize("policy", ["stale", "pb"])  # others also copy the parameters that they pin
def test_recorded_stages_read_in_place_what_waits_for_a_backward(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds use numbers of micro-batches again while others of these numbers are in flight."""
    copied: list[int] = []
    copy_each = recorded_pieces.copy_each

    def counted(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        copied.append(len(sources))
        copy_each(targets, sources)

    monkeypatch.setattr(recorded_pieces, "copy_each", counted)
    kinds, cuts = ("wide", "wide", "norm"), ("blocks.1", "blocks.2")
    case = replace(PLAIN, policy=policy, kinds=kinds, cuts=cuts, stages=((0,), (1,), (2,)), count=1)
    totals = []
    for drains in ((), tuple((t, False) for t in range(ROUNDS))):
        copied.clear()
        check(replace(case, drains=drains), Again())
        totals.append(sum(copied))
    ahead, flushed = totals
    assert ahead < 1.08 * flushed, "more are recorded, once each"


class Fitted(Blocks):
    """A random module with its optimizer."""

    def __init__(self, case: Case) -> None:
        super().__init__(case.kinds, embeds=case.embeds, ties=case.ties)
        self.case = case

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.case.optimizer(self)


def fitted(case: Case, folder: Path, options: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train a case by `Trainer.fit`; a worker function."""
    module, losses = Fitted(case).double(), Losses()
    module.load_state_dict(case.module().state_dict())
    path = folder / f"{case.policy}.yaml"
    at = "".join(f"- {{at: '{at}', ranks: {[*r]}}}\n" for at, r in zip(("", *case.cuts), case.stages, strict=True))
    shards = "shard_optimizer: true\n" if options.pop("shards", False) else ""
    path.write_text(f"stages:\n{at}microbatches: {case.count}\nschedule: 1f1b\n{shards}")
    x, y = (torch.cat(parts) for parts in zip(*map(case.batch, range(ROUNDS)), strict=True))
    strategy = dapple(plan=str(path), versions=case.policy, cache="off", seed=0, **options)
    make_trainer(strategy, callbacks=[losses], max_epochs=1).fit(
        module, DataLoader(TensorDataset(x, y), batch_size=SIZE * case.count)
    )
    return losses.losses, {**module.state_dict()}


SHARED = replace(PLAIN, policy="2bw", kinds=("wide", "again", "skip"), ties=True, stages=((0, 1), (2,)))


@pytest.mark.parametrize(
    ("case", "options"),
    [
        (PLAIN, {}),
        pytest.param(replace(PLAIN, kinds=("wide", "gate", "norm")), {"compile": True}, marks=pytest.mark.slow),
        pytest.param(SHARED, {}, marks=pytest.mark.slow),
        pytest.param(SHARED, {"shards": True}, marks=pytest.mark.slow),
        pytest.param(replace(SHARED, policy="pipedream", ties=False, adam=False), {}, marks=pytest.mark.slow),
    ],
)
def test_fits_of_modules_train_with_the_weights_that_their_stages_read(
    case: Case, options: dict[str, Any], tmp_path: Path
) -> None:
    """Compiled stages, optimizer state shared among replicas and steps in parts change no number."""
    capture, split, *_ = fit_case(case)
    stage_of = {name: part.stage for part in split.stages for name in part.parameters.values()}
    wanted = by_autograd(case, capture, Reads(case, stage_of))
    for losses, state in World(case.layout.ranks).run(fitted, case, tmp_path, options):
        assert losses == pytest.approx(wanted.losses, abs=1e-9)
        for name, content in wanted.module.state_dict().items():
            close(state[name], content, name)
