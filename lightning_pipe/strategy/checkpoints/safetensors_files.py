"""Write the weights of a checkpoint as safetensors files in the layout of Hugging Face, with the memory of one tensor.

    model.safetensors                      one file; or, if that would be larger than a file may be,
    model-00001-of-00002.safetensors       several files, with
    model.safetensors.index.json           the file of each tensor

A file is the length of its header (8 bytes, little endian), the header as JSON, and the bytes of the tensors in the
order of their offsets (https://github.com/huggingface/safetensors#format). The library writes only tensors that are all
in memory, so the bytes are written here; they are read with the library.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import torch

from lightning_pipe.disk import write_failure
from lightning_pipe.errors import CheckpointError, ConfigError
from lightning_pipe.strategy.checkpoints.files import DTYPES, INDEX, SINGLE, open_weights
from lightning_pipe.strategy.start.unread import Unread

_WORDS = {dtype: word for word, dtype in DTYPES.items()}
_ALIGNMENT = 8  # of the first tensor's bytes


def write_safetensors(
    source: Path, folder: Path, *, prefix: str = "", dtype: torch.dtype | None = None, shard_bytes: int
) -> int:
    """Write the weights of a checkpoint into a directory, and return their bytes.

    Args:
        source: a checkpoint: a directory of ranks, a file of Lightning, or what else `weights=` reads.
        folder: the directory.
        prefix: of the tensors to write, as "model": the attribute under which the module has the model; "" for all.
        dtype: what floating-point tensors are converted to; None keeps their types.
        shard_bytes: the most bytes of a file, unless one tensor is larger.

    Raises:
        CheckpointError: if the checkpoint cannot be read, or the files cannot be written.
        ConfigError: if it has no such tensors, or the directory has such files already.
    """
    if present := [*folder.glob("model*.safetensors"), *folder.glob(INDEX)]:
        raise ConfigError(f"found {present[0]}; expected a directory without weights. Name another one.")
    tensors = _chosen(open_weights(source), prefix, source)
    types = {name: dtype if dtype is not None and t.dtype.is_floating_point else t.dtype for name, t in tensors.items()}
    sizes = {name: tensor.numel() * types[name].itemsize for name, tensor in tensors.items()}
    shards = _shards(sizes, shard_bytes)
    folder.mkdir(parents=True, exist_ok=True)
    count = len(shards)
    files = [SINGLE] if count == 1 else [f"model-{k:05}-of-{count:05}.safetensors" for k in range(1, count + 1)]
    for file, names in zip(files, shards, strict=True):
        _write(folder / file, {name: tensors[name] for name in names}, types)
    if count > 1:
        placed = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": placed}
        (folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    return sum(sizes.values())


def _chosen(weights: Mapping[str, Unread], prefix: str, source: Path) -> dict[str, Unread]:
    """Return the tensors behind a prefix, by their names without it; one that hangs in several places once."""
    start = f"{prefix.rstrip('.')}." if prefix else ""
    named = {name.removeprefix(start): tensor for name, tensor in weights.items() if name.startswith(start)}
    if not named:
        raise ConfigError(f"found no tensor {start}… in {source}; it has {', '.join(list(weights)[:3])}, ...")
    first = {id(tensor): name for name, tensor in reversed(named.items())}
    return {name: tensor for name, tensor in named.items() if first[id(tensor)] == name}


def _shards(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Return the names of the tensors of each file, in their order."""
    shards: list[list[str]] = []
    filled = 0
    for name, size in sizes.items():
        if not shards or filled + size > most:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _write(path: Path, tensors: Mapping[str, Unread], types: Mapping[str, torch.dtype]) -> None:
    """Write a file, which takes its name when it is complete; tensors with larger items first, so all are aligned."""
    ordered = sorted(tensors, key=lambda name: -types[name].itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in ordered:
        begin, end = end, end + tensors[name].numel() * types[name].itemsize
        header[name] = {
            "dtype": _WORDS[types[name]], "shape": [*tensors[name].shape], "data_offsets": [begin, end],
        }  # fmt: skip
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    begun = path.with_suffix(".part")
    try:
        with begun.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for name in ordered:
                _append(file, tensors[name], types[name])
        os.replace(begun, path)
    except OSError as error:
        begun.unlink(missing_ok=True)
        raise CheckpointError(f"{path} cannot be written: {write_failure(error, path, end)}.") from error


def _append(file: BinaryIO, tensor: Unread, dtype: torch.dtype) -> None:
    values = tensor.read().to(dtype).contiguous().reshape(-1)
    file.write(values.view(torch.uint8).numpy().data)
