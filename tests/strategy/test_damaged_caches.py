"""A fit beside a cache that is damaged, full, or of somebody else is the fit without a cache, and says so once."""

from __future__ import annotations

import errno
import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from models.parity import make_loader, make_module
from ranks.world import World
from strategy.fits import Losses, checked, make_trainer

NAME = "dict_batch"
Fit = tuple[list[str], list[float]]


def full(*_: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fit(cache: str, is_full: bool) -> Fit:
    """Fit two batches; return what was warned of on this rank about files, and the losses."""
    warned: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.getMessage()) if "cache_files" in record.name else None
    logging.getLogger("lightning_pipe").addHandler(handler)
    losses = Losses()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)  # so that the check can be kept
        if is_full:
            patch.setattr("lightning_pipe.cache_files.os.replace", full)
        strategy = checked(cache=cache, layout="1-1", microbatches=2, seed=1)
        torch.manual_seed(5)
        trainer = make_trainer(strategy, max_steps=2, callbacks=[losses])
        trainer.fit(make_module(NAME, dtype=torch.float64).train(), make_loader(NAME, dtype=torch.float64))
    return warned, losses.losses


def fitted(cache: Path, *, is_full: bool = False) -> tuple[list[str], list[float]]:
    """Return the warnings of all ranks, and the losses."""
    found: list[Fit] = World(2).run(fit, str(cache), is_full)
    assert found[0][1] == found[1][1]
    return [text for warned, _ in found for text in warned], found[0][1]


def files(cache: Path) -> list[Path]:
    return sorted(path for path in cache.rglob("*") if path.suffix in (".json", ".graph"))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A cache with files, and the losses of the fit that filled it."""
    cache = tmp_path_factory.mktemp("any") / "cache"
    warned, losses = fitted(cache)
    assert not warned
    assert {path.parent.name for path in files(cache)} == {"graphs", "checks"}
    return cache, losses


def test_damaged_files_are_named_and_made_again(expected: tuple[Path, list[float]]) -> None:
    cache, losses = expected
    damaged = files(cache)
    for path in damaged:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    warned, found = fitted(cache)
    assert found == losses
    assert sorted(str(path) for path in damaged for text in warned if str(path) in text) == list(map(str, damaged))
    assert len(warned) == len(damaged)
    assert {path.parent.name for path in files(cache)} == {"graphs", "checks"}


def test_a_full_disk_ends_no_fit(expected: tuple[Path, list[float]], tmp_path: Path) -> None:
    warned, found = fitted(tmp_path / "cache", is_full=True)
    assert found == expected[1]
    assert warned and all("no space is left at" in text for text in warned)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.suffix == ".part"]


def test_a_folder_that_others_can_write_to_is_named_once_and_left_alone(
    expected: tuple[Path, list[float]], tmp_path: Path
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    (warning,), found = fitted(tmp_path / "cache")
    assert f"{tmp_path / 'cache'} is writable by others" in warning
    assert found == expected[1]
    assert not [*(tmp_path / "cache").iterdir()]
