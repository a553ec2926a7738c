"""Graph variants of a step that fixes the number of samples: one trace per number, chosen by the slice's size.

A step that turns a size into a Python integer (`range(len(x))`, `int(0.1 * x.size(0))`) has no symbolic graph. Its
graphs for two sizes can stand for each other where they are the same operations under the same names with other
shapes; then cuts, values and messages of one are those of the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_pipe.capture.graphs.joint_graph import JointGraph
from lightning_pipe.capture.steps.stage_program import Half, Split, StageProgram, Value
from lightning_pipe.capture.torch_private import operator_name
from lightning_pipe.errors import CaptureError

_PROBED = range(1, 66)  # a graph that holds for no other of these sizes is one for a single size


def is_fixed(joint: JointGraph) -> bool:
    """Return whether a graph holds for one number of samples only."""
    return all(joint.fits(samples) for samples in _PROBED if samples != joint.samples)


def difference(one: JointGraph, two: JointGraph) -> str:
    """Return where two graphs are not the same operations, "" if they are."""
    for a, b in zip(one.module.graph.nodes, two.module.graph.nodes, strict=False):
        if (a.op, a.name, a.target) != (b.op, b.name, b.target) and a.op != "get_attr":
            line = (a.meta.get("custom") or {}).get("line", "")
            return f"{operator_name(a) or a.name} became {operator_name(b) or b.name}" + (f" at {line}" if line else "")
    lengths = len(one.module.graph.nodes), len(two.module.graph.nodes)
    return "" if lengths[0] == lengths[1] else f"{lengths[0]} operations became {lengths[1]}"


@dataclass(frozen=True)
class Variants:
    """Graphs of one step for other numbers of samples, traced when they are first needed.

    Attributes:
        base: the graph for `base.samples` samples.
        retrace: traces the step for a number of samples.
        unlike: tells what a graph says that another one does not say of so many samples; "" if nothing.
    """

    base: JointGraph
    retrace: Callable[[int], JointGraph]
    unlike: Callable[[JointGraph, JointGraph, int], str]
    _known: dict[int, JointGraph] = field(default_factory=dict)

    def graph(self, samples: int) -> JointGraph:
        """Return the graph for a number of samples.

        Raises:
            CaptureError: if the step does something else for so many samples.
        """
        if samples == self.base.samples:
            return self.base
        if samples not in self._known:
            traced = self.retrace(samples)
            other = difference(self.base, traced) or self.unlike(self.base, traced, samples)
            if other:
                raise CaptureError(
                    f"The step does something else for {samples} samples than for {self.base.samples}: {other}. Let "
                    "all micro-batches have the same size: choose a batch size that `microbatches` divides, and "
                    "drop_last."
                )
            self._known[samples] = traced
        return self._known[samples]

    def dispatch(self, split_of: Callable[[JointGraph], Split]) -> Split:
        """Return a split whose functions run the graph of the size that they are given."""
        splits: dict[int, Split] = {}

        def split(samples: int) -> Split:
            if samples not in splits:
                splits[samples] = split_of(self.graph(samples))
            return splits[samples]

        base = split(self.base.samples)
        stages = tuple(_dispatched_stage(program, split) for program in base.stages)
        return replace(base, stages=stages, values={n: _dispatched_value(v, split) for n, v in base.values.items()})


def _dispatched_stage(program: StageProgram, split: Callable[[int], Split]) -> StageProgram:
    def dispatched(name: str) -> Half | None:
        half: Half | None = getattr(program, name)
        if half is None:
            return None

        def run(samples: int, *arguments: Any) -> Any:
            return getattr(split(samples).stages[program.stage], name).run(samples, *arguments)

        def stream(samples: int, *arguments: Any) -> Any:
            return getattr(split(samples).stages[program.stage], name).streamed.run(samples, *arguments)

        streamed = None if half.streamed is None else replace(half.streamed, run=stream)
        return Half(half.inputs, half.outputs, run, streamed=streamed)

    forward = dispatched("forward")
    assert forward is not None, "every stage has a forward"
    return replace(program, forward=forward, input_grad=dispatched("input_grad"), weight_grad=dispatched("weight_grad"))


def _dispatched_value(value: Value, split: Callable[[int], Split]) -> Value:
    return replace(value, size=lambda samples: split(samples).values[value.name].size(samples))
