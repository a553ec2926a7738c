"""Every module of the zoo, cut at random positions into one to four stages, has the gradients of the plain module.

Or it is refused with the name of the hazard. Two stages may share a rank.
"""

from __future__ import annotations

import copy
import functools
import random
import zlib
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_pipe.capture import Capture, Request, capture_step, flatten, real_answers
from lightning_pipe.capture.stages.state_once import state_averaged, state_once
from lightning_pipe.capture.steps.stage_program import RandomKey
from lightning_pipe.capture.steps.step_function import NUMBERS
from lightning_pipe.capture.tracked.number_expressions import Situation
from lightning_pipe.core.plan import microbatch_sizes
from lightning_pipe.core.program import Layout
from lightning_pipe.errors import BatchError, CaptureError
from lightning_pipe.runtime.executor import Executor, run_together
from lightning_pipe.runtime.job import BatchInput
from lightning_pipe.runtime.stage import State
from lightning_pipe.runtime.transport.local import Hub
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.registry import order_of
from lightning_pipe.schedule.verification.verify import verify
from models.kept import GRAPHS
from zoo import ZOO
from zoo.reference import accumulate

SAMPLES, MICROBATCHES, SEED = 7, 3, 5
CPU = torch.device("cpu")
JOINT = [name for name, entry in ZOO.items() if entry.expected == "joint"]
REFUSED = [name for name, entry in ZOO.items() if entry.expected not in ("joint", "manual optimization")]


def made(name: str):
    torch.manual_seed(0)
    module = ZOO[name].make_module().train()
    return module, ZOO[name].make_batch(SAMPLES)


@dataclass(frozen=True)
class Joint:
    """A captured step, with a batch that is cut into micro-batches of these sizes."""

    request: Request
    capture: Capture
    batch: Any
    sizes: tuple[int, ...]

    @property
    def module(self) -> pl.LightningModule:
        return self.request.module


def captured(module, batch, sizes) -> Joint:
    tensors, structure = flatten(batch)
    samples = max(2, sizes[0]) if len(sizes) > 1 else None
    request = Request(module, "training_step", structure, samples=samples, kept=GRAPHS)

    def answer() -> tuple[bool, ...]:
        return real_answers(request, [t[: sizes[0]] if t.ndim else t for t in tensors])

    return Joint(request, capture_step(replace(request, answers=answer)), batch, sizes)


def captured_to_fit(module, batch) -> Joint:
    """Capture for micro-batches, or for the whole batch if the step fixes the number of samples."""
    found = captured(module, batch, sizes_of(batch))
    if any(found.capture.misfit(size) for size in found.sizes):
        return captured(module, batch, (SAMPLES,))
    return found


@functools.cache
def of_zoo(name: str) -> Joint:
    return captured_to_fit(*made(name))


def sizes_of(batch) -> tuple[int, ...]:
    """Cut the batch into micro-batches; into one if its tensors do not have one row per sample."""
    structure = flatten(batch)[1]
    try:
        return microbatch_sizes(structure.samples(), MICROBATCHES)
    except BatchError:
        return (structure.leaves[0].shape[0],)


COUNTED = {  # what losses that are no means over samples divide by
    "bert_mlm": lambda batch: int((batch["labels"] != -100).sum()),
    "hf_bert_mlm": lambda batch: int((batch["labels"] != -100).sum()),
    "masked_mean_loss": lambda batch: int((batch[1] > -1.3).sum()),
}


def draws_for_batch(capture: Capture) -> bool:
    """Return whether all micro-batches draw the same numbers, or slices of them."""
    return (
        any("of_batch" in node.meta for node in capture.whole_graph.module.graph.nodes) if capture.is_exact else False
    )


def buffers_of(module: pl.LightningModule, capture: Capture) -> dict[str, torch.Tensor]:
    """Return the buffers of a module, and the tracked numbers that the graph reads."""
    numbers = torch.tensor(capture.numbers(Situation((0,))), dtype=torch.float64)
    return {**dict(module.named_buffers()), NUMBERS: numbers}


