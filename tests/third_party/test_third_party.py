"""Third-party projects train split over two ranks as on one device (slow).

By their own entry points, in environments that `make projects` makes; and modules of some, in this environment:

    pip install -e '.[projects]' pytest pytest-timeout 'pyarrow<21'     (as of 2026-11-23)
"""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from third_party import table
from third_party.environments import FOLDER, is_made
from third_party.modules import PROJECTS, SEEN

HERE = Path(__file__).parent
PACKAGES = {"pytorch_lifestream": "ptls"}
TOLERANCE = 1e-9


def run(module: str, name: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"third_party.{module}", name]
    return subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True, check=False)


def test_the_page_lists_every_project() -> None:
    assert SEEN.keys() == PROJECTS.keys() and len(PROJECTS) >= 9
    assert all(float(difference) < TOLERANCE for _, _, difference in SEEN.values())


def test_every_entry_point_stands_in_the_table_and_can_be_run() -> None:
    files = {path.stem: path for path in (HERE / "entries").glob("*.py")}
    assert files.keys() == table.PROJECTS.keys() and len(files) >= 10
    for path in files.values():
        tree = ast.parse(path.read_text())
        assert {"run", "reload"} <= {item.name for item in tree.body if isinstance(item, ast.FunctionDef)}, path


def test_what_is_equal_in_the_table_is_within_the_tolerance() -> None:
    for project in table.PROJECTS.values():
        for seen in project.seen.values():
            assert seen.verdict != "equal" or float(seen.number) <= project.tolerance, project


@pytest.mark.slow
@pytest.mark.timeout(2500)
@pytest.mark.parametrize("name", table.PROJECTS)
def test_a_project_trains_by_its_own_entry_point_as_the_table_has_it(name: str) -> None:
    if not is_made(FOLDER / name, table.PROJECTS[name].packages):
        pytest.skip(f"needs `make projects NAME={name}` once")
    found = run("environments", name)
    assert found.returncode == 0, found.stdout + found.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", PROJECTS)
def test_a_module_of_a_project_trains_split_as_on_one_device(name: str) -> None:
    package = PACKAGES.get(name, name)
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}, of the extra `projects`")
    found = run("run", name)
    assert found.returncode == 0, found.stderr[-3000:]
    assert float(found.stdout.split()[-1]) < TOLERANCE
