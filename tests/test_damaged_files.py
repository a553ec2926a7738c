"""Whatever happens to a file, it gives what was written, or is not used, or one error names it; no other number."""

from __future__ import annotations

import itertools
import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from core.test_published import CHAIN, piper
from core.test_published_json import dnn
from lightning_pipe import cache_files
from lightning_pipe.capture import kept_graphs
from lightning_pipe.config import conf_dir
from lightning_pipe.core.cluster_file import load_cluster
from lightning_pipe.core.plan import Plan, StagePlan
from lightning_pipe.core.profile import OptimizerProfile
from lightning_pipe.core.serial import load_yaml, save_yaml, to_dict
from lightning_pipe.errors import PipeError
from lightning_pipe.lightning_names import TorchCheckpointIO
from lightning_pipe.profiler.cache import Timing, cache_file, digest, load_timings, store_timings
from lightning_pipe.profiler.devices import DeviceFacts
from lightning_pipe.profiler.network.link_probe import LinkFacts
from lightning_pipe.profiles.published import load_published
from lightning_pipe.runtime.guard.watch import Unwatched
from lightning_pipe.schedule.formats.torch_csv import load_csv
from lightning_pipe.strategy.checkpoints import saving
from lightning_pipe.strategy.checkpoints.files import open_weights
from lightning_pipe.strategy.checkpoints.sharded import described
from lightning_pipe.strategy.checkpoints.writing import save
from lightning_pipe.strategy.plans import kept_checks, surroundings
from lightning_pipe.strategy.plans.runtime_overhead import Rehearsed
from lightning_pipe.strategy.ranks.control_plane import ControlPlane

CPU = torch.device("cpu")
ALONE = ControlPlane(None, rank=0, ranks=1, wait=Unwatched().wait)
Read = Callable[[], Any]  # reads a whole kind of file again


def damages(content: bytes, generator: random.Random) -> Iterator[bytes]:
    """Yield damaged contents without end."""
    while True:
        at, to = sorted(generator.randrange(len(content)) for _ in range(2))
        lines = content.splitlines(keepends=True)
        one, two = (generator.randrange(len(lines)) for _ in range(2))
        lines[one], lines[two] = lines[two], lines[one]
        words = content.split(b" ")
        one, two = (generator.randrange(len(words)) for _ in range(2))
        words[one], words[two] = words[two], words[one]
        flip = bytes([content[at] ^ 1 << generator.randrange(8)])
        yield content[:at] + flip + content[at + 1 :]
        yield generator.choice(
            [
                content[:at],
                content[:at] + content[to:],
                content[:to] + content[at:],
                content[:at] + bytes(to - at) + content[to:],
                b"".join(lines),
                b" ".join(words),
            ]
        )


@pytest.fixture
def layers() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def timings(folder: Path) -> Iterator[tuple[Path, Read]]:
    store_timings(folder, CPU, {digest(str(number)): Timing(number / 7, 0.1, 64.0) for number in range(9)})
    yield cache_file(folder, CPU), lambda: load_timings(folder, CPU) or None


def check(folder: Path) -> Iterator[tuple[Path, Read]]:
    known = kept_checks._KnownCheck(kept_checks.Verdict("2026"), "ab12", {"a.py": (1, 2)})
    path = folder / "checks" / "1a.json"
    cache_files.write(path, json.dumps(to_dict(known)).encode(), version=kept_checks._FORMAT)
    yield path, lambda: cache_files.read(path, kept_checks._KnownCheck.parsed, version=kept_checks._FORMAT)


def measured(folder: Path) -> Iterator[tuple[Path, Read]]:
    facts = (DeviceFacts("host", "CPU", "memory", 1 << 30, 0.5),)
    known = surroundings.Surroundings(facts, LinkFacts(), Rehearsed(1e-5, 2e-5, 64), OptimizerProfile(1e-9))
    path = folder / "surroundings" / "1a.json"
    content = json.dumps(to_dict(surroundings._Measured(1e12, known)))
    cache_files.write(path, content.encode(), version=surroundings._FORMAT)
    yield path, lambda: cache_files.read(path, surroundings._Measured.parsed, version=surroundings._FORMAT)


def graph(folder: Path) -> Iterator[tuple[Path, Read]]:
    traced = torch.fx.symbolic_trace(nn.Identity())
    fields = {"gradients": (("a", "weight"), ("b", "bias")), "samples": 4, "loss": None}
    kept_graphs.store(folder / "graphs", "1a", kept_graphs.kept_graph(traced.graph, fields, "f"))
    yield kept_graphs.path_of(folder / "graphs", "1a"), lambda: kept_graphs.load(folder / "graphs", "1a")


CACHE = (timings, check, measured, graph)


