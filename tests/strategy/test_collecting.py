"""A plain file that rank 0 collects in files, where memory is short, is the one that it collects in memory."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_pipe.strategy.checkpoints import mapped
from models.parity import make_loader, make_module
from ranks.world import World
from strategy.fits import dapple, make_trainer

NAME = "gpt_tied"


def saved(root: str, room: int | None, full: bool) -> tuple[int, list[str]]:
    """Fit and save; return how many tensors were put into files, and what was said; a worker function."""
    count, said, copied = [0], [], mapped.MappedTensors.copied

    def counting(own: mapped.MappedTensors, tensor: torch.Tensor) -> torch.Tensor:
        found = copied(own, tensor)
        count[0] += 1
        return found

    def no_room(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mapped, "_SMALL_BYTES", 0)
        patch.setattr(mapped.MappedTensors, "copied", counting)
        patch.setattr(mapped.log, "warning", lambda text, *args: said.append(text % args))
        if room is not None:
            patch.setattr(mapped, "room_bytes", lambda: room)
        if full:
            patch.setattr(os, "posix_fallocate", no_room)
        checkpoint = ModelCheckpoint(root, filename="saved")
        trainer = make_trainer(
            dapple(layout="2-1", microbatches=2),
            max_epochs=1,
            callbacks=[checkpoint],
            enable_checkpointing=True,
            default_root_dir=root,
        )
        torch.manual_seed(5)
        trainer.fit(make_module(NAME), make_loader(NAME))
    return count[0], said


def content(root: Path) -> dict[str, Any]:
    assert [path.name for path in root.iterdir()] == ["saved.ckpt"]
    found = torch.load(root / "saved.ckpt", weights_only=False)
    return {key: found[key] for key in ("state_dict", "optimizer_states", "loops")}


@pytest.mark.parametrize("full", [False, True], ids=["", "the disk is full"])
def test_what_is_collected_in_files_is_what_is_collected_in_memory(full: bool, tmp_path: Path) -> None:
    usual, short = tmp_path / "usual", tmp_path / "short"
    assert [count for count, _ in World(3).run(saved, str(usual), None, False)] == [0, 0, 0]
    first, *others = World(3).run(saved, str(short), 0, full)
    assert others == [(0, [])] * 2
    assert (first[0] > 10) != full
    assert bool(first[1]) == full and all("stay in memory" in text for text in first[1])
    torch.testing.assert_close(content(short), content(usual), rtol=0, atol=0)
