"""Results of torchmetrics calls that a step makes: logged, they are the whole batch's; used, values of this run.

Calls of torchmetrics objects are recorded, and made on every rank after the step. What only leaves the step is known
then. A step may also train on a result, or decide by it. Its value for the samples of this run is then computed where
it is used, by the objects' own methods, on states that are put back:

    forward, as torchmetrics defines it    from a fresh state: a function of its arguments, which a graph may compute
    forward of another kind, compute       from the object's state, after the calls that the step has made before;
                                           a graph would repeat that state for ever, so it refuses
"""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_pipe.capture.output.late_texts import late_text
from lightning_pipe.capture.output.text_uses import use_of_text
from lightning_pipe.capture.steps.hazards import hazard, user_line
from lightning_pipe.capture.steps.record import Applied, MetricValue
from lightning_pipe.capture.steps.trees import found_in, mapped
from lightning_pipe.capture.torch_private import as_kind
from lightning_pipe.capture.torchmetrics_objects import TABLES, is_metric, is_of_arguments, parts_of
from lightning_pipe.errors import CaptureError

RECORDED = ("update", "forward", "compute", "reset")  # methods whose calls are recorded

Compute = Callable[[], Any]


class Deferred:
    """Stand for what a recorded metric call will return, or for what the step makes of such results.

    What the step computes with it is done again when the values of the batch are known. Where a result has a gradient,
    the step computes with its value for the samples of this run, as it may be a loss.

    Attributes:
        said: what it becomes in the recording: its value, once the step has written to that.
        items: number of items along the first dimension; None if that is not known.
    """

    said: Any
    items: int | None = None
    _compute: Compute | None
    _value: Any = None
    _is_differentiable: bool
    _with_gradients: bool

    def _begin(self, said: MetricValue | Applied, compute: Compute, *, is_differentiable: bool) -> None:
        self.said, self._compute = said, compute
        self._with_gradients = torch.is_grad_enabled()
        self._is_differentiable = is_differentiable and self._with_gradients

    def value(self) -> Any:
        """Return the value for the samples of this run.

        Raises:
            CaptureError: if a graph cannot compute it.
        """
        if self._compute is not None:
            with torch.set_grad_enabled(self._with_gradients):
                self._value = self._compute()
            self._compute = None
        return self._value

    def has_gradient(self) -> bool:
        """Return whether the step may train on it."""
        return self._is_differentiable and isinstance(self.value(), torch.Tensor) and self._value.requires_grad

    def written(self) -> Any:
        """Return the value, which the step is about to change in place: that is what it means from now on."""
        self.said = self.value()
        return self.said

    def _text(self, form: Callable[..., str], *args: str) -> str:
        is_said = not self.has_gradient() and use_of_text(sys._getframe(2)) != "used"
        return late_text(self, form, *args) if is_said else form(self.value(), *args)

    def __getitem__(self, key: Any) -> Any:
        return _applied(operator.getitem, (self, key))

    def __setitem__(self, key: Any, value: Any) -> None:
        self.written()[key] = value

    def __contains__(self, item: Any) -> bool:
        return item in self.value()

    def __len__(self) -> int:
        return len(self.value()) if self.items is None else self.items

    def __float__(self) -> float:
        return float(self.value())

    def __int__(self) -> int:
        return int(self.value())

    def __index__(self) -> int:
        return operator.index(self.value())

    def __bool__(self) -> bool:
        return bool(self.value())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.value()) if self.items is None else iter([self[item] for item in range(self.items)])

    def __round__(self, digits: int | None = None) -> Any:
        return _applied(round, (self, digits))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return self._text(repr)

    def __format__(self, form: str) -> str:
        return self._text(format, form)

    __hash__ = object.__hash__


