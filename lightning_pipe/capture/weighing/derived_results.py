"""Results that the whole batch makes, and its slices do not: `loss.exp()`, `logits.std(0)`, `logits[:3]`.

The mean of `exp(loss)` over micro-batches is not `exp` of the mean loss. So such a result is not combined from those of
slices: what it is made of is combined, and the operations of the step make it of that once more, for the whole batch.

    sources     means, sums and extremes over samples that nothing bends, values that no sample enters, and values with
                a few numbers for every sample, in which samples have not met
    operations  what lies between them and the result: `exp`, `clamp`, `std`, `topk`, what picks samples

Sizes among the operations are those of the whole batch, whose graph tells what is such a result: of few samples,
`logits[:8]` are all. A result that needs much of every sample, random numbers or a parameter itself stays what its
slices make of it. So does the loss, where samples meet in it: it is made as its gradients are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import fx

from lightning_pipe.capture.graphs.joint_graph import JointGraph
from lightning_pipe.capture.graphs.sample_flow import Flow, follow, leading_only_to, leading_to, size_function
from lightning_pipe.capture.graphs.sample_mixing import is_of_their_number, is_picked_by, is_placed, meets_others
from lightning_pipe.capture.graphs.value_roles import takes_size_as_number
from lightning_pipe.capture.operators import is_random, reads_size
from lightning_pipe.capture.slicing.results import Derived
from lightning_pipe.capture.stages.emit import Emitter
from lightning_pipe.capture.steps.stage_program import Half
from lightning_pipe.capture.torch_private import is_backward
from lightning_pipe.capture.weighing.batch_numbers import is_of_slice
from lightning_pipe.capture.weighing.whole_batches import unlike_said
from lightning_pipe.errors import CaptureError

_MOST_NUMBERS = 4096  # of a source, for every sample if it has samples: more is no result but data


def graph_of_batch(
    joint: JointGraph, total: int, retrace: Callable[[], JointGraph], prepared: Callable[[JointGraph], JointGraph]
) -> JointGraph | None:
    """Return the graph by which results of a batch are judged: of a few samples, `o[:8]` may look like all of them.

    Args:
        joint: the graph of some of its samples.
        total: samples of the batch; 0 if it is not cut.
        retrace: traces the same step for a batch of `total` samples.
        prepared: makes of that what `joint` is.

    Returns:
        The same graph if it holds for the batch too; else one that does, if there is one and it says the same.
    """
    if not total or not joint.fits(total):
        return joint
    try:
        found = prepared(retrace())
    except CaptureError:
        return None
    return found if _may_judge(found, joint, total) else None


def _may_judge(found: JointGraph, joint: JointGraph, total: int) -> bool:
    """Return whether a graph holds for a batch, and says what another one says of slices."""
    is_alike = len(found.results) == len(joint.results) and not unlike_said(joint.record, found.record, total)
    return is_alike and found.symbol is not None and not found.fits(total)


def with_sources(
    joint: JointGraph,
    flow: Flow,
    of_batch: JointGraph,
    device: torch.device,
    *,
    retrace: Callable[[], JointGraph] | None = None,
) -> tuple[JointGraph, Flow, tuple[Derived, ...]] | None:
    """Return a graph with the sources of such results among its results, what is known of it, and how these are made.

    Args:
        joint, flow: the graph, to which copies of leaves are added, and what is known of it.
        of_batch: the graph that holds for the whole batch.
        device: where results are made.
        retrace: traces the step for the whole batch: what divides by totals is made once more as it was traced.

    Returns:
        None if there are results which the batch does not make as parts of it do, and which have no sources.
    """
    judges = [_Judge(joint, flow, of_batch, device)]
    found: dict[str, _Parts] = {}
    for name in dict.fromkeys((joint.loss, *joint.results)):
        if name is None or any(judge.is_combined(name) for judge in judges):
            continue
        parts = next(filter(None, (judge.parts(name) for judge in judges)), None)
        if parts is None and name != joint.loss and retrace is not None and judges[0].divides_by_totals(name):
            traced, retrace = _traced(retrace, joint), None
            judges += [] if traced is None else [_Judge(joint, flow, traced, device)]
            parts = judges[-1].parts(name)
        if parts is not None:
            found[name] = parts
        elif name != joint.loss and not any(judge.is_alike(name) for judge in judges):
            return None
    needed = {own for parts in found.values() for own in parts.half.inputs}
    copies, derived = _copies(joint, sorted(needed & joint.leaves.keys())), []
    for name, parts in found.items():
        inputs = tuple(copies.get(source, source) for source in parts.half.inputs)
        derived.append(Derived(name, replace(parts.half, inputs=inputs), parts.line, has_parts=True))
    asked = len(joint.results) - len(joint.record.guards)  # questions are the last results
    new = dict.fromkeys(name for one in derived for name in one.half.inputs if name not in joint.results)
    joint = replace(joint, results=(*joint.results[:asked], *new, *joint.results[asked:]))
    roles = flow.roles | {copy: flow.roles[leaf] for leaf, copy in copies.items()}
    samples = flow.samples | {copy: flow.samples[leaf] for leaf, copy in copies.items()}
    later = leading_only_to(found.keys() - {joint.loss}, joint)
    coupled = {name: reason for name, reason in flow.coupled.items() if name not in later}
    return joint, replace(flow, roles=roles, samples=samples, coupled=coupled), tuple(derived)


def _traced(retrace: Callable[[], JointGraph], joint: JointGraph) -> JointGraph | None:
    """Return the step as it was traced for the whole batch; None if that does not say what `joint` says."""
    try:
        found = retrace()
    except CaptureError:
        return None
    return found if _may_judge(found, joint, found.samples) else None


def _copies(joint: JointGraph, leaves: Iterable[str]) -> dict[str, str]:
    """Add copies of leaves to a graph, and name them: a result is made by some stage."""
    nodes = {node.name: node for node in joint.module.graph.nodes}
    first = next(node for node in nodes.values() if node.op != "placeholder")
    found = {}
    for leaf in leaves:
        with joint.module.graph.inserting_before(first):
            copy = joint.module.graph.call_function(torch.ops.aten.clone.default, (nodes[leaf],))
        copy.meta["val"] = nodes[leaf].meta["val"]
        found[leaf] = copy.name
    return found


class _Judge:
    """Tell what slices of a batch do not make, and what that is made of.

    Args:
        joint, flow: the graph of a slice, and what is known of it.
        of_batch: a graph of the batch.
        device: where results are made.
    """

    def __init__(self, joint: JointGraph, flow: Flow, of_batch: JointGraph, device: torch.device) -> None:
        self._own, self._slice, self._joint = flow, joint, of_batch
        self._flow = flow if of_batch is joint else follow(of_batch)
        self._nodes = {node.name: node for node in of_batch.module.graph.nodes}
        self._bent = _bent(of_batch, self._flow)
        self._same = {name: name for name in self._nodes} if of_batch is joint else _same_values(of_batch, joint)
        results = zip((joint.loss, *joint.results), (of_batch.loss, *of_batch.results), strict=True)
        self._results = {name: self._nodes[whole] for name, whole in results if name is not None and whole is not None}
        self._loss = of_batch.loss
        self._emitter = Emitter(of_batch, repeated=frozenset(), device=device)

    def is_alike(self, name: str) -> bool:
        """Return whether slices make a result as the batch does."""
        return self._is_made_alike(name, self._results[name].name)

    def _is_made_alike(self, name: str, whole: str) -> bool:
        own, other = self._own, self._flow
        return own.roles.get(name) == other.roles.get(whole) and own.samples.get(name) == other.samples.get(whole)

    def divides_by_totals(self, name: str) -> bool:
        """Return whether a result is made of what was counted of the whole batch."""
        made_of = leading_to([self._results[name].name], self._joint)
        return any(self._joint.is_of_whole_batch(one) for one in made_of)

    def is_combined(self, name: str) -> bool:
        """Return whether results of slices make a result."""
        node = self._results[name]
        if node.name != self._loss and (_is_scattered(node, self._flow) or not self.is_alike(name)):
            return False
        return node.name not in self._bent

    def parts(self, name: str) -> _Parts | None:
        """Return what a result is made of; None if that cannot be combined from slices."""
        result = self._results[name]
        rows = 0 if result.name == self._loss else max(_MOST_NUMBERS, self._numbers_of_each(name))
        sources, operations, pending, constant = set[fx.Node](), {result}, [result], set[fx.Node]()
        while pending:
            node = pending.pop()
            if is_random(node) or node.op == "placeholder":
                return None
            for source in node.all_input_nodes:
                if source in constant or _is_constant(source):
                    constant.add(source)
                elif self._is_source(source, rows=rows):
                    sources.add(source)
                elif not self._may_be_between(source, rows=rows):
                    return None
                elif source not in operations:
                    operations.add(source)
                    pending.append(source)
        first = next(node for node in self._nodes.values() if node in operations)
        half = self._emitter.make((), inputs=sorted(node.name for node in sources), outputs=[result.name])
        half = replace(half, inputs=tuple(self._same[source] for source in half.inputs))
        return _Parts(half, str((first.meta.get("custom") or {}).get("line") or first.name))

    def _numbers_of_each(self, name: str) -> int:
        """Return how many numbers slices give of every sample; 0 if they give none of each."""
        value = next(node for node in self._slice.module.graph.nodes if node.name == name).meta.get("val")
        given = self._own.roles.get(name) == "cat" and isinstance(value, torch.Tensor)
        return math.prod(size_function(value, self._slice)(1)) if given else 0

    def _is_source(self, node: fx.Node, *, rows: int) -> bool:
        """Return whether slices of a batch have a small value that makes that of the batch.

        Args:
            node: of the graph of the batch.
            rows: the most numbers that it may have for every sample.
        """
        value, role, own = node.meta.get("val"), self._flow.roles.get(node.name, "same"), self._same.get(node.name)
        if not isinstance(value, torch.Tensor) or value.is_complex() or node.name in self._bent:
            return False
        if is_of_slice(node):
            return False
        if own is None or not self._is_made_alike(own, node.name):
            return False
        if role == "cat":
            return node.name in self._flow.samples and math.prod(size_function(value, self._joint)(1)) <= rows
        is_small = all(isinstance(size, int) for size in value.shape) and value.numel() <= _MOST_NUMBERS
        return node.op == "call_function" and is_small and (role != "same" or not _is_drawn(node))

    def _may_be_between(self, node: fx.Node, *, rows: int) -> bool:
        """Return whether a value that is no source may be made once more."""
        has_samples = self._flow.roles.get(node.name, "same") == "cat" or isinstance(node.meta.get("val"), tuple | list)
        return node.name in self._bent or is_of_slice(node) or (rows > 0 and has_samples)


@dataclass(frozen=True)
class _Parts:
    """What makes a result of the names of its sources, and the user's line of its first operation."""

    half: Half
    line: str


