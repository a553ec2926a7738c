"""Results that need all samples: made once when all micro-batches are there, of what these have made.

    logits.std(0)        of the rows of all samples
    (loss / count).sqrt()    of terms that were added

Where that would take much of every sample, a result is the mean of what micro-batches make of theirs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from lightning_pipe.capture.graphs.value_sizes import Sizes, is_size
from lightning_pipe.capture.operators import is_random, shares_memory_with, takes_output
from lightning_pipe.capture.slicing.microbatch_graph import MicrobatchGraph, WaitsForAllError
from lightning_pipe.capture.slicing.placement import LOCAL, TERMS, Rows
from lightning_pipe.capture.slicing.slicing import Slicing
from lightning_pipe.capture.stages.assign import classify
from lightning_pipe.capture.stages.emit import Emitter
from lightning_pipe.capture.stages.operations import flops_of, tensors_of, touched_bytes
from lightning_pipe.capture.steps.stage_program import Half
from lightning_pipe.capture.torch_private import TORCH_NAMESPACES, OpOverload
from lightning_pipe.core.graph import HeadWork

_MOST_NUMBERS = 4096  # of a source, for every sample if it has samples: more is no result but data


@dataclass(frozen=True)
class LateValue:
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
        self._wanted: list[tuple[fx.Node, str, dict[fx.Node, fx.Node]]] = []
        self.sources: list[fx.Node] = []
        self.names: dict[str, str] = {}
        self.by_parts: list[str] = []

    def result(self, name: str) -> list[fx.Node]:
        """Return the value of micro-batches that makes a result, in a list that is empty if there is none."""
        node, build = self.nodes[name], self._build
        placement = self._slicing.placements[node]
        is_part = isinstance(placement, Rows) or placement in (TERMS, LOCAL)
        combined = build.part(name) if is_part else build.once(name)
        if combined is None and not self._is_made_after(node, ""):
            combined = build.local(node)
            self.by_parts.append(line_of(node))
        self.names[name] = name if combined is None else combined.name
        return [] if combined is None else [combined]

    def loss(self, name: str) -> fx.Node | None:
        """Return the term of the loss; None if it is made when all micro-batches are there."""
        node = self.nodes[name]
        is_early = not self._slicing.levels[node] and self._slicing.placements[node] is not LOCAL
        if not is_early and self._is_made_after(node, ""):
            return None
        return self._build.term(name)

    def state(self, state: str, name: str) -> bool:
        """Let the new content of a buffer be made when all micro-batches are there; return whether that is possible."""
        return self._is_made_after(self.nodes[name], state)

    def _is_made_after(self, node: fx.Node, state: str) -> bool:
        behind = self._behind(node)
        origins = [source for source in behind if self._is_source(source)]
        made = [source for source in behind if source not in origins]
        if self._slicing.joint.loss is None and any(map(self._is_heavy, made)):
            raise WaitsForAllError(node)  # every rank would do the work of the model
        is_drawn = any(map(is_random, made))
        if is_drawn or any(not self._is_small(source) for source in origins if source is not node):
            return False
        sources = {source: self._given(source) for source in origins}
        self._wanted.append((node, state, sources))
        self.sources += [given for given in sources.values() if given not in self.sources]
        return True

    def _is_heavy(self, node: fx.Node) -> bool:
        """Return whether an operation is a product with weights, or not torch's, so that nobody knows its work."""
        is_foreign = isinstance(node.target, OpOverload) and node.target.namespace not in TORCH_NAMESPACES
        return self._slicing.is_layer(node) or is_foreign

    def _behind(self, result: fx.Node) -> list[fx.Node]:
        """Return what a value is made of, back to what is there before all micro-batches are."""
        pending, seen = [result], {result: None}
        while pending:
            node = pending.pop()
            if not self._is_source(node):
                new = [source for source in node.all_input_nodes if source not in seen and not is_size(source)]
                seen.update(dict.fromkeys(new))
                pending += new
        return [*seen]

    def _is_source(self, node: fx.Node) -> bool:
        slicing = self._slicing
        if node in slicing.of_sizes or (node in slicing.of_batch and not self._build.varies(node)):
            return node.op == "placeholder"
        if not slicing.makes(node) and slicing.levels[node]:
            return False
        can_be_repeated = node in slicing.operations and not slicing.is_layer(node) and not is_random(node)
        return self._is_small(node) or not can_be_repeated

    def _is_small(self, node: fx.Node) -> bool:
        value, slicing = node.meta["val"], self._slicing
        if not isinstance(value, torch.Tensor):
            return False
        count = math.prod(map(slicing.number, value.shape))
        has_samples = isinstance(slicing.placements[node], Rows) or self._build.varies(node)
        return count <= _MOST_NUMBERS * (slicing.samples if has_samples else 1)

    def _given(self, node: fx.Node) -> fx.Node:
        build = self._build
        if self._slicing.levels[node] and self._slicing.makes(node):
            raise WaitsForAllError(node)
        part = build.part(node.name)
        if part is None:
            part = build.once(node.name)
        assert part is not None, f"{node} is there before all micro-batches are"
        return part

    @property
    def late_values(self) -> tuple[LateValue, ...]:
        """Return the results that are made when all micro-batches are there."""
        emitter = Emitter(self._slicing.joint, repeated=frozenset(), device=self._device)
        return tuple(self._made(emitter, *wanted) for wanted in self._wanted)

    def _made(self, emitter: Emitter, node: fx.Node, state: str, sources: Mapping[fx.Node, fx.Node]) -> LateValue:
        return LateValue(node.name, half_of(emitter, sources, [node.name]), line_of(node), state)


