"""Results of torchmetrics calls that a step makes: logged, they are those of the whole batch; as a loss, tensors.

Calls of torchmetrics objects are recorded, and made on every rank after the step. A step may train on what such a call
returns (`loss = self.loss_metric(prediction, target)`): then its value for these samples is computed as well, by the
object's own `forward` on a state of its own.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torchmetrics

from lightning_pipe.capture.steps.hazards import TracedNumber, hazard
from lightning_pipe.capture.steps.record import MetricValue, OfMetrics
from lightning_pipe.capture.steps.trees import found_in, mapped


class MetricResult:
    """Stand for what a recorded metric call will return, or for what the step makes of such results.

    It can be logged, returned and kept, and computed with beside constants: that is done when the values are known.
    Where a result has a gradient, the step computes with its value for the samples of this run, as it may be a loss.

    Args:
        said: what it becomes in the recording.
        line: the user's line.
        what: what it is, for an error.
        compute: computes the value for the samples of this run; None where it has no gradient.
    """

    def __init__(
        self, said: MetricValue | OfMetrics, line: str, *, what: str, compute: Callable[[], Any] | None = None
    ) -> None:
        self.said, self.line, self.what = said, line, what
        self._compute = compute
        self._tensor: torch.Tensor | None = None

    def tensor(self) -> torch.Tensor:
        """Return the value for the samples of this run.

        Raises:
            CaptureError: if it has no gradient: what Python does with a metric would be done to that of a micro-batch.
        """
        if not self.has_gradient():
            raise hazard(f"{self.what} is used by the step (it can only be logged, or what is made of it)", self.line)
        assert self._tensor is not None, "it has been computed"
        return self._tensor

    def has_gradient(self) -> bool:
        """Return whether the step may train on it."""
        if self._tensor is None and self._compute is not None:
            value, self._compute = self._compute(), None
            if isinstance(value, torch.Tensor) and value.requires_grad:
                self._tensor = value
        return self._tensor is not None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if not self.has_gradient() and callable(getattr(torch.Tensor, name, None)):
            return functools.partial(_applied, _method, (name, self))
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch call on the values of results, or note it."""
        return _applied(func, args, **(kwargs or {}))

    def __getitem__(self, key: Any) -> Any:
        return _applied(operator.getitem, (self, key))

    def __float__(self) -> float:
        return float(self.tensor())

    def __int__(self) -> int:
        return int(self.tensor())

    def __bool__(self) -> bool:
        return bool(self.tensor())

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.tensor())

    def __format__(self, form: str) -> str:
        return format(self.tensor(), form)


def _method(name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
    return getattr(value, name)(*args, **kwargs)


def _applied(function: Callable[..., Any], given: tuple[Any, ...], *more: Any, **kwargs: Any) -> Any:
    """Return what a function makes of results: of their values, if all have some that the step may use."""
    args = (*given, *more)
    results = list(found_in((args, kwargs), (MetricResult, torch.Tensor, TracedNumber)))
    deferred = [one for one in results if isinstance(one, MetricResult) and not one.has_gradient()]
    if not deferred:
        args, kwargs = mapped((args, kwargs), MetricResult, MetricResult.tensor)
        return function(*args, **kwargs)
    first = deferred[0]
    if not all(isinstance(one, MetricResult) for one in results):
        return first.tensor()  # which it has not
    args, kwargs = mapped((args, kwargs), MetricResult, lambda one: one.said)
    return MetricResult(OfMetrics(function, args, kwargs), first.line, what=first.what)


def _operation(function: Callable[..., Any], *, is_reflected: bool) -> Callable[..., Any]:
    def call(self: MetricResult, *others: Any) -> Any:
        return _applied(function, (*others, self) if is_reflected else (self, *others))

    return call


for _name in "add sub mul truediv pow neg abs lt le gt ge".split():
    setattr(MetricResult, f"__{_name}__", _operation(getattr(operator, _name), is_reflected=False))
for _name in "add sub mul truediv pow".split():
    setattr(MetricResult, f"__r{_name}__", _operation(getattr(operator, _name), is_reflected=True))


def value_of_call(metric: torchmetrics.Metric, own: Mapping[str, Any], args: Any, kwargs: Any) -> Any:
    """Return what `forward` of a torchmetrics object gives for these arguments, and leave the object as it is.

    Args:
        metric: the object, which is made of no others.
        own: its attributes without what was put over them to record calls.
        args, kwargs: arguments of the call.
    """
    device = next((one.device for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)), metric.device)
    with _apart(metric, own):
        metric._defaults = {name: _made_again(default, device) for name, default in metric._defaults.items()}
        vars(metric).update({name: one for name, one in metric._defaults.items() if isinstance(one, torch.Tensor)})
        metric.reset()
        return metric.forward(*args, **kwargs)


def _made_again(default: Any, device: torch.device) -> Any:
    """Return a tensor that was made in the step: in a trace, copies of a constant could not be written to."""
    if not isinstance(default, torch.Tensor):
        return default
    return torch.zeros(default.shape, dtype=default.dtype, device=device).copy_(default)


@contextlib.contextmanager
def _apart(metric: torchmetrics.Metric, own: Mapping[str, Any]) -> Iterator[None]:
    """Give a torchmetrics object other attributes for a while."""
    content = vars(metric)
    before = dict(content)
    states = {name: list(content[name]) for name in metric._defaults if isinstance(content[name], list)}
    content.clear()
    content.update({**before, **own, **states})
    for name in ("update", "forward", "compute", "reset"):
        if name not in own:
            content.pop(name, None)
    try:
        yield
    finally:
        content.clear()
        content.update(before)


def with_loss(method: str, output: Any) -> Any:
    """Return what a step returned, with the value of a torchmetrics object in the place of a loss that is one."""
    if method != "training_step":
        return output
    if isinstance(output, MetricResult):
        return output.tensor()
    if isinstance(output, dict) and isinstance(output.get("loss"), MetricResult):
        return {**output, "loss": output["loss"].tensor()}
    return output
