"""Run a graph of the whole batch as it is, and cut into micro-batches in the order of a pipeline, value by value.

What needs no barrier runs micro-batch after micro-batch, forward and backward of one before the next begins; then what
is computed once of all samples; then what micro-batches do with it. A value that is read too early is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from lightning_pipe.capture import Capture, Request
from lightning_pipe.capture.operators import RUN_AS, is_random, takes_output
from lightning_pipe.capture.recording.no_randomness import NoRandomness
from lightning_pipe.capture.slicing.operation import BatchOperation, SampleCut
from lightning_pipe.capture.slicing.placement import LOCAL, TERMS, WHOLE, Rows
from lightning_pipe.capture.slicing.slicing import Slicing
from lightning_pipe.capture.steps.stage_program import RandomKey
from lightning_pipe.strategy.checks.captured_run import run_captured
from lightning_pipe.strategy.checks.check import on_one_device, plain_run
from lightning_pipe.strategy.checks.differences import compared, compared_reports

Values = dict[fx.Node, Any]
Read = Callable[[fx.Node], Any]
_SEED = 1000


class Parts(list[Any]):
    """Values of micro-batches that make none of the batch."""


class Runs:
    """The two ways of running a graph.

    Args:
        slicing: how the graph is cut.
        sizes: samples of each micro-batch.
        inputs: by name, what the graph is given; and the constants that it holds.
    """

    def __init__(self, slicing: Slicing, sizes: Sequence[int], inputs: dict[str, Any]) -> None:
        self.slicing, self.sizes = slicing, sizes
        self.starts = [sum(sizes[:m]) for m in range(len(sizes))]
        self.nodes = [node for node in slicing.joint.module.graph.nodes if node.op == "call_function"]
        given = (node for node in slicing.joint.module.graph.nodes if node.op in ("placeholder", "get_attr"))
        self.inputs = {node: inputs[node.name] for node in given}
        self.dice = {node: k for k, node in enumerate(filter(is_random, self.nodes))}

    def _call(self, operation: BatchOperation, read: Read, microbatch: int | None = None) -> Any:
        node = operation.node
        target, args, kwargs = node.target, tuple(operation.args), operation.kwargs
        cut = self.slicing.cuts[node]
        is_cut = microbatch is not None and self.slicing.makes(node)
        if is_cut:
            size, first = self.sizes[microbatch], microbatch == 0
            target, args, kwargs = operation.call(cut, samples=size, is_first=first)
        if node in self.dice:
            torch.manual_seed(_SEED * (99 if microbatch is None else microbatch) + self.dice[node])

        def fill(source: fx.Node) -> Any:
            shift = self.starts[microbatch] if is_cut and source in cut.places else 0
            return read(source) - shift if shift else read(source)

        result = RUN_AS.get(target, target)(*fx.map_arg(args, fill), **fx.map_arg(kwargs, fill))
        return result / cut.divisor if is_cut and cut.divisor else result

    def _rows(self, value: Any, wanted: Any, microbatch: int) -> Any:
        if not isinstance(wanted, Rows):
            return value
        size, total = self.sizes[microbatch], self.slicing.samples
        return wanted.cut(value, start=self.starts[microbatch], samples=size, total=total)

    def whole(self) -> Values:
        """Run the graph as it is; only dice and batch statistics are those of micro-batches."""
        values: Values = dict(self.inputs)
        for node in self.nodes:
            if takes_output(node):
                values[node] = values[node.args[0]][node.args[1]]
            elif (operation := self.slicing.operations.get(node)) is None:
                continue
            elif self.slicing.makes(node) and self._is_of_its_own(operation):
                values[node] = self._by_microbatch(operation, values)
            else:
                values[node] = self._call(operation, values.__getitem__)
        return values

    def _is_of_its_own(self, operation: BatchOperation) -> bool:
        """Return whether every micro-batch draws numbers of its own, or takes statistics of its own."""
        is_drawn = operation.node in self.dice and operation.node not in self.slicing.of_batch
        return is_drawn or "batch_norm" in operation.name

    def _by_microbatch(self, operation: BatchOperation, values: Values) -> Any:
        wanted = self.slicing.cuts[operation.node].operands
        results = []
        for m in range(len(self.sizes)):

            def read(source: fx.Node, m: int = m) -> Any:
                value = values[source]
                return value[m] if isinstance(value, Parts) else self._rows(value, wanted[source], m)

            results.append(self._call(operation, read, m))
        held = self.slicing.placements[operation.node]
        if isinstance(held, tuple):
            return tuple(self._together([part[k] for part in results], one) for k, one in enumerate(held))
        return self._together(results, held)

    def _together(self, parts: Sequence[Any], held: Any) -> Any:
        if held is WHOLE or parts[0] is None:
            return parts[0]
        if held is LOCAL:
            return Parts(parts)
        return sum(parts[1:], parts[0]) if held is TERMS else held.join(parts, self.sizes)

    def sliced(self) -> Read:
        """Run the graph cut into micro-batches; return what reads a value of the batch."""
        slicing, values, made = self.slicing, dict(self.inputs), dict[fx.Node, Any]()

        def of_batch(node: fx.Node) -> Any:
            if node in self.inputs:
                return self.inputs[node]
            if node not in made:
                taken = takes_output(node)
                made[node] = (
                    of_batch(node.args[0])[node.args[1]] if taken else self._call(slicing.operations[node], of_batch)
                )
            return made[node]

        def whole(node: fx.Node) -> Any:
            if node in slicing.of_batch:
                return of_batch(node)
            if node in self.inputs or not slicing.makes(node):
                return values[node]
            assert len(values[node]) == len(self.sizes), f"{node} is not there for all micro-batches yet"
            if node not in made:
                made[node] = self._together(values[node], slicing.placements[node])
            return made[node]

        def read(node: fx.Node, wanted: Any, m: int) -> Any:
            if node not in self.inputs and slicing.makes(node) and wanted == slicing.placements[node]:
                return values[node][m]
            value = whole(node)
            if wanted is TERMS:
                return value if m == 0 else torch.zeros_like(value)
            return self._rows(value, wanted, m)

        for level in range(1 + max(slicing.levels.values())):
            now = [node for node in self.nodes if slicing.levels[node] == level]
            for node in now:
                if not slicing.makes(node):
                    self._once(node, values, whole)
            for m in range(len(self.sizes)):
                for node in now:
                    if slicing.makes(node):
                        is_drawn = node in self.dice and node in slicing.of_batch
                        part = self._rows(of_batch(node), slicing.placements[node], m) if is_drawn else None
                        values.setdefault(node, []).append(part if is_drawn else self._of(node, values, read, m))
        return whole

    def _once(self, node: fx.Node, values: Values, whole: Read) -> None:
        if takes_output(node):
            values[node] = whole(node) if node in self.slicing.of_batch else values[node.args[0]][node.args[1]]
        elif node in self.slicing.operations:
            values[node] = self._call(self.slicing.operations[node], whole)

    def _of(self, node: fx.Node, values: Values, read: Any, m: int) -> Any:
        if takes_output(node):
            several = values[node.args[0]]
            return several[m][node.args[1]]
        operation: BatchOperation = self.slicing.operations[node]
        cut: SampleCut = self.slicing.cuts[node]
        return self._call(operation, lambda source: read(source, cut.operands[source], m), m)


def deviation(runs: Runs) -> dict[str, float]:
    """Return by how much loss, gradients, results and state of the cut graph are off, of the largest of each."""
    joint = runs.slicing.joint
    with torch.no_grad():
        whole, sliced = runs.whole(), runs.sliced()
    by_name = {node.name: node for node in joint.module.graph.nodes}
    largest = max((_size(whole[by_name[name]]) for name, _ in joint.gradients), default=1.0)
    groups = {
        "loss": [joint.loss] if joint.loss else [],
        "gradients": [name for name, _ in joint.gradients],
        "results": [*joint.results],
        "state": [*joint.mutations.values()],
    }
    off = {}
    for group, names in groups.items():
        floor = 1e-3 * largest if group == "gradients" else 1e-12
        nodes = [by_name[name] for name in names]
        off[group] = max((_gap(whole[node], sliced(node), floor) for node in nodes), default=0.0)
    return off


def _size(value: Any) -> float:
    return float(value.abs().max()) if isinstance(value, torch.Tensor) and value.numel() else 0.0


def _gap(one: Any, two: Any, floor: float) -> float:
    if isinstance(one, Parts) or isinstance(two, Parts) or not isinstance(one, torch.Tensor) or not one.numel():
        return 0.0
    if one.shape != two.shape or not torch.equal(one.isnan(), two.isnan()):
        return float("inf")
    gap = float(torch.nan_to_num((one.double() - two.double()).abs()).max())
    return gap / max(floor, _size(torch.nan_to_num(one.double())))


def worst_value(runs: Runs) -> tuple[float, str]:
    """Return the largest deviation of a value that micro-batches make, of its largest number, and its operator."""
    with torch.no_grad():
        whole, sliced = runs.whole(), runs.sliced()
    made = [
        node
        for node, operation in runs.slicing.operations.items()
        if runs.slicing.makes(node) and not operation.name.startswith("empty")  # which holds whatever was there
    ]
    tensors = [node for node in made if isinstance(whole[node], torch.Tensor)]
    return max(((_gap(whole[node], sliced(node), 1e-5), str(node.target)) for node in tensors), default=(0.0, ""))


def deviation_of_parts(
    capture: Capture, request: Request, leaves: Sequence[torch.Tensor], *, sizes: tuple[int, ...]
) -> float:
    """Return by how much micro-batches differ from the plain step on all samples, in all that a check compares."""
    key = RandomKey(0, 0, 0)
    with on_one_device(capture, request, sum(sizes)) as prepare, NoRandomness():
        plain = plain_run(capture, request, prepare(leaves), key, matched=False)
        run = run_captured(capture, request, prepare(leaves), sizes=sizes, key=key)
        reports = compared_reports(capture, plain, run, samples=sum(sizes))
        loss: Any = run.batch.get(capture.record.loss or "")
        return max(difference.relative for difference in (*compared(plain, loss, run.gradients), reports))
