"""What stages take compiled is measured on compiled windows: once, shared by ranks, and plain where there is none."""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx

from lightning_pipe.capture import Capture
from lightning_pipe.capture.stages import compiling
from lightning_pipe.core.graph import Operation
from lightning_pipe.core.profile import Profile
from lightning_pipe.profiler.cache import Timing, Timings, digest
from lightning_pipe.profiler.timing import operators, sample_region, windows
from lightning_pipe.profiler.timing.compiled import Fusion, fusion_names, is_fused
from lightning_pipe.profiler.timing.operators import Operators, profile_capture
from profiler.test_operators import deep_capture, parity_capture

CPU = torch.device("cpu")
SIZES = (2, 3, 4)
COMPILED_FOR = 3  # the one in the middle


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Repeat everything as often as is needed for quartiles."""
    monkeypatch.setattr(sample_region, "_RUNS", (2, 2))
    monkeypatch.setattr(sample_region, "_MOST_INSTANCES", 2)
    monkeypatch.setattr(windows, "_RUNS", (1, 1))
    monkeypatch.setattr(operators, "_ROUNDS", 1)


@pytest.fixture
def compiled_graphs():
    """Run graphs as they are where a compiler would compile them, and keep them."""
    graphs: list[fx.GraphModule] = []

    def keep(module: fx.GraphModule, forms: Any, device: torch.device) -> Any:
        graphs.append(module)
        return module.forward

    with mock.patch.object(compiling, "inductor", keep):
        yield graphs


def of(capture: Capture, *, compiled: bool = True) -> Operators:
    return Operators(capture, device=CPU, sizes=SIZES, compiled=compiled)


def shares(capture: Capture, forward: float, backward: float) -> Timings:
    """Return shares of all windows as if they had been measured."""
    found = {}
    for window in range(len(windows.choose_windows(capture.graph))):
        names = fusion_names(capture.graph, COMPILED_FOR, window)
        found |= {digest(name): Timing(share, 0.0) for name, share in zip(names, (forward, backward), strict=True)}
    return found


@pytest.mark.parametrize("name", ["gpt_tied", "resnet_batchnorm"])
def test_what_is_fused_takes_its_share_and_what_a_library_computes_its_own_time(name):
    capture = parity_capture(name)
    measured = of(capture).measure({})
    whole, halved = (of(capture).assemble({**measured, **shares(capture, *both)}) for both in ((1, 1), (0.5, 0.25)))
    kinds = set()
    for operation, own, less in zip(capture.graph.operations, whole.seconds, halved.seconds, strict=True):
        left = {"forward": 0.5, "backward": 0.25, "repeated": 0.375}[operation.phase] if is_fused(operation) else 1
        assert less == pytest.approx([left * seconds for seconds in own])
        kinds.add(is_fused(operation))
    assert kinds == {True, False}
    fused = {operation.op.split(".")[1] for operation in capture.graph.operations if is_fused(operation)}
    assert not fused & {"mm", "addmm", "bmm", "convolution", "convolution_backward"}
    assert not {name for name in fused if "attention" in name}
    assert fused & {"gelu", "relu", "native_layer_norm", "add"}


def test_an_operation_takes_the_share_of_the_nearest_window():
    fusion = Fusion(windows=((0, 10), (40, 50), (90, 100)), forward=(0.1, 0.2, 0.3), backward=(0.4, 0.5, 0.6))

    def share(at: int, phase: Any) -> float:
        return fusion.of(Operation("o", "aten.gelu.default", phase, at, at, ()))

    assert [share(at, "forward") for at in (-1, 0, 24, 26, 60, 75, 1000)] == [0.1, 0.1, 0.1, 0.2, 0.2, 0.3, 0.3]
    assert [share(at, "backward") for at in (5, 45, 95)] == [0.4, 0.5, 0.6]
    assert share(45, "repeated") == pytest.approx(0.35)


def test_ranks_share_the_windows_and_none_is_compiled_again_that_is_known(compiled_graphs):
    capture = deep_capture(60)
    count = len(windows.choose_windows(capture.graph))
    assert count == 3
    found = [of(capture).measure_compiled({}, share=(rank, 2)) for rank in range(2)]
    assert [len(one) for one in found] == [2 * 2, 1 * 2], "forward and backward of two windows and of one"
    assert not found[0].keys() & found[1].keys()
    done = len(compiled_graphs)
    assert done > 0
    together = {**found[0], **found[1]}
    assert of(capture).measure_compiled(together) == {} and len(compiled_graphs) == done
    assert all(0 <= timing.seconds <= 2 for timing in together.values())


def test_stages_that_run_as_they_are_compile_nothing_and_are_priced_without_shares(compiled_graphs):
    capture = deep_capture(6)
    plain = of(capture, compiled=False)
    measured = plain.measure({})
    assert plain.measure_compiled({}) == {} and not compiled_graphs
    assert plain.assemble({**measured, **shares(capture, 0.1, 0.1)}) == plain.assemble(measured)


def test_what_cannot_be_compiled_is_priced_as_it_is_with_a_reason(caplog):
    def refuse(*_: Any) -> Any:
        raise RuntimeError("there is no compiler here")

    capture = deep_capture(6)
    measured = of(capture).measure({})
    with mock.patch.object(compiling, "inductor", refuse), caplog.at_level(logging.WARNING):
        assert of(capture).measure_compiled(measured) == {}
    assert "there is no compiler here" in caplog.text
    assert of(capture).assemble(measured) == of(capture, compiled=False).assemble(measured)


def test_shares_are_kept_and_found_again(compiled_graphs, tmp_path):
    capture = deep_capture(6)

    def profile() -> Profile:
        return profile_capture(capture, device=CPU, sizes=SIZES, cache=tmp_path, compiled=True)

    first, done = profile(), len(compiled_graphs)
    assert done and profile() == first and len(compiled_graphs) == done
    assert profile_capture(capture, device=CPU, sizes=SIZES, cache=tmp_path) != first


@pytest.mark.slow
def test_windows_run_as_kernels_of_the_compiler():
    capture = parity_capture("gpt_tied")
    found = of(capture).measure_compiled({})
    assert len(found) == 2 * len(windows.choose_windows(capture.graph))
