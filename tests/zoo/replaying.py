"""Replay a step as stages on the local transport, and run it plainly with the same random numbers."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_pipe.capture import Request, flatten
from lightning_pipe.capture.recording.unit_inputs import joined
from lightning_pipe.capture.recording.unit_trace import trace_units
from lightning_pipe.capture.recording.units import UnitTrace
from lightning_pipe.capture.replayed.module_scope import keyed, seed
from lightning_pipe.capture.replayed.replay import Replay
from lightning_pipe.capture.steps.call_recording import StepRecording, recording_calls
from lightning_pipe.capture.steps.stage_program import RandomKey
from lightning_pipe.capture.steps.trees import found_in, mapped
from lightning_pipe.capture.torch_private import checkpoint_only
from lightning_pipe.core.graph import Graph
from lightning_pipe.core.policy import ActivationPolicy
from lightning_pipe.cost.activations import StagePolicy, candidates
from lightning_pipe.cost.stage import Cutter
from lightning_pipe.planner.memory.policies import policy_of
from lightning_pipe.runtime.executor import Executor, run_together
from lightning_pipe.runtime.job import BatchInput
from lightning_pipe.runtime.stage import State
from lightning_pipe.runtime.transport.local import Hub
from lightning_pipe.schedule import SCHEDULES, order_of
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.rules import forwards_first
from lightning_pipe.schedule.verification.verify import verify

CPU = torch.device("cpu")
SEED = 5
Outcome = tuple[list[torch.Tensor], dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Replayed:
    """A module with a batch, traced for replay."""

    module: pl.LightningModule
    batch: Any
    sizes: tuple[int, ...]
    request: Request
    trace: UnitTrace

    @property
    def offsets(self) -> tuple[int, ...]:
        return tuple(itertools.accumulate((0, *self.sizes[:-1])))


def traced(module: pl.LightningModule, batch: Any, sizes: tuple[int, ...], *, parts: int = 3) -> Replayed:
    tensors, structure = flatten(batch)
    request = Request(module, "training_step", structure, samples=sizes[0] if len(sizes) > 1 else None)
    trace = trace_units(request, tensors, parts=parts)
    return Replayed(module, batch, (sum(sizes),) if trace.whole else sizes, request, trace)


def even_cuts(trace: UnitTrace, uncuttable: Collection[int], stages: int) -> tuple[int, ...] | None:
    """Return cuts that balance the seconds of the units; None if there are no such cuts."""
    places = [p for p in range(1, len(trace.units)) if p not in uncuttable]
    if len(places) < stages - 1:
        return None

    def load(cuts: tuple[int, ...]) -> float:
        bounds = (0, *cuts, len(trace.units))
        return max(sum(u.forward_s for u in trace.units[a:b]) for a, b in itertools.pairwise(bounds))

    return min(itertools.combinations(places, stages - 1), key=load)


def recomputing_all(graph: Graph, cuts: tuple[int, ...]) -> tuple[ActivationPolicy, ...]:
    """Return the policies of stages that recompute whatever they can."""
    cutter = Cutter(graph)
    again = [(w, frozenset(c.memory for c in candidates(graph, w) if c.is_remakeable)) for w in cutter.works(cuts)]
    return tuple(policy_of(cutter.tables, work, StagePolicy(found, frozenset())) for work, found in again)


def run_replayed(
    found: Replayed, *, ranks: int, schedule: str, cuts: tuple[int, ...], recompute: bool = False
) -> Outcome:
    """Return the losses by micro-batch (one, where a head makes it), and the gradients by name."""
    devices = [(rank,) for rank in range(ranks)]
    layout = SCHEDULES[schedule].layout(devices, (len(cuts) + 1) // ranks)
    modules = [copy.deepcopy(found.module) for _ in range(ranks)]
    replays = [Replay(replace(found.request, module=module), found.trace) for module in modules]
    policies = recomputing_all(replays[0].graph, cuts) if recompute else ()
    splits = [replay.split(cuts, policies=policies) for replay in replays]
    order = order_of(schedule, layout=layout, microbatches=len(found.sizes))
    order = forwards_first(order) if found.trace.head == "holds" else order
    for replay in replays:
        replay.begin((0,), found.request.structure.template)
        replay.cut(found.sizes)
    program = verify(lower(order, layout=layout, sizes=found.sizes, traffic=splits[0].traffic))
    hub = Hub()
    executors = [
        Executor(
            split,
            layout,
            state=State(dict(m.named_parameters(remove_duplicate=False)), dict(m.named_buffers()), CPU),
            transport=hub.endpoint(rank),
            loss="loss",
        )
        for rank, (m, split) in enumerate(zip(modules, splits, strict=True))
    ]
    tensors, structure = flatten(found.batch)
    cut = structure.cut() if found.request.samples is not None else (False,) * len(tensors)
    job = BatchInput(tuple(tensors), cut, found.offsets, seed=SEED, step=0)
    outcomes = run_together(executors, program, [job] * ranks)
    losses = {p.microbatch: p.content for o in outcomes for p in o.results.get("loss", ())}
    gradients: dict[str, torch.Tensor] = {}
    for module, executor in zip(modules, executors, strict=True):
        trained = {name for stage in executor.stages.values() for name in stage.program.gradients.values()}
        gradients |= {n: p.grad for n, p in module.named_parameters() if n in trained and p.grad is not None}
    return [losses[m] for m in sorted(losses)], gradients


def run_plainly(found: Replayed) -> Outcome:
    """Accumulate gradients of the plain module over the micro-batches, with the random numbers of a replay."""
    module = copy.deepcopy(found.module)
    tensors, structure = flatten(found.batch)
    if found.trace.head == "holds":
        return _run_by_units(found, module)
    losses = []
    before = {name: module.get_buffer(name).clone() for name in found.trace.once}
    for m, (offset, size) in enumerate(zip(found.offsets, found.sizes, strict=True)):
        for name, content in before.items():  # changes once per batch
            module.get_buffer(name).copy_(content)
        part = [t[offset : offset + size] if found.request.samples is not None and t.ndim else t for t in tensors]
        key = RandomKey(SEED, 0, m)
        with (
            keyed(key, CPU),
            recording_calls(module, StepRecording()),
            checkpoint_only(lambda: False),
            mock.patch.object(nn.Module, "__call__", _seeding(module, found.trace, key)),
        ):
            output = module.training_step(structure.fill(part), 0)
        loss = output["loss"] if isinstance(output, dict) else output
        weight = 1.0 if found.trace.combine == "sum" else size / sum(found.sizes)
        loss.backward(torch.tensor(weight, dtype=loss.dtype).reshape(loss.shape))
        losses.append(loss.detach().reshape(()))
    return losses, {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


def _run_by_units(found: Replayed, module: pl.LightningModule) -> Outcome:
    """Differentiate the step of the whole batch, whose units run for one micro-batch after the other."""
    units, plain = {unit.path for unit in found.trace.units}, nn.Module.__call__
    paths, called, inside = {id(child): path for path, child in module.named_modules()}, itertools.count(), [False]

    def parts(tensor: torch.Tensor, blocks: int) -> list[torch.Tensor]:
        total = sum(found.sizes) * blocks
        dims = [d for d, size in enumerate(tensor.shape) if size == total]
        dims += [d for d, size in enumerate(tensor.shape) if size % total == 0]
        if not dims:
            return [tensor] * len(found.sizes)
        split = tensor.unflatten(dims[0], (blocks, -1))
        own = split.split([n * split.shape[dims[0] + 1] // sum(found.sizes) for n in found.sizes], dims[0] + 1)
        return [part.flatten(dims[0], dims[0] + 1) for part in own]

    def call(child: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if inside[0] or paths.get(id(child)) not in units:
            return plain(child, *args, **kwargs)
        number = next(called)
        unit, (given, form) = found.trace.units[number], tree_flatten((args, kwargs))
        cut = [parts(g, unit.blocks) if isinstance(g, torch.Tensor) else [g] * len(found.sizes) for g in given]
        results, inside[0] = [], True
        for m, own in enumerate(zip(*cut, strict=True)):
            seed(RandomKey(SEED, 0, m), 2 * number + 1, CPU)
            own_args, own_kwargs = tree_unflatten(list(own), form)
            results.append(plain(child, *own_args, **own_kwargs))
        inside[0] = False
        seed(RandomKey(SEED, 0, -1), 2 * number + 2, CPU)
        pieces = zip(*([*found_in(result, torch.Tensor)] for result in results), strict=True)
        outputs = zip(pieces, unit.outputs, strict=True)
        whole = iter([joined(tensors, output.batch_dim or 0, blocks=unit.blocks) for tensors, output in outputs])
        return mapped(results[0], torch.Tensor, lambda _: next(whole))

    with (
        keyed(RandomKey(SEED, 0, -1), CPU),
        recording_calls(module, StepRecording()),
        mock.patch.object(nn.Module, "__call__", call),
    ):
        output = module.training_step(found.batch, 0)
    loss = output["loss"] if isinstance(output, dict) else output
    loss.backward()
    return [loss.detach().reshape(())], {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


def _seeding(module: pl.LightningModule, trace: UnitTrace, key: RandomKey) -> Any:
    plain, paths = nn.Module.__call__, {id(child): path for path, child in module.named_modules()}
    called, inside = itertools.count(), [False]
    units = {unit.path for unit in trace.units}

    def call(child: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if inside[0] or paths.get(id(child)) not in units:
            return plain(child, *args, **kwargs)
        number = next(called)
        seed(key, 2 * number + 1, CPU)
        inside[0] = True
        try:
            result = plain(child, *args, **kwargs)
        finally:
            inside[0] = False
        seed(key, 2 * number + 2, CPU)
        return result

    return call
