"""Joint graph of a traced step: forward and backward, with the meaning of every input and output.

The meaning is read off the descriptors that AOTAutograd puts on inputs and outputs of its joint graph.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import sympy
import torch
from torch import fx

from lightning_pipe.capture import torch_private as private
from lightning_pipe.capture.python.guards import PythonGuards
from lightning_pipe.capture.steps.call_recording import StepRecording
from lightning_pipe.capture.steps.hazards import hazard
from lightning_pipe.capture.steps.record import AnswerGuard, LogCall, ObjectCall, Read, Ref, StepRecord
from lightning_pipe.capture.steps.stage_program import Half
from lightning_pipe.capture.steps.step_function import NUMBERS, StepFunction
from lightning_pipe.capture.steps.trees import mapped
from lightning_pipe.errors import CaptureError

_LAYOUT_CHOICE = re.compile(r"fake_impls\.py, line \d+ in conv\b")  # chooses the layout that a kernel will have


@dataclass(frozen=True)
class JointGraph:
    """A traced step. Names are those of the nodes of `module.graph`.

    Attributes:
        module: graph module; constants are its attributes.
        parameters, buffers: placeholder -> name in the user's module.
        leaves: placeholder -> index of the batch leaf.
        tangents: placeholders of the loss's gradient.
        loss: node of the loss, None without one; a name of its own where it is made when all micro-batches are there.
        loss_dtype: its type in that case.
        results: nodes of recorded values, in the order of the record's numbers.
        mutations: buffer name -> node of its new content.
        gradients: (node, parameter name) in model order.
        symbol: the number of samples, None if it is a constant of the graph.
        conditions: (expression over the symbols that must hold, where it comes from).
        record: what the step said.
        guards: what the step read, which must not change.
        calls, recording: the torch calls of the step, with their lines, and what it said, as they were traced.
        batch_buffers: placeholders of buffers that are read where the batch is loaded.
        lengths: symbols for other sizes: (leaf, dimension) -> symbol (`lengths`); such a graph is not run.
        identity: under which the graph is kept (`kept_traces`): a hash of all that it was made from; "" if it is not.
        head: in the graph of a micro-batch, what is made once per batch when all micro-batches have run forward; its
            outputs are inputs of the graph.
        batch_symbol, batch_samples: in the graph of a micro-batch, the number of samples of the batch, and what it was
            when the step was captured.
    """

    module: fx.GraphModule
    parameters: Mapping[str, str]
    buffers: Mapping[str, str]
    leaves: Mapping[str, int]
    tangents: tuple[str, ...]
    loss: str | None
    results: tuple[str, ...]
    mutations: Mapping[str, str]
    gradients: tuple[tuple[str, str], ...]
    symbol: sympy.Symbol | None
    samples: int
    conditions: tuple[tuple[sympy.Basic, str], ...]
    record: StepRecord
    guards: PythonGuards
    calls: list[tuple[Any, str]]
    recording: StepRecording
    batch_buffers: frozenset[str] = frozenset()
    lengths: Mapping[tuple[int, int], sympy.Symbol] = field(default_factory=dict)
    identity: str = ""
    loss_dtype: torch.dtype | None = None
    head: Half | None = None
    batch_symbol: sympy.Symbol | None = None
    batch_samples: int = 0

    def at(self, expression: sympy.Basic, samples: int, *, batch_samples: int = 0) -> sympy.Basic:
        """Return a size as a number, for so many samples of a micro-batch and of the batch."""
        numbers = {self.symbol: sympy.Integer(samples)}
        if self.batch_symbol is not None:
            numbers[self.batch_symbol] = sympy.Integer(batch_samples or self.batch_samples)
        return expression.xreplace(numbers)

    def fits(self, samples: int) -> str:
        """Return "" if the graph holds for this number of samples, else the condition that fails and its origin."""
        if self.symbol is None:
            return "" if samples == self.samples else f"the batch size is fixed to {self.samples} by the step"
        for condition, origin in self.conditions:
            if is_layout_choice(origin):
                continue
            if condition.xreplace({self.symbol: sympy.Integer(samples)}) == sympy.false:
                return f"{condition} ({origin})"
        return ""


def is_layout_choice(origin: str) -> bool:
    """Return whether a condition from there chooses the predicted memory layout of a kernel, and nothing else."""
    return _LAYOUT_CHOICE.search(origin) is not None


def describe(
    module: fx.GraphModule,
    step: StepFunction,
    *,
    samples: int,
    leaves: tuple[torch.Tensor, ...],
    lengths: Iterable[tuple[int, int]],
    env: Any,
    guards: PythonGuards,
) -> JointGraph:
    """Read inputs and outputs off the descriptors.

    Args:
        module: what the tracer returned.
        step: the function that it traced.
        samples: number of samples that it was traced with.
        leaves: the fake batch.
        lengths: (leaf, dimension) of sizes that are symbols beside the number of samples.
        env: shape environment with the conditions on the symbols.
        guards: what the step read, which must not change.

    Raises:
        CaptureError: if there is nothing to train.
    """
    graph = module.graph
    _refuse_effects(graph)
    _drop_detaches(graph)
    _drop_unread_numbers(graph)
    _drop_copies_into_state(graph)
    _name_squeezed(graph)
    symbols, others = {s for leaf in leaves for s in _symbols(leaf)}, _symbols_at(leaves, lengths)
    _refuse_shapes_of_values(graph, symbols)
    _settle_sizes(graph)
    symbols -= {*others.values()}
    inputs = {node.name: node.meta["desc"] for node in graph.nodes if node.op == "placeholder"}
    output = graph.output_node()
    outputs: Any = output.args[0]
    described = list(zip(outputs, output.meta["desc"], strict=True))
    plain = [value for value, desc in described if isinstance(desc, private.PlainAOTOutput)]
    has_loss = step.has_loss
    loss = plain[0].name if has_loss else None
    results = tuple(_unclone(value).name for value in plain[has_loss:])
    gradients = _gradients(described)
    if has_loss and not gradients:
        raise without_gradient(_detached_at(step))
    return JointGraph(
        module=_with_new_names(module),
        parameters={n: _named_by(d) for n, d in inputs.items() if isinstance(d, private.ParamAOTInput)},
        buffers={n: _named_by(d) for n, d in inputs.items() if isinstance(d, private.BufferAOTInput)},
        leaves={n: d.idx for n, d in inputs.items() if isinstance(d, private.PlainAOTInput)},
        tangents=tuple(n for n, d in inputs.items() if isinstance(d, private.TangentAOTInput)),
        loss=loss,
        results=results,
        mutations=_mutations(described),
        gradients=gradients,
        symbol=symbols.pop() if len(symbols) == 1 else None,
        samples=samples,
        conditions=tuple((guard.expr, str(guard.sloc.framework_loc)) for guard in env.guards),
        record=_record(step, loss, results),
        guards=guards,
        calls=step.observers[-1].calls,
        recording=replace(step.recordings[-1], results=[]),
        lengths=others,
    )


def _settle_sizes(graph: fx.Graph) -> None:
    """Let sizes that have turned out to be a number be that number, as they are in graphs that were kept."""

    def settled(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return (tuple if isinstance(value, tuple) else list)(map(settled, value))
        if isinstance(value, torch.SymInt):
            return int(value.node.expr) if value.node.expr.is_Integer else value
        if not isinstance(value, private.FakeTensor) or value.layout is not torch.strided:
            return value
        form = value.shape, value.stride()
        sizes = tuple([settled(size) for size in one] for one in form)
        if all(type(own) is type(size) for own, size in zip(chain(*sizes), chain(*form), strict=True)):
            return value
        with value.fake_mode:
            return torch.empty_strided(*sizes, dtype=value.dtype, device=value.device)

    for node in graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = settled(node.meta["val"])


def _with_new_names(module: fx.GraphModule) -> fx.GraphModule:
    """Copy a graph, so that names of nodes that are inserted later do not depend on nodes that were removed before."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in module.graph.nodes:
        copies[node] = graph.node_copy(node, lambda source: copies[source])
        assert copies[node].name == node.name, "a name is free in a new graph"
    return private.HeldGraphModule(module, graph)


