"""Results that need all samples: made once when all micro-batches are there, of what these have made.

    logits.std(0)        of the rows of all samples
    (loss / count).sqrt()    of terms that were added

Where that would take much of every sample, a result is the mean of what micro-batches make of theirs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from lightning_pipe.capture.operators import is_random
from lightning_pipe.capture.slicing.microbatch_graph import MicrobatchGraph, WaitsForAllError
from lightning_pipe.capture.slicing.placement import LOCAL, TERMS, Rows
from lightning_pipe.capture.slicing.slicing import Slicing
from lightning_pipe.capture.stages.emit import Emitter
from lightning_pipe.capture.steps.stage_program import Half
from lightning_pipe.core.graph import HeadWork

_MOST_NUMBERS = 4096  # of a source, for every sample if it has samples: more is no result but data


@dataclass(frozen=True)
class Derived:
    """A result, or the new content of a buffer, that is made when all micro-batches are there.

    Attributes:
        name: its value name.
        half: makes it of other results, which are the inputs, for so many samples.
        line: the user's line of the first of the operations that make it of them.
        state: name of the buffer that it is the new content of; "" if it is a result.
        has_parts: whether micro-batches make one of their own, too.
    """

    name: str
    half: Half
    line: str
    state: str = ""
    has_parts: bool = False

    def of(self, values: Mapping[str, Any], samples: int) -> Any:
        """Return the result of a batch from the sources of that batch."""
        with torch.no_grad():
            (result,) = self.half.run(samples, None, *(values[name] for name in self.half.inputs))
        return result


class AfterAll:
    """Find how results are made.

    Args:
        slicing: how the graph of the whole batch is cut.
        build: the graph of a micro-batch, to which what results are made of is added.
        device: where results are made.

    Attributes:
        sources: values of micro-batches that results are made of.
        names: of results, by their names in the graph of the whole batch.
        nodes: of the whole batch, by name.
        by_parts: lines of results that are means over micro-batches.
    """

    def __init__(self, slicing: Slicing, build: MicrobatchGraph, device: torch.device) -> None:
        self._slicing, self._build, self._device = slicing, build, device
        self.nodes = build.nodes
        self._wanted: list[tuple[fx.Node, str, dict[fx.Node, tuple[fx.Node, Rows | None]]]] = []
        self.sources: list[fx.Node] = []
        self.names: dict[str, str] = {}
        self.by_parts: list[str] = []

    def result(self, name: str) -> list[fx.Node]:
        """Return the value of micro-batches that makes a result, in a list that is empty if there is none."""
        node, build = self.nodes[name], self._build
        placement = self._slicing.placements[node]
        is_row = isinstance(placement, Rows) and placement.outer == 1
        combined = build.part(name) if is_row or placement in (TERMS, LOCAL) else build.once(name)
        if combined is None and not self._is_derived(node, ""):
            combined = build.local(node)
            self.by_parts.append(line_of(node))
        self.names[name] = name if combined is None else combined.name
        return [] if combined is None else [combined]

    def loss(self, name: str) -> fx.Node | None:
        """Return the term of the loss; None if it is made when all micro-batches are there."""
        node = self.nodes[name]
        is_early = not self._slicing.levels[node] and self._slicing.placements[node] is not LOCAL
        if not is_early and self._is_derived(node, ""):
            return None
        return self._build.term(name)

    def state(self, state: str, name: str) -> bool:
        """Let the new content of a buffer be made when all micro-batches are there; return whether that is possible."""
        return self._is_derived(self.nodes[name], state)

    def _is_derived(self, node: fx.Node, state: str) -> bool:
        sources = self.sources_of(node)
        if any(not self._is_small(source) for source in sources if source is not node) or self._draws(node, sources):
            return False
        self._wanted.append((node, state, sources))
        self.sources += [given for given, _ in sources.values() if given not in self.sources]
        return True

    def sources_of(self, result: fx.Node) -> dict[fx.Node, tuple[fx.Node, Rows | None]]:
        """Return what a value of all samples is made of -> its value in a micro-batch, and rows if these lie first."""
        return {node: self._given(node) for node in self._behind(result) if self._is_source(node)}

    def _draws(self, result: fx.Node, sources: Mapping[fx.Node, Any]) -> bool:
        return any(is_random(node) for node in self._behind(result) if node not in sources)

    def _behind(self, result: fx.Node) -> list[fx.Node]:
        """Return what a value is made of, back to what is there before all micro-batches are."""
        pending, seen = [result], {result: None}
        while pending:
            node = pending.pop()
            if not self._is_source(node):
                new = [source for source in node.all_input_nodes if source not in seen and not _is_size(source)]
                seen.update(dict.fromkeys(new))
                pending += new
        return [*seen]

    def _is_source(self, node: fx.Node) -> bool:
        slicing = self._slicing
        if node.op == "get_attr" or (node in slicing.of_batch and not self._build.varies(node)):
            return node.op == "placeholder"
        return slicing.makes(node) or not slicing.levels[node]

    def _is_small(self, node: fx.Node) -> bool:
        value, slicing = node.meta["val"], self._slicing
        if not isinstance(value, torch.Tensor):
            return False
        count = math.prod(map(slicing.number, value.shape))
        has_samples = isinstance(slicing.placements[node], Rows) or self._build.varies(node)
        return count <= _MOST_NUMBERS * (slicing.samples if has_samples else 1)

    def _given(self, node: fx.Node) -> tuple[fx.Node, Rows | None]:
        build, placement = self._build, self._slicing.placements[node]
        if self._slicing.levels[node] and self._slicing.makes(node):
            raise WaitsForAllError(node)
        part = build.part(node.name)
        if part is None:
            part = build.once(node.name)
        assert part is not None, f"{node} is there before all micro-batches are"
        if isinstance(placement, Rows) and placement.outer > 1:
            return build.samples_first(part, placement), placement
        return part, None

    @property
    def derived(self) -> tuple[Derived, ...]:
        """Return the results that are made when all micro-batches are there."""
        emitter = Emitter(self._slicing.joint, repeated=frozenset(), device=self._device)
        return tuple(self._made(emitter, *wanted) for wanted in self._wanted)

    def _made(
        self, emitter: Emitter, node: fx.Node, state: str, sources: Mapping[fx.Node, tuple[fx.Node, Rows | None]]
    ) -> Derived:
        return Derived(node.name, half_of(emitter, sources, [node.name]), line_of(node), state)


def half_of(emitter: Emitter, sources: Mapping[fx.Node, tuple[fx.Node, Rows | None]], outputs: Sequence[str]) -> Half:
    """Return the function of values of micro-batches put together that makes values of the whole batch."""
    half = emitter.make((), inputs=[source.name for source in sources], outputs=outputs)
    laid_out = [rows for _, rows in sources.values()]
    run = _with_rows(half.run, laid_out) if any(laid_out) else half.run
    return replace(half, inputs=tuple(given.name for given, _ in sources.values()), run=run, code=None)


class HeadOfStep:
    """What is made once per batch, when all micro-batches have run forward, for their backwards.

    Args:
        slicing: how the graph of the whole batch is cut.
        build: the graph of a micro-batch, which names what its backwards read.

    Attributes:
        inputs: values of micro-batches that are put together.
    """

    def __init__(self, slicing: Slicing, build: MicrobatchGraph) -> None:
        self._slicing, self._build = slicing, build
        self._sources: dict[fx.Node, tuple[fx.Node, Rows | None]] = {}
        pending = [build.nodes[output.source] for output in build.head_outputs]
        seen = {*pending}
        while pending:
            node = pending.pop()
            given = build.for_head(node)
            if given is not None:
                self._sources[node] = self._with_samples_first(node, given)
            elif slicing.makes(node) and slicing.levels[node]:
                raise WaitsForAllError(node)
            else:
                new = [source for source in node.all_input_nodes if source not in seen and not _is_size(source)]
                seen.update(new)
                pending += new
        self.inputs = [given for given, _ in self._sources.values()]

    def _with_samples_first(self, node: fx.Node, given: fx.Node) -> tuple[fx.Node, Rows | None]:
        placement = self._slicing.placements[node]
        if isinstance(placement, Rows) and placement.outer > 1:
            return self._build.samples_first(given, placement), placement
        return given, None

    def half(self, device: torch.device) -> Half | None:
        """Return the function; None if nothing needs all samples."""
        outputs = self._build.head_outputs
        if not outputs:
            return None
        emitter = Emitter(self._slicing.joint, repeated=frozenset(), device=device)
        half = half_of(emitter, self._sources, [output.source for output in outputs])
        first = [output.rows if output.rows is not None and output.rows.outer > 1 else None for output in outputs]
        run = _with_blocks(half.run, first) if any(first) else half.run
        return replace(half, outputs=tuple(output.name for output in outputs), run=run)

    @property
    def work(self) -> HeadWork | None:
        """Return what planners see of it; None if nothing needs all samples."""
        if not (outputs := self._build.head_outputs):
            return None
        slicing = self._slicing
        first = slicing.barrier or self._build.nodes[outputs[0].source]
        rows = [node for node in self._sources if isinstance(slicing.placements[node], Rows)]
        others = [node for node in self._sources if node not in rows and node.op == "call_function"]
        sizes = {node: math.prod(map(slicing.number, node.meta["val"].shape)) for node in (*rows, *others)}
        per_sample = sum(sizes[node] * node.meta["val"].element_size() for node in rows) / slicing.samples
        fixed = sum(sizes[node] * node.meta["val"].element_size() for node in others)
        touched = sum(_bytes(node, slicing) for node in slicing.head)
        return HeadWork(line_of(first), str(first.target), per_sample, fixed, touched_bytes=touched)


def _bytes(node: fx.Node, slicing: Slicing) -> int:
    values = node.meta["val"] if isinstance(node.meta["val"], tuple | list) else [node.meta["val"]]
    tensors = (value for value in values if isinstance(value, torch.Tensor))
    return sum(math.prod(map(slicing.number, tensor.shape)) * tensor.element_size() for tensor in tensors)


def _with_blocks(run: Any, first: list[Rows | None]) -> Any:
    """Return a function that gives rows in blocks of `(samples, ..., outer, per_sample, ...)`."""

    def in_blocks(samples: int, key: Any, *values: Any) -> Any:
        made = zip(run(samples, key, *values), first, strict=True)
        return tuple(value if rows is None else rows.blocks(value, samples) for value, rows in made)

    return in_blocks


def _with_rows(run: Any, laid_out: list[Rows | None]) -> Any:
    """Return a function of values whose samples lie in their first dimension."""

    def of_rows(samples: int, key: Any, *values: Any) -> Any:
        pairs = zip(values, laid_out, strict=True)
        return run(samples, key, *(value if rows is None else rows.placed(value) for value, rows in pairs))

    return of_rows


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)


def line_of(node: fx.Node) -> str:
    """Return the user's line of an operation; its name if that is not known."""
    return str((node.meta.get("custom") or {}).get("line") or node.name)
