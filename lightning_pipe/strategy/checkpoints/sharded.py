"""Read a checkpoint that nobody has gathered: a directory of `torch.distributed.checkpoint`, a part from every rank.

    DIR/.metadata, DIR/*.distcp   tensors by name: model.NAME, optimizer_0.NAME.KEY
    DIR/meta.pt                   what else Lightning keeps, and what puts the tensors back in their places

What hangs in several places was written once. `writing` writes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_pipe.errors import UnsupportedError
from lightning_pipe.strategy.checkpoints.commit import existing
from lightning_pipe.strategy.start.unread import Unread

REST = "meta.pt"
MODEL = "model"
_OURS = "lightning_pipe"


def is_sharded(path: Path) -> bool:
    """Return whether a path is such a checkpoint, or one of torch."""
    return (existing(path) / ".metadata").is_file()


class Directory(Mapping[str, Unread]):
    """The tensors of a directory, each read when it is asked for.

    Args:
        path: the directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = existing(path)
        self._reader = FileSystemReader(self.path)
        self._metadata = self._reader.read_metadata()
        known = self._metadata.state_dict_metadata
        self._sizes = {name: one for name, one in known.items() if isinstance(one, TensorStorageMetadata)}

    def __getitem__(self, name: str) -> Unread:
        one = self._sizes[name]
        return Unread.of(one.size, one.properties.dtype, lambda: self._read(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def _read(self, name: str) -> torch.Tensor:
        one, planner = self._sizes[name], DefaultLoadPlanner()
        target = {name: torch.empty(one.size, dtype=one.properties.dtype)}
        planner.set_up_planner(target, self._metadata, True)
        self._reader.set_up_storage_reader(self._metadata, True)
        plan = planner.finish_plan(self._reader.prepare_local_plan(planner.create_local_plan()))
        self._reader.read_data(plan, planner).wait()
        return target[name]


def load(path: Path, *, weights_only: bool | None = None) -> dict[str, Any]:
    """Return a checkpoint as Lightning knows it, with tensors that are not read yet.

    Raises:
        UnsupportedError: if the directory was written by something else.
    """
    tensors = Directory(path)
    if not (tensors.path / REST).is_file():
        raise UnsupportedError(
            f"{path} is a directory of torch.distributed.checkpoint without {REST}, so that nothing but tensors can be "
            f"read from it. Give it as DappleStrategy(weights={str(path)!r}) to start from its weights."
        )
    rest: dict[str, Any] = torch.load(tensors.path / REST, map_location="cpu", weights_only=weights_only)
    ours = rest.pop(_OURS, None)
    if ours is None:
        raise UnsupportedError(
            f"{path} was written by another strategy. Make a plain file of it (python -m "
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
