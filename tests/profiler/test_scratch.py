"""What a call holds for itself is measured exactly, on the host and on CUDA, and is part of the profile."""

from __future__ import annotations

import math
import os

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_pipe.capture import Capture, Request, capture_step, flatten
from lightning_pipe.capture.allocations import Allocations, highest
from lightning_pipe.capture.graphs.value_sizes import TensorSpec
from lightning_pipe.capture.stages.operation_calls import OperatorCall, operator_calls
from lightning_pipe.capture.steps.stage_program import RandomKey
from lightning_pipe.core.profile import Profile
from lightning_pipe.core.serial import from_yaml, to_yaml
from lightning_pipe.cost.memory import MemoryModel
from lightning_pipe.cost.stage import stage_works
from lightning_pipe.profiler.cache import load_timings
from lightning_pipe.profiler.timing import operators, windows
from lightning_pipe.profiler.timing import sample_region as part
from lightning_pipe.profiler.timing.arguments import Maker, specs_of
from lightning_pipe.profiler.timing.operators import profile_capture
from lightning_pipe.profiler.timing.workspace import gauge_of

CPU = torch.device("cpu")
KIB = 2**10
DEVICES = [CPU, pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]


def flat(kib: int, device: torch.device = CPU) -> torch.Tensor:
    return torch.empty(kib * KIB, dtype=torch.uint8, device=device)


def described(kib: int) -> TensorSpec:
    return TensorSpec(torch.uint8, (kib * KIB,), (1,))


def scratch_of(target, *args, results=(), device=CPU) -> float:
    """Return the scratch of a function that returns these results: (KiB, where)."""
    flat(1, device)  # so that the device has been used
    call = OperatorCall("call", target, args, {}, tuple((described(kib), where) for kib, where in results))
    with gauge_of(device) as gauge:
        watched = gauge.around(call)
        watched(*args)
    return gauge.scratch["call"] / KIB


def test_the_environment_stays_as_it_was_since_a_step_may_read_it():
    """A model of transformers reads it: a variable that profiling had left on rank 0 made that rank capture again."""
    before = dict(os.environ)
    with Allocations():
        flat(1)
    assert dict(os.environ) == before


@pytest.mark.parametrize("device", DEVICES)
def test_what_a_call_allocates_and_releases_is_its_scratch(device):
    def target() -> torch.Tensor:
        first = flat(300, device)
        del first
        second = flat(100, device)
        result = flat(50, device)
        del second
        return result

    assert scratch_of(target, results=[(50, ())], device=device) == 250, "300 at once, of which 50 are the result's"


@pytest.mark.parametrize("device", DEVICES)
def test_results_that_nothing_takes_are_scratch(device):
    def target() -> tuple[torch.Tensor, ...]:
        return flat(10, device), flat(20, device), flat(40, device)

    assert scratch_of(target, results=[(10, (0,)), (40, (2,))], device=device) == 20


@pytest.mark.parametrize("device", DEVICES)
def test_views_and_changes_in_place_have_no_scratch(device):
    given = flat(64, device)
    assert scratch_of(lambda x: x[: 8 * KIB], given, results=[(8, ())], device=device) == 0
    assert scratch_of(torch.Tensor.zero_, given, results=[(64, ())], device=device) == 0


def test_two_views_of_one_result_have_its_memory_once():
    def target() -> tuple[torch.Tensor, torch.Tensor]:
        both = flat(30)
        return both, both[: 10 * KIB]

    assert scratch_of(target, results=[(30, (0,)), (10, (1,))]) == 0


def test_scratch_is_the_most_of_all_calls_that_are_alike():
    sizes = iter((10, 70, 30))
    call = OperatorCall("call", lambda: flat(next(sizes)), (), {}, ())
    with gauge_of(CPU) as gauge:
        for _ in range(3):
            gauge.around(call)()
    assert gauge.scratch == {"call": 70 * KIB}


