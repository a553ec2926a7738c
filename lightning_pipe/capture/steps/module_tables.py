"""Tables of a module: where its parameters, buffers and sub-modules hang, each place once, whatever number of names.

A module object may have several names (`self.last = self.net[-1]`), and one buffer may hang in several modules. A trace
swaps what hangs in a place, so it must know places and not names.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from torch import nn


def refill(table: dict[str, Any], content: dict[str, Any]) -> None:
    """Give a dict its content back."""
    if list(table) != list(content) or any(table[name] is not content[name] for name in content):
        table.clear()
        table.update(content)


def canonical_names(module: nn.Module) -> dict[str, str]:
    """Map every parameter name to the first name of the same parameter."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(p), name) for name, p in module.named_parameters(remove_duplicate=False)}


def twin_buffers(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the other names of every buffer that hangs in several places, by its first one."""
    names: dict[int, list[str]] = defaultdict(list)
    for path, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                names[id(buffer)].append(f"{path}.{name}" if path else name)
    return {first: tuple(twins) for first, *twins in names.values() if twins}


def buffers_inside(module: nn.Module, path: str) -> frozenset[str]:
    """Return the first names of the buffers of a sub-module, whatever names the sub-module has."""
    first = {id(buffer): name for name, buffer in module.named_buffers()}
    return frozenset(first[id(buffer)] for buffer in module.get_submodule(path).buffers())


class ModuleTables:
    """What hangs in a module at one moment."""

    def __init__(self, module: nn.Module) -> None:
        self._tables = [
            (f"{path}." if path else "", table, dict(table))
            for path, owner in module.named_modules()
            for table in (owner._parameters, owner._buffers, owner._modules)
            if isinstance(table, dict)  # those of a scripted module are no Python
        ]

    def renamed(self) -> list[str]:
        """Return the names that came or went since."""
        return [prefix + name for prefix, table, before in self._tables for name in table.keys() ^ before.keys()]

    def replaced(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield name, content then and content now of everything in whose place something else hangs."""
        for prefix, table, before in self._tables:
            for name in table.keys() & before.keys():
                if table[name] is not before[name]:
                    yield prefix + name, before[name], table[name]

    def restore(self) -> None:
        """Hang everything where it was."""
        for _, table, before in self._tables:
            refill(table, before)


class HookTables:
    """Hooks on the calls and backwards of a module and its sub-modules at one moment; some install them in a call."""

    def __init__(self, module: nn.Module) -> None:
        found = (vars(owner).get(name) for owner in module.modules() for name in _HOOKS)
        self._tables = [(table, dict(table) if table else {}) for table in found if isinstance(table, dict)]

    def is_same(self) -> bool:
        """Return whether there are the same hooks now."""
        return all(len(table) == len(before) and table == before for table, before in self._tables)

    def restore(self) -> None:
        """Have the hooks of that moment."""
        for table, before in self._tables:
            refill(table, before)


_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks"),
    *("_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks"),
)


@contextlib.contextmanager
def tables_restored(module: nn.Module) -> Iterator[None]:
    """Hang everything where it was in the end, hooks among it, whatever happens inside."""
    tables, hooks = ModuleTables(module), HookTables(module)
    try:
        yield
    finally:
        tables.restore()
        hooks.restore()
