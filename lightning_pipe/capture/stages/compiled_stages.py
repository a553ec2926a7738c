"""Stages whose functions run compiled or recorded, for the numbers of samples that they were compiled for.

    stages = CompiledStages(split, device, trials=True, kernels=True, recorder=None)
    stages.compile(stage, "F", samples)     F of this stage from now on, for slices of so many samples
    stages.split                            what runs; for other numbers of samples as it was

A compiled function is compared with the plain one when it first runs, on what it is given: if results differ by more
than rounding, or it fails, the plain one runs from then on, and the log says so. So does what cannot be compiled.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch import fx

from lightning_pipe.capture.graphs.value_sizes import TensorSpec
from lightning_pipe.capture.stages.compiling import RecordedHalf, compile_code
from lightning_pipe.capture.stages.cuda_recorder import LaunchRecorder
from lightning_pipe.capture.stages.recorded_pieces import Slots
from lightning_pipe.capture.steps.keyed_random import drawn_operation
from lightning_pipe.capture.steps.stage_program import Code, Half, RandomKey, Split, StageProgram
from lightning_pipe.capture.torch_private import OpOverload, result_names

log = logging.getLogger(__name__)

HalfKind = Literal["F", "I", "W"]
_LEFT_AS_IT_IS = ("rng_state", "unused", "philox_seed", "philox_offset", "debug_attn_mask")
_FEW = 1e-3  # share of integers and truth values that rounding may turn over


class CompiledStages:
    """The stages of a split, some functions of which are compiled.

    Args:
        split: the stages.
        device: where they run.
        trials: whether compiled functions are compared with the plain ones when they first run.
        kernels: whether kernels are compiled; if not, functions are only recorded.
        recorder: records what they launch; None if that is not wanted.

    Attributes:
        split: the stages that run.
    """

    def __init__(
        self,
        split: Split,
        device: torch.device,
        *,
        trials: bool,
        kernels: bool = True,
        recorder: LaunchRecorder | None = None,
    ) -> None:
        self._device, self._trials, self._kernels, self._recorder = device, trials, kernels, recorder
        self._runs: dict[tuple[int, HalfKind], _Runs] = {}
        self.split = replace(split, stages=tuple(map(self._with_runs, split.stages)))

    @property
    def can_be_compiled(self) -> bool:
        """Return whether the operations of any function are known."""
        return bool(self._runs)

    def compile(self, stage: int, kind: HalfKind, samples: int) -> bool:
        """Compile a function for a number of samples; return whether there was anything to do, and it was done."""
        runs = self._runs.get((stage, kind))
        if runs is None or samples in runs.compiled:
            return False
        try:
            compiled = compile_code(runs.code, samples, self._device, kernels=self._kernels, recording=runs.recording)
        except Exception as error:  # whatever the compiler may raise
            runs.leave_plain(samples, f"it cannot be compiled: {_first_line(error)}")
            return False
        runs.compiled[samples] = _Trial(runs, compiled, samples) if self._trials else compiled
        return True

    def _with_runs(self, program: StageProgram) -> StageProgram:
        slots = None if self._recorder is None else Slots(self._recorder)
        back, weights = program.input_grad, program.weight_grad
        return replace(
            program,
            forward=self._half(program, "F", program.forward, slots),
            input_grad=None if back is None else self._half(program, "I", back, slots),
            weight_grad=None if weights is None else self._half(program, "W", weights, slots),
        )

    def _half(self, program: StageProgram, kind: HalfKind, half: Half, slots: Slots | None) -> Half:
        if half.code is None:
            return half
        streamed = half.streamed
        name, recording = f"{kind} of stage {program.stage}", None
        if slots is not None:
            recording = RecordedHalf(name, slots, program.parameters.keys() | program.buffers.keys(), _leaving(program))
        runs = _Runs(name, kind, half, recording)
        self._runs[program.stage, kind] = runs
        if streamed is None:
            return replace(half, run=runs)
        streamed = replace(streamed, run=runs)
        return replace(half, streamed=streamed, run=streamed.collected(half.outputs))


def _leaving(program: StageProgram) -> set[str]:
    """Name the values of a stage that others than its functions read, or that are elsewhere for a time."""
    sent = {name for names in program.sends.values() for name in names}
    of_head = () if program.head is None else program.head.half.inputs
    return {*sent, *program.results, *program.mutations.values(), *program.gradients, *program.offloaded, *of_head}


class _Runs:
    """The runs of one function: compiled for some numbers of samples, plain for others.

    Args:
        name: of the function, for the log.
        kind: which function it is.
        half: the function.
        recording: how it is recorded; None if it is not.
    """

    def __init__(self, name: str, kind: HalfKind, half: Half, recording: RecordedHalf | None) -> None:
        assert half.code is not None, "only these are compiled"
        self.name, self.code, self.is_streamed = name, half.code, half.streamed is not None
        self.recording, self._kind = recording, kind
        self.plain: Callable[..., Any] = half.streamed.run if half.streamed is not None else half.run
        self.compiled: dict[int, Callable[..., Any]] = {}

    def __call__(self, samples: int, key: RandomKey | None, *rest: Any) -> Any:
        run = self.compiled.get(samples, self.plain) if self.code.holds_for(key) else self.plain
        if self.recording is None or key is None or run is self.plain:
            return run(samples, key, *rest)
        with self.recording.slots.of(self._kind, (key.step, key.microbatch)):
            return run(samples, key, *rest)

    def leave_plain(self, samples: int, why: str) -> None:
        """Run as it is from now on for this number of samples."""
        self.compiled[samples] = self.plain
        log.warning("%s runs uncompiled for %d samples: %s", self.name, samples, why)


class _Trial:
    """The first run of a compiled function: beside the plain one, whose results are taken if they differ."""

    def __init__(self, runs: _Runs, compiled: Callable[..., Any], samples: int) -> None:
        self._runs, self._compiled, self._samples = runs, compiled, samples

    def __call__(self, samples: int, key: RandomKey | None, *rest: Any) -> Any:
        runs = self._runs
        give, inputs = (rest[0], rest[1:]) if runs.is_streamed else (None, rest)
        wanted, gifts = self._run(runs.plain, key, inputs)
        try:
            found, found_gifts = self._run(self._compiled, key, inputs)
            values = [[*_values(runs.code, one), *_given(its)] for one, its in ((found, found_gifts), (wanted, gifts))]
            wrong = _difference(*values, coarsest=_coarsest(runs.code, self._samples))
        except Exception as error:  # whatever a kernel may raise
            wrong = _first_line(error)
        if wrong:
            runs.leave_plain(self._samples, wrong)
        else:
            runs.compiled[self._samples] = self._compiled
            wanted, gifts = found, found_gifts
        if give is not None:
            for name, terms in gifts:
                give(name, *terms)
        return wanted

    def _run(self, function: Callable[..., Any], key: RandomKey | None, inputs: Sequence[Any]) -> tuple[Any, _Gifts]:
        gifts: _Gifts = []
        give = [lambda name, *terms: gifts.append((name, terms))] if self._runs.is_streamed else []
        return function(self._samples, key, *give, *inputs), gifts


_Gifts = list[tuple[str, tuple[torch.Tensor, ...]]]


def _given(gifts: _Gifts) -> list[torch.Tensor]:
    return [term for _, terms in sorted(gifts, key=lambda gift: gift[0]) for term in terms]


def _values(code: Code, results: Sequence[Any]) -> list[torch.Tensor]:
    """Return the results that are the same whenever a function runs."""
    *_, output = code.module.graph.nodes
    nodes = zip(cast("Sequence[fx.Node]", output.args[0]), results, strict=True)
    return [value for node, value in nodes if isinstance(value, torch.Tensor) and not _is_arbitrary(node)]


def _is_arbitrary(node: fx.Node) -> bool:
    """Return whether a value is what attention says of its random numbers: without dropout that is any memory."""
    if node.target is not operator.getitem:
        return False
    source, index = node.args
    assert isinstance(source, fx.Node), "a value of the graph"
    operation = drawn_operation(source.target) or source.target
    if not (isinstance(operation, OpOverload) and isinstance(index, int)):
        return False
    names = result_names(operation)
    return len(names) > 1 and names[index] in _LEFT_AS_IT_IS  # one name may be that of a list


def _coarsest(code: Code, samples: int) -> float:
    """Return the precision of the coarsest type in which a function computes: a compiled one may round to it less."""
    forms = (code.form(node, samples) for node in code.module.graph.nodes)
    types = {form.dtype for form in forms if isinstance(form, TensorSpec) and form.dtype.is_floating_point}
    return max((torch.finfo(dtype).eps for dtype in types), default=0.0)


def _difference(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], *, coarsest: float) -> str:
    """Return "" if values are the same up to rounding, else how they differ.

    A value may differ by the square root of the precision with which it was computed, of its largest element; or by
    little of the largest element of all, as of a sum of which nothing is left but rounding.

    Args:
        found, wanted: the values.
        coarsest: precision of the coarsest type that they were made in.
    """
    largest = max((_largest(_real(value)) for value in wanted), default=0.0)
    for number, (one, two) in enumerate(zip(found, wanted, strict=True)):
        if one.shape != two.shape or one.dtype != two.dtype:
            return f"result {number} is {one.dtype} {list(one.shape)}; expected {two.dtype} {list(two.shape)}"
        one, two = _real(one), _real(two)
        if not two.dtype.is_floating_point:
            if two.numel() and float((one != two).double().mean()) > _FEW:
                return f"result {number} differs"
            continue
        precision = max(torch.finfo(two.dtype).eps, coarsest)
        allowed = max(precision**0.5 * _largest(two), 64 * precision * largest)
        if not torch.allclose(one, two, rtol=0.0, atol=allowed, equal_nan=True):
            return f"result {number} differs by {_largest(one - two):.3g}, more than {allowed:.3g}"
    return ""


def _real(value: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value


def _largest(value: torch.Tensor) -> float:
    """Return the largest finite absolute value."""
    if not value.dtype.is_floating_point or not value.numel():
        return 0.0
    return float(value.nan_to_num(0.0, 0.0, 0.0).abs().max())


def _first_line(error: Exception) -> str:
    said = str(error).strip()
    return f"{type(error).__name__}: {said.splitlines()[0]}" if said else type(error).__name__