def _same_values(one: JointGraph, other: JointGraph) -> dict[str, str]:
    """Return the names of values of a graph that another graph makes by the same operations -> names there."""
    theirs = {history: name for name, history in _histories(other).items()}
    return {name: theirs[history] for name, history in _histories(one).items() if history in theirs}


def _histories(joint: JointGraph) -> dict[str, int]:
    """Return by name of a node what tells by which operations it is made of which inputs."""
    found: dict[str, int] = {}
    for node in joint.module.graph.nodes:
        if node.op != "call_function" or is_backward(node) or is_random(node):  # twice the same gives other numbers
            found[node.name] = hash((node.op, node.name))
            continue
        args = fx.map_arg((node.args, node.kwargs), lambda n: found[n.name])
        found[node.name] = hash((str(node.target), repr(args)))
    return found


def _bent(joint: JointGraph, flow: Flow) -> set[str]:
    """Name the values that slices do not make by rows, as a mean, a sum or an extreme, or only if something is idle."""
    found, met = set[str](), set[str]()  # in the latter, or before them, samples meet
    for node in joint.module.graph.nodes:
        role = flow.roles.get(node.name, "same")
        if role == "same" or is_backward(node):
            continue
        sources = {source.name for source in node.all_input_nodes if not is_picked_by(source, node)}
        if role == "cat":
            bends = meets_others(node, flow) or takes_size_as_number(node) or is_placed(node, flow)
            bends |= is_of_their_number(node, joint)
        else:
            bends = role in ("mixed", "linear") or node.name in flow.assumed
        if not sources.isdisjoint(met) or (role == "cat" and bends):
            met.add(node.name)
        if node.name in met or (  # a role that was given says what slices make, unless samples have met
            "role" not in node.meta and (bends or not sources.isdisjoint(found))
        ):
            found.add(node.name)
    return found


def _is_scattered(node: fx.Node, flow: Flow) -> bool:
    """Return whether a value has samples that lie in no rows of their own."""
    return flow.roles.get(node.name, "same") == "cat" and node.name not in flow.samples


def _is_constant(node: fx.Node) -> bool:
    """Return whether a value depends on nothing but sizes and constants of the graph."""
    return not any(one.op == "placeholder" or is_random(one) for one in _all_before(node))


def _is_drawn(node: fx.Node) -> bool:
    return any(map(is_random, _all_before(node)))


def _all_before(node: fx.Node) -> set[fx.Node]:
    """Return a node and all that it is computed from; sizes are computed from nothing."""
    found, pending = set[fx.Node](), [node]
    while pending:
        one = pending.pop()
        if one not in found:
            found.add(one)
            pending += [] if reads_size(one) else one.all_input_nodes
    return found
