"""Checksums of checkpoints: those that `torch.save` writes and `torch.load` does not compare, and those of directories.

Every entry of a file of `torch.save` has a CRC; 0 if the user has turned that off (`torch.serialization`). A directory
of this package has a file with hashes of its two small files; its tensors have the CRCs of `torch.save`.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import torch

_FILE = "checksums.json"
_BLOCK_BYTES = 1 << 20


def check_entries(file: Path | IO[bytes], *, with_tensors: bool) -> None:
    """Compare the entries of a file of `torch.save` with their checksums.

    Args:
        file: the file.
        with_tensors: whether the values of tensors are read too, which takes as long as loading them.

    Raises:
        zipfile.BadZipFile: naming an entry that is damaged.
    """
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            with archive.open(entry) as content:  # which compares the names in both headers of an entry
                if entry.CRC and (with_tensors or "/data/" not in entry.filename):
                    while content.read(_BLOCK_BYTES):
                        pass


class StorageSums:
    """The checksums of the storages of tensors in a file of `torch.save` that is mapped into memory.

    Args:
        file: the file.
    """

    def __init__(self, file: Path) -> None:
        with zipfile.ZipFile(file) as archive:
            known = [entry for entry in archive.infolist() if "/data/" in entry.filename and entry.file_size]
        self._sums = {(entry.file_size, entry.CRC) for entry in known} if all(entry.CRC for entry in known) else None
        self._checked: set[int] = set()

    def check(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor as it is in the file; its storage is read as a whole, once.

        Raises:
            ValueError: if no storage of the file has these values.
        """
        storage = tensor.untyped_storage()
        if self._sums is not None and storage.nbytes() and storage.data_ptr() not in self._checked:
            values = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
            if (values.nbytes, zlib.crc32(values.data)) not in self._sums:
                raise ValueError("the values of a tensor are not what was written")
            self._checked.add(storage.data_ptr())
        return tensor


def write_checksums(folder: Path, names: Iterable[str]) -> None:
    """Write the hashes of files of a folder, beside them."""
    (folder / _FILE).write_text(json.dumps({name: _hash(folder / name) for name in names}), encoding="utf-8")


def check_files(folder: Path, names: Iterable[str]) -> None:
    """Compare files of a folder with their hashes, if it has some.

    Raises:
        ValueError: naming a file that is not what was written.
    """
    if not (folder / _FILE).exists():
        return
    hashes = json.loads((folder / _FILE).read_bytes())
    for name in names:
        if not isinstance(hashes, dict) or hashes.get(name) != _hash(folder / name):
            raise ValueError(f"{name} or {_FILE} is not what was written")


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
