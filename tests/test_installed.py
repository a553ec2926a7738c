"""What the pages say of the command line is true of an installed package: its commands run from the built wheel."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OF_THE_READER = ("profile=", "plan=", "model=project.")  # files and modules that a reader has, and the package has not


def commands() -> list[str]:
    """List the commands of all pages that need nothing but the package."""
    blocks = [
        b for page in PAGES for b in re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    ]
    lines = [line.strip() for block in blocks for line in block.splitlines() if line.startswith("lightning-pipe ")]
    return list(dict.fromkeys(line for line in lines if not any(mark in line for mark in OF_THE_READER)))


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


def test_pages_have_commands_that_need_nothing_but_the_package():
    assert {shlex.split(command)[1] for command in commands()} >= {"plan", "report", "schedules"}


@pytest.mark.slow
@pytest.mark.parametrize("command", commands())
def test_commands_of_the_pages_run_from_the_wheel(command, installed, tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    words = shlex.split(command.split(" #")[0])
    where = [str(installed / "python"), "-c", "import lightning_pipe; print(lightning_pipe.__file__)"]
    place = subprocess.run(where, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert str(installed.parent) in place
    found = subprocess.run(
        [str(installed / words[0]), *words[1:]], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    for word in words:
        if word.startswith("out="):
            assert (tmp_path / word.removeprefix("out=")).is_file()
