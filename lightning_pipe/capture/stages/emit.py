"""Code generation: a set of nodes of a joint graph becomes a function that runs at eager speed.

The nodes are copied, in order, into an fx graph whose Python code frees every value after its last use. Sizes become
functions of the number of samples, random nodes draw from their key.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import sympy
import torch
from torch import fx

from lightning_pipe.capture.graphs.joint_graph import JointGraph
from lightning_pipe.capture.graphs.value_sizes import Sizes
from lightning_pipe.capture.operators import RUN_AS, is_random, reads_size
from lightning_pipe.capture.steps.keyed_random import keyed, undisturbed
from lightning_pipe.capture.steps.stage_program import Code, Give, Half, RandomKey, Streamed

NOTHING: Mapping[str, Any] = MappingProxyType({})


class Emitter:
    """Make functions from nodes of one joint graph.

    Args:
        joint: the graph.
        repeated: nodes that every function computes itself.
        device: where random nodes draw.

    Attributes:
        sizes: of the values of the graph.
    """

    def __init__(self, joint: JointGraph, *, repeated: frozenset[str], device: torch.device) -> None:
        self._joint = joint
        self._nodes = {node.name: node for node in joint.module.graph.nodes}
        self._order = {name: position for position, name in enumerate(self._nodes)}
        self._repeated = repeated
        self._device = device
        self.sizes = Sizes(joint)
        self._random = {
            n.name: n.meta.get("draw", i) for i, n in enumerate(filter(is_random, joint.module.graph.nodes))
        }

    def inputs_of(self, names: Sequence[str]) -> set[str]:
        """Return the names that these nodes read, with repeated nodes replaced by what those read."""
        found: set[str] = set()
        real = (name for name in names if not self._is_size_of_input(name))
        pending = [n.name for name in real for n in self._nodes[name].all_input_nodes]
        while pending:
            name = pending.pop()
            if name in found:
                continue
            if name in self._repeated:
                if not self._is_size_of_input(name):
                    pending.extend(n.name for n in self._nodes[name].all_input_nodes)
            else:
                found.add(name)
        return found

    def _is_size_of_input(self, name: str) -> bool:
        return reads_size(self._nodes[name])

    def inputs_behind(self, names: Iterable[str]) -> list[str]:
        """Return the inputs of the graph that these values are computed from, in its order."""
        pending, seen = [self._nodes[name] for name in names], set[fx.Node]()
        while pending:
            node = pending.pop()
            if node not in seen:
                seen.add(node)
                pending += [] if reads_size(node) else node.all_input_nodes
        return sorted((node.name for node in seen if node.op == "placeholder"), key=self._order.__getitem__)

    def in_order(self, names: Iterable[str], outputs: Sequence[str] = ()) -> list[str]:
        """Return nodes, and the repeated ones that a function needs which computes these, in the graph's order."""
        names = set(names)
        return sorted(names | self.repeated_by(names, outputs), key=self._order.__getitem__)

    def make(
        self,
        names: Sequence[str],
        *,
        inputs: Sequence[str],
        outputs: Sequence[str],
        copied: Mapping[str, str] = NOTHING,
        given: Mapping[str, tuple[str, ...]] = NOTHING,
    ) -> Half:
        """Return the function that computes the nodes `names` from `inputs` and returns `outputs`.

        Args:
            names: nodes to compute, in this order; what they need of repeated nodes that are not among them, and of
                sizes, comes just before they read it.
            inputs: values to be given, in order.
            outputs: values to be returned, in order; nodes, or keys of `copied`.
            copied: output name -> input of which it is a copy (state that is overwritten after the function).
            given: canonical name of a parameter -> outputs that are the terms of its gradient, and can be given away.
        """
        graph = fx.Graph()
        samples, key = graph.placeholder("samples"), graph.placeholder("key")
        give = graph.placeholder("give") if given else None
        parameter_of = {term: name for name, terms in given.items() for term in terms}
        gone: dict[str, tuple[str, ...]] = {}  # what is given away, in this order
        made: dict[str, fx.Node] = {name: self._noted(graph.placeholder(name), name) for name in inputs}
        for output, source in copied.items():
            made[output] = self._noted(graph.call_function(torch.ops.aten.clone.default, (made[source],)), source)

        def compute(name: str) -> None:
            if name in made:
                return
            node = self._nodes[name]
            if not self._is_size_of_input(name):
                for read in node.all_input_nodes:
                    compute(read.name)
            made[name] = self._noted(self._copy(node, graph, made, samples, key), name)
            if give is not None and name in parameter_of:
                terms = given[parameter_of[name]]
                if all(term in made for term in terms):
                    graph.call_function(_call, (give, parameter_of[name], *(made[term] for term in terms)))
                    gone[parameter_of[name]] = terms

        for name in (*names, *outputs):
            compute(name)
        rest = tuple(name for name in outputs if name not in parameter_of)
        graph.output(tuple(made[name] for name in rest))
        module = fx.GraphModule(self._joint.module, graph, class_name="Stage")
        run: Callable[..., Any] = module.forward
        if any(name in self._random for name in names):
            run = functools.partial(undisturbed_run, run, self._device)
        of_batch = any(isinstance(node.target, SizeOfBatch) for node in graph.nodes)
        code = Code(module, self.sizes.form, self._joint.batch_samples if of_batch else 0)
        if give is None:
            return Half(tuple(inputs), tuple(outputs), run, code=code)
        streamed = Streamed(gone, rest, run)
        return Half(tuple(inputs), tuple(outputs), streamed.collected(tuple(outputs)), streamed=streamed, code=code)

    def _noted(self, copy: fx.Node, name: str) -> fx.Node:
        """Let the node of a function say what its value is; that of the number of samples has none of its own."""
        copy.meta.setdefault("val", self._nodes[name].meta.get("val"))
        return copy

    def repeated_by(self, names: Iterable[str], outputs: Sequence[str] = ()) -> set[str]:
        """Return the repeated nodes that a function which computes these nodes, and returns these, computes too."""
        names = set(names)
        found: set[str] = {name for name in outputs if name in self._repeated}
        pending = [n.name for name in names | found for n in self._nodes[name].all_input_nodes]
        while pending:
            name = pending.pop()
            if name in self._repeated and name not in found:
                found.add(name)
                if not self._is_size_of_input(name):
                    pending.extend(n.name for n in self._nodes[name].all_input_nodes)
        return found

    def _copy(
        self, node: fx.Node, graph: fx.Graph, made: dict[str, fx.Node], samples: fx.Node, key: fx.Node
    ) -> fx.Node:
        if reads_size(node):
            return self._size(node, graph, samples, key)
        if node.op == "get_attr":
            return graph.get_attr(str(node.target))
        args = fx.map_arg(node.args, lambda n: made[n.name])
        kwargs = fx.map_arg(node.kwargs, lambda n: made[n.name])
        operation: Any = node.target
        if node.name in self._random:
            target = keyed(operation, self._random[node.name], self._device, by_batch="of_batch" in node.meta)
            return graph.create_node("call_function", target, (key, *args), kwargs, name=node.name)
        return graph.create_node("call_function", RUN_AS.get(operation, operation), args, kwargs, name=node.name)

    def _size(self, node: fx.Node, graph: fx.Graph, samples: fx.Node, key: fx.Node) -> fx.Node:
        value = node.meta["val"]
        if isinstance(value, int):
            return graph.call_function(_constant(value), (samples,), name=node.name)
        expression, joint = value.node.expr, self._joint
        if expression == joint.symbol:
            return samples
        if joint.batch_symbol in expression.free_symbols:
            return graph.call_function(SizeOfBatch(expression, joint), (samples, key), name=node.name)
        return graph.call_function(_expression(expression, joint.symbol), (samples,), name=node.name)


