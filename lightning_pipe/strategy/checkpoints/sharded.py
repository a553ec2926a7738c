"""Read a checkpoint that nobody has gathered: a directory of `torch.distributed.checkpoint`, a part from every rank.

    DIR/.metadata, DIR/*.distcp   tensors by name: model.NAME, optimizer_0.NAME.KEY
    DIR/meta.pt                   what else Lightning keeps, and what puts the tensors back in their places
    DIR/checksums.json            hashes of .metadata and meta.pt

What hangs in several places was written once. `writing` writes it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection

from lightning_pipe.errors import CheckpointError, PipeError, UnsupportedError
from lightning_pipe.strategy.checkpoints.checksums import check_files
from lightning_pipe.strategy.checkpoints.commit import existing
from lightning_pipe.strategy.checkpoints.stored_tensors import METADATA, stored_tensors
from lightning_pipe.strategy.start.unread import Unread

REST = "meta.pt"
MODEL = "model"
_OURS = "lightning_pipe"


@contextlib.contextmanager
def unreadable(path: Path, what: str = "") -> Iterator[None]:
    """Read inside; say of which checkpoint it is what a damaged one makes torch and others raise.

    Raises:
        CheckpointError: naming it.
    """
    try:
        yield
    except PipeError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{what}{path} cannot be read: {type(error).__name__}: {error}. It is damaged, or was written by something "
            "else. Use another checkpoint."
        ) from error


def is_sharded(path: Path) -> bool:
    """Return whether a path is such a checkpoint, or one of torch."""
    return (existing(path) / METADATA).is_file()


class Directory(Mapping[str, Unread]):
    """The tensors of a directory, each read when it is asked for.

    Args:
        path: the directory.

    Raises:
        CheckpointError: if it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = existing(path)
        with unreadable(path):
            check_files(self.path, [METADATA, REST])
            self._tensors = stored_tensors(self.path)

    def __getitem__(self, name: str) -> Unread:
        tensor = self._tensors[name]
        return Unread.of(tensor.size, tensor.dtype, lambda: self._read(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def _read(self, name: str) -> torch.Tensor:
        with unreadable(self.path, f"{name} in "):
            return self._tensors[name].read(self.path)


def load(path: Path, *, weights_only: bool | None = None) -> dict[str, Any]:
    """Return a checkpoint as Lightning knows it, with tensors that are not read yet.

    Raises:
        UnsupportedError: if the directory was written by something else.
        CheckpointError: if it cannot be read.
    """
    tensors = Directory(path)
    if not (tensors.path / REST).is_file():
        raise UnsupportedError(
            f"{path} is a directory of torch.distributed.checkpoint without {REST}, so that nothing but tensors can be "
            f"read from it. Give it as DappleStrategy(weights={str(path)!r}) to start from its weights."
        )
    with unreadable(path):
        return _put_back(tensors, torch.load(tensors.path / REST, map_location="cpu", weights_only=weights_only))


def _put_back(tensors: Directory, rest: dict[str, Any]) -> dict[str, Any]:
    """Return all of a checkpoint, with its tensors in their places."""
    ours = rest.pop(_OURS, None)
    if ours is None:
        raise UnsupportedError(
            f"{tensors.path} was written by another strategy. Make a plain file of it (python -m "
            "lightning.pytorch.utilities.consolidate_checkpoint), and resume from that."
        )
    names, others = ours["names"], ours["others"]
    unread = {first: tensors[f"{MODEL}.{first}"] for first in dict.fromkeys(names.values())}
    state = {name: unread[names[name]] if name in names else others[name] for name in ours["order"]}
    found: dict[str, Any] = {**rest, "state_dict": state}
    if ours["optimizers"] is not None:
        found["optimizer_states"] = [_optimizer(number, one, tensors) for number, one in enumerate(ours["optimizers"])]
    return found


def _optimizer(number: int, saved: dict[str, Any], tensors: Directory) -> dict[str, Any]:
    """Return the state dict of an optimizer."""
    names = iter(saved["names"])

    def found(tensor: torch.Tensor) -> torch.Tensor:
        name = next(names)
        return tensor if name is None else tensors[f"{optimizer_part(number)}.{name}"]

    whole: dict[str, Any] = apply_to_collection(saved["tree"], torch.Tensor, found)
    return whole


def optimizer_part(number: int) -> str:
    """Return what the tensors of an optimizer are under."""
    return f"optimizer_{number}"


def described(
    order: list[str], names: Mapping[str, str], others: Mapping[str, Any], optimizers: list[dict[str, Any]] | None
) -> dict[str, Any]:
    """Return what `load` needs to know.

    Args:
        order: the keys of the state dict.
        names: of its tensors -> under which they were written.
        others: what else is in it.
        optimizers: of each its state dict without tensors, and their names. None if none is saved.
    """
    return {
        _OURS: {"version": 1, "order": order, "names": dict(names), "others": dict(others), "optimizers": optimizers}
    }
