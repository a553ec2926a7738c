"""Layers of published profiles: their times and bytes, and who reads whose output.

The readers of file formats make `Layers`; `published_graph` makes a graph of them. Indices of layers are positions
in `Layers.layers`.
"""

from __future__ import annotations

import dataclasses
import graphlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_pipe.errors import ProfileError


@dataclass(frozen=True)
class LayerOutput:
    """One tensor that a layer makes: its bytes per sample, and the layers that read it."""

    bytes_per_sample: float
    readers: tuple[int, ...]


@dataclass(frozen=True)
class Layer:
    """One layer.

    Attributes:
        name: unique name, without spaces.
        description: what the file says of it, e.g. `Conv2d_1_1`.
        forward_s, backward_s: seconds for each of the numbers of samples of the profile.
        parameter_bytes: bytes of its parameters.
        outputs: the tensors that it makes.
        stash_per_sample: bytes that it keeps from forward to backward beside its inputs, which layers keep too.
    """

    name: str
    description: str
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    parameter_bytes: int
    outputs: tuple[LayerOutput, ...]
    stash_per_sample: float = 0.0

    @property
    def works_backward(self) -> bool:
        """Return whether it has parameters or takes time in backward; a first layer that does not is an input."""
        return self.parameter_bytes > 0 or any(self.backward_s)


@dataclass(frozen=True)
class Layers:
    """A published model.

    Attributes:
        layers: the layers, each before those that read its outputs.
        samples: numbers of samples for which times were taken, rising.
        update_s_per_byte: seconds of the optimizer step per byte of parameters, if the file says it.
    """

    layers: tuple[Layer, ...]
    samples: tuple[int, ...]
    update_s_per_byte: float = 0.0

    @property
    def sources(self) -> tuple[tuple[int, ...], ...]:
        """Return for every layer those whose outputs it reads, each once, in order."""
        found: list[dict[int, None]] = [{} for _ in self.layers]
        for position, layer in enumerate(self.layers):
            for output in layer.outputs:
                for reader in output.readers:
                    found[reader][position] = None
        return tuple(tuple(positions) for positions in found)

    @property
    def differentiated(self) -> tuple[bool, ...]:
        """Return for every layer whether its outputs have a gradient.

        They have one where the layer, or one that it depends on, has parameters or takes time in backward: as autograd
        decides it, so that no gradient flows to inputs and masks.
        """
        found: list[bool] = []
        for layer, sources in zip(self.layers, self.sources, strict=True):
            found.append(layer.works_backward or any(found[source] for source in sources))
        return tuple(found)

    @property
    def kept(self) -> tuple[float, ...]:
        """Return for every layer the bytes per sample of its outputs that readers keep for their backward."""
        differentiated = self.differentiated
        return tuple(
            sum(output.bytes_per_sample for output in layer.outputs if any(differentiated[r] for r in output.readers))
            for layer in self.layers
        )


def in_order(layers: Sequence[Layer], *, source: str) -> tuple[Layer, ...]:
    """Return layers such that each stands before its readers; as they are given if that is so already.

    Otherwise inputs come first, since the first stage loads the batch, and then one chain after the other: after a
    layer comes a reader of its output, until one has to wait for another branch. So few values cross a cut.

    Raises:
        ProfileError: if layers read each other in a circle.
    """
    waiting: list[set[int]] = [set() for _ in layers]
    for position, layer in enumerate(layers):
        for output in layer.outputs:
            for reader in output.readers:
                waiting[reader].add(position)
    _check_circles(layers, waiting, source=source)
    if all(other < position for position, others in enumerate(waiting) for other in others):
        return tuple(layers)
    ready = [position for position, others in enumerate(waiting) if not others]
    ready.sort(key=lambda position: (not layers[position].works_backward, -position))  # the last is taken first
    order: list[int] = []
    while ready:
        position = ready.pop()
        order.append(position)
        readers = dict.fromkeys(reader for output in layers[position].outputs for reader in output.readers)
        for reader in reversed(readers):
            waiting[reader].discard(position)
            if not waiting[reader]:
                ready.append(reader)
    return _permuted(layers, order)


def _check_circles(layers: Sequence[Layer], waiting: Sequence[set[int]], *, source: str) -> None:
    try:
        graphlib.TopologicalSorter(dict(enumerate(waiting))).prepare()
    except graphlib.CycleError as error:
        circle = " -> ".join(layers[position].name for position in error.args[1])
        raise ProfileError(
            f"{source}: found layers {circle} that read each other's outputs in a circle; expected edges without one."
        ) from None


def _permuted(layers: Sequence[Layer], order: Sequence[int]) -> tuple[Layer, ...]:
    place = {position: k for k, position in enumerate(order)}
    return tuple(
        dataclasses.replace(
            layers[position],
            outputs=tuple(
                LayerOutput(output.bytes_per_sample, tuple(sorted(place[reader] for reader in output.readers)))
                for output in layers[position].outputs
            ),
        )
        for position in order
    )


def with_saved(layers: Layers, saved_per_sample: float, *, source: str) -> Layers:
    """Return layers that together keep this many bytes per sample from forward to backward, on one device.

    Formula:
        stash of a layer = (saved - outputs that layers keep as their inputs) x its outputs / outputs of all layers

    over the layers with a gradient. Left out: that kinds of layers differ in what they keep beside their inputs.

    Raises:
        ProfileError: if it is less than the inputs that layers keep.
    """
    kept = sum(layers.kept)
    made = [
        sum(output.bytes_per_sample for output in layer.outputs) * has_gradient
        for layer, has_gradient in zip(layers.layers, layers.differentiated, strict=True)
    ]
    rest = saved_per_sample - kept
    if rest < 0 or not sum(made):
        raise ProfileError(
            f"{source}: saved_bytes_per_sample is {saved_per_sample:g}, but the inputs that layers keep for their "
            f"backward are {kept:g} bytes per sample already. Pass at least that, or leave it out."
        )
    return _with_stashes(layers, [rest * count / sum(made) for count in made])


def with_kept(layers: Layers, kept_per_sample: Mapping[str, float]) -> Layers:
    """Return layers of which each keeps this many bytes per sample, where the outputs that others keep are its own.

    Formula:
        stash of a layer = what it keeps - its outputs that readers keep, at least 0

    so that a stage keeps what its layers keep, and what it is given instead of what it gives.

    Args:
        layers: the layers.
        kept_per_sample: bytes by name of the layer.
    """
    pairs = zip(layers.layers, layers.kept, strict=True)
    return _with_stashes(layers, [max(0.0, kept_per_sample[layer.name] - kept) for layer, kept in pairs])


def _with_stashes(layers: Layers, stashes: Sequence[float]) -> Layers:
    pairs = zip(layers.layers, stashes, strict=True)
    return dataclasses.replace(
        layers, layers=tuple(dataclasses.replace(layer, stash_per_sample=stash) for layer, stash in pairs)
    )


def unique_names(wanted: Sequence[str]) -> tuple[str, ...]:
    """Make names of what files call their layers: `_` for what is no letter or digit, a number where names repeat."""
    plain = [re.sub(r"\W+", "_", name).strip("_") or "node" for name in wanted]
    plain = [f"node{name}" if name.isdigit() else name for name in plain]
    counts = Counter(plain)
    return tuple(name if counts[name] == 1 else f"{name}.{k}" for k, name in enumerate(plain))