def run_pipeline(capture: Capture, module, job: BatchInput, *, cuts, layout: Layout, sizes, schedule: str):
    """Return losses by micro-batch and gradients by parameter name."""
    split = capture.split(cuts)
    order = order_of(schedule, layout=layout, microbatches=len(sizes))
    program = verify(lower(order, layout=layout, sizes=sizes, traffic=split.traffic))
    hub, replicas = Hub(), [copy.deepcopy(module) for _ in range(layout.ranks)]
    executors = [
        Executor(
            split,
            layout,
            state=State(dict(m.named_parameters(remove_duplicate=False)), buffers_of(m, capture), CPU),
            transport=hub.endpoint(rank),
            loss=capture.record.loss,
        )
        for rank, m in enumerate(replicas)
    ]
    outcomes = run_together(executors, program, [job] * layout.ranks)
    losses = {p.microbatch: p.content for o in outcomes for p in o.results.get(capture.record.loss, ())}
    losses |= dict.fromkeys(range(len(sizes)), torch.zeros(())) if not losses else {}  # made of other results
    gradients = {
        name: parameter.grad
        for executor, m in zip(executors, replicas, strict=True)
        for name, parameter in m.named_parameters()
        if name in {n for s in executor.stages.values() for n in s.program.gradients.values()}
    }
    return [losses[m] for m in range(len(sizes))], gradients


def check_joint(name: str, captured: Joint, *, counts: tuple[int, ...]) -> None:
    """Cut a module at random positions into so many stages, and compare losses and gradients with the plain module."""
    module, capture, sizes = captured.module, captured.capture, captured.sizes
    tensors, structure = flatten(captured.batch)
    whole = len(sizes) == 1
    cut = tuple(not whole and t.ndim > 0 for t in tensors)
    offsets = tuple(sum(sizes[:m]) for m in range(len(sizes)))
    pieces = [
        structure.fill([t[o : o + n] if c else t for t, c in zip(tensors, cut, strict=True)])
        for o, n in zip(offsets, sizes, strict=True)
    ]
    counted = [COUNTED[name](piece) for piece in pieces] if name in COUNTED else list(sizes)
    weights = [count / sum(counted) for count in counted]
    once = state_once(capture.joint, capture.flow) | state_averaged(capture.joint, capture.flow)
    is_by_parts = capture.graph.head is None and not draws_for_batch(capture)
    if is_by_parts:
        losses, expected = accumulate(module, pieces, weights=weights, seed=SEED, once=once)
    dice = random.Random(zlib.crc32(name.encode()))
    places = [k for k in range(1, len(capture.graph.nodes)) if k not in capture.graph.uncuttable]
    leaves, cut = capture.with_totals(
        tensors, cut=cut, sizes=sizes, buffers=dict(module.named_buffers()), key=RandomKey(SEED, 0, 0)
    )
    job = BatchInput(leaves, cut, offsets, seed=SEED)
    schedules = ["gpipe"] if capture.graph.head is not None else ["gpipe", "1f1b"]
    one_stage = functools.partial(run_pipeline, cuts=(), layout=Layout(((0,),)), sizes=sizes, schedule="gpipe")
    if not is_by_parts:  # that these are those of the uncut graph is the law of slicing
        losses, expected = one_stage(capture, module, job)
    for stages in counts:
        if len(places) < stages - 1:
            continue
        cuts = tuple(sorted(dice.sample(places, stages - 1)))
        layout = Layout(tuple((dice.choice(range(stages)),) for _ in range(stages)))
        layout = Layout(tuple((sorted({r for (r,) in layout.stages}).index(r),) for (r,) in layout.stages))
        found_losses, found = run_pipeline(
            capture, module, job, cuts=cuts, layout=layout, sizes=sizes, schedule=dice.choice(schedules)
        )
        for m, (one, two) in enumerate(zip(found_losses, losses, strict=True)):
            of_batch = two * weights[m] if is_by_parts and capture.is_exact and len(sizes) > 1 else two
            torch.testing.assert_close(one, of_batch, rtol=1e-6, atol=1e-7, msg=f"loss {m} for cuts {cuts}")
        assert found.keys() == expected.keys(), cuts
        for parameter, gradient in expected.items():
            scale = float(gradient.abs().max())
            difference = float((found[parameter] - gradient).abs().max())
            assert difference <= 1e-6 * max(scale, 1.0), f"{parameter} differs by {difference} of {scale}, cuts {cuts}"


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("name", JOINT)
def test_a_module_of_the_zoo_has_its_gradients_when_cut_anywhere(name):
    check_joint(name, of_zoo(name), counts=(1, 2, 3, 4))


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", REFUSED)
def test_a_module_of_the_zoo_is_refused_with_its_hazard(name):
    module, batch = made(name)
    with pytest.raises(CaptureError, match=ZOO[name].expected) as caught:
        captured(module, batch, sizes_of(batch))
    assert ".py:" in str(caught.value), "the refusal names no line"
