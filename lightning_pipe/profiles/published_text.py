"""PipeDream and DAPPLE profiles: text, with a line for every layer and every edge.

    node4 -- Conv -- forward_compute_time=1.5, backward_compute_time=3.0, activation_size=64.0, parameter_size=8.0
    <tab>node4 -- node5

Milliseconds and bytes, for all samples of the profile. Edges are indented, by a tab in PipeDream's files, by any white
space in DAPPLE's. Partitioned files end the line of a layer with `-- stage_id=0`, which is not used. Where a layer has
several outputs (`activation_size=[a; b]`), and as many readers, each reader reads one of them, in the order of the
edges: DAPPLE's files of AmoebaNet mean that. Otherwise all readers read all of them, as PipeDream's own reader has it.
A layer that reads nothing and is described as `Input...` takes no time: what the file states is the loading of data,
which PipeDream's own optimizer strikes out too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from lightning_pipe.errors import ProfileError
from lightning_pipe.profiles.published_layers import Layer, LayerOutput, Layers, in_order, unique_names

_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_MILLISECOND = 1e-3
_LINE_OF_LAYER = f"`id -- description -- {', '.join(f'{field}=...' for field in _FIELDS)}`"


@dataclass(frozen=True)
class _Line:
    """A line with its place, for errors."""

    place: str
    text: str

    def error(self, found: str, expected: str) -> ProfileError:
        return ProfileError(f"{self.place}: found {found}; expected {expected}.")


@dataclass(frozen=True)
class _Entry:
    """The line of a layer, taken apart."""

    description: str
    forward_ms: float
    backward_ms: float
    output_bytes: tuple[float, ...]
    parameter_bytes: float

    @property
    def is_input(self) -> bool:
        """Return whether it is described as a field of the batch."""
        return self.description.lower().startswith("input")


def is_graph_text(text: str) -> bool:
    """Return whether a text looks like such a profile."""
    return any(f"{field}=" in text for field in _FIELDS)


def layers_from_text(text: str, *, samples: int, source: str) -> Layers:
    """Read the layers of a profile.

    Args:
        text: content of the file.
        samples: samples that the file was measured with.
        source: name of the file in errors.

    Raises:
        ProfileError: if a line cannot be read, or does not fit the others.
    """
    entries: dict[str, _Entry] = {}
    edges: list[_Line] = []
    for number, content in enumerate(text.splitlines(), start=1):
        line = _Line(f"{source}, line {number}", content)
        if not content.strip():
            continue
        if content[0].isspace():
            edges.append(line)
            continue
        identifier, entry = _entry(line)
        if identifier in entries:
            raise line.error(f"a second layer {identifier!r}", "every layer once")
        entries[identifier] = entry
    readers = _readers(edges, list(entries))
    reading = {reader for found in readers.values() for reader in found}
    layers = [
        Layer(
            name=name,
            description=entry.description,
            forward_s=(0.0 if entry.is_input and position not in reading else entry.forward_ms * _MILLISECOND,),
            backward_s=(entry.backward_ms * _MILLISECOND,),
            parameter_bytes=round(entry.parameter_bytes),
            outputs=_outputs([size / samples for size in entry.output_bytes], readers[position]),
        )
        for position, (name, entry) in enumerate(zip(unique_names(list(entries)), entries.values(), strict=True))
    ]
    return Layers(in_order(layers, source=source), (samples,))


def _entry(line: _Line) -> tuple[str, _Entry]:
    """Take the line of a layer apart."""
    parts = [part.strip() for part in line.text.split(" -- ")]
    is_staged = len(parts) == 4 and parts[3].startswith("stage_id=")
    if not (len(parts) == 3 or is_staged) or not all(parts):
        raise line.error(repr(line.text.strip()[:80]), f"{_LINE_OF_LAYER}, or an indented edge `id -- id`")
    identifier, description, values = parts[:3]
    fields = dict(part.split("=", 1) for part in values.split(", ") if "=" in part)
    missing = [field for field in _FIELDS if field not in fields]
    if missing:
        raise line.error(f"layer {identifier!r} without {', '.join(missing)}", _LINE_OF_LAYER)
    forward, backward, outputs, parameters = (fields[field].strip() for field in _FIELDS)
    is_list = outputs.startswith("[") and outputs.endswith("]")
    sizes = tuple(outputs[1:-1].split(";") if is_list else [outputs])
    return identifier, _Entry(
        description,
        _number(forward, line, _FIELDS[0]),
        _number(backward, line, _FIELDS[1]),
        tuple(_number(size, line, _FIELDS[2]) for size in sizes),
        _number(parameters, line, _FIELDS[3]),
    )


def _number(text: str, line: _Line, field: str) -> float:
    expected = "a number of at least 0"
    try:
        found = float(text)
    except ValueError:
        raise line.error(f"{field}={text!r}", expected) from None
    if not math.isfinite(found) or found < 0:
        raise line.error(f"{field}={text}", expected)
    return found


def _readers(edges: list[_Line], identifiers: list[str]) -> defaultdict[int, list[int]]:
    """Return who reads the outputs of every layer, in the order of the edges."""
    position = {identifier: k for k, identifier in enumerate(identifiers)}
    found: defaultdict[int, list[int]] = defaultdict(list)
    for line in edges:
        ends = [part.strip() for part in line.text.strip().split(" -- ")]
        if len(ends) != 2:
            raise line.error(repr(line.text.strip()[:80]), "an edge `id -- id`, as the line is indented")
        unknown = [end for end in ends if end not in position]
        if unknown:
            raise line.error(f"an edge of layer {unknown[0]!r}, which has no line", "edges between layers of the file")
        maker, reader = (position[end] for end in ends)
        if reader in found[maker]:
            raise line.error(f"the edge {ends[0]} -- {ends[1]} again", "every edge once")
        found[maker].append(reader)
    return found


def _outputs(sizes: list[float], readers: list[int]) -> tuple[LayerOutput, ...]:
    if len(sizes) > 1 and len(sizes) == len(readers):
        return tuple(LayerOutput(size, (reader,)) for size, reader in zip(sizes, readers, strict=True))
    return (LayerOutput(sum(sizes), tuple(readers)),)
