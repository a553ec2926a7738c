"""Parsing of the command line, and its errors: one text on stderr, and exit status 2."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import lightning_pipe
from lightning_pipe.cli.commands import run_compare, run_explain, run_plan, run_report, run_simulate
from lightning_pipe.cli.consolidate import run_consolidate
from lightning_pipe.cli.max_batch import MaxBatchOptions, run_max_batch
from lightning_pipe.cli.options import (
    CompareOptions,
    ExplainOptions,
    PlanOptions,
    ReportOptions,
    SimulateOptions,
    meanings,
    read_options,
)
from lightning_pipe.cli.schedules import SchedulesOptions, run_schedules
from lightning_pipe.core.serial import Dataclass
from lightning_pipe.entry import run_program
from lightning_pipe.errors import PipeError
from lightning_pipe.report.table import WIDE, text_of

NAME = "lightning-pipe"
_REFUSED = 2  # exit status, as that of argparse

CONSOLIDATE = "consolidate"  # takes paths, which Hydra's grammar would not read

COMMANDS: dict[str, tuple[type[Dataclass], Any]] = {
    "plan": (PlanOptions, run_plan),
    "compare": (CompareOptions, run_compare),
    "simulate": (SimulateOptions, run_simulate),
    "explain": (ExplainOptions, run_explain),
    "report": (ReportOptions, run_report),
    "schedules": (SchedulesOptions, run_schedules),
    "max-batch": (MaxBatchOptions, run_max_batch),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status.

    Args:
        arguments: command and overrides; by default those of the process.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] == [run_program.COMMAND]:
        return run_program.main(words[1:])
    if mistake := _dashes(words):
        _show_error(f"{words[0]}: {mistake}")
        return _REFUSED
    found = command_parser().parse_args(words)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    width = console.width if console.is_terminal else WIDE
    try:
        for text in _texts(found, width):
            console.print(text, end="\n\n")
    except PipeError as error:
        _show_error(f"{found.command}: {error}")
        return _REFUSED
    return 0


def _show_error(text: str) -> None:
    Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print(f"{NAME} {text}")


def _dashes(words: Sequence[str]) -> str:
    """Return what to write instead of an option with dashes; "" if there is none of a command's options."""
    known = COMMANDS[words[0]][0].__dataclass_fields__ if words and words[0] in COMMANDS else {}
    for word, following in zip_longest(words[1:], words[2:], fillvalue=""):
        name = word.partition("=")[0].removeprefix("--").replace("-", "_")
        if word.startswith("--") and name in known:
            value = word.partition("=")[2] or following
            return f"found {word}; options have no dashes: write {name}={value}"
    return ""


def _texts(found: argparse.Namespace, width: int) -> Iterator[str]:
    """Run a command, and yield what is to be printed."""
    if found.command == CONSOLIDATE:
        yield from run_consolidate(found)
        return
    kind, run = COMMANDS[found.command]
    yield from run(read_options(kind, found.overrides), width)


def command_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(NAME, description="Plan pipelines for hardware you do not have at hand.")
    parser.add_argument("--version", action="version", version=lightning_pipe.__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, (kind, _) in COMMANDS.items():
        meaning = str(kind.__doc__)
        command = commands.add_parser(
            name,
            help=meaning,
            description=meaning,
            epilog=_table(kind),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_argument("overrides", nargs="*", metavar="key=value", help="options, in Hydra's grammar")
    commands.add_parser(run_program.COMMAND, help="Run a Python program, in which strategy='dapple' is known.")
    meaning = "Convert a checkpoint into a single .ckpt file or safetensors files, one tensor at a time."
    command = commands.add_parser(CONSOLIDATE, help=meaning, description=meaning)
    command.add_argument(
        "directory", help="directory that save_distributed_checkpoint=True wrote; for safetensors a file too"
    )
    command.add_argument("out", help="file to write; for safetensors a directory")
    form = "ckpt: a checkpoint of Lightning (default); safetensors: the weights, for from_pretrained and weights="
    command.add_argument("--format", choices=("ckpt", "safetensors"), default="ckpt", help=form)
    most = "of a safetensors file, as 5GB (default); more become several with an index"
    command.add_argument("--max-shard-size", default="5GB", metavar="BYTES", help=most)
    attribute = "write the weights of this attribute only, without its name, as model for self.model"
    command.add_argument("--prefix", default="", metavar="NAME", help=attribute)
    kinds = ("float64", "float32", "float16", "bfloat16")
    command.add_argument("--dtype", choices=kinds, help="convert floating-point weights")
    trusted = "unpickle objects of any class (weights_only=False): the checkpoint's author can then run code here"
    command.add_argument("--trusted", action="store_true", help=trusted)
    return parser


def _table(kind: type[Dataclass]) -> str:
    table = Table(box=box.SIMPLE)
    for heading in ("option", "default", "meaning"):
        table.add_column(heading, overflow="fold")
    for row in meanings(kind):
        table.add_row(*map(escape, row))
    return text_of(table, WIDE).replace("%", "%%")
