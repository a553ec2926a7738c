"""Recording of calls: what a step logs and what it asks of torchmetrics and loggers is noted instead of done.

`strategy.steps.metrics` makes the calls again after the step, on every rank, with the values of the whole batch.
"""

from __future__ import annotations

import contextlib
import operator
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torchmetrics
from torch import nn

from lightning_pipe.capture.output.late_texts import UNKNOWN_TEXT, LateText, LateTexts, joined, late_texts
from lightning_pipe.capture.output.output_functions import output_noted
from lightning_pipe.capture.output.printed_tensors import Elsewhere, TooLarge
from lightning_pipe.capture.steps.hazards import TracedNumber, hazard, printed, user_line
from lightning_pipe.capture.steps.metric_result import (
    RECORDED,
    Deferred,
    MadeCall,
    MetricResult,
    MetricValues,
    copied_result,
    is_result,
)
from lightning_pipe.capture.steps.numbers import sized
from lightning_pipe.capture.steps.record import (
    STAND_INS,
    Applied,
    BatchText,
    Computed,
    KeptState,
    LogCall,
    LoggerCall,
    MetricCall,
    MetricRef,
    MetricValue,
    ObjectCall,
    OutputCall,
    Read,
    Ref,
)
from lightning_pipe.capture.steps.trees import can_be_told, found_in, leaves_mapped, mapped
from lightning_pipe.capture.text_fields import MarkedText, index_of
from lightning_pipe.capture.torch_private import FakeTensor, version_of
from lightning_pipe.capture.torchmetrics_objects import (
    PLAIN,
    is_differentiable,
    is_metric_or_collection,
    items_of,
    metrics_in,
)
from lightning_pipe.capture.tracked.tracked_number import is_tracked
from lightning_pipe.lightning_names import pl


