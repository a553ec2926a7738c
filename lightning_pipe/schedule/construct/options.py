"""Read the options of a schedule: every unknown name is an error that lists the known ones."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_pipe.core.program import Options
from lightning_pipe.errors import ConfigError
from lightning_pipe.foreign_names import expected_names


def read_options(options: Options, *, schedule: str, defaults: Mapping[str, int | str]) -> dict[str, int | str]:
    """Return the options of a schedule with defaults filled in.

    Raises:
        ConfigError: if an option is unknown.
    """
    for name in options:
        if name not in defaults:
            known = ", ".join(f"{key}={value}" for key, value in defaults.items())
            expected = f"{expected_names(name, defaults)} (defaults: {known})" if defaults else "it has none"
            raise ConfigError(f"schedule {schedule!r} has no option {name!r}; {expected}")
    return {**defaults, **options}


def check_microbatches(microbatches: int) -> None:
    """Refuse a number of micro-batches below one.

    Raises:
        ConfigError: if there is no micro-batch.
    """
    if microbatches < 1:
        raise ConfigError(f"found {microbatches} micro-batches; a schedule needs at least 1")
