"""Modules of third-party projects train split over two ranks as on one device (slow).

They want an environment of their own, since they limit each other's versions (as of 2026-11-23):

    pip install -e '.[projects]' pytest pytest-timeout 'pyarrow<21'
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from third_party.projects import PROJECTS, SEEN, SINGLE

PACKAGES = {"pytorch_lifestream": "ptls"}
TOLERANCE = {True: 1e-4, False: 1e-9}  # 20 steps of Adam amplify the rounding of float32


def test_the_page_lists_every_project() -> None:
    assert SEEN.keys() == PROJECTS.keys() and len(PROJECTS) >= 12
    assert all(float(difference) < TOLERANCE[name in SINGLE] for name, (_, _, difference) in SEEN.items())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", PROJECTS)
def test_a_project_trains_split_as_on_one_device(name: str) -> None:
    package = PACKAGES.get(name, name)
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}, of the extra `projects`")
    command = [sys.executable, "-m", "third_party.run", name]
    found = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-3000:]
    assert float(found.stdout.split()[-1]) < TOLERANCE[name in SINGLE]