@dataclass
class StepRecording:
    """What one run of the step said: calls, and the tensors that must leave the graph.

    Attributes:
        is_graph: whether the run is traced, and its graph is repeated for other batches.
        calls: of `self.log`, metrics and loggers, in their order.
        results: tensors that they, what was returned and what was kept refer to.
        returned: what the step returned.
        kept: what it left behind in Python state.
        answers: truth values of its tensors that it asked for, where somebody notes them.
        is_whole: whether the run came to the end of the step.
        law: how it made its loss, where somebody notes that (`recording.unit_loss.Reductions`).
        turned: parameters whose `requires_grad` it has set to another value, which this is; where somebody notes that.
        called: numbers of the units that it has called, where somebody notes that.
        unlike: what units of micro-batches were given that is not what the batch gives them; "" if nothing.
        loss: of the whole batch, where a head has made it.
        outputs: calls of output functions, in their order.
        position: says where the step is (`OutputCall`).
        is_play: whether the step runs on real tensors, and on fake ones in the place of those of other stages.
        printed_tensors: by the references of what was printed, the tensors and how often they had been written to.
    """

    is_graph: bool = False
    calls: list[LogCall | ObjectCall] = field(default_factory=list)
    results: list[torch.Tensor] = field(default_factory=list)
    returned: Any = None
    kept: list[KeptState] = field(default_factory=list)
    answers: list[bool] = field(default_factory=list)
    is_whole: bool = False
    law: Any = None
    turned: dict[str, bool] = field(default_factory=dict)
    called: tuple[int, ...] = ()
    unlike: str = ""
    loss: torch.Tensor | None = None
    outputs: list[OutputCall] = field(default_factory=list)
    position: Callable[[], int] = int
    is_play: bool = False
    printed_tensors: dict[str, tuple[torch.Tensor, int]] = field(default_factory=dict)

    def ref(self, tensor: torch.Tensor) -> Ref:
        """Return the reference of a tensor, as a new result if it is none yet; named after its number for now."""
        for index, known in enumerate(self.results):
            if known is tensor:
                return Ref(str(index))
        self.results.append(tensor)
        return Ref(str(len(self.results) - 1))

    def with_arrays(self, said: Any) -> Any:
        """Return what leaves the step with references in the place of arrays of numbers, too."""

        def one(array: np.ndarray[Any, Any] | np.generic) -> Any:
            if array.dtype.kind not in "biufc":
                return array
            return Ref(self.ref(torch.from_numpy(np.array(array))).name, is_array=True)

        return mapped(said, (np.ndarray, np.generic), one)

    def lift(self, value: Any, loss: torch.Tensor | None = None) -> Any:
        """Return what leaves the step with references in the place of tensors, and of numbers that vary.

        Raises:
            CaptureError: if it has a text of a tensor's value, a size that values decide, or what torch made of no
                values.
        """

        def one(leaf: Any) -> Any:
            if is_tracked(leaf):
                return Computed(leaf.expression)
            if isinstance(leaf, TracedNumber):
                return Read(self.ref(leaf.tensor).name) if leaf.applied is None else self.lift(leaf.applied)
            if is_result(leaf):
                return self.lift(leaf.said)
            if isinstance(leaf, torch.SymBool):  # what is asked about a size, without a branch
                return bool(leaf)
            if isinstance(leaf, (torch.SymInt, torch.SymFloat)):
                if not leaf.node.has_hint():  # a size that no trace knows: `len(y.unique())`
                    raise hazard("a size that depends on the values of tensors leaves the step", user_line())
                return sized(leaf)
            if isinstance(leaf, MarkedText):
                return BatchText(index_of(leaf))
            if isinstance(leaf, str):
                if UNKNOWN_TEXT in leaf:
                    raise hazard("a tensor's value is made a text, which leaves the step", user_line())
                return leaf
            if leaf.is_meta:
                raise copied_result()
            return Ref("loss") if leaf is loss else self.ref(leaf)

        kinds = (torch.Tensor, TracedNumber, Deferred, torch.SymInt, torch.SymFloat, torch.SymBool, str)
        return mapped(value, kinds, one)

    def printed(self, value: Any, texts: LateTexts) -> Any:
        """Return what the step outputs with references in the place of tensors as they are now, and of late texts.

        Args:
            value: an argument of an output function.
            texts: of this run.
        """

        def one(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor) and not is_result(leaf):
                return self._printed_tensor(leaf)
            if is_result(leaf) or isinstance(leaf, (MarkedText, *_NUMBERS)):
                return self.lift(leaf)
            if isinstance(leaf, (*STAND_INS, *_PLAIN, type, TooLarge, Elsewhere)) and not isinstance(leaf, str):
                return leaf
            parts = [self._late(part) for part in texts.parts(str(leaf))]
            return "".join(parts) if all(isinstance(part, str) for part in parts) else Applied(joined, tuple(parts))

        return leaves_mapped(value, one)

    def _printed_tensor(self, tensor: torch.Tensor) -> Any:
        if self.is_play and isinstance(tensor, FakeTensor):
            return Elsewhere()
        said = self.lift(printed(tensor))
        if self.is_play:
            self.printed_tensors |= {ref.name: (tensor, version_of(tensor)) for ref in found_in(said, Ref)}
        return said

    def _late(self, part: str | LateText) -> Any:
        if isinstance(part, str):
            return part
        return Applied(part.form, (self.lift(part.value), *part.args))


@contextlib.contextmanager
def recording_calls(
    module: pl.LightningModule, recording: StepRecording, metrics: Mapping[str, nn.Module] | None = None
) -> Iterator[None]:
    """Record calls of `self.log`, `self.log_dict`, of torchmetrics, loggers and output instead of making them.

    Args:
        module: the user's module.
        recording: where to.
        metrics: what `metrics_in(module)` has found before; looked for if not given.
    """
    recorded = metrics_in(module) if metrics is None else metrics
    with contextlib.ExitStack() as stack:
        caller = _Caller(recording, recorded, stack.enter_context(late_texts()))
        stack.enter_context(output_noted(caller.output))
        for owner, name, replacement in [
            (module, "log", caller.log),
            (module, "log_dict", caller.log_dict),
            *((m, method, caller.metric(path, method)) for path, m in recorded.items() for method in RECORDED),
        ]:
            stack.enter_context(_shadowed(owner, name, replacement))
        if loggers := getattr(module._trainer, "loggers", None):
            trainer: Any = module._trainer
            stack.callback(setattr, trainer, "loggers", loggers)
            trainer.loggers = [LoggerStandIn(str(n), one, caller) for n, one in enumerate(loggers)]
        yield


