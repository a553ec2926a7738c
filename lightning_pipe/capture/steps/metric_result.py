"""Results of torchmetrics calls that a step makes: logged, they are those of the whole batch; as a loss, tensors.

Calls of torchmetrics objects are recorded, and made on every rank after the step. A step may train on what such a call
returns (`loss = self.loss_metric(prediction, target)`): then its value for these samples is computed as well, by the
object's own `forward` on a state of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torchmetrics

from lightning_pipe.capture.steps.hazards import hazard, user_line
from lightning_pipe.capture.steps.trees import mapped
from lightning_pipe.capture.torchmetrics_objects import is_metric


class MetricResult:
    """Stand for what a recorded metric call will return; it can be logged, and differentiated if it has a gradient.

    Args:
        call: number of the call in its recording.
        compute: computes the value for the samples of this run.
        line: the user's line.
    """

    def __init__(self, call: int, compute: Callable[[], Any], line: str) -> None:
        self.call, self.line = call, line
        self._compute = compute
        self._tensor: torch.Tensor | None = None

    def tensor(self) -> torch.Tensor:
        """Return the value for the samples of this run.

        Raises:
            CaptureError: if it has no gradient: what Python does with a metric would be done to that of a micro-batch.
        """
        if self._tensor is None:
            value = self._compute()
            if not isinstance(value, torch.Tensor) or not value.requires_grad:
                raise hazard(
                    "the value of a torchmetrics object is used by the step (it can only be logged)", self.line
                )
            self._tensor = value
        return self._tensor

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch call on the values of results."""
        args, kwargs = mapped((args, kwargs or {}), cls, cls.tensor)
        return func(*args, **kwargs)

    def __float__(self) -> float:
        return float(self.tensor())

    def __bool__(self) -> bool:
        return bool(self.tensor())


def _delegated(name: str) -> Callable[..., Any]:
    def call(self: MetricResult, *others: Any) -> Any:
        values = mapped(others, MetricResult, MetricResult.tensor)
        return getattr(torch.Tensor, name)(self.tensor(), *values)

    return call


_OPERATORS = "add radd sub rsub mul rmul truediv rtruediv pow rpow neg abs getitem lt le gt ge".split()
for _operator in _OPERATORS:
    setattr(MetricResult, f"__{_operator}__", _delegated(f"__{_operator}__"))


def refuse_accumulated(line: str) -> None:
    """Refuse a step that uses what a torchmetrics object has accumulated."""
    raise hazard("what a torchmetrics object has accumulated is used by the step (it can only be logged)", line)


def value_of_call(metric: torch.nn.Module, own: Mapping[str, Any], args: Any, kwargs: Any) -> Any:
    """Return what `forward` of a torchmetrics object gives for these arguments, and leave the object as it is.

    Args:
        metric: the object.
        own: its attributes without what was put over them to record calls.
        args, kwargs: arguments of the call.

    Raises:
        CaptureError: if it is made of other such objects.
    """
    if not is_metric(metric) or any(map(is_metric, metric.children())):
        raise hazard(
            "the value of several torchmetrics objects is used by the step (it can only be logged)", user_line(2)
        )
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
