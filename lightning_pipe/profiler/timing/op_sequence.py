"""Operation sequence of a step, and a part of it that shows every distinct call at work.

An operation that is run again and again by itself finds its tensors and its code in the caches, and memory that was
just freed for its result: it is up to twice as quick as in a step. So operations are timed where they stand, between
their neighbours and with the tensors that these hand on. A deep network repeats itself; a few of its positions show
every distinct call several times, and only these are run (`Course.part`).

The course of a step is its operations in the order of the joint graph, except that gradients which only parameters need
are made last, as in stages. A stage does two things more with what operations make: after the forward it copies new
contents of buffers into them, after the backward it adds every gradient to that of its parameter. Both count as part of
the operation that made the value. So the first gradient of a batch, which is not added to anything, is priced too high.

Where a gradient has several terms, additions of terms (`Operation.adds_terms`) count as part of the operations that
make the terms, one for each, as it depends on the cut who adds them: the stage function, or the stage afterwards.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from lightning_pipe.capture.stages.operation_calls import OperatorCall
from lightning_pipe.core.graph import Graph
from lightning_pipe.profiler.timing.arguments import specs_of

_CLOSE = 12  # positions between two that are run are run too, so that their tensors are handed on


@dataclass(frozen=True)
class Item:
    """One call.

    Attributes:
        call: what is called.
        operation: index of the operation whose seconds it is part of.
        reads: names of the tensors among its arguments.
    """

    call: OperatorCall
    operation: int
    reads: frozenset[str]


class Course:
    """The calls of a step on so many samples.

    Args:
        graph: its operations.
        calls: those of the operations, in the same order.

    Attributes:
        items: all calls in the order in which stages make them: forward and repeated ones, input halves, weight halves.
        signatures: those of the items, each once, by the position of its first item.
        forms: tensors by name.
        own: signatures of the calls of the operations, in their order.
    """

    def __init__(self, graph: Graph, calls: Sequence[OperatorCall]) -> None:
        self.graph = graph
        self.forms = {spec.name: spec for call in calls for spec in specs_of((call.args, call.kwargs))}
        self.forms |= {spec.name: spec for call in calls for spec, _ in call.results}
        self.own: tuple[str, ...] = tuple(call.signature for call in calls)
        own = [_item(call, o) for o, call in enumerate(calls)]
        forward = [item for item in own if graph.operations[item.operation].phase != "backward"]
        backward = [item for item in own if graph.operations[item.operation].phase == "backward"]
        backward.sort(key=self._is_weight_half)
        self.items: tuple[Item, ...] = (*forward, *self._copies(), *backward, *self._additions())
        self._forward_end = len(self.items) - len(backward) - len(self._additions())
        self._by_position = sorted(range(len(self.items)), key=self._position)
        self.signatures = tuple(dict.fromkeys(self.items[i].call.signature for i in self._by_position))

    def _position(self, item: int) -> int:
        return max(0, self.graph.operations[self.items[item].operation].at)

    def _is_repeated(self, item: int) -> bool:
        return self.graph.operations[self.items[item].operation].phase == "repeated"

    def _is_weight_half(self, item: Item) -> bool:
        """Return whether a backward operation is part of W wherever the graph is cut: it flows nowhere earlier."""
        operation = self.graph.operations[item.operation]
        return operation.reach >= operation.at

    def _copies(self) -> list[Item]:
        """Return the copies of new contents into buffers."""
        updates = self.graph.updates
        return [item for t, state in updates for item in self._inplace("copy_", torch.Tensor.copy_, t, into=state)]

    def _additions(self) -> list[Item]:
        """Return the additions of gradients with one term to what their parameters have."""
        operations, tensors = self.graph.operations, self.graph.tensors
        whole = [(t, p) for t, p in self.graph.gradients if not operations[tensors[t].maker].adds_terms]
        return [i for t, p in whole for i in self._inplace("add_", torch.Tensor.add_, t, into=f"gradient of {p}")]

    def _inplace(self, word: str, target: Callable[..., Any], tensor: int, *, into: str) -> Iterator[Item]:
        described = self.graph.tensors[tensor]
        value = self.forms.get(described.name)
        if value is not None:
            call = OperatorCall(f"{word}({value})", target, (replace(value, name=into), value), {}, ())
            yield _item(call, described.maker)

    def charges(self) -> Iterator[tuple[str, int]]:
        """Yield (signature, operation) for every call that counts as part of an operation."""
        operations, tensors = self.graph.operations, self.graph.tensors
        for item in self.items:
            if not operations[item.operation].adds_terms:
                yield item.call.signature, item.operation
                continue
            makers = (tensors[t].maker for t in operations[item.operation].reads)
            yield from ((item.call.signature, maker) for maker in makers if not operations[maker].adds_terms)

    @cached_property
    def last_reader(self) -> dict[str, int]:
        """Return the item that reads a tensor last; without those that outlive their pass (saved, results)."""
        makers = {spec.name: i for i, item in enumerate(self.items) for spec, _ in item.call.results}
        readers = {name: i for i, item in enumerate(self.items) for name in item.reads if name in makers}
        results = {self.graph.tensors[t].name for t in self.graph.results}
        return {
            name: last
            for name, last in readers.items()
            if name not in results and (makers[name] < self._forward_end) == (last < self._forward_end)
        }

    def part(self, signatures: AbstractSet[str], *, instances: int) -> tuple[int, ...]:
        """Choose items among which every one of these signatures is met `instances` times, or as often as it occurs.

        They are all items of some positions, and the repeated ones that these read.
        """
        met: Counter[str] = Counter()
        positions: list[int] = []
        for i in self._by_position:
            signature = self.items[i].call.signature
            if signature in signatures and not self._is_repeated(i) and met[signature] < instances:
                met[signature] += 1
                positions.append(self._position(i))
        near = _filled(positions)
        chosen = {i for i in self._by_position if not self._is_repeated(i) and self._position(i) in near}
        return tuple(sorted(self._with_repeated(chosen, signatures)))

    def _with_repeated(self, chosen: AbstractSet[int], signatures: AbstractSet[str]) -> set[int]:
        """Add the repeated items that the chosen ones read, and one for each of these signatures that is not met."""
        found = set(chosen)
        pending = list(chosen)
        while pending:
            names = self.items[pending.pop()].reads & self._repeated_makers.keys()
            read = {self._repeated_makers[name] for name in names}
            pending.extend(read - found)
            found |= read
        met = {self.items[i].call.signature for i in found}
        for i in self._repeated_makers.values():
            signature = self.items[i].call.signature
            if signature in signatures and signature not in met:
                met.add(signature)
                found.add(i)
        return found

    @cached_property
    def _repeated_makers(self) -> dict[str, int]:
        repeated = (i for i in range(self._forward_end) if self._is_repeated(i))
        return {spec.name: i for i in repeated for spec, _ in self.items[i].call.results}


def _item(call: OperatorCall, operation: int) -> Item:
    return Item(call, operation, frozenset(spec.name for spec in specs_of((call.args, call.kwargs))))


def _filled(positions: list[int]) -> set[int]:
    """Return rising positions with what lies between two that are close."""
    found = set(positions)
    for here, there in itertools.pairwise(positions):
        if there - here <= _CLOSE:
            found.update(range(here, there))
    return found
