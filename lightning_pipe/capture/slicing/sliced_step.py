"""A step that was traced for all samples of a batch, as micro-batches run it.

What the step gives (loss, logged and returned values, answers, the new content of buffers) is that of the batch:

    rows     of every sample      put together
    terms                         added
    the rest                      made once more of these when all micro-batches are there (`results`)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from lightning_pipe.capture import torch_private as private
from lightning_pipe.capture.graphs.declared_shapes import misshapen
from lightning_pipe.capture.graphs.joint_graph import JointGraph
from lightning_pipe.capture.graphs.sample_flow import BATCH_STATISTICS, UNKNOWN_MIXING, Flow, SampleRows
from lightning_pipe.capture.operators import is_random, takes_batch_statistics
from lightning_pipe.capture.slicing.microbatch_graph import InputValue, MicrobatchGraph, WaitsForAllError
from lightning_pipe.capture.slicing.placement import LOCAL, TERMS, WHOLE, Placement, Rows
from lightning_pipe.capture.slicing.results import AfterAll, LateValue, SlicedHead, line_of
from lightning_pipe.capture.slicing.slicing import Slicing
from lightning_pipe.capture.slicing.whole_batch import of_whole_batch
from lightning_pipe.capture.stages.emit import Emitter
from lightning_pipe.capture.steps.record import LogCall, Read, Ref, StepRecord
from lightning_pipe.capture.steps.stage_program import Combine, Half, RandomKey
from lightning_pipe.capture.steps.trees import mapped
from lightning_pipe.core.graph import HeadWork

_ROLES: Mapping[Placement, Combine] = {TERMS: "sum", WHOLE: "same", LOCAL: "mean"}


@dataclass(frozen=True)
class SlicedStep:
    """A step as micro-batches run it.

    Attributes:
        joint: the graph of a micro-batch.
        flow: how its values make those of the batch.
        late_values: results that are made when all micro-batches are there.
        batch: what is computed where the batch is loaded; None if nothing is.
        whole: the graph of the whole batch.
        by_parts: lines of results that are means over micro-batches.
        head: what runs once per batch, as planners see it; None if nothing does.
    """

    joint: JointGraph
    flow: Flow
    late_values: tuple[LateValue, ...]
    batch: ValuesOfBatch | None
    whole: JointGraph
    by_parts: tuple[str, ...]
    head: HeadWork | None


@dataclass(frozen=True)
class ValuesOfBatch:
    """Values that the batch alone tells, which stages read like more tensors of it.

    Attributes:
        half: makes them of tensors of the batch and of buffers, for all samples.
        values: which they are.
        leaves: input of `half` -> index of the tensor of the batch.
        buffers: input of `half` -> name of the buffer.
        batch_dim: dimension of the samples in tensors of the batch.
    """

    half: Half
    values: tuple[InputValue, ...]
    leaves: Mapping[str, int]
    buffers: Mapping[str, str]
    batch_dim: int

    def of(
        self, tensors: Sequence[Any], buffers: Mapping[str, torch.Tensor], *, samples: int, key: RandomKey
    ) -> list[torch.Tensor]:
        """Return the values for a batch.

        Args:
            tensors: of the batch.
            buffers: by name.
            samples: of the batch.
            key: of the random numbers of the batch.
        """
        given = [tensors[self.leaves[n]] if n in self.leaves else buffers[self.buffers[n]] for n in self.half.inputs]
        with torch.no_grad():
            made = dict(zip(self.half.outputs, self.half.run(samples, key.of_batch, *given), strict=True))
        return [self._laid_out(made[value.source], value.rows, samples) for value in self.values]

    def _laid_out(self, value: Any, rows: Rows | None, samples: int) -> torch.Tensor:
        """Put the samples of a value that is cut where tensors of the batch have theirs."""
        tensor: torch.Tensor = value if rows is None else rows.blocks(value, samples)[(None,) * self.batch_dim]
        return tensor


def sliced(
    joint: JointGraph, *, samples: int, total: int, batch_dim: int, device: torch.device, whole_batch: str = "exact"
) -> SlicedStep | str:
    """Return a step as micro-batches run it; in words, what needs all samples where micro-batches take their own.

    Args:
        joint: the graph of the batch, or of any number of samples.
        samples: of a micro-batch, by which the graph is priced.
        total: samples of the batch.
        batch_dim: dimension of the samples in tensors of the batch.
        device: where results are made.
        whole_batch: what happens where gradients need all samples, as the option says.
    """
    uncut: tuple[str, ...] = ()  # operations whose rules are wrong about sizes
    while True:  # ends: an operation that is not cut has the shape that was traced
        slicing = Slicing(of_whole_batch(joint), total, batch_dim=batch_dim, once=uncut)
        if slicing.barrier and whole_batch == "by_microbatch":
            return f"{line_of(slicing.barrier)} needs all samples of the batch"
        if whole_batch == "auto" and any(slicing.is_layer(node) for node in slicing.head):
            assert slicing.barrier is not None, "the head waits"
            return f"{line_of(slicing.barrier)} needs all samples of the batch in the middle of the model"
        try:
            return _sliced(slicing, joint, samples=samples, batch_dim=batch_dim, device=device)
        except WaitsForAllError as late:
            return f"{line_of(late.node)} needs more than the forwards of all micro-batches"
        except _MisshapenError as wrong:
            if wrong.name in uncut or wrong.name not in {node.name for node in slicing.operations}:
                raise
            uncut = (*uncut, wrong.name)


class _MisshapenError(Exception):
    """An operation of a micro-batch has another shape than its rule says."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def _sliced(slicing: Slicing, joint: JointGraph, *, samples: int, batch_dim: int, device: torch.device) -> SlicedStep:
    whole, total = slicing.joint, slicing.samples
    by_name = {node.name: node for node in whole.module.graph.nodes}
    build = MicrobatchGraph(slicing, samples=samples, batch_dim=batch_dim)
    after = AfterAll(slicing, build, device)
    results = {name: after.result(name) for name in dict.fromkeys(whole.results)}
    loss = None if whole.loss is None else after.loss(whole.loss)
    combine: dict[str, Combine] = {}
    mutations: dict[str, fx.Node] = {}
    for state, new in whole.mutations.items():
        once = build.once(new)
        placement = slicing.placements[build.nodes[new]]
        if once is not None:
            mutations[state] = once
        elif placement is LOCAL:
            mutations[state] = build.local(by_name[new])
        elif placement is TERMS:
            mutations[state] = build.mean(new)
            combine[mutations[state].name] = "mean"
        elif not after.state(state, new):
            raise WaitsForAllError(by_name[new])
    gradients = tuple((build.term(name), parameter) for name, parameter in whole.gradients)
    asked = len(whole.results) - len(joint.record.guards)  # questions are the last results
    head = SlicedHead(slicing, build, mutations)
    listed = [*dict.fromkeys(node for name in whole.results[:asked] for node in results[name])]
    listed += [node for node in after.sources if node not in listed]
    questions = [node for name in whole.results[asked:] for node in results[name]]
    outputs = [
        *listed,
        *questions,
        *head.inputs,
        *mutations.values(),
        *(node for node, _ in gradients),
        *([loss] if loss else []),
    ]
    build.graph.output(tuple(outputs))
    values = _without_unused(build)
    names = {old: after.names[new] for old, new in zip(joint.results, whole.results, strict=True)}
    loss_name = None if whole.loss is None else whole.loss if loss is None else loss.name
    names |= {joint.loss: loss_name} if joint.loss and loss_name else {}
    of_batch = _values_of_batch(whole, values, batch_dim=batch_dim, device=device)
    first = max(joint.leaves.values(), default=-1) + 1
    cut = replace(
        joint,
        module=private.HeldGraphModule(whole.module, build.graph),
        leaves={**joint.leaves, **{value.name: first + at for at, value in enumerate(values)}},
        loss=loss_name,
        loss_dtype=None if whole.loss is None else by_name[whole.loss].meta["val"].dtype,
        results=(*dict.fromkeys(node.name for node in [*listed, *questions]),),
        mutations={state: node.name for state, node in mutations.items()},
        gradients=tuple((node.name, parameter) for node, parameter in gradients),
        symbol=build.symbol,
        samples=samples,
        record=_renamed(joint.record, names),
        head=head.half(device),
        batch_symbol=build.total,
        batch_samples=total,
        batch_buffers=frozenset() if of_batch is None else frozenset(of_batch.buffers),
        conditions=(),
    )
    if wrong := misshapen(cut, whole):
        raise _MisshapenError(wrong)
    flow = _flow(cut, build, slicing, combine)
    return SlicedStep(cut, flow, after.late_values, of_batch, whole, tuple(after.by_parts), head.work)


