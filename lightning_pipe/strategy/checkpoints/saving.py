"""Checkpoints that nobody gathers: what a rank writes into one, and what it takes from one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection

from lightning_pipe.lightning_names import CheckpointIO
from lightning_pipe.strategy.checkpoints import sharded
from lightning_pipe.strategy.checkpoints.commit import begin, commit, existing
from lightning_pipe.strategy.parameters.optimizer import Groups
from lightning_pipe.strategy.parameters.weights import Weights
from lightning_pipe.strategy.ranks.control_plane import ControlPlane

_STATE, _OPTIMIZERS = "state_dict", "optimizer_states"


def save_sharded(
    path: Path, checkpoint: Mapping[str, Any], *, weights: Weights, groups: Sequence[Groups], control: ControlPlane
) -> None:
    """Write this rank's part of a checkpoint; on all ranks together.

    Args:
        path: the directory.
        checkpoint: what Lightning and the user's hooks have collected on this rank; what other ranks hold is there as
            tensors of the meta device, and the state of optimizers is that of this rank.
        weights: whose they are.
        groups: of the optimizers.
        control: to the other ranks.
    """
    state = checkpoint[_STATE]
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    first_names = {name: weights.first_name(name) for name in tensors}
    mine = {first_names[name]: value.detach() for name, value in tensors.items() if weights.saver(name) == control.rank}
    parts: dict[str, dict[str, torch.Tensor]] = {sharded.MODEL: mine}
    optimizers = None
    if _OPTIMIZERS in checkpoint:
        optimizers = []
        for number, (saved, group) in enumerate(zip(checkpoint[_OPTIMIZERS], groups, strict=True)):
            names = group.names()
            parts[sharded.optimizer_part(number)], described = _apart(saved, names)
            optimizers.append(_merged(described, control))
    others = {name: value for name, value in state.items() if name not in tensors}
    rest = {key: value for key, value in checkpoint.items() if key not in (_STATE, _OPTIMIZERS)}
    sharded.save(path, parts, {**rest, **sharded.described([*state], first_names, others, optimizers)}, control)


def _apart(saved: Mapping[str, Any], names: Sequence[str]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors in an optimizer's state by the names of parameters, and all else with these names."""
    found: dict[str, torch.Tensor] = {}
    plain: dict[Any, dict[str, Any]] = {}
    written: dict[Any, dict[str, str]] = {}
    for key, values in saved["state"].items():
        of = names[key] if isinstance(key, int) else str(key)
        entries = values if isinstance(values, dict) else {"": values}
        spelled = {name: f"{of}.{name}" for name, value in entries.items() if isinstance(value, torch.Tensor)}
        found.update({spelled[name]: entries[name].detach() for name in spelled})
        written[key] = spelled
        plain[key] = {name: value for name, value in entries.items() if name not in spelled}
    return found, {**saved, "state": plain, "written": written}


def _merged(described: dict[str, Any], control: ControlPlane) -> dict[str, Any]:
    """Return on rank 0 what all ranks say of an optimizer; elsewhere what this one says."""
    what = "what ranks keep of the optimizer"
    told = [control.to_first(described, source=rank, what=what) for rank in range(control.ranks)]
    for one in (one for one in told if one is not None):
        described["state"].update(one["state"])
        described["written"].update(one["written"])
    return described


def save_plain(path: Path, checkpoint: Mapping[str, Any]) -> None:
    """Write the plain file, straight to the disk, so that the one before is never lost."""
    part = begin(path)
    with part.open("wb") as file:
        torch.save(dict(checkpoint), file)
    commit(path)


def load(path: Path, io: CheckpointIO, *, is_plain: bool, weights_only: bool | None) -> dict[str, Any]:
    """Return a checkpoint whose weights and optimizer states are read when they are needed.

    Args:
        path: a file or a directory, on this host.
        io: reads what is neither.
        is_plain: whether files are those of torch.
        weights_only: as of `torch.load`.
    """
    if sharded.is_sharded(path):
        return sharded.load(path, weights_only=weights_only)
    try:
        file = existing(path)
        found = torch.load(file, map_location="cpu", mmap=True, weights_only=weights_only) if is_plain else None
    except RuntimeError:  # a file of an old format cannot be mapped
        found = None
    if found is None:
        other: dict[str, Any] = io.load_checkpoint(path, weights_only=weights_only)
        return other
    small = {key: value for key, value in found.items() if key not in (_STATE, _OPTIMIZERS)}
    return {**found, **apply_to_collection(small, torch.Tensor, torch.Tensor.clone)}
