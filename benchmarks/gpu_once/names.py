"""Look, without a GPU, whether every name exists that the sections use: of this package, of torch, of the tests.

A section that fails for a renamed function wastes minutes of a GPU. So every chain of attributes that begins with an
imported name (`torch.cuda.set_sync_debug_mode`) is followed as far as it leads through modules and classes.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import types
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from benchmarks.gpu_once.fits import NAMES, contestants
from benchmarks.gpu_once.pytest_runs import GRAPHS, LAWS, REST, ROOT
from benchmarks.gpu_once.sections import SECTIONS
from benchmarks.gpu_once.step_calls import CASES
from lightning_pipe import DappleStrategy
from lightning_pipe.errors import ConfigError
from lightning_pipe.runtime.transport.nccl import NcclTransport

FOLDER = Path(__file__).parent
SOURCES = [*sorted(FOLDER.glob("*.py")), *(FOLDER.parent / f"{name}.py" for name in ("gpu", "fits", "models", "ranks"))]
NOT_EVERYWHERE = ("triton", "torch._C", "benchmarks.gpu_once.triton_kernel")  # what builds of torch for CPUs lack


def missing() -> list[str]:
    """List what is missing: names, functions of sections, files of tests, options of the strategy."""
    sections = [name for name, section in SECTIONS.items() if not hasattr(_module(section.file), name)]
    names = [f"{path.name}: {name}" for path in SOURCES for name in missing_names(path.read_text(encoding="utf-8"))]
    tests = [path for path in (*LAWS, *GRAPHS, *REST) if path.startswith("tests/") and not (ROOT / path).exists()]
    return [*sections, *names, *tests, *_refused_options(), *_refused_arguments()]


def missing_names(source: str) -> list[str]:
    """List the imports of a module that fail, and the attributes of imported modules and classes that do not exist."""
    tree, imported, absent = ast.parse(source), dict[str, object](), list[str]()
    for name, path in _imports(tree):
        try:
            imported[name] = _resolve(path)
        except (ImportError, AttributeError):
            absent.append(path)
    chains = {".".join(chain) for node in ast.walk(tree) if (chain := _chain(node)) and chain[0] in imported}
    absent += sorted(chain for chain in chains if not _leads_somewhere(imported, chain.split(".")))
    has_gpu = torch.cuda.is_available()
    return [name for name in absent if has_gpu or not name.startswith(NOT_EVERYWHERE)]


def _module(file: str) -> types.ModuleType:
    return importlib.import_module(f"benchmarks.gpu_once.{file}")


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the name that every import binds, and the path of what it is bound to."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield (
                        alias.asname or alias.name.split(".")[0],
                        alias.name if alias.asname else alias.name.split(".")[0],
                    )
            case ast.ImportFrom(module=str(module), names=names):
                for alias in names:
                    yield alias.asname or alias.name, f"{module}.{alias.name}"


def _resolve(path: str) -> object:
    """Return the module or the attribute of a module that a path names."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        if not module:
            raise
        value: object = getattr(importlib.import_module(module), name)
        return value


def _chain(node: ast.AST) -> list[str]:
    """Return the names of `a.b.c`; none for other expressions."""
    match node:
        case ast.Attribute(value=value, attr=attribute):
            chain = _chain(value)
            return [*chain, attribute] if chain else []
        case ast.Name(id=name):
            return [name]
    return []


def _leads_somewhere(imported: Mapping[str, object], chain: list[str]) -> bool:
    """Return whether every attribute of a chain exists, as far as it leads through modules and classes."""
    value = imported[chain[0]]
    for name in chain[1:]:
        if not isinstance(value, (types.ModuleType, type)):
            return True
        try:
            value = inspect.getattr_static(value, name) if isinstance(value, type) else getattr(value, name)
        except AttributeError:
            return False
    return True


def _refused_options() -> list[str]:
    """List the strategy's options that it refuses."""
    fitted = [contestant.options for section in NAMES for contestant in contestants(*section).values()]
    counted = [case.contestant.options for case in CASES.values()]
    refused = list[str]()
    for options in (*fitted, *counted, {"memory_limit": "100kB"}):
        try:
            DappleStrategy(**(options or {}))
        except ConfigError as error:
            refused.append(str(error))
    return refused


def _refused_arguments() -> list[str]:
    """List the transport's arguments that its constructor refuses: no process group is here to make one."""
    try:
        inspect.signature(NcclTransport).bind(rank=0, device=torch.device("cuda", 0), timeout_s=60)
    except TypeError as error:
        return [f"NcclTransport: {error}"]
    return []