def _without_unused(build: MicrobatchGraph) -> tuple[InputValue, ...]:
    """Remove operations that nothing reads; return the values of the batch that are left."""
    for node in reversed([*build.graph.nodes]):
        if not node.users and node.op == "call_function":
            build.graph.erase_node(node)
    used = {node.name: node for node in build.graph.nodes if node.op == "placeholder" and node.users}
    for node in [*build.graph.nodes]:
        if node.name in {value.name for value in build.batch_values} - used.keys():
            build.graph.erase_node(node)
    return tuple(value for value in build.batch_values if value.name in used)


def _values_of_batch(
    whole: JointGraph, values: Sequence[InputValue], *, batch_dim: int, device: torch.device
) -> ValuesOfBatch | None:
    if not values:
        return None
    sources = [*dict.fromkeys(value.source for value in values)]
    emitter = Emitter(whole, repeated=frozenset(), device=device)
    given = emitter.inputs_behind(sources)
    half = emitter.make((), inputs=given, outputs=sources)
    leaves = {name: whole.leaves[name] for name in given if name in whole.leaves}
    buffers = {name: whole.buffers[name] for name in given if name in whole.buffers}
    return ValuesOfBatch(half, tuple(values), leaves, buffers, batch_dim)


def _flow(joint: JointGraph, build: MicrobatchGraph, slicing: Slicing, combine: Mapping[str, Combine]) -> Flow:
    known: dict[str, Combine] = {}
    samples: dict[str, SampleRows] = {}
    for node in joint.module.graph.nodes:
        placement = build.placements.get(node.name, WHOLE)
        known[node.name] = "cat" if isinstance(placement, Rows) else _ROLES[placement]
        if isinstance(placement, Rows):
            samples[node.name] = SampleRows(placement.dim, placement.per_sample, placement.outer)
    statistics = (node for node in slicing.operations if takes_batch_statistics(node) and _is_local(slicing, node))
    coupled = {node.name: BATCH_STATISTICS for node in statistics}
    if coupled:  # no layout changes what such a step draws: its replicas share no samples there either
        coupled |= {node.name: UNKNOWN_MIXING for node in slicing.operations if is_random(node)}
    return Flow({**known, **combine}, samples, coupled, "same" if joint.loss is None else "sum")


def _is_local(slicing: Slicing, node: fx.Node) -> bool:
    """Return whether a batch norm takes the statistics of a micro-batch."""
    placement, operation = slicing.placements[node], slicing.operations[node]
    return operation.trains and isinstance(placement, tuple) and LOCAL in placement


def _renamed(record: StepRecord, names: Mapping[str, str]) -> StepRecord:
    """Return what a step said, with other names of its values."""

    def named(value: Any) -> Any:
        return mapped(value, (Ref, Read), lambda one: replace(one, name=names.get(one.name, one.name)))

    calls = tuple(
        replace(one, value=named(one.value), kwargs=named(one.kwargs))
        if isinstance(one, LogCall)
        else replace(one, args=named(one.args), kwargs=named(one.kwargs))
        for one in record.calls
    )
    guards = tuple(replace(one, ref=named(one.ref)) for one in record.guards)
    kept = tuple(replace(one, value=named(one.value)) for one in record.kept)
    loss = None if record.loss is None else names[record.loss]
    outputs = tuple(one.mapped(named) for one in record.outputs)
    returned = named(record.returned)
    return replace(record, calls=calls, loss=loss, returned=returned, guards=guards, kept=kept, outputs=outputs)