class MetricResult(Deferred, torch.Tensor):  # type: ignore[misc]  # another __repr__
    """A tensor of that kind. Torch finds no values in it, wherever it looks past Python."""

    @classmethod
    def of(cls, said: MetricValue | Applied, compute: Compute, *, is_differentiable: bool = False) -> MetricResult:
        """Return the stand-in.

        Args:
            said: as the attribute says.
            compute: computes the value for the samples of this run.
            is_differentiable: whether that may have a gradient.
        """
        made: MetricResult = as_kind(cls, _NO_VALUE)
        made._begin(said, compute, is_differentiable=is_differentiable)
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch call on the values of results, or note it."""
        if func.__name__ != "__get__":
            return _applied(func, args, **(kwargs or {}))
        name = func.__self__.__name__
        if name in _NO_GRADIENT and not args[0].has_gradient():
            return _NO_GRADIENT[name]
        return getattr(args[0].value(), name)


class MetricNumber(Deferred):
    """A number that was read from such a tensor."""

    def __init__(self, said: Applied, compute: Compute) -> None:
        self._begin(said, compute, is_differentiable=False)

    @property
    def __class__(self) -> type:
        """What the step takes it for; of a float proper Python would read the value past all methods."""
        return float

    @__class__.setter
    def __class__(self, kind: type) -> None:
        raise TypeError("it stands for a float")


_NO_VALUE = torch.empty((), device="meta")
_NO_GRADIENT: Mapping[str, Any] = {"requires_grad": False, "grad_fn": None, "grad": None, "is_leaf": True}
_FORMS = frozenset(
    "numel nelement dim ndimension size stride is_floating_point is_complex element_size data_ptr is_contiguous "
    "get_device untyped_storage storage storage_offset numpy tolist is_conj is_neg __len__ __array__".split()
)


def is_result(value: Any) -> bool:
    """Return whether a value stands for a result, which it does not say of itself."""
    return issubclass(type(value), Deferred)


def copied_result() -> CaptureError:
    """Build the refusal of a copy of a stand-in's memory, which torch makes past Python."""
    what = "what torch.tensor made of the result of a metric leaves the step (take the result as it is)"
    return hazard(what, user_line(2))


def _writes(name: str) -> bool:
    """Return whether a function of this name changes its argument in place."""
    return name.startswith(("__i", "__set")) if name.startswith("__") else name.endswith("_")


def _applied(function: Callable[..., Any], given: tuple[Any, ...], *more: Any, **kwargs: Any) -> Any:
    """Return what a function makes of results; of their values, if it needs them or all are results with a gradient."""
    args, name = (*given, *more), getattr(function, "__name__", "")
    results = [one for one in found_in((args, kwargs), Deferred) if is_result(one)]
    if kwargs.get("device") == _NO_VALUE.device:
        raise copied_result()

    def of_values() -> Any:
        values, named = mapped((args, kwargs), Deferred, Deferred.value)
        return function(*values, **named)

    if _writes(name) and is_result(args[0]):
        args[0].written()
        of_values()
        return args[0]
    is_trained = all(isinstance(one.said, MetricValue) and one.has_gradient() for one in results)
    if is_trained or _writes(name) or name in _FORMS or kwargs.get("out") is not None:
        return of_values()
    values, named = mapped((args, kwargs), Deferred, lambda one: one.said)
    said = Applied(function, values, named)
    if name == "item" or all(type(one) is MetricNumber for one in results):
        return MetricNumber(said, of_values)
    tensors = found_in((args, kwargs), torch.Tensor)
    is_differentiable = any(one._is_differentiable if is_result(one) else one.requires_grad for one in tensors)
    return MetricResult.of(said, of_values, is_differentiable=is_differentiable)


def _operation(function: Callable[..., Any], *, is_reflected: bool) -> Callable[..., Any]:
    def call(self: Deferred, *others: Any) -> Any:
        return _applied(function, (*others, self) if is_reflected else (self, *others))

    return call


for _name in "add sub mul truediv floordiv mod pow neg abs eq ne lt le gt ge".split():
    setattr(Deferred, f"__{_name}__", _operation(getattr(operator, _name), is_reflected=False))
