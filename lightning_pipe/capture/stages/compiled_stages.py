"""Stages whose functions run compiled, for the numbers of samples that they were compiled for.

    stages = CompiledStages(split, device, trials=True)
    stages.compile(stage, "F", samples)     F of this stage from now on, for slices of so many samples
    stages.split                            what runs; for other numbers of samples as it was

A compiled function is compared with the plain one when it first runs, on what it is given: if results differ by more
than rounding, or it fails, the plain one runs from then on, and the log says so. So does what cannot be compiled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from lightning_pipe.capture.graphs.value_sizes import TensorSpec
from lightning_pipe.capture.stages.compiling import compile_code
from lightning_pipe.capture.steps.stage_program import Code, Half, RandomKey, Split, StageProgram

log = logging.getLogger(__name__)

HalfKind = Literal["F", "I", "W"]
_FEW = 1e-3  # share of integers and truth values that rounding may turn over


class CompiledStages:
    """The stages of a split, some functions of which are compiled.

    Args:
        split: the stages.
        device: where they run.
        trials: whether compiled functions are compared with the plain ones when they first run.

    Attributes:
        split: the stages that run.
    """

    def __init__(self, split: Split, device: torch.device, *, trials: bool) -> None:
        self._device, self._trials = device, trials
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
            compiled = compile_code(runs.code, samples, self._device)
        except Exception as error:  # whatever the compiler may raise
            runs.leave_plain(samples, f"it cannot be compiled: {_first_line(error)}")
            return False
        runs.compiled[samples] = _Trial(runs, compiled, samples) if self._trials else compiled
        return True

    def _with_runs(self, program: StageProgram) -> StageProgram:
        stage, back, weights = program.stage, program.input_grad, program.weight_grad
        return replace(
            program,
            forward=self._half(stage, "F", program.forward),
            input_grad=None if back is None else self._half(stage, "I", back),
            weight_grad=None if weights is None else self._half(stage, "W", weights),
        )

    def _half(self, stage: int, kind: HalfKind, half: Half) -> Half:
        if half.code is None:
            return half
        streamed = half.streamed
        runs = _Runs(f"{kind} of stage {stage}", half)
        self._runs[stage, kind] = runs
        if streamed is None:
            return replace(half, run=runs)
        streamed = replace(streamed, run=runs)
        return replace(half, streamed=streamed, run=streamed.collected(half.outputs))


class _Runs:
    """The runs of one function: compiled for some numbers of samples, plain for others.

    Args:
        name: of the function, for the log.
        half: the function.
    """

    def __init__(self, name: str, half: Half) -> None:
        assert half.code is not None, "only these are compiled"
        self.name, self.code, self.is_streamed = name, half.code, half.streamed is not None
        self.plain: Callable[..., Any] = half.streamed.run if half.streamed is not None else half.run
        self.compiled: dict[int, Callable[..., Any]] = {}

    def __call__(self, samples: int, key: RandomKey | None, *rest: Any) -> Any:
        return self.compiled.get(samples, self.plain)(samples, key, *rest)

    def leave_plain(self, samples: int, why: str) -> None:
        """Run as it is from now on for this number of samples."""
        self.compiled[samples] = self.plain
        log.warning("%s runs uncompiled for %d samples: %s", self.name, samples, why)


class _Trial:
    """The first run of a compiled function: beside the plain one, whose results are taken."""

    def __init__(self, runs: _Runs, compiled: Callable[..., Any], samples: int) -> None:
        self._runs, self._compiled, self._samples = runs, compiled, samples

    def __call__(self, samples: int, key: RandomKey | None, *rest: Any) -> Any:
        runs = self._runs
        give, inputs = (rest[0], rest[1:]) if runs.is_streamed else (None, rest)
        wanted, gifts = self._run(runs.plain, key, inputs)
        try:
            found, found_gifts = self._run(self._compiled, key, inputs)
            values = [*_values(found), *_given(found_gifts)], [*_values(wanted), *_given(gifts)]
            wrong = _difference(*values, coarsest=_coarsest(runs.code, self._samples))
        except Exception as error:  # whatever a kernel may raise
            wrong = _first_line(error)
        if wrong:
            runs.leave_plain(self._samples, wrong)
        else:
            runs.compiled[self._samples] = self._compiled
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


def _values(results: Sequence[Any]) -> list[torch.Tensor]:
    return [value for value in results if isinstance(value, torch.Tensor)]


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
