"""Graph and profile of published layers, as a capture would have made them.

Every layer is one node with two operations, forward and backward; backward makes the gradients of its inputs and of its
parameters at once. So a stage has no weight half (W) except where no gradient leaves it, as in the first.

    output of a layer    made by its forward, read by forward and backward of its readers, so that a stage keeps a_{i-1}
                         for each of its layers i (after MadPipe)
    gradient of it       as big; the last reader hands it to the reader before, which adds its own, and so on to the
                         layer: as captured graphs do, where a sum of gradients sits where its earliest term is
    stash                made by forward, read by the backward of the same layer: to drop it and run forward again is
                         recomputation of the layer
    parameters           one for each layer that has any; backward makes its gradient

Seconds are proportional to samples where a file has them for one number of samples only. Left out: what the formats
leave out (`published`), results of the step, and fields of the batch that the file does not list among its layers.

Legend: n layers; the forward of layer k is operation k, its backward is operation 2n - 1 - k.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter

from lightning_pipe.core.graph import Graph, Node, Operation, Tensor
from lightning_pipe.core.profile import OptimizerProfile, Profile
from lightning_pipe.profiles.published_layers import Layer, Layers

_NO_BASE = -1
_BATCH = 0  # index of the tensor that stands for the batch


def graph_of(layers: Layers, *, fingerprint: str) -> Graph:
    """Return the graph of published layers."""
    return _Drawing(layers).graph(fingerprint)


def profile_of(layers: Layers, *, fingerprint: str, device: str, optimizer_state: float) -> Profile:
    """Return the profile that belongs to the graph of published layers."""
    forward = [layer.forward_s for layer in layers.layers]
    backward = [layer.backward_s for layer in reversed(layers.layers)]
    optimizer = OptimizerProfile(layers.update_s_per_byte, state_bytes_per_byte=optimizer_state)
    return Profile(
        fingerprint,
        device,
        layers.samples,
        (*forward, *backward),
        source="published",
        optimizer=optimizer,
    )


def stash_of(layer: str) -> str:
    """Return the name of the tensor that stands for what a layer saves."""
    return f"{layer}.stash"


class _Drawing:
    """The graph under construction: its tensors, and what every operation reads."""

    def __init__(self, layers: Layers) -> None:
        self._model, self._layers = layers, layers.layers
        self._differentiated = layers.differentiated
        count = len(self._layers)
        self._reads: list[list[int]] = [[] for _ in range(2 * count)]
        self._receivers: list[list[int]] = [[] for _ in self._layers]  # to whom the backward of a layer hands gradients
        self._tensors: list[Tensor] = []
        self._gradients: list[tuple[int, str]] = []
        self._add_batch()
        for k, layer in enumerate(self._layers):
            self._add_outputs(k, layer)
        for k, layer in enumerate(self._layers):
            if self._differentiated[k]:
                self._add_stash(k, layer)
                self._add_gradients(k, layer)

    def _backward(self, k: int) -> int:
        return 2 * len(self._layers) - 1 - k

    def _add(self, name: str, maker: int, *, per_sample: float = 0.0, fixed: int = 0, base: int = _NO_BASE) -> int:
        self._tensors.append(Tensor(name, maker, base, per_sample, fixed))
        return len(self._tensors) - 1

    def _add_batch(self) -> None:
        """Add what the first layer reads: its own outputs if it is an input, otherwise nothing that the file states."""
        first = self._layers[0]
        size = sum(output.bytes_per_sample for output in first.outputs) if not first.works_backward else 0.0
        self._reads[0].append(self._add("batch", -1, per_sample=size))

    def _add_outputs(self, k: int, layer: Layer) -> None:
        base = _BATCH if k == 0 and not layer.works_backward else _NO_BASE
        for i, output in enumerate(layer.outputs):
            made = self._add(f"{layer.name}.output{i}", k, per_sample=output.bytes_per_sample, base=base)
            for reader in output.readers:
                self._reads[reader].append(made)
                if self._differentiated[reader]:
                    self._reads[self._backward(reader)].append(made)

    def _add_stash(self, k: int, layer: Layer) -> None:
        if layer.stash_per_sample:
            made = self._add(stash_of(layer.name), k, per_sample=layer.stash_per_sample)
            self._reads[self._backward(k)].append(made)

    def _add_gradients(self, k: int, layer: Layer) -> None:
        for i, output in enumerate(layer.outputs):
            chain = [*sorted(output.readers, reverse=True), k]
            for giver, taker in itertools.pairwise(chain):
                name = f"{layer.name}.output{i}.gradient{giver}"
                made = self._add(name, self._backward(giver), per_sample=output.bytes_per_sample)
                self._reads[self._backward(taker)].append(made)
                self._receivers[giver].append(taker)
        if layer.parameter_bytes:
            made = self._add(f"{layer.name}.parameters.gradient", self._backward(k), fixed=layer.parameter_bytes)
            self._gradients.append((made, _parameters(layer)[0]))

    def _reaches(self) -> list[int]:
        """Return for every layer the smallest position to which its gradients flow, through other layers too."""
        found: list[int] = []
        for k, receivers in enumerate(self._receivers):
            found.append(min((found[taker] for taker in receivers), default=k))
        return found

    def graph(self, fingerprint: str) -> Graph:
        layers, samples = self._layers, self._model.samples[-1]
        descriptions = Counter(layer.description for layer in layers)
        sources = self._model.sources
        return Graph(
            nodes=tuple(
                Node(
                    name=layer.name,
                    op=layer.description,
                    module=layer.description if _is_module(layer) and descriptions[layer.description] == 1 else "",
                    line="",
                    inputs=tuple(layers[source].name for source in sources[k]),
                    parameters=_parameters(layer),
                    output_bytes=round(sum(output.bytes_per_sample for output in layer.outputs) * samples),
                    flops=0,
                    backward_flops=0,
                    touched_bytes=0,
                )
                for k, layer in enumerate(layers)
            ),
            samples=samples,
            parameter_bytes={name: layer.parameter_bytes for layer in layers for name in _parameters(layer)},
            fingerprint=fingerprint,
            operations=self._operations(),
            tensors=tuple(self._tensors),
            gradients=tuple(self._gradients),
        )

    def _operations(self) -> tuple[Operation, ...]:
        reads = [tuple(dict.fromkeys(found)) for found in self._reads]
        forward = [
            Operation(layer.name, layer.description, "forward", k, k, reads[k], _parameters(layer))
            for k, layer in enumerate(self._layers)
        ]
        backward = [
            Operation(
                f"{layer.name}.backward",
                layer.description,
                "backward",
                k,
                reach,
                reads[self._backward(k)],
                _parameters(layer),
            )
            for k, (layer, reach) in enumerate(zip(self._layers, self._reaches(), strict=True))
        ]
        return (*forward, *reversed(backward))


def _parameters(layer: Layer) -> tuple[str, ...]:
    return (f"{layer.name}.parameters",) if layer.parameter_bytes else ()


def _is_module(layer: Layer) -> bool:
    """Return whether the description can stand for a module in a plan: a word that is not the name already."""
    return layer.description != layer.name and re.fullmatch(r"[\w-]+", layer.description) is not None
