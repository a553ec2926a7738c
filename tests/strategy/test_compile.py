"""Laws of `compile=True`: the numbers are those of the uncompiled stages, and what cannot be compiled runs as it is."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from torch import fx

from benchmarks.models import GPT
from capture.recorders import Again
from lightning_pipe.capture import Request, capture_step, flatten
from lightning_pipe.capture.stages import compiling
from lightning_pipe.capture.stages.compiled_stages import CompiledStages
from lightning_pipe.capture.steps.stage_program import RandomKey
from lightning_pipe.profiler.timing.operators import Operators
from lightning_pipe.strategy import preparation
from lightning_pipe.strategy.start.compilation import recorder_of
from ranks.world import World
from strategy.fits import Case, Fitted, assert_same, fit, fit_as_pipeline

CPU = torch.device("cpu")
KEY = RandomKey(seed=1, step=0, microbatch=0)
SAMPLES, WIDTH = 4, 6


@dataclass(frozen=True)
class Told:
    """A fit, what ranks compiled of it, and what was said."""

    fitted: Fitted
    compiled: int
    said: list[str]


class Ears(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            self.said.append(record.getMessage())


def fit_compiled(case: Case) -> Told:
    """Fit with graphs that are run as they are where a compiler would compile them; a worker function."""
    graphs: list[fx.GraphModule] = []

    def keep(module: fx.GraphModule, forms: Any, device: torch.device) -> Any:
        graphs.append(module)
        return module.forward

    ears = Ears()
    logger = logging.getLogger("lightning_pipe.capture.stages.compiled_stages")
    logger.addHandler(ears)
    try:
        with mock.patch.object(compiling, "inductor", keep):
            return Told(fit_as_pipeline(case), len(graphs), ears.said)
    finally:
        logger.removeHandler(ears)


@pytest.mark.parametrize(
    "case",
    [
        Case(
            "gpt_tied", {"layout": "1-1", "microbatches": 3, "compile": True}, {"gradient_clip_val": 0.5}, dropout=0.1
        ),
        pytest.param(
            Case("resnet_batchnorm", {"layout": "2", "microbatches": 2, "compile": True}), marks=pytest.mark.slow
        ),
    ],
    ids=["pipeline", "replicas"],
)
def test_graphs_that_a_compiler_is_given_train_as_the_stages_do(case):
    plain = {**case.options, "compile": False}
    expected = World(2).run(fit_as_pipeline, Case(**{**vars(case), "options": plain}))
    for told, other in zip(World(2).run(fit_compiled, case), expected, strict=True):
        assert told.compiled
        assert not told.said
        assert_same(told.fitted, other, rtol=0)


def fit_planned(case: Case) -> tuple[Told, int]:
    """Fit, and count what was measured of compiled windows here; a worker function."""
    found: list[int] = []
    measure = Operators.measure_compiled

    def counted(self: Operators, known: Any, **share: Any) -> Any:
        timings = measure(self, known, **share)
        found.append(len(timings))
        return timings

    with mock.patch.object(Operators, "measure_compiled", counted):
        return fit_compiled(case), sum(found)


@pytest.mark.parametrize("is_compiled", [True, False])
def test_ranks_measure_compiled_windows_together_where_stages_are_compiled(is_compiled):
    case = Case("gpt_tied", {"layout": "1-1", "microbatches": 3, "costs": "measured", "compile": is_compiled})
    found = World(2).run(fit_planned, case, deadline_s=100)
    counts = [count for _, count in found]
    assert (sum(counts) > 0) == is_compiled
    assert not is_compiled or sum(counts) % 2 == 0, "forward and backward of every window"
    assert all(not told.said and (told.compiled > 0) == is_compiled for told, _ in found)


def fit_recorded(case: Case) -> tuple[Fitted, Again, list[str]]:
    """Fit with a stand-in for CUDA graphs; a worker function."""
    recorder, ears = Again(), Ears()
    logger = logging.getLogger("lightning_pipe.capture.stages")
    logger.addHandler(ears)
    try:
        with mock.patch.object(preparation, "recorder_of", return_value=recorder):
            return fit_as_pipeline(case), recorder, ears.said
    finally:
        logger.removeHandler(ears)


@pytest.mark.parametrize(
    ("name", "options", "fit_options"),
    [
        ("gpt_tied", {"layout": "1-1", "microbatches": 4, "schedule": "zb_h1"}, {"gradient_clip_val": 0.5}),
        pytest.param(
            *("gpt_tied", {"layout": "1-1", "microbatches": 3, "schedule": "gpipe"}, {"accumulate_grad_batches": 2}),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("gpt_tied", {"layout": "1-1", "microbatches": 4, "schedule": "interleaved", "stages_per_device": 2}, {}),
            marks=pytest.mark.slow,
        ),
        ("resnet_batchnorm", {"layout": "2", "microbatches": 2}, {}),
    ],
    ids=["zero bubble", "gpipe", "interleaved", "replicas"],
)
def test_recorded_stages_train_as_the_stages_do(name, options, fit_options):
    case = Case(name, {**options, "cuda_graphs": True}, fit_options, dropout=0.1)
    expected = World(2).run(fit_as_pipeline, Case(name, options, fit_options, dropout=0.1))
    for (found, recorder, said), other in zip(World(2).run(fit_recorded, case), expected, strict=True):
        assert recorder.launched > recorder.recorded > 0
        assert not said
        assert_same(found, other, rtol=0)


def test_recording_where_nothing_records_says_so():
    with pytest.warns(UserWarning, match="cuda_graphs=True has no effect on cpu"):
        assert recorder_of(CPU) is None


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compiled_stages_train_like_one_device():
    case = Case("gpt_tied", {"layout": "1-1", "microbatches": 2, "compile": True}, epochs=1, dtype=torch.float32)
    for found in World(2).run(fit_as_pipeline, case):
        assert_same(found, fit(case), rtol=1e-3)


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 1)

    def training_step(self, batch, batch_idx):
        return self.last(torch.tanh(self.first(batch))).square().mean()


def stage_of(context):
    """Return one stage that is captured in a context, and what its F reads."""
    torch.manual_seed(0)
    module, (tensors, structure) = Net(), flatten(torch.randn(SAMPLES, WIDTH))
    capture = capture_step(Request(module, "training_step", structure, samples=SAMPLES, context=context))
    split = capture.split(())
    (program,) = split.stages
    leaves, _ = capture.with_totals(tensors, cut=(False,), sizes=(SAMPLES,), buffers={})
    given = {name: leaves[index] for name, index in program.leaves.items()}
    given |= {name: module.get_parameter(own) for name, own in program.parameters.items()}
    return split, [given[name] for name in program.forward.inputs]


@pytest.fixture(scope="module")
def stage():
    return stage_of(contextlib.nullcontext)


def run(stages: CompiledStages, inputs: list[torch.Tensor]) -> tuple[Any, ...]:
    with torch.no_grad():
        return stages.split.stages[0].forward.run(SAMPLES, KEY, *inputs)


def raising(*_: Any) -> Any:
    raise RuntimeError("no compiler here\nand more")


@pytest.mark.parametrize(
    ("compiler", "why"),
    [
        (raising, "cannot be compiled: RuntimeError: no compiler here"),
        (lambda module, forms, device: raising, "RuntimeError: no compiler here"),
        (lambda module, forms, device: lambda *t: [1.01 * v for v in module(*t)], "result 0 differs by"),
        (lambda module, forms, device: lambda *t: [v.double() for v in module(*t)], "expected torch.float32"),
    ],
    ids=["compiler fails", "kernel fails", "other numbers", "other type"],
)
def test_a_function_that_compiles_wrongly_runs_as_it_is_and_the_log_says_why(stage, compiler, why, caplog):
    split, inputs = stage
    stages = CompiledStages(split, CPU, trials=True)
    with mock.patch.object(compiling, "inductor", compiler):
        stages.compile(0, "F", SAMPLES)
    with torch.no_grad():
        expected = split.stages[0].forward.run(SAMPLES, KEY, *inputs)
    for _ in range(2):
        torch.testing.assert_close(run(stages, inputs), expected, rtol=0, atol=0)
    (said,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert said.startswith("F of stage 0 runs uncompiled for 4 samples: ")
    assert why in said


@pytest.mark.parametrize(("cast", "is_kept"), [(True, True), (False, False)], ids=["bfloat16", "float32"])
def test_numbers_are_compared_as_coarsely_as_they_are_computed(cast: bool, is_kept: bool, caplog):
    """Gradients and losses in single precision that are made of others were held to single precision."""
    split, inputs = stage_of(lambda: torch.autocast("cpu", torch.bfloat16, enabled=cast))
    stages = CompiledStages(split, CPU, trials=True)
    with mock.patch.object(compiling, "inductor", lambda module, *_: lambda *t: [v * (1 + 2**-8) for v in module(*t)]):
        stages.compile(0, "F", SAMPLES)
    run(stages, inputs)
    assert is_kept == (not [one for one in caplog.records if one.levelno >= logging.WARNING])


def test_a_kernel_gets_its_inputs_as_they_were_foreseen(stage):
    """Another rank may send a tensor that lies otherwise in memory; a kernel would read it wrongly."""
    split, inputs = stage
    seen: list[tuple[int, ...]] = []

    def compiler(module: fx.GraphModule, forms: Any, device: torch.device) -> Any:
        def kernel(*tensors: torch.Tensor) -> Any:
            seen.extend(t.stride() == tuple(stride) for t, (_, stride, _) in zip(tensors, forms, strict=True))
            return module(*tensors)

        return kernel

    stages = CompiledStages(split, CPU, trials=False)
    with mock.patch.object(compiling, "inductor", compiler):
        stages.compile(0, "F", SAMPLES)
    turned = [t.t().contiguous().t() if t.ndim == 2 else t for t in inputs]
    torch.testing.assert_close(run(stages, turned), run(stages, inputs), rtol=0, atol=0)
    assert seen
    assert all(seen)


def test_gradients_are_given_away_before_too_many_are_held(stage):
    split, _ = stage
    (program,) = split.stages
    half = next(h for h in (program.weight_grad, program.input_grad) if h is not None and h.streamed is not None)

    def pieces(together: int) -> int:
        with (
            mock.patch.object(compiling, "_GIVEN_TOGETHER", together),
            mock.patch.object(compiling, "inductor") as compiler,
        ):
            compiling.compile_code(half.code, SAMPLES, CPU)
        return compiler.call_count

    assert pieces(1) > pieces(1 << 30) == 1


def test_attention_without_dropout_is_no_seam():
    """It was taken to draw, so that a function of a GPT was compiled in as many pieces as it has blocks."""
    torch.manual_seed(0)
    _, structure = flatten([torch.randint(50, (SAMPLES, 9))])
    module = GPT(vocabulary=50, context=8, width=16, depth=3)
    (program,) = capture_step(Request(module, "training_step", structure, samples=SAMPLES)).split(()).stages
    with mock.patch.object(compiling, "inductor") as compiler:
        compiling.compile_code(program.forward.code, SAMPLES, CPU)
    assert compiler.call_count == 1
