"""Train projects by their own entry points, each in an environment of its own: `make projects`, or with NAME=darts.

python -m third_party.environments [NAME ...]     (in tests; this file needs no torch, but the package index)

An environment is a copy of one that has torch and this package; files of both are one on the disk.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from third_party.table import PROJECTS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "projects"
BASE = FOLDER / "base"
SOURCES = "antlr4-python3-runtime,docrep"  # pure Python of which the index has no wheels


def python_of(environment: Path) -> Path:
    return environment / "bin" / "python"


def is_made(environment: Path, packages: str) -> bool:
    marker = environment / "installed"
    return marker.exists() and marker.read_text() == packages


def install(environment: Path, packages: str) -> None:
    """Install packages next to the torch of `constraints.txt`, and mark the environment as complete."""
    subprocess.run(
        [
            python_of(environment), "-m", "pip", "install", "--no-input", "-qq", "--disable-pip-version-check",
            "--only-binary", ":all:", "--no-binary", SOURCES, "-c", "constraints.txt", "torch", *packages.split(),
        ],
        cwd=ROOT, check=True,
    )  # fmt: skip
    (environment / "installed").unlink(missing_ok=True)
    (environment / "installed").write_text(packages)


def made(name: str) -> Path:
    """Return the environment of a project; make it if it is missing or has other packages."""
    environment, packages = FOLDER / name, PROJECTS[name].packages
    if is_made(environment, packages):
        return environment
    if not is_made(BASE, "-e ."):
        subprocess.run([sys.executable, "-m", "venv", "--clear", BASE], check=True)
        install(BASE, "-e .")
    shutil.rmtree(environment, ignore_errors=True)
    shutil.copytree(BASE, environment, symlinks=True, copy_function=os.link)
    install(environment, packages)
    return environment


def compare(name: str) -> int:
    """Compare a project's runs in its environment; return 0 if they are as the table has them."""
    search = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.call([python_of(made(name)), "-m", "third_party.compare", name], cwd=ROOT / "tests", env=search)


if __name__ == "__main__":
    sys.exit(max([compare(name) for name in sys.argv[1:] or PROJECTS]))
