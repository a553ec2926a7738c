"""Results that need all samples: made once when all micro-batches are there, of what these have made.

    logits.std(0)        of the rows of all samples
    (loss / count).sqrt()    of terms that were added

Where that would take much of every sample, a result is the mean of what micro-batches make of theirs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from lightning_pipe.capture.operators import is_random
from lightning_pipe.capture.slicing.microbatch_graph import MicrobatchGraph
from lightning_pipe.capture.slicing.placement import LOCAL, TERMS, Rows
from lightning_pipe.capture.slicing.slicing import Slicing
from lightning_pipe.capture.stages.emit import Emitter
from lightning_pipe.capture.steps.stage_program import Half

_MOST_NUMBERS = 4096  # of a source, for every sample if it has samples: more is no result but data


@dataclass(frozen=True)
class Derived:
    """A result, or the new content of a buffer, that is made when all micro-batches are there.

    Attributes:
        name: its value name.
        half: makes it of other results, which are the inputs, for so many samples.
        line: the user's line of the first of the operations that make it of them.
        state: name of the buffer that it is the new content of; "" if it is a result.
    """

    name: str
    half: Half
    line: str
    state: str = ""

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
            self.by_parts.append(_line(node))
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
        sources = self._sources(node)
        if sources is None:
            return False
        self._wanted.append((node, state, sources))
        self.sources += [given for given, _ in sources.values() if given not in self.sources]
        return True

    def _sources(self, result: fx.Node) -> dict[fx.Node, tuple[fx.Node, Rows | None]] | None:
        """Return what a result is made of; None if that is too much, or is drawn."""
        found: dict[fx.Node, tuple[fx.Node, Rows | None]] = {}
        pending, seen = [result], {result}
        while pending:
            node = pending.pop()
            if self._is_source(node):
                if not self._is_small(node) and node is not result:
                    return None
                found[node] = self._given(node)
            elif is_random(node):
                return None
            else:
                new = [source for source in node.all_input_nodes if source not in seen and not _is_size(source)]
                seen.update(new)
                pending += new
        return found

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
        half = emitter.make((), inputs=[source.name for source in sources], outputs=[node.name])
        laid_out = [rows for _, rows in sources.values()]
        if any(laid_out):
            half = replace(half, run=_with_rows(half.run, laid_out))
        half = replace(half, inputs=tuple(given.name for given, _ in sources.values()), code=None)
        return Derived(node.name, half, _line(node), state)


def _with_rows(run: Any, laid_out: list[Rows | None]) -> Any:
    """Return a function of values whose samples lie in their first dimension."""

    def of_rows(samples: int, key: Any, *values: Any) -> Any:
        pairs = zip(values, laid_out, strict=True)
        return run(samples, key, *(value if rows is None else rows.placed(value) for value, rows in pairs))

    return of_rows


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)


def _line(node: fx.Node) -> str:
    return str((node.meta.get("custom") or {}).get("line") or node.name)
