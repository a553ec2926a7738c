"""Parameters that hooks replace after ranks have shared the module out: nobody would train the new ones."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from operator import methodcaller
from typing import Any

from torch import nn

from lightning_pipe.errors import UnsupportedError


class ParameterWatch:
    """Look whether a module still has the parameters that it had, by identity.

    Args:
        module: the user's module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parameters = _parameters(module)
        self._note()

    def refuse_others(self) -> None:
        """Raise if the module has other parameters now.

        Raises:
            UnsupportedError: with their names.
        """
        if [*map(len, self._tables)] == self._sizes and [*map(id, _entries(self._tables))] == self._ids:
            return
        now = _parameters(self._module)
        names = [name for name in {**self._parameters, **now} if now.get(name) is not self._parameters.get(name)]
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise UnsupportedError(
                f"A hook has replaced, added or removed the parameter {', '.join(names[:3])}{more} after ranks have "
                "shared the parameters of the module, so none would compute with what is there now. Do so in "
                "`configure_model` or before `fit`, or write into the parameter that is there (`parameter.data.copy_`)."
            )
        self._note()

    def _note(self) -> None:
        """Note what hangs in the tables of sub-modules and parameters; it stays alive, so that its ids stay its own."""
        self._tables = [table for part in self._module.modules() for table in (part._modules, part._parameters)]
        self._sizes, self._alive = [*map(len, self._tables)], [*_entries(self._tables)]
        self._ids = [*map(id, self._alive)]


def _entries(tables: list[dict[str, Any]]) -> Iterator[Any]:
    return chain.from_iterable(map(methodcaller("values"), tables))


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters(remove_duplicate=False))