def half_of(emitter: Emitter, sources: Mapping[fx.Node, fx.Node], outputs: Sequence[str]) -> Half:
    """Return the function of values of micro-batches put together that makes values of the whole batch."""
    half = emitter.make((), inputs=[source.name for source in sources], outputs=outputs)
    return replace(half, inputs=tuple(given.name for given in sources.values()), code=None)


class SlicedHead:
    """What is made once per batch, when all micro-batches have run forward, for their backwards.

    Args:
        slicing: how the graph of the whole batch is cut.
        build: the graph of a micro-batch, which names what its backwards read.
        written: names of the buffers that stages write; others get their new content after the batch.

    Attributes:
        inputs: values of micro-batches that are put together.
    """

    def __init__(self, slicing: Slicing, build: MicrobatchGraph, written: Collection[str]) -> None:
        self._slicing, self._build = slicing, build
        self._sources: dict[fx.Node, fx.Node] = {}
        self._operations: list[fx.Node] = []
        pending = [build.nodes[output.source] for output in build.head_outputs]
        seen = {*pending}
        repeated = self._repeated(written) if pending else frozenset[str]()
        while pending:
            node = pending.pop()
            given = build.for_head(node, repeated)
            if given is not None:
                self._sources[node] = given
            elif slicing.makes(node) and slicing.levels[node]:
                raise WaitsForAllError(node)
            else:
                self._operations.append(node)
                new = [source for source in node.all_input_nodes if source not in seen and not is_size(source)]
                seen.update(new)
                pending += new
        self.inputs = [*self._sources.values()]

    def _repeated(self, written: Collection[str]) -> frozenset[str]:
        """Return the names of values that no stage makes, where stages write these buffers alone."""
        joint = self._slicing.joint
        by_stages = {state: name for state, name in joint.mutations.items() if state in written}
        return classify(replace(joint, mutations=by_stages)).repeated

    def half(self, device: torch.device) -> Half | None:
        """Return the function; None if nothing needs all samples."""
        outputs = self._build.head_outputs
        if not outputs:
            return None
        emitter = Emitter(self._slicing.joint, repeated=frozenset(), device=device)
        half = half_of(emitter, self._sources, [output.source for output in outputs])
        return replace(half, outputs=tuple(output.name for output in outputs))

    @property
    def work(self) -> HeadWork | None:
        """Return what planners see of it, without what it reads; None if nothing needs all samples."""
        slicing, outputs = self._slicing, self._build.head_outputs
        if not outputs:
            return None
        first = slicing.barrier or self._build.nodes[outputs[0].source]
        sizes, samples = Sizes(slicing.joint), slicing.samples
        run = [node for node in self._operations if node in slicing.operations and shares_memory_with(node) is None]
        return HeadWork(
            line_of(first),
            str(first.target),
            samples=samples,
            operations=len(run),
            flops=sum(flops_of(node, sizes, samples) for node in run),
            touched_bytes=sum(touched_bytes(node, sizes, samples) for node in run),
            workspace_bytes=self._workspace(sizes),
        )

    def _workspace(self, sizes: Sizes) -> int:
        """Return the bytes of what is made and still needed, at most at once."""
        operations = {node for node in self._operations if node.op == "call_function"}
        order = [node for node in self._slicing.joint.module.graph.nodes if node in operations]
        memory: dict[fx.Node, fx.Node] = {}  # whose results hold that of others
        end: dict[fx.Node, int] = {}
        for i, node in enumerate(order):
            base = node.all_input_nodes[0] if takes_output(node) else shares_memory_with(node)
            memory[node] = node if base is None else memory.get(base, base)
            end |= {memory.get(read, read): i for read in (node, *node.all_input_nodes)}
        results = [self._build.nodes[output.source] for output in self._build.head_outputs]
        end |= {memory.get(result, result): len(order) for result in results}
        changes = [0] * (len(order) + 2)
        for i, node in enumerate(order):
            if memory[node] is node:
                size = sum(sizes.count(tensor, self._slicing.samples) for tensor in tensors_of(node))
                changes[i] += size
                changes[end[node] + 1] -= size
        return max(accumulate(changes))


def line_of(node: fx.Node) -> str:
    """Return the user's line of an operation; its name if that is not known."""
    return str((node.meta.get("custom") or {}).get("line") or node.name)
