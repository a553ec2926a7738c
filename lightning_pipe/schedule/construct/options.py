"""Read the options of a schedule: every unknown name is an error that lists the known ones."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from lightning_pipe.core.program import Options
from lightning_pipe.errors import ConfigError


def read_options(options: Options, *, schedule: str, defaults: Mapping[str, int | str]) -> dict[str, int | str]:
    """Return the options of a schedule with defaults filled in.

    Raises:
        ConfigError: if an option is unknown.
    """
    for name in options:
        if name not in defaults:
            known = ", ".join(f"{key} (default {value!r})" for key, value in defaults.items()) or "none"
            raise ConfigError(
                f"schedule {schedule!r} has no option {name!r}; its options: {known}" + hint(name, defaults)
            )
    return {**defaults, **options}


def check_microbatches(microbatches: int) -> None:
    """Refuse a number of micro-batches below one.

    Raises:
        ConfigError: if there is no micro-batch.
    """
    if microbatches < 1:
        raise ConfigError(f"found {microbatches} micro-batches; a schedule needs at least 1")


_CLOSE = 0.65  # of two names as difflib compares them: "stage" is not "trace" (0.6), "spq" is "spp" (0.67)


def hint(found: str, known: Mapping[str, object]) -> str:
    """Return `"; did you mean …?"` for a misspelt name, or nothing."""
    close = get_close_matches(found, list(known), n=1, cutoff=_CLOSE)
    return f"; did you mean {close[0]!r}?" if close else ""