for _name in "add sub mul truediv floordiv mod pow".split():
    setattr(Deferred, f"__r{_name}__", _operation(getattr(operator, _name), is_reflected=True))


@dataclass(frozen=True)
class MadeCall:
    """A call of a method of a torchmetrics object, with the user's line."""

    metric: nn.Module
    method: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    line: str

    def make(self) -> Any:
        """Call the method; results of other calls among the arguments are their values."""
        args, kwargs = mapped((self.args, dict(self.kwargs)), Deferred, Deferred.value)
        return getattr(self.metric, self.method)(*args, **kwargs)


class MetricValues:
    """Compute what calls of torchmetrics objects return, and leave the objects as they are.

    Args:
        metrics: the objects of a module by path, before anything is put over their methods.
        is_graph: whether a graph is made of the run.
    """

    def __init__(self, metrics: Mapping[str, nn.Module], *, is_graph: bool) -> None:
        self._own = {
            id(metric): {name: vars(metric)[name] for name in RECORDED if name in vars(metric)}
            for metric in metrics.values()
        }
        self._is_graph = is_graph
        self._calls: list[MadeCall] = []

    def of(self, call: MadeCall) -> Callable[[], Any]:
        """Note a call; return what computes its value."""
        self._calls.append(call)
        if call.method == "forward" and is_of_arguments(call.metric):
            return partial(self._from_fresh_state, call)
        return partial(self._from_state, call, self._calls[:-1])

    def _from_fresh_state(self, call: MadeCall) -> Any:
        parts = parts_of(call.metric)
        tensors = found_in((call.args, dict(call.kwargs)), torch.Tensor)
        device = next((tensor.device for tensor in tensors), None)
        with self._apart(parts):
            for metric in filter(is_metric, parts):
                content: Any = vars(metric)
                own_device = device or metric.device
                content["_defaults"] = {name: _made_again(one, own_device) for name, one in metric._defaults.items()}
                content.update({n: one for n, one in content["_defaults"].items() if isinstance(one, torch.Tensor)})
                metric.reset()
            return call.make()

    def _from_state(self, call: MadeCall, earlier: Sequence[MadeCall]) -> Any:
        if self._is_graph:
            raise hazard("it uses what a torchmetrics object has accumulated", call.line)
        parts = {id(part): part for part in parts_of(call.metric)}
        related = []
        for one in earlier:
            theirs = {id(part): part for part in parts_of(one.metric)}
            if not parts.keys().isdisjoint(theirs):
                related.append(one)
                parts |= theirs
        with self._apart([*parts.values()]):
            for part in parts.values():
                vars(part).update({n: v.clone() for n, v in vars(part).items() if isinstance(v, torch.Tensor)})
            for one in related:
                one.make()
            return call.make()

    @contextlib.contextmanager
    def _apart(self, parts: Sequence[nn.Module]) -> Iterator[None]:
        """Give torchmetrics objects copies of their state, and their own methods, for a while."""
        previous = [(vars(part), dict(vars(part))) for part in parts]
        for part in parts:
            content = vars(part)
            content.update({n: v.copy() for n, v in content.items() if type(v) in (list, dict) and n not in TABLES})
            for name in RECORDED if id(part) in self._own else ():
                content.pop(name, None)
            content.update(self._own.get(id(part), {}))
        try:
            yield
        finally:
            for content, values in previous:
                content.clear()
                content.update(values)


def _made_again(default: Any, device: torch.device) -> Any:
    """Return a tensor that was made in the step: in a trace, copies of a constant could not be written to."""
    if not isinstance(default, torch.Tensor):
        return default
    return torch.zeros(default.shape, dtype=default.dtype, device=device).copy_(default)


def with_loss(method: str, output: Any) -> Any:
    """Return what a step returned, with the value of a torchmetrics object in the place of a loss that is one."""
    if method != "training_step":
        return output
    if is_result(output):
        return output.value()
    if isinstance(output, dict) and is_result(output.get("loss")):
        return {**output, "loss": output["loss"].value()}
    return output
