"""Record of what a step reports besides its loss: calls of `self.log`, torchmetrics and loggers, the returned value.

While a step is captured these calls are recorded instead of made. Tensors in them become results of the graph and are
named here by `Ref`; after the pipeline has run, `strategy.steps.metrics` makes the calls again, on every rank, with the
values combined over micro-batches and replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal


@dataclass(frozen=True)
class Ref:
    """Stand for a tensor result of the graph.

    Attributes:
        name: its value name.
        is_array: whether it was an array of NumPy, which it becomes again.
    """

    name: str
    is_array: bool = False


@dataclass(frozen=True)
class Read:
    """Stand for a tensor result that the step has read into Python (`.item()`): it becomes a number again."""

    name: str


@dataclass(frozen=True)
class Sized:
    """Stand for a Python number that depends on the number of samples: `of(samples)`.

    `x.size(0)` and `float(x.numel())` are such numbers.

    Attributes:
        of: the number for so many samples.
        expression: the same over the symbols of the graph.
    """

    of: Callable[[int], int | float]
    expression: Any


@dataclass(frozen=True)
class BatchText:
    """Stand for a text of the batch, by its number in the order of the structure."""

    index: int


@dataclass(frozen=True)
class Computed:
    """Stand for a Python number that the step computes from counters and such (`capture.tracked.tracked_number`)."""

    expression: Any


@dataclass(frozen=True)
class KeptState:
    """What a step leaves behind in Python state, on the module or elsewhere.

    Attributes:
        path: where (`capture.python.places.follow`).
        name: the same for a reader.
        how: `assign` a value, `remove` it, `extend` a list by values, `refill` a collection with values, `update` a
            dict, set the `state` of a generator of random numbers or the content of an array or tensor.
        value: with tensors replaced by `Ref` and the like.
    """

    path: tuple[tuple[str, Any], ...]
    name: str
    how: Literal["assign", "remove", "extend", "refill", "update", "state"]
    value: Any


@dataclass(frozen=True)
class MetricRef:
    """Stand for a torchmetrics object of the module by the path of its attribute (`self.log("acc", self.acc)`)."""

    path: str


@dataclass(frozen=True)
class MetricValue:
    """Stand for what the `call`-th recorded call returned (`self.log("acc", self.acc(preds, y))`)."""

    call: int


@dataclass(frozen=True)
class Applied:
    """What a function makes of stand-ins when they have values: a branch, with these among its arguments."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


STAND_INS = (Ref, Read, Sized, BatchText, Computed, MetricRef, MetricValue)


@dataclass(frozen=True)
class LogCall:
    """One `self.log` (or one entry of `self.log_dict`): arguments with tensors replaced by `Ref` and the like."""

    name: str
    value: Any
    kwargs: dict[str, Any]
    line: str


@dataclass(frozen=True)
class ObjectCall:
    """A call of a method of an object that others than the step own.

    Attributes:
        path: which object.
        method, args, kwargs: what was called, with tensors replaced by `Ref` and the like.
        line: the user's line.
    """

    path: str
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    line: str

    @property
    def name(self) -> str:
        """Return what was called, as the user would write it."""
        return f"self.{self.path}.{self.method}"


@dataclass(frozen=True)
class MetricCall(ObjectCall):
    """One `update`, `forward` (also by calling it), `compute` or `reset` of the torchmetrics object at a path."""


@dataclass(frozen=True)
class LoggerCall(ObjectCall):
    """A call of a logger of the trainer, by its number (`0`), or of what hangs on it (`0.experiment`)."""

    @property
    def name(self) -> str:
        """Return what was called, as the user would write it."""
        number, _, rest = self.path.partition(".")
        return ".".join(
            ["self.logger" if number == "0" else f"self.loggers[{number}]", *filter(None, [rest]), self.method]
        )


@dataclass(frozen=True)
class OutputCall(ObjectCall):
    """A call of an output function, such as `print`; made on rank 0, and by no other.

    `args` are its positional arguments, and the conditions under which it is made: pairs of what was asked and the
    answer.

    Attributes:
        position: between units of a replayed step, an even number, or inside of one, an odd number.
    """

    position: int = 0

    def mapped(self, function: Callable[[Any], Any]) -> OutputCall:
        """Return the call with what a function makes of its arguments."""
        return replace(self, args=function(self.args), kwargs=function(self.kwargs))

    @property
    def name(self) -> str:
        """Return what was called, as the user would write it."""
        names = {"logging": "logging", "self": "self.print", "warnings": "warnings.warn", "tqdm": "tqdm.write"}
        return names.get(self.path, "print" if self.method == "print" else f"{self.path}.{self.method}")


@dataclass(frozen=True)
class AnswerGuard:
    """An answer that the graph was captured under: the value `Ref` must equal `expected` at run time."""

    ref: Ref
    expected: bool | int | float
    line: str


@dataclass(frozen=True)
class StepRecord:
    """Everything a step said, in order.

    Attributes:
        calls: of `self.log`, metrics and loggers in the order in which they were made.
        loss: value name of the loss; None for a step that has none (validation, or a skipped step).
        returned: the returned value as a tree with tensors replaced by `Ref`.
        guards: answers to be checked at run time.
        kept: what it leaves on the module.
        outputs: calls of output functions, in their order.
    """

    calls: tuple[LogCall | ObjectCall, ...]
    loss: str | None
    returned: Any
    guards: tuple[AnswerGuard, ...]
    kept: tuple[KeptState, ...] = ()
    outputs: tuple[OutputCall, ...] = ()
