"""Import rules: imports point down the floors, and the pure packages never see torch.

    roof     __init__  registration  entry  cli  examples  __main__
    floor 4  strategy, above config
    floor 3  planner  profiler  runtime
    floor 2  cost  schedule  simulator  report  capture
    floor 1  core, below profiles
    floor 0  errors, below units, collection, freed_memory, once, random_start and lightning_package, below disk,
             below cache_files

Neighbours on a floor do not see each other. Imports hidden in functions count.
"""

import ast
import collections
import graphlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parent.parent / "lightning_pipe"
FILES = sorted(PACKAGE.rglob("*.py"))

FLOORS = (
    {"errors"},
    {"units", "collection", "freed_memory", "once", "random_start", "lightning_package", "foreign_names"},
    {"disk"},
    {"cache_files"},
    {"core", "lightning_names"},
    {"profiles"},
    {"cost", "schedule", "simulator", "report", "capture"},
    {"planner", "profiler", "runtime"},
    {"config"},
    {"strategy"},
    {"__init__", "__main__", "registration", "entry", "cli", "examples"},
)
FLOOR_OF = {part: floor for floor, parts in enumerate(FLOORS) for part in parts}
ROOF = len(FLOORS) - 1
PURE = {
    "errors",
    "units",
    "collection",
    "freed_memory",
    "once",
    "random_start",
    "lightning_package",
    "foreign_names",
    "disk",
    "cache_files",
    "core",
    "profiles",
    "cost",
    "schedule",
    "simulator",
    "planner",
    "report",
}
LIGHT = {"__init__", "registration", "config", "entry"}  # imported by every Hydra application of the environment
HEAVY = {"torch", "lightning", "torchmetrics"}
SEES_LIGHTNING = {"capture", "strategy", "entry", "cli", "examples"}
NAMES_LIGHTNING = {"lightning_names.py", "strategy/lightning_private.py"}
LIGHTNINGS = {"lightning", "pytorch_lightning", "lightning_fabric"}
PRIVATE_NAMES_IN = {"capture/torch_private.py", "strategy/lightning_private.py"}


class Import(NamedTuple):
    file: Path
    line: int
    module: str
    names: tuple[str, ...] = ()

    @property
    def part(self) -> str:
        """Return the part of the package that imports: its directory, or its file below the roof."""
        return self.file.relative_to(PACKAGE).parts[0].removesuffix(".py")

    @property
    def of(self) -> str:
        """Return the top-level package that is imported."""
        return self.module.split(".")[0]

    @property
    def of_part(self) -> str:
        """Return the part of this package that is imported, `__init__` for the package itself."""
        return self.module.partition(".")[2].partition(".")[0] or "__init__"

    def __str__(self) -> str:
        return f"{self.file.relative_to(PACKAGE.parent)}:{self.line} imports {self.module} {' '.join(self.names)}"