def _call(give: Give, name: str, *terms: torch.Tensor) -> None:
    """Give the terms of a gradient away, in the midst of a function."""
    give(name, *terms)


def gives(node: fx.Node) -> bool:
    """Return whether a node of a function gives a gradient away."""
    return node.target is _call


def undisturbed_run(run: Callable[..., Any], device: torch.device, *args: Any) -> Any:
    """Run a function that draws random numbers, and give the generators their states back."""
    with undisturbed(device):
        return run(*args)


class SizeOfBatch:
    """A number that depends on how many samples a batch has, and perhaps on how many of them a micro-batch has.

    Args:
        expression: over the symbols of a graph.
        joint: the graph.
    """

    def __init__(self, expression: sympy.Basic, joint: JointGraph) -> None:
        self._expression, self._joint = expression, joint
        self.__name__ = "size_of_batch"
        self.__module__ = __name__
        self._known: dict[tuple[int, int], int | float] = {}

    def __call__(self, samples: int, key: RandomKey | None) -> int | float:
        """Return the number for so many samples of a batch that the key tells of."""
        return self.at(samples, 0 if key is None else key.batch_samples)

    def at(self, samples: int, batch_samples: int = 0) -> int | float:
        """Return the number; 0 samples of the batch stand for as many as the graph was captured with."""
        where = samples, batch_samples
        if where not in self._known:
            value = self._joint.at(self._expression, samples, batch_samples=batch_samples)
            self._known[where] = int(value) if value.is_Integer and self._expression.is_integer else float(value)
        return self._known[where]


def _constant(value: int) -> Callable[[int], int]:
    def constant(samples: int) -> int:
        return value

    return constant


def _expression(expression: Any, symbol: Any) -> Callable[[int], int]:
    @functools.cache
    def size(samples: int) -> int:
        return int(expression.xreplace({symbol: sympy.Integer(samples)}))

    size.__name__ = "size"
    return size
