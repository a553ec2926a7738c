"""A checkpoint for which there is no room is said to be one, with its path and size, and leaves the one before."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_pipe import disk
from lightning_pipe.errors import PipeError
from lightning_pipe.lightning_names import TorchCheckpointIO
from lightning_pipe.runtime.guard.watch import Unwatched
from lightning_pipe.strategy.checkpoints import commit, writing
from lightning_pipe.strategy.checkpoints.saving import load, save_plain
from lightning_pipe.strategy.checkpoints.sharded import described
from lightning_pipe.strategy.ranks.control_plane import ControlPlane

ALONE = ControlPlane(None, rank=0, ranks=1, wait=Unwatched().wait)
LARGE = 1 << 19  # elements: 2 MiB


def plain(path: Path, value: torch.Tensor) -> None:
    save_plain(path, {"state_dict": {"w": value}, "epoch": 1})


def at_once(path: Path, value: torch.Tensor) -> None:
    writing.save(path, {"model": {"w": value}}, described(["w"], {"w": "w"}, {}, None), ALONE)


def behind(path: Path, value: torch.Tensor) -> None:
    rest = described(["w"], {"w": "w"}, {}, None)
    writing.BehindTraining(path, {"model": {"w": value}}, rest, ALONE).settle(ALONE)


WAYS = [plain, at_once, behind]
Save = Callable[[Path, torch.Tensor], None]


@contextlib.contextmanager
def files_of_at_most(count: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("save", WAYS)
def test_a_checkpoint_that_does_not_fit_is_named_with_what_it_needs(save: Save, tmp_path: Path) -> None:
    """Torch says that its container is at an unexpected position."""
    path = tmp_path / "last.ckpt"
    save(path, torch.ones(1))
    with files_of_at_most(1 << 20), pytest.raises(PipeError) as raised:
        save(path, torch.zeros(LARGE))
    assert f"a file grew too large at {path}: it needs about 2 MiB, and the disk has" in str(raised.value)
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]
    found = load(path, TorchCheckpointIO(), is_plain=True, weights_only=True)
    assert torch.equal(found["state_dict"]["w"] + 0, torch.ones(1))


@pytest.mark.parametrize("save", WAYS)
def test_a_disk_that_is_full_at_the_very_end_is_named(
    save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(commit, "_flush", full)
    with pytest.raises(PipeError, match=rf"no space is left at {tmp_path}/last\.ckpt: it needs about 4 B"):
        save(tmp_path / "last.ckpt", torch.ones(1))
    assert not [*tmp_path.iterdir()]


def test_an_error_of_another_kind_is_told_as_it_is(tmp_path: Path) -> None:
    assert disk.write_failure(RuntimeError("no"), tmp_path / "a", 10) == "RuntimeError: no"
    assert "no space is left" in disk.write_failure(RuntimeError("unexpected pos"), tmp_path / "a", 1 << 62)


@pytest.mark.parametrize("save", WAYS)
def test_what_a_process_that_died_has_begun_is_removed_by_the_next_start(save: Save, tmp_path: Path) -> None:
    """Under whatever name; what another job may be writing at the moment stays."""
    begun = {name: commit.begin(tmp_path / name) for name in ("epoch=1.ckpt", "epoch=2.ckpt", "other.ckpt")}
    for part in begun.values():
        part.mkdir()
        (part / "__0_0.distcp").write_bytes(b"half")
    past = time.time() - 2 * disk.UNFINISHED_S
    for path in (begun["epoch=1.ckpt"], begun["epoch=1.ckpt"] / "__0_0.distcp"):
        os.utime(path, (past, past))
    save(tmp_path / "epoch=2.ckpt", torch.ones(1))
    assert {path.name for path in tmp_path.iterdir()} == {"epoch=2.ckpt", begun["other.ckpt"].name}
