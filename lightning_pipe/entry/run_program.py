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

from lightning_pipe.errors import ConfigError

COMMAND = "run"
_PREFIX = ("-m", "lightning_pipe", COMMAND)
_running: list[Sequence[str]] = []  # prefixes of programs that were run in this process


def command_prefix() -> Sequence[str]:
    """Return what stands between interpreter and program where this process runs one; () if it does not."""
    return _running[-1] if _running else ()


def main() -> int:
    """Run the program that the words after `run` name; return the exit status."""
    try:
        run_program(sys.argv[2:])
    except ConfigError as error:
        sys.stderr.write(f"lightning-pipe {COMMAND}: {error}\n")
        return 2
    return 0


def run_program(words: Sequence[str]) -> None:
    """Run a program as the main one of this process; it ends as the program does.

    Args:
        words: the file, or "-m" and the module, and the arguments of the program.

    Raises:
        ConfigError: if there is no such program, or it is not written in Python.
    """
    usage = f"expected `{COMMAND} train.py ...`, `{COMMAND} -m package.module ...`, or the name of a command"
    is_module = words[:1] == ["-m"]
    program = next(iter(words[1:] if is_module else words), None)
    if program is None or (program.startswith("-")):
        raise ConfigError(f"found {program or 'no program'}; {usage}")
    arguments = words[2:] if is_module else words[1:]
    path = program if is_module else _script(program, usage)
    _running.append(_PREFIX)
    sys.argv = [path, *arguments]
    sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.abspath(path))
    if is_module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(path, run_name="__main__")


def _script(program: str, usage: str) -> str:
    """Return the path of a script, or of a command that is one."""
    path = program if Path(program).exists() else shutil.which(program)
    if path is None:
        raise ConfigError(f"found neither a file nor a command named {program!r}; {usage}")
    if Path(path).is_file() and Path(path).suffix not in (".py", ".pyw", ".pyc"):
        with open(path, "rb") as file:
            first = file.readline()
        if not first.startswith(b"#!"):
            raise ConfigError(f"found {path}, which is no Python program; {usage}")
    return path
