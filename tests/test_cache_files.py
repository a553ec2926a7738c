"""A file of the cache is what was written, or is not used, which one warning says; a full disk ends nothing."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_pipe import cache_files, disk
from lightning_pipe.config import DappleConfig

CONTENT = b'{"seconds": 1.5}'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "times"


@pytest.fixture
def file(folder: Path) -> Path:
    assert cache_files.write(folder / "a.json", CONTENT, version=3)
    return folder / "a.json"


def read(path: Path, version: int = 3) -> bytes | None:
    return cache_files.read(path, bytes, version=version)


def test_what_was_written_is_read(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read(file) == CONTENT
    assert read(file.with_name("b.json")) is None
    assert not caplog.records


def flipped(content: bytes, bit: int) -> bytes:
    return content[: bit // 8] + bytes([content[bit // 8] ^ 1 << bit % 8]) + content[bit // 8 + 1 :]


def test_no_bit_may_differ_and_no_byte_be_missing(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = file.read_bytes()
    damaged = [flipped(whole, bit) for bit in range(8 * len(whole))] + [whole[:end] for end in range(len(whole))]
    for content in [*damaged, whole + b" "]:
        file.write_bytes(content)
        caplog.clear()
        assert read(file) is None
        assert [str(file) in record.getMessage() for record in caplog.records] == [True]
        assert read(file) is None, "it is not there any more"
        assert len(caplog.records) == 1


def test_a_file_of_another_name_or_version_is_not_read(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = file.with_name("b.json")
    shutil.copy(file, other)
    assert read(other) is None
    assert read(file, version=4) is None
    reasons = [record.getMessage() for record in caplog.records]
    assert ["another version wrote it" in reason for reason in reasons] == [False, True]


def test_a_content_that_its_reader_refuses_is_not_used(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert cache_files.read(file, lambda content: {}[content], version=3) is None
    assert [str(file) in record.getMessage() for record in caplog.records] == [True]
    assert not file.exists()


def test_folders_are_the_users_own(file: Path) -> None:
    for folder in (file.parent, file.parent.parent):
        assert folder.stat().st_mode & 0o777 == 0o700
        folder.chmod(0o755)  # as those of a usual umask
    assert file.stat().st_mode & 0o777 == 0o600
    root = file.parent.parent
    assert DappleConfig(cache=str(root)).cache_dir == root
    assert DappleConfig(cache=str(root / "not there yet")).cache_dir == root / "not there yet"


@pytest.mark.parametrize("which", ["cache", "times"])
@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777, 0o1777])
def test_a_folder_that_others_can_write_to_is_not_used(
    file: Path, which: str, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    root = file.parent.parent
    folder = root if which == "cache" else file.parent
    folder.chmod(mode)
    assert [DappleConfig(cache=str(root)).cache_dir for _ in range(2)] == [None, None]
    (record,) = caplog.records
    assert f"{folder} is writable by others" in record.getMessage()


def test_a_folder_of_another_user_is_not_used_and_one_of_root_is(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    root = file.parent.parent
    mine = root.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    assert DappleConfig(cache=str(root)).cache_dir == (root if mine == 0 else None)
    found = root.stat()
    status = os.stat_result((*found[:4], 4321, *found[5:]))
    monkeypatch.setattr(Path, "stat", lambda path, **options: status)
    assert DappleConfig(cache=str(root)).cache_dir is None
    assert "belongs to another user (uid 4321" in caplog.text


def full(*_: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_said_with_path_and_size_and_ends_nothing(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        assert not cache_files.write(file, bytes(2 << 20), version=3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    monkeypatch.setattr(os, "replace", full)
    assert not cache_files.write(file, bytes(2 << 20), version=3)
    too_large, no_space = (record.getMessage() for record in caplog.records)
    assert f"a file grew too large at {file}" in too_large
    assert f"no space is left at {file}: it needs about 2 MiB" in no_space
    assert [*file.parent.iterdir()] == [file]
    assert read(file) == CONTENT


def test_what_a_stopped_process_has_begun_is_removed_and_what_may_go_on_stays(folder: Path) -> None:
    folder.mkdir(parents=True)
    old, young = folder / "old.part", folder / "young.part"
    for path in (old, young):
        path.mkdir()
        (path / "inside").write_text("half")
    past = time.time() - 2 * disk.UNFINISHED_S
    for path in (old, old / "inside", young):
        os.utime(path, (past, past))
    cache_files.write(folder / "a.json", CONTENT, version=1)
    assert sorted(path.name for path in folder.iterdir()) == ["a.json", "young.part"]
