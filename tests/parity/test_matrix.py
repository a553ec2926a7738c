"""Every parity module under every layout and schedule: twenty optimizer steps in float32, on the local transport.

The same pipelines run under the trainer, on real processes, in tests/strategy; here the whole matrix is cheap, because
a module is captured once.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from dataclasses import replace

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_pipe.capture import Capture, Request, capture_step, flatten, real_answers
from lightning_pipe.capture.split import check_slices
from lightning_pipe.capture.step import Recording, recording_calls
from lightning_pipe.core.plan import microbatch_sizes
from lightning_pipe.planner.problem import Wishes, counted_problem
from lightning_pipe.planner.registry import propose
from lightning_pipe.planner.resolve import resolve
from lightning_pipe.runtime.executor import Executor, run_together
from lightning_pipe.runtime.job import Job
from lightning_pipe.runtime.stage import State
from lightning_pipe.runtime.transport.local import Hub
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.registry import order_of
from lightning_pipe.schedule.verify import verify
from models.parity import PARITY, make_loader, make_module

STEPS, MICROBATCHES, BATCH, SEED = 20, 3, 8, 3
TOLERANCE = 1e-5
CPU = torch.device("cpu")
UNREPLICATED = ["1", "1-1", "1-1-1"]
REPLICATED = ["2-1", "1-2", "2-2"]
COUPLED = {"resnet_batchnorm"}  # compared with accumulation over the same micro-batches, as batch statistics see them
Weights = tuple[tuple[int, ...], ...]
Update = Callable[[int, object], torch.Tensor]  # (number of the step, batch) -> loss; leaves gradients in the module


def batches() -> list[int]:
    return list(range(STEPS))


@functools.cache
def loader(name: str) -> list:
    return list(make_loader(name, batch_size=BATCH))


@functools.cache
def captured(name: str, dropout: float) -> Capture:
    module = make_module(name, dropout=dropout).train()
    tensors, structure = flatten(loader(name)[0])
    request = Request(module, "training_step", structure, samples=microbatch_sizes(BATCH, MICROBATCHES)[0])
    answers = functools.partial(real_answers, request, [t[: request.samples] for t in tensors])
    return capture_step(Request(**{**vars(request), "answers": answers}))


def train(module: pl.LightningModule, name: str, update: Update) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Take twenty optimizer steps; return the losses and the parameters."""
    optimizer = module.configure_optimizers()
    optimizer = optimizer["optimizer"] if isinstance(optimizer, dict) else optimizer
    losses = []
    for number, batch in zip(batches(), itertools.cycle(loader(name)), strict=False):
        optimizer.zero_grad()
        losses.append(update(number, batch))
        optimizer.step()
    return losses, {n: p.detach().clone() for n, p in module.named_parameters()}


def whole_batches(module: pl.LightningModule) -> Update:
    """One forward and backward of the batch, as `Trainer(devices=1)` does."""

    def update(number: int, batch: object) -> torch.Tensor:
        with recording_calls(module, Recording()):
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
            with recording_calls(module, Recording()), torch.backends.mkldnn.flags(enabled=fused):
                loss = module.training_step(structure.fill([t[offset : offset + size] for t in tensors]), 0)
            weight = size / sum(sizes)
            loss.backward(torch.tensor(weight))
            total = total + loss.detach() * weight
        return total

    return update


def pipeline(
    module: pl.LightningModule, name: str, *, layout: str, schedule: str, dropout: float = 0.0, weights: Weights = ()
) -> Update:
    """Programs on ranks of one process; gradients are brought to `module`, parameters back to the ranks."""
    capture = captured(name, dropout)
    replicas = [int(n) for n in layout.split("-")]
    wishes = Wishes(MICROBATCHES, tuple(replicas), schedule, "pa" if schedule == "1f1b" else None)
    problem = replace(counted_problem(capture.graph, ranks=sum(replicas), samples=BATCH), wishes=wishes)
    plan = propose(problem, "uniform")[0].plan
    stages = itertools.zip_longest(plan.stages, weights, fillvalue=())
    plan = replace(plan, stages=tuple(replace(stage, weights=own) for stage, own in stages))
    split = capture.split(resolve(plan, capture.graph, ranks=sum(replicas)), exact_ties=True)
    check_slices(split, plan.layout)
    hub, modules = Hub(), [copy.deepcopy(module) for _ in range(sum(replicas))]
    states = [State(dict(m.named_parameters(remove_duplicate=False)), dict(m.named_buffers()), CPU) for m in modules]
    executors = [
        Executor(split, plan.layout, state=s, transport=hub.endpoint(r), loss=capture.record.loss)
        for r, s in enumerate(states)
    ]
    order = functools.partial(order_of, schedule, layout=plan.layout)

    def update(number: int, batch: object) -> torch.Tensor:
        tensors, structure = flatten(batch)
        sizes = microbatch_sizes(structure.samples(), MICROBATCHES)
        program = verify(lower(order(microbatches=len(sizes)), layout=plan.layout, sizes=sizes, traffic=split.traffic))
        job = Job(
            tuple(tensors), structure.cut(), tuple(itertools.accumulate((0, *sizes[:-1]))), seed=SEED, step=number
        )
        for own in modules:
            own.load_state_dict({**own.state_dict(), **dict(module.named_parameters())})
            own.zero_grad()
        outcomes = run_together(executors, program, [job] * len(modules))
        _bring_gradients(module, modules, executors)
        pieces = {(p.microbatch, p.samples): p for o in outcomes for p in o.results.get(capture.record.loss, ())}
        total = torch.zeros(())
        for (_, samples), piece in sorted(pieces.items()):
            total = total + piece.content * (len(samples) / sum(sizes))
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
def expected(name: str, how: Callable) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    module = make_module(name).train()
    return train(module, name, how(module))