def joint_graph_of(
    module: fx.GraphModule, fields: Mapping[str, Any], step: StepFunction, *, guards: PythonGuards
) -> JointGraph:
    """Return the joint graph of a step that has run, from a graph that was traced before.

    Args:
        module: the graph.
        fields: what a tracer has found, by name.
        step: the step, whose last run is what the graph holds.
        guards: what it read, which must not change.
    """
    return JointGraph(
        module=module,
        record=_record(step, fields["loss"], fields["results"]),
        guards=guards,
        calls=step.observers[-1].calls,
        recording=replace(step.recordings[-1], results=[]),
        **fields,
    )


def _refuse_effects(graph: fx.Graph) -> None:
    """Refuse operations that do something besides computing (raise an error for a singular matrix), in an order.

    Raises:
        CaptureError: naming the first one and its line.
    """
    for node in graph.nodes:
        if private.operator_name(node) == "with_effects":
            line = (node.meta.get("custom") or {}).get("line", "")
            raise hazard(f"it calls {node.args[1]}, which does something besides computing", line)


def without_gradient(line: str) -> CaptureError:
    """Build the refusal of a loss that trains nothing.

    Args:
        line: the user's line that detaches it; "" if unknown.
    """
    where = f" It is detached at {line}." if line else ""
    return CaptureError(
        "The loss does not depend on any parameter that requires a gradient; there is nothing to train."
        f"{where} Return a loss that is computed from the module's parameters, without detach(), .data, .item() or "
        "no_grad() in between."
    )


