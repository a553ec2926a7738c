"""Tensors of a directory of `torch.distributed.checkpoint`: where they are, and their values.

Torch keeps in `.metadata` a pickle of its own classes, and unpickles it with whatever else it names. Here it is read
with stand-ins for those classes, which only take what they are given. What they were given is then looked at.
"""

from __future__ import annotations

import io
import itertools
import math
import pickle
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import torch

from lightning_pipe.strategy.checkpoints.checksums import check_entries

METADATA = ".metadata"
_CLASSES = frozenset(
    {
        *(
            ("torch.distributed.checkpoint.metadata", name)
            for name in (
                "Metadata MetadataIndex TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata "
                "TensorProperties StorageMeta _MEM_FORMAT_ENCODING"
            ).split()
        ),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        *(
            ("torch.distributed._shard.sharded_tensor.metadata", name)  # before torch 2.3
            for name in ("TensorProperties", "MEM_FORMAT_ENCODING")
        ),
        ("torch.serialization", "_get_layout"),
        *((module, f"{kind}Path") for module in ("pathlib", "pathlib._local") for kind in ("Posix", "Windows", "")),
    }
)  # none of them is called: a stand-in takes its place
_KINDS = {name: kind for name, kind in vars(torch).items() if isinstance(kind, (torch.dtype, torch.layout))}


@dataclass(frozen=True)
class StoredPiece:
    """A part of a tensor: its place in the tensor, and in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor and its pieces, which cover it and do not overlap."""

    size: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[StoredPiece, ...]

    def read(self, folder: Path) -> torch.Tensor:
        """Return its values.

        Raises:
            Exception: whatever a damaged file makes torch or zipfile raise.
        """
        if len(self.pieces) == 1:
            return self._piece(folder, self.pieces[0])
        whole = torch.empty(self.size, dtype=self.dtype)
        for piece in self.pieces:
            place = tuple(slice(start, start + size) for start, size in zip(piece.offsets, piece.sizes, strict=True))
            whole[place].copy_(self._piece(folder, piece))
        return whole

    def _piece(self, folder: Path, piece: StoredPiece) -> torch.Tensor:
        with (folder / piece.file).open("rb") as file:
            file.seek(piece.start)
            content = io.BytesIO(file.read(piece.length))
        check_entries(content, with_tensors=True)
        content.seek(0)
        values: torch.Tensor = torch.load(content, map_location="cpu", weights_only=True)
        if (tuple(values.shape), values.dtype) != (piece.sizes, self.dtype):
            raise ValueError(f"found {values.dtype} of {tuple(values.shape)}; expected {self.dtype} of {piece.sizes}")
        return values


class _StandIn:
    """Take what an object of one of torch's classes would be given."""

    def __new__(cls, *_: Any) -> _StandIn:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _MetadataReader(pickle.Unpickler):
    """Read what torch writes into `.metadata`, and nothing else."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._stand_ins: dict[tuple[str, str], type] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return a stand-in for a class, which nothing else has.

        Raises:
            pickle.UnpicklingError: if torch does not write it.
        """
        if module == "torch" and name in _KINDS:
            return _KINDS[name]
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) not in _CLASSES:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which torch does not write there")
        return self._stand_ins.setdefault((module, name), type(name, (_StandIn,), {}))


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a directory by name.

    Raises:
        Exception: whatever is raised by a file that torch has not written.
    """
    state = _MetadataReader(io.BytesIO((folder / METADATA).read_bytes())).load().state
    places = {}
    for index, where in state["storage_data"].items():
        if (offsets := index.state.get("offset")) is not None:
            places[index.state["fqn"], offsets] = where.state
    return {
        name: _tensor(name, kind.state, places)
        for name, kind in state["state_dict_metadata"].items()
        if type(kind).__name__ == "TensorStorageMetadata"
    }


def _tensor(name: str, known: dict[str, Any], places: dict[Any, dict[str, Any]]) -> StoredTensor:
    size, dtype = _lengths(known["size"]), known["properties"].state[0]
    pieces = tuple(dict.fromkeys(_piece(name, chunk.state, places) for chunk in known["chunks"]))
    inside = all(
        len(piece.sizes) == len(piece.offsets) == len(size)
        and all(start + part <= whole for start, part, whole in zip(piece.offsets, piece.sizes, size, strict=True))
        for piece in pieces
    )
    count = sum(math.prod(piece.sizes) for piece in pieces)
    if not inside or count != math.prod(size) or any(itertools.starmap(_overlap, itertools.combinations(pieces, 2))):
        raise ValueError(f"the pieces of {name} do not make a tensor of {size}")
    if not isinstance(name, str) or not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} is no tensor of {dtype!r}")
    return StoredTensor(size, dtype, pieces)


def _piece(name: str, chunk: dict[str, Any], places: dict[Any, dict[str, Any]]) -> StoredPiece:
    offsets, sizes = _lengths(chunk["offsets"]), _lengths(chunk["sizes"])
    where = places[name, offsets]
    file = where["relative_path"]
    if PurePath(file).is_absolute() or ".." in PurePath(file).parts or where.get("transform_descriptors"):
        raise ValueError(f"{name} is in {file}, not in a plain file of the directory")
    return StoredPiece(offsets, sizes, file, *_lengths((where["offset"], where["length"])))


def _lengths(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple) or not all(type(value) is int and value >= 0 for value in values):
        raise ValueError(f"found {values!r}; expected sizes")
    return values


def _overlap(one: StoredPiece, two: StoredPiece) -> bool:
    return all(
        a < b + m and b < a + n for a, n, b, m in zip(one.offsets, one.sizes, two.offsets, two.sizes, strict=True)
    )
