"""A plain file that rank 0 collects in files, where memory is short, is the one that it collects in memory."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_pipe.strategy.checkpoints import collecting
from lightning_pipe.strategy.start import mapped
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
            patch.setattr(collecting, "room_bytes", lambda: room)
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


@pytest.mark.parametrize(
    "full", [pytest.param(False, marks=pytest.mark.slow, id=""), pytest.param(True, id="the disk is full")]
)
def test_what_is_collected_in_files_is_what_is_collected_in_memory(full: bool, tmp_path: Path) -> None:
    usual, short = tmp_path / "usual", tmp_path / "short"
    assert [count for count, _ in World(3).run(saved, str(usual), None, False)] == [0, 0, 0]
    first, *others = World(3).run(saved, str(short), 0, full)
    assert others == [(0, [])] * 2
    assert (first[0] > 10) != full
    assert len(first[1]) == 2 * full, "once for weights and once for the state of the optimizer"
    assert all("stay in memory" in text for text in first[1])
    torch.testing.assert_close(content(short), content(usual), rtol=0, atol=0)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.empty(0, 4),
        torch.arange(12.0).reshape(3, 4).t(),
        torch.tensor([True, False]),
        torch.randn(5, dtype=torch.bfloat16),
        torch.randn(2, 3, dtype=torch.complex64, requires_grad=True),
        torch.arange(6)[::2],
    ],
    ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)}",
)
def test_a_tensor_in_a_file_is_the_tensor(tensor: torch.Tensor, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(mapped, "_SMALL_BYTES", 1)
    found = mapped.MappedTensors(tmp_path).copied(tensor)
    assert torch.equal(found, tensor) and (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_cannot_be_is_said_once(tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(mapped, "_SMALL_BYTES", 0)
    (tmp_path / "file").touch()
    tensors = mapped.MappedTensors(tmp_path / "file" / "below")
    one, two = torch.ones(2), torch.zeros(3)
    assert tensors.copied_if_possible(one) is one and tensors.copied_if_possible(two) is two
    assert [record.message.count("stay in memory") for record in caplog.records] == [1]
    caplog.clear()
    assert mapped.MappedTensors(tmp_path / "file" / "below").zeros_if_possible(one) is None
    assert [record.message.count("stay in memory") for record in caplog.records] == [1], "for gradients, too"
