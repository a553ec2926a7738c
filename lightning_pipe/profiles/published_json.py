"""Values of a JSON profile with the way to them, so that errors name the place at which a file breaks.

Every method raises `ProfileError` if the value is not what is asked for.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_pipe.errors import ProfileError
from lightning_pipe.profiles.published_layers import LayerOutput


@dataclass(frozen=True)
class JsonValue:
    """A value of a file with the way to it.

    Attributes:
        path: the file, and the keys that lead to the value.
        value: as `json.load` gives it.
    """

    path: str
    value: object

    @classmethod
    def read(cls, path: Path) -> JsonValue:
        """Return the content of a file that lies beside a profile."""
        try:
            content: object = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ProfileError(f"cannot read {path}: {error}") from None
        return cls(str(path), content)

    def error(self, found: str, expected: str) -> ProfileError:
        """Return an error that names the place."""
        return ProfileError(f"{self.path}: found {found}; expected {expected}.")

    def at(self, key: str) -> JsonValue:
        """Return the value of a key of a mapping."""
        if not isinstance(self.value, Mapping):
            raise self.error(repr(self.value)[:80], f"a mapping with the key {key!r}")
        if key not in self.value:
            raise self.error(f"the keys {', '.join(map(str, self.value)) or 'none'}", f"the key {key!r} among them")
        return JsonValue(f"{self.path}, {key}", self.value[key])

    def names(self) -> tuple[str, ...]:
        """Return the keys of a mapping."""
        if not isinstance(self.value, Mapping):
            raise self.error(repr(self.value)[:80], "a mapping")
        return tuple(map(str, self.value))

    def items(self) -> list[JsonValue]:
        """Return the items of a list."""
        if not isinstance(self.value, list):
            raise self.error(repr(self.value)[:80], "a list")
        return [JsonValue(f"{self.path}[{k}]", item) for k, item in enumerate(self.value)]

    def text(self) -> str:
        """Return a text."""
        if not isinstance(self.value, str):
            raise self.error(repr(self.value)[:80], "a text")
        return self.value

    def count(self) -> int:
        """Return an integer."""
        if not isinstance(self.value, int) or isinstance(self.value, bool):
            raise self.error(repr(self.value)[:80], "an integer")
        return self.value

    def flag(self) -> bool:
        """Return true or false, which may be written as 1 or 0."""
        if self.value not in (True, False):
            raise self.error(repr(self.value)[:80], "true or false, or 1 or 0")
        return bool(self.value)

    def number(self) -> float:
        """Return a number of at least 0."""
        value = self.value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= sys.float_info.max:
            raise self.error(repr(value)[:80], "a number of at least 0")
        return float(value)


def edge_outputs(
    edges: Sequence[JsonValue], position: Mapping[int, int], *, size: str, samples: int
) -> dict[int, tuple[LayerOutput, ...]]:
    """Return the outputs of every layer: one for each size among its edges.

    Args:
        edges: with `sourceId` and `destId`.
        position: of the layers, by their ids.
        size: key of an edge's bytes, for all samples.
        samples: of the file.

    Raises:
        ProfileError: if an edge stands twice, or one of its ends is no layer.
    """
    readers: dict[int, dict[float, list[int]]] = defaultdict(lambda: defaultdict(list))
    seen: set[tuple[int, int]] = set()
    for edge in edges:
        ends = [edge.at("sourceId"), edge.at("destId")]
        for end in ends:
            if end.count() not in position:
                raise end.error(f"the unknown node {end.count()}", "the id of a node of the file")
        maker, reader = (position[end.count()] for end in ends)
        if (maker, reader) in seen:
            raise edge.error(f"the edge {ends[0].count()} -> {ends[1].count()} again", "every edge once")
        seen.add((maker, reader))
        readers[maker][edge.at(size).number()].append(reader)
    return {
        k: tuple(LayerOutput(cost / samples, tuple(found)) for cost, found in readers.get(k, {}).items())
        for k in position.values()
    }