class LoggerStandIn:
    """Stand for a logger while a step runs: calls are recorded, and return None, as those of other ranks than 0 do.

    Args:
        path: of the logger among those of the trainer, or of what hangs on it.
        logger: the logger, which answers what is no call; None for what hangs on it, which rank 0 alone may have.
        caller: records calls.
    """

    def __init__(self, path: str, logger: Any, caller: _Caller) -> None:
        vars(self).update(_path=path, _logger=logger, _caller=caller)

    @property  # type: ignore[misc]  # for `isinstance(self.logger, TensorBoardLogger)`
    def __class__(self) -> type:
        if self._logger is None:
            raise self._used("the class of")
        return type(self._logger)

    def _used(self, what: str) -> Exception:
        path = LoggerCall(self._path, "", (), {}, "").name.rstrip(".")
        return hazard(f"it looks at {what} {path}, which rank 0 alone has", user_line(2))

    def __getattr__(self, name: str) -> Any:
        path, logger = self._path, self._logger
        if name.startswith("__"):
            raise AttributeError(name)
        if logger is None:
            return _Recorded(f"{path}.{name}", self._caller)
        if name == "experiment":
            return LoggerStandIn(f"{path}.{name}", None, self._caller)
        found = getattr(logger, name)
        if callable(found):
            return self._caller.logger(path, name)
        is_plain = isinstance(found, (*PLAIN, list, tuple, dict, set))
        return found if is_plain else LoggerStandIn(f"{path}.{name}", None, self._caller)

    def __setattr__(self, name: str, value: Any) -> None:
        raise hazard(f"it sets `{name}` of a logger", user_line())

    def __getitem__(self, key: Any) -> Any:
        raise self._used(f"{key!r} of")


class _Recorded(LoggerStandIn):
    """Stand for an attribute of an experiment, which is called, or has attributes that are."""

    def __init__(self, path: str, caller: _Caller) -> None:
        super().__init__(path, None, caller)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        path, _, method = self._path.rpartition(".")
        return self._caller.logger(path, method)(*args, **kwargs)


