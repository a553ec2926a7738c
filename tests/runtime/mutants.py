"""Modules whose source has one line changed, to see whether a law misses it."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType


@dataclass(frozen=True)
class Mutant:
    """A source file with one line changed; `number` counts the lines alike."""

    module: str
    line: str
    instead: str = "pass"
    number: int = 0

    def load(self) -> ModuleType:
        """Return the module of the changed source."""
        path = Path(str(importlib.import_module(self.module).__file__))
        lines = path.read_text().splitlines()
        places = [index for index, line in enumerate(lines) if line.strip() == self.line]
        assert len(places) > self.number, f"{path} has no such line: {self.line}"
        index = places[self.number]
        lines[index] = lines[index].replace(self.line, self.instead)
        return executed("\n".join(lines), path)


def unchanged(name: str) -> ModuleType:
    """Return a module of its own with the source of another."""
    path = Path(str(importlib.import_module(name).__file__))
    return executed(path.read_text(), path)


def executed(source: str, path: Path) -> ModuleType:
    """Return a module of its own with this source."""
    module = ModuleType(f"mutant_{path.stem}")
    sys.modules[module.__name__] = module  # where dataclasses look for it
    exec(compile(source, str(path), "exec"), vars(module))
    return module
