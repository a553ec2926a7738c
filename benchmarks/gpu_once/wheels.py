"""Install what the interpreter lacks from a folder of wheels: without a network, and without changing the interpreter.

`make wheels` fills the folder where there is a network.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path


def missing_wheels(folder: Path) -> list[Path]:
    """List the wheels of a folder whose package this interpreter lacks, whatever its version."""
    return [wheel for wheel in sorted(folder.glob("*.whl")) if not _is_installed(wheel.name.split("-")[0])]


def install_missing(folder: Path, *, into: Path) -> None:
    """Install the missing wheels.

    Raises:
        subprocess.CalledProcessError: if pip cannot.
    """
    if wheels := missing_wheels(folder):
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--upgrade"]
        subprocess.run([*pip, "--target", str(into), *map(str, wheels)], check=True)


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True
