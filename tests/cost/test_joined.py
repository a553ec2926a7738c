"""One W of several micro-batches is what their W are one after the other: in gradients, and in predicted bytes."""

from __future__ import annotations

import copy

import pytest
import torch

from cost.captures import zoo_capture
from cost.test_against_split import cuts_of
from cost.test_against_stages import CPU, SMALL, Tally, storages
from lightning_pipe.capture import flatten
from lightning_pipe.core.cluster import NO_LINK, Cluster, Device, Host
from lightning_pipe.core.program import Joined, Layout, VerifiedProgram
from lightning_pipe.cost.counted import counted
from lightning_pipe.cost.prices import Pricer
from lightning_pipe.runtime.executor import Executor, run_together
from lightning_pipe.runtime.job import BatchInput
from lightning_pipe.runtime.stage import Stage, State
from lightning_pipe.runtime.transport.local import Hub
from lightning_pipe.schedule import order_of
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.registry import options_with_forwards_first
from lightning_pipe.schedule.verification.verify import verify

SIZES = (3, 1, 2)
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 1e-2}


class Runs:
    """A cut module of the zoo, run on the local transport with a stage per rank."""

    def __init__(self, capture, module, batch, cuts) -> None:
        self.split, self.loss = capture.split(cuts), capture.record.loss
        self.layout = Layout(tuple((s,) for s in range(len(cuts) + 1)))
        self._module = module
        tensors = tuple(t[: sum(SIZES)] if t.ndim else t for t in flatten(batch)[0])
        offsets = tuple(sum(SIZES[:m]) for m in range(len(SIZES)))
        cut = tuple(t.ndim > 0 for t in tensors)
        leaves, cut = capture.with_totals(tensors, cut=cut, sizes=SIZES, buffers=dict(module.named_buffers()))
        self.job = BatchInput(leaves, cut, offsets, seed=3)

    def program(self, join: int) -> VerifiedProgram:
        options = options_with_forwards_first("2bp") if self.split.traffic.head else {}
        order = order_of("2bp", layout=self.layout, microbatches=len(SIZES), options=options)
        return verify(lower(order, layout=self.layout, sizes=SIZES, traffic=self.split.traffic, join=join))

    def gradients(self, join: int) -> dict[tuple[int, str], torch.Tensor]:
        """Return the gradients by rank and parameter; nothing may be left in the stages."""
        hub, modules = Hub(), [copy.deepcopy(self._module) for _ in self.layout.stages]
        executors = [
            Executor(self.split, self.layout, state=state_of(m), transport=hub.endpoint(rank), loss=self.loss)
            for rank, m in enumerate(modules)
        ]
        run_together(executors, self.program(join), [self.job] * len(modules))
        assert not [left for executor in executors for stage in executor.stages.values() for left in stage.left()]
        found = ((rank, name, p.grad) for rank, m in enumerate(modules) for name, p in m.named_parameters())
        return {(rank, name): grad for rank, name, grad in found if grad is not None}


def state_of(module) -> State:
    return State(dict(module.named_parameters(remove_duplicate=False)), dict(module.named_buffers()), CPU)


def test_a_joined_w_has_the_gradients_of_single_ones(zoo):
    name, capture, module, batch = zoo
    if why := "; ".join(filter(None, map(capture.misfit, (*SIZES, sum(SIZES))))):
        pytest.skip(why)
    for cuts in cuts_of(name, capture.graph)[:4]:
        runs = Runs(capture, module, batch, cuts)
        alone, together = runs.gradients(1), runs.gradients(len(SIZES))
        assert alone.keys() == together.keys()
        for key, gradient in alone.items():
            scale = max(1.0, float(gradient.abs().max()))
            tolerance = TOLERANCES[torch.bfloat16 if name == "autocast_inside" else torch.float32]
            difference = float((together[key] - gradient).abs().max())
            assert difference <= tolerance * scale, f"{name} cut at {cuts}, {key} differs by {difference} of {scale}"


def copied(given: dict) -> dict:
    return {name: content.clone() for name, content in given.items()}


def measured(monkeypatch, runs: Runs) -> dict[int, int]:
    """Return by stage the most bytes that its joined W had, with what was kept of its micro-batches."""
    peaks: dict[int, int] = {}
    join = Stage.join

    def counted_join(stage: Stage, microbatches, slice_) -> None:
        parameters = [*stage._state.parameters.values()]
        for parameter in parameters:  # as after an earlier W
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradients = [parameter.grad for parameter in parameters]
        own = storages([*parameters, *gradients, *stage._state.buffers.values()])
        tally = Tally(own)
        tally.watch(tensor for m in microbatches for tensor in stage._held[m].values())
        with tally:
            join(stage, microbatches, slice_)
        peaks[stage.program.stage] = tally.peak

    for method in ("load", "receive"):  # what arrives has memory of its own, as from another rank
        take = getattr(Stage, method)
        monkeypatch.setattr(Stage, method, lambda stage, m, given, take=take: take(stage, m, copied(given)))
    monkeypatch.setattr(Stage, "join", counted_join)
    runs.gradients(len(SIZES))
    return peaks


@pytest.mark.parametrize("name", ["nanogpt_tied", "dense_graphs", "masked_mean_loss"])
def test_the_bytes_of_a_joined_w_are_those_that_were_predicted(name, monkeypatch):
    capture, module, batch = zoo_capture(name)
    graph = capture.graph
    cluster = Cluster((Host("h", (Device("cpu", 1),) * 8, NO_LINK, NO_LINK),))
    pricer = Pricer(graph, profile=counted(graph), cluster=cluster)
    for cuts in cuts_of(name, graph)[1:4]:
        runs = Runs(capture, module, batch, cuts)
        prices = pricer.price(cuts, runs.layout)
        for stage, peak in measured(monkeypatch, runs).items():
            joined = Joined(stage, tuple(range(len(SIZES))))
            kept = sum(prices.kept_bytes(stage, size) for size in SIZES)
            expected = kept + prices.workspace_bytes(joined, sum(SIZES))
            assert peak == pytest.approx(expected, rel=0.02, abs=len(SIZES) * SMALL), f"{name} at {cuts}, stage {stage}"
