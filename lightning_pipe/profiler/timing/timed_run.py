"""Timed run of a part of an operation sequence: the seconds of every call, where it stands.

The chosen items are run in their order; a tensor that none of them has made is made up. Memory is given back as in a
stage function: a tensor that dies in its pass is freed after its last reader, within the time of that call; what
outlives its pass stays until the end. If all tensors together would need more than the limit, whatever the next call
does not read is dropped when the limit is reached, and made up again when it is read: so a part of any size is walked
within the limit, or within what its largest call needs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any

import torch

from lightning_pipe.capture.graphs.value_sizes import TensorSpec
from lightning_pipe.capture.stages.operation_calls import OperatorCall
from lightning_pipe.profiler.timing.arguments import Maker, bytes_of, index_bounds, specs_of
from lightning_pipe.profiler.timing.clock import TimingClock
from lightning_pipe.profiler.timing.op_sequence import Course

log = logging.getLogger(__name__)

Key = str | tuple[str, int]  # name of a tensor; with a bound: of random indices in its stead
Values = dict[Key, torch.Tensor]
Fill = Callable[[Values], Any]  # makes an argument
Around = Callable[[OperatorCall], Callable[..., Any]]  # says what is run for a call


@dataclass(frozen=True)
class Tools:
    """What every walk needs.

    Attributes:
        maker: makes tensors up.
        clock: times calls.
        limit_bytes: memory for tensors.
    """

    maker: Maker
    clock: TimingClock
    limit_bytes: int


class Walk:
    """Run a part of a course.

    Args:
        course: all calls.
        chosen: items to run, in order.
        tools: maker, clock, memory.
        around: what is run in the place of a call's target, if it is not this itself.
    """

    def __init__(
        self, course: Course, chosen: Sequence[int], tools: Tools, *, around: Around = attrgetter("target")
    ) -> None:
        self._tools = tools
        self._calls = list(_prepared(course, chosen, around))
        forms: dict[Key, TensorSpec] = {spec.name: spec for call in self._calls for spec in call.made}
        forms |= {key: spec for call in self._calls for key, spec in call.inputs.items()}
        self._is_tight = sum(map(bytes_of, forms.values())) > tools.limit_bytes
        self._given: Values = {}
        self._failed: set[str] = set()

    def run(self) -> list[float]:
        """Run all once and return their seconds; those of a call that cannot be run are not a number."""
        clock, marks = self._tools.clock, []
        lacks_inputs = self._is_tight or not self._given
        values = dict(self._given)
        for number, call in enumerate(self._calls):
            if self._is_tight:
                self._make_room(call, values)
            if lacks_inputs:
                self._provide(call, values)
            clock.before(number)
            marks.append(self._run(call, values))
        clock.finish()
        return [clock.between(*mark) if mark is not None else math.nan for mark in marks]

    def _run(self, call: _Call, values: Values) -> tuple[Any, Any] | None:
        """Make one call, and return the marks before and after."""
        now, target, dying = self._tools.clock.now, call.target, call.dying
        args = [fill(values) for fill in call.args]
        kwargs = {name: fill(values) for name, fill in call.kwargs}
        start = now()
        try:
            returned = target(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # what kernels of the user raise where numbers are made up
            self._fail(call, error)
            return None
        del args, kwargs
        for name in dying:
            del values[name]
        end = now()
        for name, where in call.kept:
            value = returned
            for index in where:
                value = value[index]
            values[name] = value
        return start, end

    def _fail(self, call: _Call, error: Exception) -> None:
        if call.signature not in self._failed:
            self._failed.add(call.signature)
            log.info("%s cannot be timed on made-up inputs, so its time is estimated: %r", call.signature[:200], error)

    def _provide(self, call: _Call, values: Values) -> None:
        """Make up what the call reads and nothing has made."""
        maker = self._tools.maker
        for key, spec in call.inputs.items():
            if key not in values:
                made = maker.tensor(spec) if isinstance(key, str) else maker.indices(spec, key[1])
                values[key] = self._given[key] = made

    def _make_room(self, call: _Call, values: Values) -> None:
        """Drop what the call does not read, if there would not be enough memory for it otherwise."""
        new = [spec for key, spec in call.inputs.items() if key not in values]
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in values.values()}
        if sum(held.values()) + sum(map(bytes_of, (*new, *call.made))) > self._tools.limit_bytes:
            self._given.clear()
            for key in [key for key in values if key not in call.inputs]:
                del values[key]


@dataclass(frozen=True)
class _Call:
    """One call, prepared so that little happens between it and the next.

    Attributes:
        signature: for messages.
        target: the function.
        args, kwargs: make its arguments.
        inputs: description of every value that it reads.
        dying: tensors that a stage frees after the call.
        kept: names of results that a further call reads, and where each lies.
        made: descriptions of all results.
    """

    signature: str
    target: Callable[..., Any]
    args: tuple[Fill, ...]
    kwargs: tuple[tuple[str, Fill], ...]
    inputs: dict[Key, TensorSpec]
    dying: tuple[str, ...]
    kept: tuple[tuple[str, tuple[int, ...]], ...]
    made: tuple[TensorSpec, ...]


def _prepared(course: Course, chosen: Sequence[int], around: Around) -> Iterator[_Call]:
    read_here = {name for i in chosen for name in course.items[i].reads}
    made_here = {spec.name for i in chosen for spec, _ in course.items[i].call.results}
    for i in chosen:
        item = course.items[i]
        call, bounds = item.call, index_bounds(item.call)
        yield _Call(
            signature=call.signature,
            target=around(call),
            args=tuple(_fill(argument, bounds) for argument in call.args),
            kwargs=tuple((name, _fill(argument, bounds)) for name, argument in call.kwargs.items()),
            inputs={_key(spec, bounds): spec for spec in specs_of((call.args, call.kwargs))},
            dying=tuple(name for name in item.reads & made_here if course.last_reader.get(name) == i),
            kept=tuple((spec.name, where) for spec, where in call.results if spec.name in read_here),
            made=tuple(spec for spec, _ in call.results),
        )


def _key(spec: TensorSpec, bounds: dict[int, int]) -> Key:
    return (spec.name, bounds[id(spec)]) if id(spec) in bounds else spec.name


def _fill(argument: Any, bounds: dict[int, int]) -> Fill:
    """Return what makes an argument from the values."""
    if isinstance(argument, TensorSpec):
        return itemgetter(_key(argument, bounds))
    if isinstance(argument, (tuple, list)) and any(specs_of(argument)):
        fills = [_fill(item, bounds) for item in argument]
        return lambda values: [fill(values) for fill in fills]
    return lambda values: argument
