"""Every block of the pages is true of an installed package: it runs from the built wheel, or says why it does not.

A block that is not run has a line `<!-- not run: reason -->` above it; the marks are listed here. Commands run in the
order of their page, in a folder that has what a reader has: a profile, a project of their own, a Hydra application.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"(?:^<!-- not run: (?P<why>.+?) -->\n+)?^```(?P<kind>.*)\n(?P<body>(?:.*\n)*?)^```$", re.MULTILINE)
COMPARED = {"schedules.md", "concepts.md"}  # whose drawings other tests compare with the simulator
MARKS = {
    "a drawing": 16,
    "needs a checkout": 8,
    "needs several hosts": 2,
    "needs transformers": 1,
    "needs two GPUs": 2,
    "needs a checkpoint that ranks wrote": 2,
    "part of a script": 1,
    "takes minutes": 1,
    "what a run prints": 5,
    "a warning": 1,
    "needs a library with a command, and torchrun starts processes": 1,
    "needs a main.py of LightningCLI, as examples/07_lightning_cli.py is": 1,
}
NEEDS = {"02_lora_llama": "transformers", "03_vit_on_digits": "sklearn", "07_lightning_cli": "jsonargparse"}

PROFILE = "".join(
    f"node{k} -- Conv_{k} -- forward_compute_time={k % 5 + 1}, backward_compute_time={2 * (k % 5 + 1)}, "
    f"activation_size={(k % 3 + 1) << 20}, parameter_size={(k % 4 + 1) << 20}\n"
    for k in range(1, 31)
) + "".join(f"\tnode{k} -- node{k + 1}\n" for k in range(1, 30))
NETS = """
from lightning_pipe.examples import gpt


class GPT(gpt.GPT):
    def __init__(self, depth=8):
        super().__init__(depth, width=64, heads=4, context=64, vocabulary=512)
"""
DATA = """
import torch


def one_batch():
    return torch.randint(0, 512, (8, 65))
"""
TRAIN = """
import hydra


@hydra.main(version_base=None, config_path="conf", config_name="train")
def main(config):
    print(type(hydra.utils.instantiate(config.trainer).strategy).__name__)


if __name__ == "__main__":
    main()
"""
TRAINER = (
    "trainer: {_target_: lightning.pytorch.Trainer, strategy: auto, accelerator: cpu, devices: 1, logger: false}\n"
)
RUN_BLOCKS = """
import json, os, sys, tempfile, traceback
import lightning.pytorch as pl
import lightning_pipe
from lightning_pipe.core.cluster_file import cluster_from_text
from lightning_pipe.core.plan import Plan
from lightning_pipe.core.serial import from_yaml

print(lightning_pipe.__file__, file=sys.stderr)
failed = []
for name, kind, body in json.load(sys.stdin):
    os.chdir(tempfile.mkdtemp())
    try:
        if kind == "python":
            exec(compile(body, name, "exec", dont_inherit=True), {"pl": pl})
        else:
            cluster_from_text(body, source=name) if body.startswith("hosts:") else from_yaml(Plan, body)
    except Exception:
        failed.append(f"{name}: {traceback.format_exc()}")
