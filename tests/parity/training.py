"""Train the parity modules in float32 as pipelines on the local transport, in whole batches, and by accumulation."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from dataclasses import replace

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_pipe.capture import Capture, Request, capture_step, flatten, real_answers
from lightning_pipe.capture.stages.split import check_slices
from lightning_pipe.capture.steps.call_recording import StepRecording, recording_calls
from lightning_pipe.capture.steps.stage_program import RandomKey
from lightning_pipe.core.plan import microbatch_sizes
from lightning_pipe.planner.evaluation.resolve import resolve
from lightning_pipe.planner.problem import Constraints, Problem, counted_problem
from lightning_pipe.planner.registry import propose
from lightning_pipe.runtime.executor import Executor, run_together
from lightning_pipe.runtime.job import BatchInput
from lightning_pipe.runtime.stage import State
from lightning_pipe.runtime.transport.local import Hub
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.registry import planned_join, planned_order
from lightning_pipe.schedule.verification.verify import verify
from models.kept import GRAPHS
from models.parity import make_loader, make_module

STEPS, MICROBATCHES, BATCH, SEED = 20, 3, 8, 3
TOLERANCE = 1e-5
CPU = torch.device("cpu")
Weights = tuple[tuple[int, ...], ...]
Update = Callable[[int, object], torch.Tensor]  # (number of the step, batch) -> loss; leaves gradients in the module


@functools.cache
def loader(name: str) -> list:
    return list(make_loader(name, batch_size=BATCH))


@functools.cache
def captured(name: str, dropout: float) -> Capture:
    module = make_module(name, dropout=dropout).train()
    tensors, structure = flatten(loader(name)[0])
    request = Request(module, "training_step", structure, samples=microbatch_sizes(BATCH, MICROBATCHES)[0], kept=GRAPHS)
    answers = functools.partial(real_answers, request, [t[: request.samples] for t in tensors])
    return capture_step(Request(**{**vars(request), "answers": answers}))


def train(
    module: pl.LightningModule, name: str, update: Update, *, steps: int = STEPS
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Take optimizer steps; return the losses and the parameters."""
    optimizer = module.configure_optimizers()
    optimizer = optimizer["optimizer"] if isinstance(optimizer, dict) else optimizer
    losses = []
    for number, batch in zip(range(steps), itertools.cycle(loader(name)), strict=False):
        optimizer.zero_grad()
        losses.append(update(number, batch))
        optimizer.step()
    return losses, {n: p.detach().clone() for n, p in module.named_parameters()}


def whole_batches(module: pl.LightningModule) -> Update:
    """One forward and backward of the batch, as `Trainer(devices=1)` does."""

    def update(number: int, batch: object) -> torch.Tensor:
        with recording_calls(module, StepRecording()):
            loss = module.training_step(batch, 0)
        loss.backward()
        return loss.detach()

    return update


def accumulation(module: pl.LightningModule) -> Update:
    """One forward and backward per micro-batch, gradients accumulated."""

    def update(number: int, batch: object) -> torch.Tensor:
        tensors, structure = flatten(batch)
        sizes = microbatch_sizes(structure.samples(), MICROBATCHES)
        total = torch.zeros(())
        fused = not any(isinstance(m, nn.RNNBase) for m in module.modules())  # oneDNN's LSTM rounds in its own way
        for offset, size in zip(itertools.accumulate((0, *sizes[:-1])), sizes, strict=True):
            with recording_calls(module, StepRecording()), torch.backends.mkldnn.flags(enabled=fused):
                loss = module.training_step(structure.fill([t[offset : offset + size] for t in tensors]), 0)
            weight = size / sum(sizes)
            loss.backward(torch.tensor(weight))
            total = total + loss.detach() * weight
        return total

    return update


def problem_of(name: str, *, ranks: int, constraints: Constraints, dropout: float = 0.0) -> Problem:
    """Return the problem of a captured module with counted costs."""
    return replace(counted_problem(captured(name, dropout).graph, ranks=ranks, samples=BATCH), constraints=constraints)


