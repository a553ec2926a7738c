"""Checkpoints that nobody gathers: what a rank writes into one, and what it takes from one."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection

from lightning_pipe.capture.steps.trees import found_in
from lightning_pipe.disk import write_failure
from lightning_pipe.errors import CheckpointError
from lightning_pipe.lightning_names import CheckpointIO
from lightning_pipe.strategy.checkpoints import sharded
from lightning_pipe.strategy.checkpoints.after_exception import patience_after_failure
from lightning_pipe.strategy.checkpoints.checksums import check_entries
from lightning_pipe.strategy.checkpoints.commit import begin, commit, discard, existing
from lightning_pipe.strategy.checkpoints.optimizer_tensors import own_tensors, without_tensors
from lightning_pipe.strategy.checkpoints.writing import BehindTraining, save
from lightning_pipe.strategy.parameters.optimizer import Groups
from lightning_pipe.strategy.parameters.weights import Weights
from lightning_pipe.strategy.ranks.control_plane import ControlPlane

_STATE, _OPTIMIZERS = "state_dict", "optimizer_states"


class Directories:
    """Checkpoints that are directories.

    Args:
        is_behind: whether training goes on while one is written.
        deadline_s: of waits for other ranks.
    """

    def __init__(self, *, is_behind: bool, deadline_s: float) -> None:
        self._is_behind, self._patience_s = is_behind, patience_after_failure(deadline_s)
        self._under_way: BehindTraining | None = None

    def save(
        self, path: Path, checkpoint: Mapping[str, Any], *, weights: Weights, groups: Sequence[Groups], in_fit: bool
    ) -> None:
        """Write this rank's part of a checkpoint, or begin to; on all ranks together.

        Args:
            path: the directory.
            checkpoint: what Lightning and the user's hooks have collected on this rank; what other ranks hold is there
                as tensors of the meta device, and the state of optimizers is that of this rank.
            weights: whose they are.
            groups: of the optimizers.
            in_fit: whether there is a training to go on.

        Raises:
            PipelineError: if a rank could not write its part, of this one or of the one before.
        """
        control = weights.control
        self.settle(control)
        parts, rest = _parts(checkpoint, weights, groups)
        if self._is_behind and in_fit:
            self._under_way = BehindTraining(path, parts, rest, control)
        else:
            save(path, parts, rest, control)

    def remove(self, removal: Callable[[], None]) -> None:
        """Remove a checkpoint that the last one replaces, when that one is complete."""
        if self._under_way is None:
            removal()
        else:
            self._under_way.remove(removal)

    def settle(self, control: ControlPlane) -> None:
        """Wait until what is written behind the training is complete; on all ranks together.

        Raises:
            PipelineError: if a rank could not write its part.
        """
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.settle(control)

    def abandon(self) -> None:
        """Wait a while for what is written behind a training that has failed, on this rank alone."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.abandon(self._patience_s)


def _parts(
    checkpoint: Mapping[str, Any], weights: Weights, groups: Sequence[Groups]
) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
    """Return the tensors of a checkpoint that this rank writes, and all else."""
    state = checkpoint[_STATE]
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    first_names = {name: weights.first_name(name) for name in tensors}
    mine = {
        first_names[name]: value.detach()
        for name, value in tensors.items()
        if weights.saver(name) == weights.control.rank
    }
    parts: dict[str, dict[str, torch.Tensor]] = {sharded.MODEL: mine}
    optimizers = None
    if _OPTIMIZERS in checkpoint:
        optimizers = []
        for number, (saved, group) in enumerate(zip(checkpoint[_OPTIMIZERS], groups, strict=True)):
            own = own_tensors(group)
            parts[sharded.optimizer_part(number)] = {name: tensor.detach() for name, tensor in own.items()}
            optimizers.append(without_tensors(saved, own))
    others = {name: value for name, value in state.items() if name not in tensors}
    rest = {key: value for key, value in checkpoint.items() if key not in (_STATE, _OPTIMIZERS)}
    return parts, {**rest, **sharded.described([*state], first_names, others, optimizers)}


def save_plain(path: Path, checkpoint: Mapping[str, Any]) -> None:
    """Write the plain file, straight to the disk, so that the one before is never lost.

    Raises:
        CheckpointError: if it cannot be written.
    """
    try:
        with begin(path).open("wb") as file:
            torch.save(dict(checkpoint), file)
        commit(path)
    except Exception as error:
        discard(path)
        failure = write_failure(error, path, sum(tensor.nbytes for tensor in found_in(checkpoint, torch.Tensor)))
        raise CheckpointError(
            f"the checkpoint {path} cannot be written: {failure}. Those that were complete before are still there."
        ) from error


def load(path: Path, io: CheckpointIO, *, is_plain: bool, weights_only: bool | None) -> dict[str, Any]:
    """Return a checkpoint whose weights and optimizer states are read when they are needed.

    Args:
        path: a file or a directory, on this host.
        io: reads what is neither.
        is_plain: whether files are those of torch.
        weights_only: as of `torch.load`.

    Raises:
        CheckpointError: if a directory or a file of torch cannot be read.
    """
    if sharded.is_sharded(path):
        return sharded.load(path, weights_only=weights_only)
    if not is_plain:
        other: dict[str, Any] = io.load_checkpoint(path, weights_only=weights_only)
        return other
    with sharded.unreadable(path):
        return _load_plain(existing(path), weights_only=weights_only)


def _load_plain(file: Path, *, weights_only: bool | None) -> dict[str, Any]:
    is_mapped = zipfile.is_zipfile(file)  # a file of an old format cannot be
    found = torch.load(file, map_location="cpu", mmap=is_mapped, weights_only=weights_only)
    if is_mapped:
        check_entries(file, with_tensors=False)
    small = {key: value for key, value in found.items() if key not in (_STATE, _OPTIMIZERS)}
    return {**found, **apply_to_collection(small, torch.Tensor, torch.Tensor.clone)}
