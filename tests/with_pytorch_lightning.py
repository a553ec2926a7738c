"""Run tests with `pytorch_lightning` where they say `lightning`: the same tests for users of the other package.

python tests/with_pytorch_lightning.py tests/strategy -k parity

The tests are copied with the names of its modules replaced, so that scripts which they start, processes which they fork
and texts which they expect are of that package, too.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
_NAMES = (
    (r"\blightning\.pytorch\b", "pytorch_lightning"),
    (r"\blightning\.fabric\b", "lightning_fabric"),
    (r"\blightning/pytorch\b", "pytorch_lightning"),
    (r"\bimport lightning as\b", "import pytorch_lightning as"),
)
_COPIED = ("tests", "examples", "docs", "benchmarks", "conf", "README.md", "CHANGELOG.md", "pyproject.toml")
_SKIPPED_FILES = {"test_floors.py", "test_lightning_package.py", "test_registration.py", "test_project.py"}


def renamed(text: str) -> str:
    """Return a source of tests that uses the other package."""
    for pattern, name in _NAMES:
        text = re.sub(pattern, name, text)
    return text


def copy(folder: Path) -> None:
    """Write the tests, and what they read beside them, with the other package into a folder."""
    for name in _COPIED:
        paths = [ROOT / name] if (ROOT / name).is_file() else sorted((ROOT / name).rglob("*"))
        for path in (p for p in paths if p.is_file() and "__pycache__" not in p.parts):
            target = folder / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            data = path.read_bytes()
            target.write_bytes(renamed(data.decode()).encode() if path.suffix in {".py", ".md"} else data)


def main() -> int:
    """Run pytest on the copy with the arguments given, and return its exit status."""
    with tempfile.TemporaryDirectory() as folder:
        copy(Path(folder))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, f"{folder}/tests", str(ROOT)])}
        ignored = [f"--ignore=tests/{name}" for name in sorted(_SKIPPED_FILES)]
        command = [sys.executable, "-m", "pytest", "-c", f"{folder}/pyproject.toml", "-p", "no:cacheprovider"]
        command += ["-p", "pytorch_lightning"]  # imported first, it is the package in use
        return subprocess.run([*command, *ignored, *sys.argv[1:]], cwd=folder, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