class Sorting(pl.LightningModule):
    """Sort needs memory for itself; nobody takes its indices. The loss of absolute values needs none."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        made = self.layer(batch)
        return torch.cumsum(made, 1).abs().sum() + (torch.sort(batch, dim=1)[0] * made).sum()


@pytest.fixture
def quick(monkeypatch):
    """Repeat what is timed as often as is needed for quartiles."""
    for module, name, value in [
        (part, "_RUNS", (2, 2)),
        (part, "_MOST_INSTANCES", 2),
        (windows, "_RUNS", (1, 1)),
        (operators, "_ROUNDS", 1),
    ]:
        monkeypatch.setattr(module, name, value)


def captured(module: pl.LightningModule, batch: torch.Tensor) -> Capture:
    _, structure = flatten(batch)
    return capture_step(Request(module.train(), "training_step", structure, samples=len(batch)))


@pytest.fixture
def sorting(quick):
    return captured(Sorting(), torch.zeros(8, 64))


def test_a_profile_tells_the_scratch_of_every_operation_and_so_does_its_file(sorting, tmp_path):
    profile = profile_capture(sorting, device=CPU, sizes=(16, 64), cache=tmp_path)
    assert len(profile.scratch_bytes) == len(sorting.graph.operations)
    pairs = zip(sorting.graph.operations, profile.scratch_bytes, strict=True)
    found = {operation.op: scratch for operation, scratch in pairs}
    indices = [samples * 64 * 8 for samples in profile.samples]
    assert all(scratch >= least for scratch, least in zip(found["aten.sort.default"], indices, strict=True)), found
    assert found["aten.abs.default"] == (0, 0), found
    assert from_yaml(Profile, to_yaml(profile)) == profile
    assert profile_capture(sorting, device=CPU, sizes=(16, 64), cache=tmp_path) == profile, "from the cache"


def test_a_profile_file_without_scratch_still_loads():
    text = "{graph: g, device: cpu, samples: [1], seconds: [[0.5]]}"
    assert from_yaml(Profile, text) == Profile("g", "cpu", (1,), ((0.5,),))


def test_while_another_profiler_runs_scratch_is_not_known_and_nothing_is_kept(sorting, tmp_path, caplog):
    with torch.autograd.profiler.profile(use_cpu=True):
        assert math.isnan(scratch_of(lambda: flat(1)))
        caplog.clear()
        profile = profile_capture(sorting, device=CPU, sizes=(8,), cache=tmp_path)
    assert [record.getMessage() for record in caplog.records] == [
        "Another profiler runs, so memory that operations need for themselves is not predicted."
    ]
    assert set(profile.scratch_bytes) == {(0,)}
    assert all(math.isfinite(timing.scratch_bytes) for timing in load_timings(tmp_path, CPU).values())
    assert len(load_timings(tmp_path, CPU)) == 2, "only what glue takes, which needs no memory"


class Convolving(pl.LightningModule):
    """Convolutions copy what they read into forms of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3, 2, bias=False), nn.ReLU())

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.body(batch).square().mean()


def test_stage_functions_need_what_was_predicted(quick):
    capture, samples = captured(Convolving(), torch.zeros(4, 3, 32, 32)), 6
    profile = profile_capture(capture, device=CPU, sizes=(samples,))
    assert any(own > 0 for (own,) in profile.scratch_bytes), "there is scratch"
    (work,), (program,) = stage_works(capture.graph, ()), capture.split(()).stages
    expected = MemoryModel(capture.graph, profile=profile).stage(work).live
    forms = {s.name: s for c in operator_calls(capture.joint, samples, CPU) for s in specs_of((c.args, c.kwargs))}
    values: dict[str, torch.Tensor] = {}
    for half, live in zip((program.forward, program.input_grad, program.weight_grad), expected, strict=True):
        if half is None:
            continue
        given = [values[name] if name in values else Maker(CPU).tensor(forms[name]) for name in half.inputs]
        with torch.no_grad():
            half.run(samples, RandomKey(0, 0, 0), *given)  # kernels keep some memory from their first call on
            with Allocations() as seen:
                outputs = half.run(samples, RandomKey(0, 0, 0), *given)
        values |= dict(zip(half.outputs, outputs, strict=True))
        assert highest(seen.changes) == pytest.approx(live.peak(samples), rel=0.01), half.outputs
