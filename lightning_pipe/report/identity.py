"""Identity of a report, by which two can be told apart: module, devices, versions, date, host and command."""

from __future__ import annotations

import datetime
import platform
import shlex
import socket
import sys
from importlib.metadata import PackageNotFoundError, version

from lightning_pipe.units import format_bytes

_PACKAGES = ("lightning-pipe", "torch", "lightning", "pytorch-lightning")


def identity(module: str, *, parameters: int, parameter_bytes: int, devices: str) -> tuple[tuple[str, str], ...]:
    """Return names and values for people; the command line is that of this process, as it was given.

    Args:
        module: class of the module, or where its profile is from.
        parameters: number of its parameters; 0 if it is not known.
        parameter_bytes: their bytes.
        devices: kinds and hosts.
    """
    now = datetime.datetime.now(datetime.timezone.utc)
    size = format_bytes(parameter_bytes)
    return (
        ("Module", module or "not known"),
        ("Parameters", f"{parameters:,} ({size})" if parameters else size),
        ("Devices", devices),
        ("Versions", ", ".join([*_versions(), f"Python {platform.python_version()}"])),
        ("Written", f"{now:%Y-%m-%d %H:%M} UTC on {socket.gethostname()}"),
        ("Command", shlex.join(sys.argv)),
    )


def _versions() -> list[str]:
    """Return the installed packages that decide what a step does, with their versions."""
    found = []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return found