def pipeline(
    module: pl.LightningModule,
    name: str,
    *,
    layout: str,
    schedule: str,
    dropout: float = 0.0,
    weights: Weights = (),
    join: int = 1,
) -> Update:
    """Programs on ranks of one process; gradients are brought to `module`, parameters back to the ranks."""
    capture = captured(name, dropout)
    replicas = [int(n) for n in layout.split("-")]
    constraints = Constraints(MICROBATCHES, tuple(replicas), schedule, "pa" if schedule == "1f1b" else None)
    problem = problem_of(name, ranks=sum(replicas), constraints=constraints, dropout=dropout)
    plan = propose(problem, "uniform")[0].plan
    stages = itertools.zip_longest(plan.stages, weights, fillvalue=())
    options = {**plan.options, "join": join} if planned_join(plan) > 1 or join > 1 else plan.options
    plan = replace(plan, options=options, stages=tuple(replace(stage, weights=own) for stage, own in stages))
    split = capture.split(resolve(plan, capture.graph, ranks=sum(replicas)), exact_ties=True)
    check_slices(split, plan.layout)
    hub, modules = Hub(), [copy.deepcopy(module) for _ in range(sum(replicas))]
    states = [State(dict(m.named_parameters(remove_duplicate=False)), dict(m.named_buffers()), CPU) for m in modules]
    executors = [
        Executor(split, plan.layout, state=s, transport=hub.endpoint(r), loss=capture.record.loss)
        for r, s in enumerate(states)
    ]

    def update(number: int, batch: object) -> torch.Tensor:
        tensors, structure = flatten(batch)
        sizes = microbatch_sizes(structure.samples(), MICROBATCHES)
        order = planned_order(plan, microbatches=len(sizes))
        program = verify(lower(order, layout=plan.layout, sizes=sizes, traffic=split.traffic, join=planned_join(plan)))
        leaves, cut = capture.with_totals(
            tensors,
            cut=structure.cut(),
            sizes=sizes,
            buffers=dict(module.named_buffers()),
            key=RandomKey(SEED, number, 0),
        )
        job = BatchInput(leaves, cut, tuple(itertools.accumulate((0, *sizes[:-1]))), seed=SEED, step=number)
        for own in modules:
            own.load_state_dict({**own.state_dict(), **dict(module.named_parameters())})
            own.zero_grad()
        outcomes = run_together(executors, program, [job] * len(modules))
        _bring_gradients(module, modules, executors)
        pieces = {(p.microbatch, p.samples): p for o in outcomes for p in o.results.get(capture.record.loss, ())}
        total = torch.zeros(())
        for (_, samples), piece in sorted(pieces.items()):
            is_term = split.values[capture.record.loss].combine == "sum"
            total = total + piece.content * (1.0 if is_term else len(samples) / sum(sizes))
        return total

    return update


def _bring_gradients(module, modules, executors) -> None:
    parameters = dict(module.named_parameters())
    for own, executor in zip(modules, executors, strict=True):
        trained = {n for stage in executor.stages.values() for n in stage.program.gradients.values()}
        for name, parameter in own.named_parameters():
            if name in trained:
                parameters[name].grad = parameter.grad


@functools.cache
def expected(name: str, how: Callable, *, steps: int = STEPS) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return losses and parameters of the plain module."""
    module = make_module(name).train()
    return train(module, name, how(module), steps=steps)


def assert_same_training(found: tuple[list, dict], wanted: tuple[list, dict]) -> None:
    """Compare losses and parameters within the rounding of float32."""
    for number, (loss, expected_loss) in enumerate(zip(found[0], wanted[0], strict=True)):
        close(loss, expected_loss, f"step {number}")
    for parameter, value in wanted[1].items():
        close(found[1][parameter], value, parameter)


def close(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    """Compare two tensors within the rounding of float32."""
    torch.testing.assert_close(found, wanted, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda m: f"{what}: {m}")