def close(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(found, wanted, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda m: f"{what}: {m}")


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("layout", UNREPLICATED)
@pytest.mark.parametrize("name", PARITY)
def test_without_replicas_training_is_accumulation_bit_for_bit(name, layout, schedule):
    module = make_module(name).train()
    losses, parameters = train(module, name, pipeline(module, name, layout=layout, schedule=schedule))
    expected_losses, expected_parameters = expected(name, accumulation)
    assert [float(loss) for loss in losses] == [float(loss) for loss in expected_losses]
    for parameter, value in expected_parameters.items():
        assert torch.equal(parameters[parameter], value), parameter


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("layout", [*UNREPLICATED, *REPLICATED])
@pytest.mark.parametrize("name", PARITY)
def test_training_is_that_of_one_device(name, layout, schedule):
    module = make_module(name).train()
    losses, parameters = train(module, name, pipeline(module, name, layout=layout, schedule=schedule))
    expected_losses, expected_parameters = expected(name, accumulation if name in COUPLED else whole_batches)
    for number, (loss, wanted) in enumerate(zip(losses, expected_losses, strict=True)):
        torch.testing.assert_close(loss, wanted, rtol=TOLERANCE, atol=0, msg=lambda m, n=number: f"step {n}: {m}")
    for parameter, value in expected_parameters.items():
        close(parameters[parameter], value, parameter)


@pytest.mark.parametrize(("layout", "weights"), [("2-1", ((3, 1),)), ("2-2", ((1, 4), (3, 1)))])
@pytest.mark.parametrize("name", ["gpt_tied", "dict_batch"])
def test_training_with_replicas_in_unequal_parts_is_accumulation(name, layout, weights):
    """Micro-batches of 3, 3 and 2 samples: one to four leaves the first replica without any."""
    module = make_module(name).train()
    update = pipeline(module, name, layout=layout, schedule="1f1b", weights=weights)
    losses, parameters = train(module, name, update)
    expected_losses, expected_parameters = expected(name, accumulation)
    for number, (loss, wanted) in enumerate(zip(losses, expected_losses, strict=True)):
        torch.testing.assert_close(loss, wanted, rtol=TOLERANCE, atol=0, msg=lambda m, n=number: f"step {n}: {m}")
    for parameter, value in expected_parameters.items():
        close(parameters[parameter], value, parameter)


@pytest.mark.parametrize("name", ["gpt_tied", "lstm", "seq2seq"])
def test_dropout_gives_the_same_losses_under_every_unreplicated_layout(name):
    runs = []
    for layout in UNREPLICATED:
        module = make_module(name, dropout=0.3).train()
        update = pipeline(module, name, layout=layout, schedule="1f1b", dropout=0.3)
        runs.append([float(loss) for loss in train(module, name, update)[0]])
    assert runs[0] == runs[1] == runs[2]
    assert len(set(runs[0])) == STEPS


def test_tied_gradients_that_are_added_once_per_step_differ_by_rounding_only():
    """The default: bit-equal but for the tied parameter, whose two sums are added in another order."""
    capture = captured("gpt_tied", 0.0)
    problem = counted_problem(capture.graph, ranks=2, samples=BATCH)
    wishes = Wishes(MICROBATCHES, (1, 1), warmup="pa")
    plan = propose(replace(problem, wishes=wishes), "uniform")[0].plan
    split = capture.split(resolve(plan, capture.graph, ranks=2))
    tied = {
        p
        for ps, b in zip(split.bucket_parameters, split.traffic.buckets, strict=True)
        if len(b.stages) == 2
        for p in ps
    }
    exact = capture.split(resolve(plan, capture.graph, ranks=2), exact_ties=True)
    assert len(tied) == 1
    sent = {
        s: sum(e.fixed_bytes for e in cut.traffic.edges if e.direction == "B")
        for s, cut in (("step", split), ("exact", exact))
    }
    assert sent["step"] == 0 < sent["exact"]