@pytest.mark.parametrize("kind", CACHE)
def test_a_damaged_cache_file_is_not_used(
    kind: Callable[[Path], Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ((path, read),) = kind(tmp_path)
    whole, expected = path.read_bytes(), read()
    assert expected is not None
    for damaged in itertools.islice(damages(whole, random.Random(1)), 400):
        path.write_bytes(damaged)
        caplog.clear()
        found = read()
        if damaged == whole:
            assert found == expected
            continue
        assert found is None, damaged
        assert [str(path) in record.getMessage() for record in caplog.records] == [True]


def plan(folder: Path) -> Iterator[tuple[Path, Read]]:
    stages = (StagePlan("", (0, 1)), StagePlan("layers.2", (2,)))
    save_yaml(Plan(stages, microbatches=4, options={"warmup": "pb"}), folder / "plan.yaml")
    yield folder / "plan.yaml", lambda: load_yaml(Plan, folder / "plan.yaml")


def cluster(folder: Path) -> Iterator[tuple[Path, Read]]:
    path = folder / "cluster.yaml"
    shutil.copy(conf_dir() / "cluster" / "mixed_a100_v100.yaml", path)
    yield path, lambda: load_cluster(path)


def profiles(folder: Path) -> Iterator[tuple[Path, Read]]:
    for name, text in {"chain.txt": CHAIN, "piper.json": piper(), "dnn.json": dnn()}.items():
        (folder / name).write_text(text)
        yield folder / name, lambda path=folder / name: load_published(path)


def schedule(folder: Path) -> Iterator[tuple[Path, Read]]:
    path = folder / "schedule.csv"
    path.write_text("0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1\n")
    yield path, lambda: load_csv(str(path))


WORDS = (
    "1e999 -1 nan .nan .inf 2001-99-99 2001-01-01 [] {} null true !!int_x !!timestamp_x !!bool_x &a_[*a] *a <<:_1 ''"
).split()
DEEP, LONG, LONGER = "[" * 3000, "9" * 400, "9" * 5000


def other_words(content: bytes, generator: random.Random) -> Iterator[bytes]:
    """Yield contents with another word or number at a random place."""
    places = [match.span() for match in re.finditer(rb"[\w.-]+", content)]
    for word in [*WORDS * 4, DEEP, *[LONG, LONGER] * 20]:
        start, end = generator.choice(places)
        yield content[:start] + word.replace("_", " ").encode() + content[end:]


def named_error(read: Read, path: Path) -> Any:
    """Return what is read, or None and see that the error is ours, and names the file or its folder."""
    try:
        return read()
    except PipeError as error:
        text = str(error)
    assert str(path) in text or str(path.parent) in text
    return None


@pytest.mark.parametrize("kind", [plan, cluster, profiles, schedule])
def test_a_damaged_file_that_people_write_is_read_or_named(kind: Callable[[Path], Any], tmp_path: Path) -> None:
    """Another number in such a file is another number that somebody has written."""
    for path, read in kind(tmp_path):
        whole = path.read_bytes()
        some = itertools.islice(damages(whole, random.Random(2)), 150)
        for damaged in itertools.chain(some, other_words(whole, random.Random(2))):
            path.write_bytes(damaged)
            named_error(read, path)
        path.write_bytes(whole)
        assert read() is not None


Values = dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]


def values(tensors: Any) -> Values:
    plain = {name: tensor + 0 for name, tensor in tensors.items()}
    return {name: (one.dtype, tuple(one.shape), one.numpy().tobytes()) for name, one in plain.items()}


def resumed(path: Path) -> tuple[Values, int]:
    found = saving.load(path, TorchCheckpointIO(), is_plain=True, weights_only=True)
    return values(found["state_dict"]), found["epoch"]


def directory(folder: Path, state: dict[str, torch.Tensor]) -> Iterator[tuple[Path, Read]]:
    path = folder / "sharded.ckpt"
    names = {name: name for name in state}
    save(path, {"model": state}, {"epoch": 7, **described([*state], names, {}, None)}, ALONE)
    assert {file.name for file in path.iterdir()} == {".metadata", "meta.pt", "checksums.json", "__0_0.distcp"}
    for file in sorted(path.iterdir()):
        yield file, lambda: resumed(path)


def torch_directory(folder: Path, state: dict[str, torch.Tensor]) -> Iterator[tuple[Path, Read]]:
    torch.distributed.checkpoint.save(state, checkpoint_id=folder / "dcp", no_dist=True)
    yield folder / "dcp" / "__0_0.distcp", lambda: values(open_weights(folder / "dcp"))


def plain_weights(folder: Path, state: dict[str, torch.Tensor]) -> Iterator[tuple[Path, Read]]:
    torch.save({"state_dict": state, "epoch": 3}, folder / "plain.ckpt")
    yield folder / "plain.ckpt", lambda: values(open_weights(folder / "plain.ckpt"))


@pytest.mark.parametrize("kind", [directory, torch_directory, plain_weights])
def test_a_damaged_checkpoint_gives_what_was_saved_or_is_named(
    kind: Callable[..., Any], tmp_path: Path, layers: nn.Module
) -> None:
    for path, read in kind(tmp_path, dict(layers.state_dict())):
        whole, expected = path.read_bytes(), read()
        for damaged in itertools.islice(damages(whole, random.Random(3)), 150):
            path.write_bytes(damaged)
            assert named_error(read, path) in (None, expected), f"{path}: {damaged}"
        path.write_bytes(whole)


def test_all_but_the_tensors_of_a_plain_checkpoint_is_as_it_was_saved_or_it_is_named(
    tmp_path: Path, layers: nn.Module
) -> None:
    """Every rank reads its own tensors of a file; checking all of them would read all of it on all ranks."""
    path = tmp_path / "plain.ckpt"
    torch.save({"state_dict": layers.state_dict(), "epoch": 3, "loops": {"step": [1, 2]}}, path)
    whole, expected = path.read_bytes(), resumed(path)
    for damaged in itertools.islice(damages(whole, random.Random(4)), 300):
        path.write_bytes(damaged)
        found = named_error(lambda: resumed(path), path)
        if found is not None:
            forms = [{name: one[:2] for name, one in state.items()} for state in (found[0], expected[0])]
            assert (forms[0], found[1]) == (forms[1], expected[1])


def test_damaged_safetensors_are_read_or_named(tmp_path: Path, layers: nn.Module) -> None:
    """The format has no checksum."""
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    folder = tmp_path / "weights"
    folder.mkdir()
    safetensors.save_file(dict(layers.state_dict()), folder / "one.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(layers.state_dict(), "one.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        for damaged in itertools.islice(damages(whole, random.Random(5)), 100):
            path.write_bytes(damaged)
            named_error(lambda: values(open_weights(folder)), path)
        path.write_bytes(whole)