def _detached_at(step: StepFunction) -> str:
    """Return the last line at which the step detaches a tensor."""
    calls = step.observers[-1].calls if step.observers else []
    return next((line for (name, *_), line in reversed(calls) if name in ("detach", "detach_")), "")


def _gradients(described: list[tuple[Any, Any]]) -> tuple[tuple[str, str], ...]:
    """Return (node, parameter) of every gradient of a parameter, in model order."""
    return tuple(
        (value.name, _named_by(desc.grad_of))
        for value, desc in described
        if isinstance(desc, private.GradAOTOutput)
        and value is not None
        and isinstance(desc.grad_of, private.ParamAOTInput)
    )


def _mutations(described: list[tuple[Any, Any]]) -> dict[str, str]:
    """Return the nodes of the new content of state, by its name."""
    return {
        _named_by(desc.mutated_input): value.name
        for value, desc in described
        if isinstance(desc, private.InputMutationAOTOutput)
        and not isinstance(desc.mutated_input, private.PlainAOTInput)  # the batch, which nobody reads afterwards
    }


def _named_by(description: Any) -> str:
    """Return the user's name of the parameter or buffer that a descriptor names."""
    return str(description.target).removeprefix("model.")


def _symbols(leaf: torch.Tensor) -> set[Any]:
    shape: tuple[Any, ...] = leaf.shape  # sizes may be symbols, of which their type does not know
    return {s for size in shape if isinstance(size, torch.SymInt) for s in size.node.expr.free_symbols}


def _symbols_at(leaves: tuple[torch.Tensor, ...], places: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Any]:
    """Return the symbols that sizes at these places (leaf, dimension) were made with, where they are symbols."""
    sizes: dict[tuple[int, int], Any] = {(leaf, dim): leaves[leaf].shape[dim] for leaf, dim in places}
    return {place: private.own_symbol(size) for place, size in sizes.items() if isinstance(size, torch.SymInt)}