def imports_of(source: str, file: Path = PACKAGE / "__init__.py") -> Iterator[Import]:
    """Yield every import of a file, wherever it stands; `from package import part` counts as one of the part."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (Import(file, node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: imports are absolute"
            names = tuple(alias.name for alias in node.names)
            if node.module == "lightning_pipe":
                yield from (Import(file, node.lineno, f"lightning_pipe.{name}") for name in names)
            else:
                yield Import(file, node.lineno, str(node.module), names)


IMPORTS = [found for file in FILES for found in imports_of(file.read_text(encoding="utf-8"), file)]
OWN = [found for found in IMPORTS if found.of == "lightning_pipe"]


def test_no_folder_is_a_crowd():
    """At most 15 modules in a folder, so that what one looks for is found by its topic."""
    crowds = {
        str(folder.relative_to(PACKAGE)): count
        for folder in {file.parent for file in FILES}
        if (count := sum(file.parent == folder for file in FILES)) > 15
    }
    assert not crowds, f"give them sub-packages by topic: {crowds}"


def rooms_of(module: str) -> tuple[str, str]:
    """Return the part of a module, and the sub-package of the part in which it lies; "" for its own files."""
    path = PACKAGE.joinpath(*module.split(".")[1:])
    folder = path if path.is_dir() else path.parent
    part, *inner = (*folder.relative_to(PACKAGE).parts, "")
    return part, ".".join(inner).strip(".")


def test_sub_packages_import_each_other_in_one_direction():
    arrows = collections.defaultdict(set)
    for found in OWN:
        here = rooms_of(".".join(("lightning_pipe", *found.file.relative_to(PACKAGE).with_suffix("").parts)))
        there = rooms_of(found.module)
        if here[0] == there[0] and here != there and here[1] and there[1]:
            arrows[here].add(there)
    try:
        graphlib.TopologicalSorter(arrows).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"sub-packages in a circle: {error.args[1]}")


def test_no_two_public_classes_share_a_name():
    places = collections.defaultdict(list)
    for file in FILES:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(file.relative_to(PACKAGE)))
    twice = {name: files for name, files in places.items() if len(files) > 1}
    assert not twice, f"name them apart: {twice}"


def test_modules_open_with_a_statement():
    openings = {path: ast.get_docstring(ast.parse(path.read_text())) or "" for path in FILES}
    titles = {str(path.relative_to(PACKAGE)): text.partition("\n\n")[0] for path, text in openings.items()}
    assert {name: title for name, title in titles.items() if not title or "?" in title or "\n" in title} == {}


def test_every_part_has_a_floor():
    parts = {file.relative_to(PACKAGE).parts[0].removesuffix(".py") for file in FILES}
    assert parts <= set(FLOOR_OF), f"give {parts - set(FLOOR_OF)} a floor in DESIGN and here"


def test_imports_point_down_the_floors():
    wrong = [
        str(found)
        for found in OWN
        if found.part != found.of_part
        and FLOOR_OF[found.part] <= FLOOR_OF[found.of_part]
        and FLOOR_OF[found.part] != ROOF
    ]
    assert not wrong, "\n".join(wrong)


def test_pure_packages_never_see_torch():
    wrong = [str(found) for found in IMPORTS if found.part in PURE | LIGHT and found.of in HEAVY]
    assert not wrong, "\n".join(wrong)


def test_pure_packages_see_only_pure_parts():
    wrong = [str(found) for found in OWN if found.part in PURE and found.of_part not in PURE]
    assert not wrong, "\n".join(wrong)


def test_profiler_and_runtime_do_not_see_lightning():
    names = {"torchmetrics", "lightning_names"}
    wrong = [str(found) for found in IMPORTS if {found.of, found.of_part} & names and found.part not in SEES_LIGHTNING]
    assert not [line for line in wrong if "lightning_names.py" not in line], "\n".join(wrong)


def test_lightning_is_named_where_its_package_is_chosen():
    wrong = [
        str(found)
        for found in IMPORTS
        if found.of in LIGHTNINGS and found.file.relative_to(PACKAGE).as_posix() not in NAMES_LIGHTNING
    ]
    assert not wrong, "import from lightning_pipe.lightning_names:\n" + "\n".join(wrong)


def is_private(found: Import) -> bool:
    """Return whether a name of torch or Lightning is meant to be private: a leading underscore in its path."""
    path = [*found.module.split("."), *found.names]
    return found.of in HEAVY and any(name.startswith("_") and not name.startswith("__") for name in path)


def test_private_names_are_touched_in_two_listed_files_only():
    wrong = [
        str(found)
        for found in IMPORTS
        if is_private(found) and found.file.relative_to(PACKAGE).as_posix() not in PRIVATE_NAMES_IN
    ]
    assert not wrong, "\n".join(wrong)


def private_attributes(source: str) -> Iterator[tuple[int, str]]:
    """Yield `torch.x._y` and the like: private names that are reached through an attribute."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Attribute):
            continue
        dotted = ast.unparse(node)
        private = node.attr.startswith("_") and not node.attr.startswith("__")
        operator = dotted.startswith("torch.ops.")  # an operator is public under whatever name
        if private and not operator and dotted.split(".")[0] in {"torch", "pl", "lightning", "torchmetrics"}:
            yield node.lineno, dotted


def test_private_names_are_not_reached_through_attributes():
    wrong = [
        f"{file.relative_to(PACKAGE.parent)}:{line} uses {dotted}"
        for file in FILES
        if file.relative_to(PACKAGE).as_posix() not in PRIVATE_NAMES_IN
        for line, dotted in private_attributes(file.read_text(encoding="utf-8"))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("source", "modules"),
    [
        ("def f():\n    import torch.nn", ["torch.nn"]),
        ("from lightning_pipe import planner, config", ["lightning_pipe.planner", "lightning_pipe.config"]),
        ("if x:\n    from torch._C import a", ["torch._C"]),
    ],
)
def test_hidden_imports_are_seen(source: str, modules: list[str]):
    assert [found.module for found in imports_of(source)] == modules


def test_hidden_private_names_are_seen():
    assert [dotted for _, dotted in private_attributes("x = [torch._C._get_it() for y in z]")] == [
        "torch._C._get_it",
        "torch._C",
    ]
    assert is_private(Import(PACKAGE, 1, "torch.nn.utils.stateless", ("_reparametrize_module",)))
    assert not is_private(Import(PACKAGE, 1, "torch.nn", ("Linear",)))
