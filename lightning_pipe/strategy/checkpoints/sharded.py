"""A checkpoint that nobody gathers: a directory of `torch.distributed.checkpoint`, where every rank writes its part.

    DIR/.metadata, DIR/*.distcp   tensors by name: model.NAME, optimizer_0.NAME.KEY
    DIR/meta.pt                   what else Lightning keeps, and what puts the tensors back in their places

Ranks agree over the connections of the run, which have deadlines. What hangs in several places is written once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_pipe.errors import UnsupportedError
from lightning_pipe.strategy.checkpoints.commit import begin, commit, existing
from lightning_pipe.strategy.ranks.control_plane import ControlPlane
from lightning_pipe.strategy.start.unread import Unread

REST = "meta.pt"
MODEL = "model"
_OURS = "lightning_pipe"


def save(
    path: Path, tensors: Mapping[str, Mapping[str, torch.Tensor]], rest: dict[str, Any], control: ControlPlane
) -> None:
    """Write a checkpoint; on all ranks together.

    Args:
        path: the directory, on a file system that all ranks see.
        tensors: those of this rank, by group and name; no two ranks have one name.
        rest: what else there is; that of rank 0 is written.
        control: to the other ranks.
    """
    first = control.rank == 0
    part = control.agreed(lambda: begin(path), source=0, what="where the checkpoint is written")
    writer, planner = FileSystemWriter(part), DefaultSavePlanner()
    writer.set_up_storage_writer(first)
    planner.set_up_planner({name: dict(group) for name, group in tensors.items()}, writer.storage_meta(), first)
    local = writer.prepare_local_plan(planner.create_local_plan())
    plans = _gathered(local, control, "what ranks will write")
    metadata = None
    if first:
        plans, metadata = planner.create_global_plan(plans)
        plans = writer.prepare_global_plan(plans)
    plans = control.broadcast(plans, source=0, what="what ranks will write")
    written = writer.write_data(planner.finish_plan(plans[control.rank]), planner).wait()
    results = _gathered(written, control, "what ranks have written")

    def finish() -> None:
        writer.finish(metadata, results)  # type: ignore[arg-type]
        torch.save(rest, part / REST)
        commit(path)

    control.agreed(finish, source=0, what="the end of the checkpoint")


def _gathered(mine: Any, control: ControlPlane, what: str) -> list[Any]:
    """Return the values of all ranks on rank 0; there alone the list counts."""
    return [control.to_first(mine, source=rank, what=what) for rank in range(control.ranks)]


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
    state: dict[Any, Any] = {key: dict(values) for key, values in saved["state"].items()}
    for key, written in saved.pop("written").items():
        found = {name: tensors[f"{optimizer_part(number)}.{spelled}"] for name, spelled in written.items()}
        state[key] = found[""] if "" in found else {**state[key], **found}
    return {**saved, "state": dict(sorted(state.items(), key=lambda item: str(item[0]).zfill(12)))}


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
        optimizers: of each its state dict without tensors; "written" says where these are. None if none is saved.
    """
    return {
        _OURS: {"version": 1, "order": order, "names": dict(names), "others": dict(others), "optimizers": optimizers}
    }
