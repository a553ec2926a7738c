"""A checkpoint that every rank writes its part of: it resumes under any layout, and a crash leaves the last one."""

from __future__ import annotations

import json
import os
import shutil
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from lightning_pipe.cli import main
from lightning_pipe.strategy.checkpoints import commit, safetensors_files
from lightning_pipe.strategy.start.unread import Unread
from models.parity import make_loader, make_module
from ranks.world import World
from strategy.built_late import Late
from strategy.fits import Losses, assert_same, dapple, drawn_on_host, fitted, make_trainer

F64 = {"dtype": torch.float64}
SHARDED = {"microbatches": 2, "save_distributed_checkpoint": True}


def train(
    name: str, options: dict[str, Any] | None, *, epochs: int, save: str | None = None, load: str | None = None
) -> Any:
    """Fit a module that is built late, from a checkpoint if one is given; save one afterwards, twice, if wanted."""
    strategy = "auto" if options is None else dapple(**options)
    module, losses = Late(lambda: make_module(name, **F64).train()), Losses()
    trainer = make_trainer(strategy, max_epochs=epochs, callbacks=[losses])
    torch.manual_seed(5)
    trainer.fit(module, make_loader(name, **F64), ckpt_path=load)
    for _ in range(2 if save is not None else 0):  # the second time over the first one
        trainer.save_checkpoint(save)
    return fitted(trainer, module, losses.losses) if options is None or options.get("restore") != "none" else None


def saved(name: str, options: dict[str, Any], path: str) -> None:
    train(name, options, epochs=1, save=path)