print(json.dumps(failed))
"""


class Block(NamedTuple):
    """A fenced block of a page: why it is not run ("" if it is), its language, and what it says."""

    page: str
    why: str
    kind: str
    body: str


def blocks(page: Path) -> list[Block]:
    found = FENCE.finditer(page.read_text(encoding="utf-8"))
    return [Block(page.name, block["why"] or "", block["kind"], block["body"]) for block in found]


BLOCKS = [block for page in PAGES for block in blocks(page)]
COMMANDS = {
    page.name: [
        command
        for block in BLOCKS
        if block.page == page.name and block.kind == "bash" and not block.why
        for command in filter(None, (line.split(" #")[0].strip() for line in block.body.splitlines()))
    ]
    for page in PAGES
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """Build the wheel, install it into an environment of its own beside the libraries of this one; return its bin."""
    folder = tmp_path_factory.mktemp("installed")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    built = subprocess.run(build, capture_output=True, text=True, check=False)
    if built.returncode:
        pytest.skip(f"the wheel cannot be built here: {built.stderr[-300:]}")
    (wheel,) = folder.glob("*.whl")
    environment = folder / "environment"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    put = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", str(wheel)]
    subprocess.run(put, check=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "libraries.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return environment / "bin"


@pytest.fixture
def reader(tmp_path) -> Path:
    """Return a folder that has what a reader has: a profile, a project of their own, a Hydra application."""
    (tmp_path / "vgg-19-pbs-32.txt").write_text(PROFILE)
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "nets.py").write_text(NETS)
    (tmp_path / "project" / "data.py").write_text(DATA)
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "train.yaml").write_text(TRAINER)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


@pytest.fixture(autouse=True)
def _only_what_is_installed(monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)


def test_every_block_is_run_or_says_why_not():
    fences = sum(page.read_text(encoding="utf-8").count("\n```") for page in PAGES)
    assert 2 * len(BLOCKS) == fences, "every fence is read here"
    assert {block.kind for block in BLOCKS} <= {"python", "yaml", "bash", "text"}, (
        "the site shows no fence of two words"
    )
    shown = [block for block in BLOCKS if block.kind == "text" and not block.why]
    assert {block.page for block in shown} <= COMPARED, [
        block.body[:80] for block in shown if block.page not in COMPARED
    ]
    assert all(re.match(r"(stage )?0 \| ", block.body) for block in shown), "a drawing of a schedule"
    marks = [block.why for block in BLOCKS if block.why]
    assert {why: marks.count(why) for why in marks} == MARKS


def test_pages_have_commands_of_every_kind():
    commands = [shlex.split(command) for commands in COMMANDS.values() for command in commands]
    words = [[word for word in command if not re.match(r"[A-Z_]+=", word)] for command in commands]
    assert {program for program, *_ in words} == {"lightning-pipe", "python"}
    commands = {first for program, first, *_ in words if program == "lightning-pipe"}
    assert commands >= {"plan", "compare", "simulate", "explain", "report", "schedules", "max-batch"}


@pytest.mark.slow
def test_blocks_of_python_and_yaml_run_from_the_wheel(installed, tmp_path):
    given = [
        (f"{block.page}, block {k}", block.kind, block.body)
        for k, block in enumerate(BLOCKS)
        if block.kind in ("python", "yaml") and not block.why
    ]
    assert len(given) > 20
    command = [str(installed / "python"), "-c", RUN_BLOCKS]
    found = subprocess.run(command, input=json.dumps(given), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert str(installed.parent) in found.stderr, "the installed package"
    assert json.loads(found.stdout.splitlines()[-1]) == []


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page, commands in COMMANDS.items() if commands])
def test_commands_of_a_page_run_from_the_wheel(page, installed, reader):
    """One after the other: `simulate` takes the plan that `plan` has written above it."""
    environment = {**os.environ, "PATH": f"{installed}:{os.environ['PATH']}"}
    missing = []
    for command in COMMANDS[page]:
        words = shlex.split(command)
        library = NEEDS.get(Path(words[1]).stem)
        if library is not None and importlib.util.find_spec(library) is None:
            missing.append(f"{command} needs {library}")
            continue
        found = subprocess.run(words, cwd=reader, env=environment, capture_output=True, text=True, check=False)
        assert found.returncode == 0, f"{command}:\n{found.stderr}"
        if words[1] == "train.py":
            assert "DappleStrategy" in found.stdout
        if words[1].startswith("examples/"):
            told = re.search(r"^(trained \d+ steps|after \d+ steps|Wrote the plan)", found.stdout, re.MULTILINE)
            assert told is not None, found.stdout
            if "09_" not in words[1]:  # which trains nothing; the others fail if losses differ
                assert re.fullmatch(r"one device: \d\.\d+, pipeline: \d\.\d+", found.stdout.splitlines()[-1])
        for name, _, value in (word.partition("=") for word in words):
            if name in ("out", "draw", "trace", "csv"):
                assert (reader / value).is_file(), f"{command} was to write {value}"
    if missing:
        pytest.skip("; ".join(missing))