class _Nothing(_Recorded):
    """Stand for what a call returned, which nobody knows: to have it is no harm, to use it is."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise self._used("what was returned by")

    def __getattr__(self, name: str) -> Any:
        raise self._used("what was returned by")


def _using(name: str) -> Callable[..., Any]:
    def use(self: LoggerStandIn, *_: Any) -> Any:
        raise self._used("the content of")

    use.__name__ = name
    return use


_USES = "bool str repr format fspath int float index len iter contains eq ne lt le gt ge hash enter exit setitem"
for _use in f"{_USES} add radd mul rmul sub rsub truediv rtruediv neg".split():
    setattr(_Recorded, f"__{_use}__", _using(f"__{_use}__"))


class _Caller:
    """Methods that stand for those of the module and of its metrics; the user's line is that of who calls them."""

    def __init__(self, recording: StepRecording, metrics: Mapping[str, nn.Module], texts: LateTexts) -> None:
        self._recording, self._texts = recording, texts
        self._metrics = metrics
        self._given: list[tuple[dict[str, MetricResult], dict[str, MetricResult], MetricResult]] = []
        self._paths = {id(metric): path for path, metric in metrics.items()}
        self._values = MetricValues(metrics, is_graph=recording.is_graph)

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        self._log(name, value, args, kwargs)

    def log_dict(self, dictionary: Any, *args: Any, **kwargs: Any) -> None:
        for entries, before, whole in self._given:
            if entries is dictionary and [*map(id, entries.values())] == [*map(id, before.values())]:
                dictionary = whole  # metrics may have several entries each
        items = [("", dictionary)] if is_result(dictionary) else dictionary.items()
        for name, value in items:
            self._log(name, value, args, kwargs)

    def metric(self, path: str, method: str) -> Callable[..., Any]:
        """Return what stands for a method of a metric."""

        def record(*args: Any, **kwargs: Any) -> Any:
            line, metric = user_line(), self._metrics[path]
            values, named = tuple(map(self._lift, args)), {name: self._lift(value) for name, value in kwargs.items()}
            self._recording.calls.append(MetricCall(path, method, values, named, line))
            compute = self._values.of(MadeCall(metric, method, args, kwargs, line))
            if method in ("update", "reset"):
                return None
            said = MetricValue(len(self._recording.calls) - 1)
            if isinstance(metric, torchmetrics.MetricCollection):
                return self._entries(metric, MetricResult.of(said, compute))
            is_trained = method == "forward" and is_differentiable(metric)
            result = MetricResult.of(said, compute, is_differentiable=is_trained)
            result.items = items_of(metric)
            return result

        return record

    def _entries(self, metrics: torchmetrics.MetricCollection, whole: MetricResult) -> dict[str, MetricResult]:
        """Return what a call of a collection gives: an entry of every metric, by its name."""

        def entry(name: str) -> MetricResult:
            return MetricResult.of(Applied(operator.getitem, (whole.said, name)), lambda: whole.value()[name])

        entries = {str(name): entry(str(name)) for name in metrics.keys(keep_base=False)}
        self._given.append((entries, {**entries}, whole))
        return entries

    def logger(self, path: str, method: str) -> Callable[..., _Nothing]:
        """Return what stands for a method of a logger."""

        def record(*args: Any, **kwargs: Any) -> _Nothing:
            line, lift = user_line(), self._recording.lift
            values, named = tuple(map(lift, args)), {name: lift(value) for name, value in kwargs.items()}
            call = LoggerCall(path, method, values, named, line)
            if not can_be_told((values, named), STAND_INS):
                raise hazard(f"it gives {call.name}() what other ranks cannot be told, as it cannot be pickled", line)
            self._recording.calls.append(call)
            return _Nothing(f"{path}.{method}", self)

        return record

    def output(self, path: str, method: str, *args: Any, **kwargs: Any) -> None:
        asked = self._texts.conditions(sys._getframe(1))
        said, conditions, named = (self._recording.printed(one, self._texts) for one in (args, asked, kwargs))
        line, position = user_line(), self._recording.position()
        self._recording.outputs.append(OutputCall(path, method, (said, conditions), named, line, position))

    def _log(self, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        options = dict(zip(_OPTIONS, args, strict=False)) | kwargs
        lifted = {key: self._lift(option) for key, option in options.items()}
        self._recording.calls.append(LogCall(self._lift(name), self._lift(value), lifted, user_line()))

    def _lift(self, value: Any) -> Any:
        """Return what an argument becomes in the recording; a metric its path, at the top alone."""
        if isinstance(value, TracedNumber):
            return self._recording.ref(value.tensor)
        if is_metric_or_collection(value):
            return MetricRef(self._paths[id(value)]) if id(value) in self._paths else value
        return self._recording.lift(value)


_NUMBERS = (TracedNumber, Deferred, torch.SymInt, torch.SymFloat, torch.SymBool)  # tracked ones, too
_PLAIN = (bool, int, float, str, bytes, type(None), os.PathLike)
_OPTIONS = ("prog_bar", "logger", "on_step", "on_epoch")  # of `self.log`, in the order of its arguments


@contextlib.contextmanager
def _shadowed(owner: nn.Module, name: str, replacement: Any) -> Iterator[None]:
    """Give an object another method for a while."""
    missing = object()
    before = vars(owner).get(name, missing)
    vars(owner)[name] = replacement
    try:
        yield
    finally:
        if before is missing:
            del vars(owner)[name]
        else:
            vars(owner)[name] = before
