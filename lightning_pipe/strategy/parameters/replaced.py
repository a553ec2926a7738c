"""Parameters that hooks replace after ranks have shared the module out: nobody would train the new ones."""

from __future__ import annotations

from operator import is_
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
        self._tables, self._parameters = _tables(module), _parameters(module)

    def refuse_others(self) -> None:
        """Raise if the module has other parameters now.

        Raises:
            UnsupportedError: with their names.
        """
        if all(len(table) == len(known) and all(map(is_, table.values(), known)) for table, known in self._tables):
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
        self._tables = _tables(self._module)


def _tables(module: nn.Module) -> list[tuple[dict[str, Any], list[Any]]]:
    """List the tables in which sub-modules and parameters hang, with what is in them."""
    tables: list[dict[str, Any]] = [table for part in module.modules() for table in (part._modules, part._parameters)]
    return [(table, [*table.values()]) for table in tables]


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters(remove_duplicate=False))