def resumed(name: str, options: dict[str, Any], path: str) -> Any:
    return train(name, options, epochs=2, load=path)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that two ranks have saved, neither of which had the whole module."""
    path = tmp_path_factory.mktemp("sharded") / "epoch=0-step=3.ckpt"
    World(2).run(saved, "gpt_tied", {"layout": "1-1", "restore": "none", **SHARDED}, str(path))
    return path


@drawn_on_host
def test_training_goes_on_under_another_layout(directory: Path) -> None:
    expected = train("gpt_tied", None, epochs=2)
    expected.losses = expected.losses[3:]
    found = World(3).run(resumed, "gpt_tied", {"layout": "1-1-1", **SHARDED}, str(directory))
    alone = resumed("gpt_tied", SHARDED, str(directory))
    for one in [*found, alone]:
        assert_same(one, expected, rtol=1e-9)


def test_every_tensor_is_written_once(directory: Path) -> None:
    metadata = FileSystemReader(directory).read_metadata()
    assert all(len(one.chunks) == 1 for one in metadata.state_dict_metadata.values())
    module = make_module("gpt_tied", **F64)
    assert sum(name.startswith("model.") for name in metadata.state_dict_metadata) == len([*module.parameters()])
    assert {place.relative_path for place in metadata.storage_data.values()} == {"__0_0.distcp", "__1_0.distcp"}
    assert [path.name for path in directory.parent.iterdir()] == [directory.name]


@drawn_on_host
def test_it_becomes_the_plain_file(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, out = tmp_path / "plain.ckpt", tmp_path / "out.ckpt"
    train("gpt_tied", None, epochs=1, save=str(plain))
    assert main(["consolidate", str(directory), str(out)]) == 0
    assert "Wrote" in capsys.readouterr().out
    expected, found = (torch.load(path, weights_only=True) for path in (plain, out))
    assert found.keys() == expected.keys()
    assert list(found["state_dict"]) == list(expected["state_dict"])
    torch.testing.assert_close(found["state_dict"], expected["state_dict"], rtol=1e-9, atol=1e-9)
    (ours,), (theirs,) = found["optimizer_states"], expected["optimizer_states"]
    assert ours["param_groups"] == theirs["param_groups"] and list(ours["state"]) == list(theirs["state"])
    torch.testing.assert_close(ours["state"], theirs["state"], rtol=1e-9, atol=1e-9)
    assert found["loops"]["fit_loop"] == expected["loops"]["fit_loop"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.ckpt", "plain.ckpt"]


def test_it_becomes_safetensors_files_that_hold_every_tensor_once(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors are read with the extra `weights`")
    alive: list[weakref.ref[Any]] = []
    most_alive = 0
    open_all = safetensors_files.open_weights

    def watched(path: Path) -> dict[str, Unread]:
        def reading(tensor: Unread) -> torch.Tensor:
            nonlocal most_alive
            values = tensor.read().numpy().copy()
            alive.append(weakref.ref(values))
            most_alive = max(most_alive, sum(one() is not None for one in alive))
            return torch.from_numpy(values)

        found = open_all(path)
        once = {id(t): Unread.of(t.shape, t.dtype, partial(reading, t)) for t in found.values()}
        return {name: once[id(tensor)] for name, tensor in found.items()}

    plain = tmp_path / "plain.ckpt"
    assert main(["consolidate", str(directory), str(plain)]) == 0
    state = torch.load(plain, weights_only=True)["state_dict"]
    first = {value.data_ptr(): name for name, value in reversed(state.items())}
    expected = {name: value for name, value in state.items() if first[value.data_ptr()] == name}
    assert len(expected) == len([*make_module("gpt_tied", **F64).parameters()]) < len(state)
    monkeypatch.setattr(safetensors_files, "open_weights", watched)
    for number, source in enumerate((directory, plain)):
        folder = tmp_path / str(number)
        command = ["consolidate", str(source), str(folder), "--format", "safetensors", "--max-shard-size", "8KB"]
        assert main(command) == 0
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        files = sorted({*index["weight_map"].values()})
        assert files[0] == f"model-00001-of-{len(files):05}.safetensors" and len(files) > 1
        read = {name: value for file in files for name, value in safetensors.load_file(folder / file).items()}
        torch.testing.assert_close(read, expected, rtol=0, atol=0)
        assert index["metadata"]["total_size"] == sum(value.nbytes for value in expected.values())
        torch.testing.assert_close(
            {name: tensor.read() for name, tensor in open_all(folder).items()}, expected, rtol=0, atol=0
        )
        assert main(command) == 2, "files that are there stay"
    assert most_alive == 1, "the memory of one tensor"


def test_safetensors_of_one_attribute_have_its_names_and_the_type_that_was_asked_for(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors are read with the extra `weights`")
    state = {"model.a": torch.ones(3, 2).T, "model.steps": torch.tensor(5), "head.b": torch.ones(1)}
    state["model.c"] = torch.ones(0)
    torch.save({"state_dict": state}, tmp_path / "last.ckpt")
    command = ["consolidate", str(tmp_path / "last.ckpt"), str(tmp_path / "out"), "--format", "safetensors"]
    assert main([*command, "--prefix", "model", "--dtype", "bfloat16"]) == 0
    read = safetensors.load_file(tmp_path / "out" / "model.safetensors")
    half = {"a": torch.ones(2, 3).bfloat16(), "steps": torch.tensor(5), "c": torch.ones(0).bfloat16()}
    torch.testing.assert_close(read, half, rtol=0, atol=0)
    assert main([*command[:2], str(tmp_path / "no"), "--format", "safetensors", "--prefix", "net"]) == 2


def test_what_is_no_checkpoint_is_not_consolidated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["consolidate", str(tmp_path), str(tmp_path / "out.ckpt")]) == 2
    assert "found no sharded checkpoint" in capsys.readouterr().err


class Dies(BaseException):
    """The process is killed."""


def write_directory(path: Path, content: str) -> None:
    part = commit.begin(path)
    part.mkdir()
    (part / "a").write_text(content)
    (part / "b").write_text(content)
    commit.commit(path)


def write_file(path: Path, content: str) -> None:
    commit.begin(path).write_text(content)
    commit.commit(path)


def content_of(path: Path) -> str:
    there = commit.existing(path)
    if there.is_file():
        return there.read_text()
    found = {(there / name).read_text() for name in "ab"}
    assert len(found) == 1
    return found.pop()


@pytest.mark.parametrize("write", [write_file, write_directory])
@pytest.mark.parametrize("before", [write_file, write_directory])
def test_whenever_the_process_dies_the_last_complete_checkpoint_is_there(
    write: Callable[[Path, str], None],
    before: Callable[[Path, str], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Die before every change of the disk, one after another, and write again afterwards."""
    path, steps = tmp_path / "last.ckpt", 0

    def counted(change: Callable[..., Any]) -> Callable[..., Any]:
        def changing(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise Dies
            return change(*arguments, **options)

        return changing

    while True:
        shutil.rmtree(tmp_path)
        before(path, "old")
        left = steps
        with monkeypatch.context() as patched:
            for owner, name in ((os, "replace"), (Path, "rename"), (Path, "mkdir"), (Path, "write_text")):
                patched.setattr(owner, name, counted(getattr(owner, name)))
            patched.setattr(shutil, "rmtree", counted(shutil.rmtree))
            patched.setattr(Path, "unlink", counted(Path.unlink))
            try:
                write(path, "new")
                died = False
            except Dies:
                died = True
        assert content_of(path) in ("old", "new")
        write(path, "newest")
        assert content_of(path) == "newest" and [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]
        if not died:
            break
        steps += 1
    assert steps > 2