def _refuse_shapes_of_values(graph: fx.Graph, known: set[Any]) -> None:
    """Refuse a graph in which a shape depends on the values of tensors."""
    for node in graph.nodes:
        value = node.meta.get("val")
        for tensor in value if isinstance(value, (tuple, list)) else [value]:
            if isinstance(tensor, torch.Tensor) and _symbols(tensor) - known:
                custom = node.meta.get("custom") or {}
                what = f"the shape of {private.operator_name(node)}() depends on the values of tensors (data-dependent)"
                raise hazard(what, custom.get("line", ""), custom.get("module", ""))


def _drop_detaches(graph: fx.Graph) -> None:
    """Remove `detach` nodes: the graph runs without autograd."""
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.detach.default:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _name_squeezed(graph: fx.Graph) -> None:
    """Let `squeeze()` name its dimensions: a part with one sample keeps that of the samples, as the batch does."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.squeeze.default):
        sizes = node.args[0].meta["val"].shape
        node.target = torch.ops.aten.squeeze.dims
        node.args = (node.args[0], [dim for dim, size in enumerate(sizes) if isinstance(size, int) and size == 1])


def _drop_unread_numbers(graph: fx.Graph) -> None:
    """Remove the vector of tracked numbers from the inputs of a graph that reads none."""
    for node in graph.find_nodes(op="placeholder"):
        desc = node.meta["desc"]
        if isinstance(desc, private.BufferAOTInput) and desc.target == NUMBERS and not node.users:
            graph.erase_node(node)


def _drop_copies_into_state(graph: fx.Graph) -> None:
    """Let what is copied into a buffer as a whole be its new content where it is computed, not at the end of the step.

    What depends on parameters and constants only may be repeated in several stages; it keeps its copy, which is not.
    """
    for node in list(graph.nodes):
        if node.target is not torch.ops.aten.copy.default or node.args[0].op != "placeholder":
            continue
        before, content = node.args[:2]
        one, two = (n.meta["val"] for n in (before, content))
        if (one.shape, one.dtype) == (two.shape, two.dtype) and _has_a_place(content, before):
            node.replace_all_uses_with(content)
            graph.erase_node(node)


def _has_a_place(node: fx.Node, state: fx.Node) -> bool:
    """Return whether an operation depends on the content of the batch, or of state that the step overwrites."""
    pending, seen = list(node.all_input_nodes), set[fx.Node]()
    while pending:
        one = pending.pop()
        if one is state or isinstance(one.meta.get("desc"), private.PlainAOTInput):
            return True
        if one not in seen and isinstance(one.meta.get("val"), torch.Tensor | tuple | list):
            seen.add(one)
            pending += one.all_input_nodes
    return False


def _unclone(node: fx.Node) -> fx.Node:
    """Return the node whose copy was made a result (a batch leaf keeps its copy, so that it has a place)."""
    if node.target is not torch.ops.aten.clone.default:
        return node
    (source,) = node.all_input_nodes
    return source if source.op == "call_function" else node


def _record(step: StepFunction, loss: str | None, results: tuple[str, ...]) -> StepRecord:
    """Return the record of the last run with results named after their nodes."""
    recording, observer = step.recordings[-1], step.observers[-1]
    from_guards = len(recording.results)

    def named(value: Any) -> Any:
        if value.name == "loss":
            return Ref(loss or "")
        return type(value)(results[int(value.name)])

    def name(value: Any) -> Any:
        return mapped(value, (Ref, Read), named)

    calls: list[LogCall | ObjectCall] = [
        replace(c, value=name(c.value), kwargs=name(c.kwargs))
        if isinstance(c, LogCall)
        else replace(c, args=name(c.args), kwargs=name(c.kwargs))
        for c in recording.calls
    ]
    guards = tuple(
        AnswerGuard(Ref(results[from_guards + i]), answer, line) for i, (_, answer, line) in enumerate(observer.guards)
    )
    kept = tuple(replace(one, value=name(one.value)) for one in recording.kept)
    outputs = tuple(one.mapped(name) for one in recording.outputs)
    return StepRecord(tuple(calls), loss, name(recording.returned), guards, kept, outputs)
