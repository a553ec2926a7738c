"""Metrics and logs of a step, reported on every rank with the values of the whole batch.

The calls that were recorded when the step was captured are made in their order, with the arguments combined over
micro-batches and replicas. Every rank makes the same calls with the same values, so every callback sees the same
numbers, and a torchmetrics object has on every rank the state that it would have on one device. Therefore nothing may
be summed over ranks again: `sync_dist` is harmless because the strategy's `reduce` is the identity, and metrics are
told that there is nobody to synchronise with.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from functools import reduce
from typing import Any, cast
from unittest import mock

import torch
import torchmetrics

from lightning_pipe.capture import Route
from lightning_pipe.capture.output.output_functions import make_output
from lightning_pipe.capture.steps.record import (
    STAND_INS,
    AnswerGuard,
    Applied,
    BatchText,
    Computed,
    LogCall,
    LoggerCall,
    MetricCall,
    MetricRef,
    MetricValue,
    ObjectCall,
    OutputCall,
    Read,
    Ref,
    Sized,
    StepRecord,
)
from lightning_pipe.capture.steps.trees import found_in, mapped
from lightning_pipe.capture.torchmetrics_objects import metric_at
from lightning_pipe.capture.tracked.number_expressions import Situation, evaluate
from lightning_pipe.errors import PipelineError
from lightning_pipe.lightning_names import pl, rank_zero_warn
from lightning_pipe.runtime.exchanges.slicing import Content
from lightning_pipe.strategy.steps.kept_state import keep_state


def outputs(record: StepRecord) -> tuple[str, ...]:
    """Return the names of all values that are needed after the step, each once."""
    found: dict[str, None] = {} if record.loss is None else {record.loss: None}
    said = [
        record.returned,
        [guard.ref for guard in record.guards],
        [(call.value, call.kwargs) if isinstance(call, LogCall) else (call.args, call.kwargs) for call in record.calls],
        [kept.value for kept in record.kept],
        [(call.args, call.kwargs) for call in record.outputs],
    ]
    return tuple({**found, **dict.fromkeys(one.name for one in found_in(said, (Ref, Read)))})


def exchanged(capture: Route) -> tuple[str, ...]:
    """Return the names of all values that ranks exchange after the step: what results are made of in their place."""
    late_values = {one.name for one in capture.late_values}
    names = [name for name in outputs(capture.record) if name not in late_values]
    return tuple(dict.fromkeys([*names, *(name for one in capture.late_values for name in one.half.inputs)]))


def replay(
    record: StepRecord,
    values: Mapping[str, Content],
    *,
    samples: int,
    module: pl.LightningModule,
    situation: Situation,
) -> Any:
    """Make the recorded calls, keep on the module what the step keeps, and return what the step returned.

    Args:
        record: what the step said.
        values: its outputs for the whole batch.
        samples: samples of the batch.
        module: the module that logs.
        situation: what numbers that vary are read from.

    Raises:
        PipelineError: if an answer that the step was captured with was another one for this batch.
    """
    _check_guards(record, values)
    results: list[Any] = []

    def real(said: Any) -> Any:
        return mapped(mapped(said, STAND_INS, one), Applied, _of_metrics)

    def one(said: Any) -> Any:
        match said:
            case Ref(name, is_array):
                return torch.as_tensor(values[name]).cpu().numpy()[()] if is_array else values[name]
            case Read(name):
                return torch.as_tensor(values[name]).item()
            case Sized(of=of):
                return of(samples)
            case BatchText(index):
                return situation.texts[index]
            case Computed(expression):
                return evaluate(expression, situation)
            case MetricRef(path):
                return metric_at(module, path)
            case MetricValue(call):
                return results[call]

    for call in record.calls:
        results.append(_make(call, real, module))
    if module.trainer.is_global_zero:
        for call in record.outputs:
            _output(call, real, module)
    for kept in record.kept:
        keep_state(kept, real(kept.value), module)
    return real(record.returned)


def _of_metrics(said: Applied) -> Any:
    """Compute with results of metrics.

    Raises:
        PipelineError: if that cannot be done with them.
    """
    args, kwargs = mapped((said.args, said.kwargs), Applied, _of_metrics)
    try:
        return said.function(*args, **kwargs)
    except Exception as error:  # whatever a function of the step's choice may raise
        known = f" It has {', '.join(map(str, args[0]))}." if args and isinstance(args[0], dict) else ""
        raise PipelineError(
            f"What the step makes of the result of a torchmetrics object fails: {type(error).__name__}: {error}."
            f"{known} Give the result as it is to self.log or self.log_dict."
        ) from error


def _make(call: LogCall | ObjectCall, real: Any, module: pl.LightningModule) -> Any:
    match call:
        case LogCall(name, value, kwargs):
            log = module.log_dict if name == "" else lambda *a, **k: module.log(name, *a, **k)
            log(real(value), **real(kwargs))
            return None
        case MetricCall(path, method, args, kwargs):
            return getattr(metric_at(module, path), method)(*real(args), **real(kwargs))
        case LoggerCall(path, method, args, kwargs):
            number, *attributes = path.split(".")
            if attributes and not module.trainer.is_global_zero:  # who has no experiment
                return None
            logger: Any = reduce(getattr, attributes, module.trainer.loggers[int(number)])
            return getattr(logger, method)(*real(args), **real(kwargs))
    raise AssertionError(f"{call} is of no known kind")


def _output(call: OutputCall, real: Any, module: pl.LightningModule) -> None:
    """Make a call of an output function, if its conditions hold; training does not depend on it."""
    try:
        args, conditions = call.args
        if all(bool(asked) is answer for asked, answer in real(conditions)):
            make_output(call.path, call.method, real(args), real(call.kwargs), module=module)
    except Warning:  # that is to be an error
        raise
    except Exception as error:  # whatever a text of the step's choice may raise
        rank_zero_warn(f"{call.name}() at {call.line} has failed: {type(error).__name__}: {error}")


def wrong_answer(record: StepRecord, values: Mapping[str, Content]) -> AnswerGuard | None:
    """Return the first question whose answer is not the one that the step was captured with, None if all are."""
    answers = cast("Mapping[str, torch.Tensor]", values)  # those of guards are tensors
    return next((guard for guard in record.guards if float(answers[guard.ref.name]) > 0), None)


def _check_guards(record: StepRecord, values: Mapping[str, Content]) -> None:
    if (guard := wrong_answer(record, values)) is not None:
        raise PipelineError(
            f"The step was captured with the answer {guard.expected} to the question at {guard.line}; for this "
            "batch the answer is another one, so the captured graph does not hold. Compute both branches with "
            "torch.where, or raise in the branch that is an error."
        )


class MetricsAlone:
    """Tell all torchmetrics objects that there are no other ranks, whoever has or makes them, and undo it."""

    def __init__(self) -> None:
        usual = torchmetrics.Metric.sync

        def sync(
            self: torchmetrics.Metric,
            dist_sync_fn: Any = None,
            process_group: Any = None,
            should_sync: bool = True,
            distributed_available: Any = None,
        ) -> None:
            usual(self, dist_sync_fn, process_group, should_sync, lambda: False)

        self._replaced = mock.patch.object(torchmetrics.Metric, "sync", functools.wraps(usual)(sync))

    def begin(self) -> None:
        """Switch synchronisation over ranks off."""
        self._replaced.start()

    def end(self) -> None:
        """Switch it on again."""
        self._replaced.stop()
