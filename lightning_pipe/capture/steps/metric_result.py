"""Results of torchmetrics calls that a step makes: logged, they are those of the whole batch; as a loss, tensors.

Calls of torchmetrics objects are recorded, and made on every rank after the step. A step may train on what such a call
returns (`loss = self.loss_metric(prediction, target)`): then its value for these samples is computed as well, by the
object's own `forward` on a state of its own.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
import torchmetrics

from lightning_pipe.capture.output.late_texts import late_text
from lightning_pipe.capture.steps.hazards import hazard
from lightning_pipe.capture.steps.record import Applied, MetricValue
from lightning_pipe.capture.steps.trees import found_in, mapped
from lightning_pipe.capture.torch_private import as_kind


class Deferred:
    """Stand for what a recorded metric call will return, or for what the step makes of such results.

    It can be logged, returned and kept, and computed with: that is done when the values of the batch are known.
    Where a result has a gradient, the step computes with its value for the samples of this run, as it may be a loss.

    Attributes:
        said: what it becomes in the recording.
        line: the user's line.
        what: what it is, for an error.
        items: number of items along the first dimension; None if that is not known.
    """

    said: MetricValue | Applied
    line: str
    what: str
    items: int | None = None
    _compute: Callable[[], Any] | None = None
    _value: torch.Tensor | None = None

    def tensor(self) -> torch.Tensor:
        """Return the value for the samples of this run.

        Raises:
            CaptureError: if it has no gradient: what Python does with a metric would be done to that of a micro-batch.
        """
        if not self.has_gradient():
            self.refuse()
        assert self._value is not None, "it has been computed"
        return self._value

    def has_gradient(self) -> bool:
        """Return whether the step may train on it."""
        if self._value is None and self._compute is not None:
            value, self._compute = self._compute(), None
            if isinstance(value, torch.Tensor) and value.requires_grad:
                self._value = value
        return self._value is not None

    def refuse(self) -> NoReturn:
        """Refuse that the step goes by the value, or changes it in place.

        Raises:
            CaptureError: in all cases.
        """
        raise hazard(f"{self.what} is used by the step (it can only be logged, or what is made of it)", self.line)

    def __getitem__(self, key: Any) -> Any:
        return _applied(operator.getitem, (self, key))

    def __setitem__(self, key: Any, value: Any) -> None:
        self.refuse()

    def __contains__(self, item: Any) -> bool:
        return item in self.tensor()

    def __len__(self) -> int:
        return len(self.tensor()) if self.items is None else self.items

    def __float__(self) -> float:
        return float(self.tensor())

    def __int__(self) -> int:
        return int(self.tensor())

    def __index__(self) -> int:
        return self.tensor().__index__()

    def __bool__(self) -> bool:
        return bool(self.tensor())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tensor()) if self.items is None else iter([self[item] for item in range(self.items)])

    def __round__(self, digits: int | None = None) -> Any:
        return _applied(round, (self, digits))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return repr(self._value) if self.has_gradient() else late_text(self, repr)

    def __format__(self, form: str) -> str:
        return format(self._value, form) if self.has_gradient() else late_text(self, format, form)

    __hash__ = object.__hash__


class MetricResult(Deferred, torch.Tensor):  # type: ignore[misc]  # another __repr__
    """A tensor of that kind. Torch finds no values in it, wherever it looks past Python."""

    @classmethod
    def of(
        cls, said: MetricValue | Applied, line: str, *, what: str, compute: Callable[[], Any] | None = None
    ) -> MetricResult:
        """Return the stand-in.

        Args:
            said, line, what: as the attributes say.
            compute: computes the value for the samples of this run; None where it has no gradient.
        """
        made: MetricResult = as_kind(cls, _NO_VALUE)
        made.said, made.line, made.what, made._compute = said, line, what, compute
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch call on the values of results, or note it."""
        if func.__name__ == "__get__" and not args[0].has_gradient():
            name = func.__self__.__name__
            return _NO_GRADIENT[name] if name in _NO_GRADIENT else args[0].refuse()
        return _applied(func, args, **(kwargs or {}))


class MetricNumber(Deferred):
    """A number that was read from such a tensor."""

    def __init__(self, said: Applied, line: str, what: str) -> None:
        self.said, self.line, self.what = said, line, what

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


def _writes(name: str) -> bool:
    """Return whether a function of this name changes its argument in place."""
    return name.startswith(("__i", "__set")) if name.startswith("__") else name.endswith("_")


def _applied(function: Callable[..., Any], given: tuple[Any, ...], *more: Any, **kwargs: Any) -> Any:
    """Return what a function makes of results: of their values, if all have some that the step may use."""
    args, name = (*given, *more), getattr(function, "__name__", "")
    results = [one for one in found_in((args, kwargs), Deferred) if is_result(one)]
    deferred = [one for one in results if not one.has_gradient()]
    if not deferred:
        args, kwargs = mapped((args, kwargs), Deferred, Deferred.tensor)
        return function(*args, **kwargs)
    first = deferred[0]
    if _writes(name) or name in _FORMS or kwargs.get("out") is not None:
        first.refuse()
    args, kwargs = mapped((args, kwargs), Deferred, lambda one: one.said)
    said = Applied(function, args, kwargs)
    if name == "item" or all(type(one) is MetricNumber for one in results):
        return MetricNumber(said, first.line, first.what)
    return MetricResult.of(said, first.line, what=first.what)


def _operation(function: Callable[..., Any], *, is_reflected: bool) -> Callable[..., Any]:
    def call(self: Deferred, *others: Any) -> Any:
        return _applied(function, (*others, self) if is_reflected else (self, *others))

    return call


for _name in "add sub mul truediv floordiv mod pow neg abs eq ne lt le gt ge".split():
    setattr(Deferred, f"__{_name}__", _operation(getattr(operator, _name), is_reflected=False))
for _name in "add sub mul truediv floordiv mod pow".split():
    setattr(Deferred, f"__r{_name}__", _operation(getattr(operator, _name), is_reflected=True))


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
    if is_result(output):
        return output.tensor()
    if isinstance(output, dict) and is_result(output.get("loss")):
        return {**output, "loss": output["loss"].tensor()}
    return output
