"""Reading a file runs no code of whoever wrote it; where objects are unpickled is listed, with who wrote them."""

from __future__ import annotations

import ast
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from lightning_pipe.cli import main
from lightning_pipe.errors import PipeError
from lightning_pipe.lightning_names import TorchCheckpointIO
from lightning_pipe.runtime.guard.watch import Unwatched
from lightning_pipe.strategy.checkpoints import saving
from lightning_pipe.strategy.checkpoints.files import open_weights
from lightning_pipe.strategy.checkpoints.sharded import described
from lightning_pipe.strategy.checkpoints.writing import Writing, save
from lightning_pipe.strategy.ranks.control_plane import ControlPlane

PACKAGE = Path(__file__).parent.parent / "lightning_pipe"
ALONE = ControlPlane(None, rank=0, ranks=1, wait=Unwatched().wait)
UNPICKLING = frozenset(
    "pickle.load pickle.loads pickle.Unpickler torch.load np.load numpy.load marshal.load marshal.loads shelve.open "
    "yaml.unsafe_load yaml.full_load FileSystemReader dcp.load eval exec".split()
)
LAST_NAMES = frozenset(name.rpartition(".")[2] for name in UNPICKLING)
PLACES = {
    ("capture/python/twisters.py", "pickle.loads"): "what this process has pickled",
    ("strategy/loading/batch_loading.py", "pickle.loads"): "from another rank",
    ("strategy/loading/known_structures.py", "pickle.loads"): "from another rank",
    ("strategy/ranks/control_plane.py", "pickle.loads"): "from another rank",
    ("strategy/ranks/outcome.py", "pickle.loads"): "a private temporary file of a rank that this process has started",
    ("strategy/checkpoints/stored_tensors.py", "pickle.Unpickler"): "stand-ins for the classes of torch",
    ("strategy/checkpoints/saving.py", "torch.load"): "as the user says in `weights_only`",
    ("strategy/checkpoints/sharded.py", "torch.load"): "as the user says in `weights_only`",
}


def unpickling(file: Path) -> set[tuple[str, str]]:
    """Return what of a file can make objects of what it reads; `weights_only=True` does not."""
    found = set()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    safe = {
        id(call.func)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        and any(word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in call.keywords)
    }
    for node in ast.walk(tree):
        last = getattr(node, "attr", getattr(node, "id", None))
        if last in LAST_NAMES and id(node) not in safe and (name := ast.unparse(node)) in UNPICKLING:
            found.add((file.relative_to(PACKAGE).as_posix(), name))
        if isinstance(node, ast.ImportFrom):
            found |= {(str(file), name.name) for name in node.names if f"{node.module}.{name.name}" in UNPICKLING}
    return found


def test_objects_are_unpickled_in_listed_places_only() -> None:
    assert set().union(*map(unpickling, PACKAGE.rglob("*.py"))) == PLACES.keys()


class Harm:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return (Path.touch, (Path("harm"),))


SET_METHOD = b"N}X\x0c\x00\x00\x00__setstate__K\x01s\x86b."  # the state of a class: a dict of its attributes
PATCHING = b"\x80\x02" + pickle.dumps(ChunkStorageMetadata, protocol=2)[2:-1] + SET_METHOD


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a checkpoint of one rank, as a directory; unpickled harm shows in the directory above."""
    monkeypatch.chdir(tmp_path)
    rest = {"epoch": 7, **described(["weight"], {"weight": "weight"}, {}, None)}
    save(tmp_path / "last.ckpt", {"model": {"weight": torch.ones(3)}}, rest, ALONE)
    return tmp_path / "last.ckpt"


def consolidated(path: Path) -> None:
    if main(["consolidate", str(path), "out.ckpt"]):
        raise PipeError(str(path))  # as the command has printed


READERS: dict[str, Callable[[Path], Any]] = {
    "weights": open_weights,
    "resume": lambda path: saving.load(path, TorchCheckpointIO(), is_plain=True, weights_only=None),
    "consolidate": consolidated,
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("content", [pickle.dumps(Harm()), PATCHING], ids=["code", "another method"])
def test_metadata_of_a_directory_runs_nothing_and_changes_no_class(content: bytes, reader: str, folder: Path) -> None:
    before = dict(vars(ChunkStorageMetadata))
    (folder / ".metadata").write_bytes(content)
    (folder / "checksums.json").unlink()
    with pytest.raises(PipeError, match=r"last\.ckpt"):
        READERS[reader](folder)
    assert not Path("harm").exists()
    assert vars(ChunkStorageMetadata) == before


@pytest.mark.parametrize("reader", ["resume", "consolidate"])
def test_the_rest_of_a_directory_runs_nothing(reader: str, folder: Path) -> None:
    torch.save({"epoch": Harm()}, folder / "meta.pt")
    (folder / "checksums.json").unlink()
    with pytest.raises(PipeError, match=r"last\.ckpt"):
        READERS[reader](folder)
    assert not Path("harm").exists()


def test_a_checkpoint_of_a_trusted_source_may_hold_any_object(folder: Path) -> None:
    rest = {"epoch": Harm(), **described(["weight"], {"weight": "weight"}, {}, None)}
    save(folder, {"model": {"weight": torch.ones(3)}}, rest, ALONE)
    assert main(["consolidate", "--trusted", str(folder), "out.ckpt"]) == 0
    assert Path("harm").exists() and Path("out.ckpt").exists()


@pytest.mark.parametrize("reader", ["weights", "resume"])
def test_a_plain_file_runs_nothing(reader: str, folder: Path) -> None:
    torch.save({"state_dict": {"weight": Harm()}}, "plain.ckpt")
    with pytest.raises(PipeError, match=r"plain\.ckpt"):
        READERS[reader](Path("plain.ckpt"))
    assert not Path("harm").exists()


def test_a_note_of_a_rank_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lies in a directory that others may be able to write to."""
    monkeypatch.chdir(tmp_path)
    writing = Writing(tmp_path / "last.ckpt", {"model": {"weight": torch.ones(3)}}, lambda file: None, ALONE)
    writing.write()
    (note,) = tmp_path.glob(".last.ckpt.*/.0.written")
    assert json.loads(note.read_text())
    note.write_bytes(pickle.dumps(Harm()))
    with pytest.raises(ValueError, match="utf-8"):
        writing.finish(None)
    assert not Path("harm").exists()


def test_an_index_names_files_beside_it_only(tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    for name in ("/etc/passwd", "../one.safetensors"):
        index = {"weight_map": {"weight": name}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(PipeError, match="expected names of files beside it"):
            open_weights(tmp_path)


def test_a_directory_names_its_own_files_only(folder: Path) -> None:
    (folder / "checksums.json").unlink()
    content = (folder / ".metadata").read_bytes()
    name = b"__0_0.distcp"
    assert name in content
    shutil.copy(folder / name.decode(), folder.parent / "01.distcp")
    (folder / ".metadata").write_bytes(content.replace(name, b"../01.distcp"))
    with pytest.raises(PipeError, match="not in a plain file of the directory"):
        open_weights(folder)
