"""Run a Python program with the strategy registered: `python -m lightning_pipe run train.py --epochs 3`.

    run FILE ARGUMENT...        a script, or the name of a command that is written in Python, such as `chemprop`
    run -m MODULE ARGUMENT...   a module, as `python -m` runs it

Lightning knows no entry points for strategies (those for callbacks are loaded after the strategy was looked up). The
program needs no import of this package: `strategy="dapple"` is known when it begins. Processes of other ranks run it
the same way.
"""

from __future__ import annotations

import os
import runpy
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lightning_pipe.errors import ConfigError

COMMAND = "run"
_PREFIX = ("-m", "lightning_pipe", COMMAND)
_USAGE = (
    f"expected `{COMMAND} train.py ...`, `{COMMAND} -m package.module ...`, or a command such as `{COMMAND} chemprop`"
)
_running: list[Sequence[str]] = []  # prefixes of programs that were run in this process


def command_prefix() -> Sequence[str]:
    """Return what stands between interpreter and program where this process runs one; () if it does not."""
    return _running[-1] if _running else ()


def main(words: Sequence[str] | None = None) -> int:
    """Run a program as the main one of this process, and return the exit status.

    Args:
        words: the program and its arguments; by default those of this process that follow `run`.
    """
    try:
        program, arguments = _found(sys.argv[2:] if words is None else list(words))
    except ConfigError as error:
        sys.stderr.write(f"lightning-pipe {COMMAND}: {error}\n")
        return 2
    _running.append(_PREFIX)
    sys.argv = [program.name, *arguments]
    sys.path[0] = program.folder
    if program.is_module:
        runpy.run_module(program.name, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program.name, run_name="__main__")
    return 0


class _Program(NamedTuple):
    """A program: a module by its name, or a script by its path, and where its imports are looked up first."""

    name: str
    is_module: bool
    folder: str


def _found(words: Sequence[str]) -> tuple[_Program, Sequence[str]]:
    """Return the program that the first words name, and its arguments.

    Raises:
        ConfigError: if there is no such program, or it is not written in Python.
    """
    is_module = words[:1] == ["-m"]
    name, arguments = next(iter(words[is_module:]), "nothing"), words[1 + is_module :]
    if name == "nothing" or name.startswith("-"):
        raise ConfigError(f"found {name}; {_USAGE}")
    if is_module:
        return _Program(name, True, os.getcwd()), arguments
    path = _script(name)
    return _Program(path, False, os.path.dirname(os.path.abspath(path))), arguments


def _script(program: str) -> str:
    """Return the path of a script, or of a command that is one."""
    path = program if Path(program).exists() else shutil.which(program)
    if path is None:
        raise ConfigError(f"found neither a file nor a command named {program!r}; {_USAGE}")
    if Path(path).is_file() and Path(path).suffix not in (".py", ".pyw", ".pyc"):
        with open(path, "rb") as file:
            first = file.readline()
        if not first.startswith(b"#!"):
            raise ConfigError(f"found {path}, which is no Python program; {_USAGE}")
    return path
