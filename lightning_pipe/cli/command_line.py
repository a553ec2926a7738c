"""Parsing of the command line, and its errors: one text on stderr, and exit status 2."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
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
from lightning_pipe.errors import PipeError
from lightning_pipe.report.table import WIDTH, text_of

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
    found = command_parser().parse_args(arguments)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    width = console.width if console.is_terminal else WIDTH
    try:
        for text in _texts(found, width):
            console.print(text, end="\n\n")
    except PipeError as error:
        Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print(f"{NAME} {found.command}: {error}")
        return _REFUSED
    return 0


def _texts(found: argparse.Namespace, width: int) -> Iterator[str]:
    """Run a command, and yield what is to be printed."""
    if found.command == CONSOLIDATE:
        yield from run_consolidate(found)
        return
    kind, run = COMMANDS[found.command]
    yield from run(read_options(kind, found.overrides), width)


def command_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(NAME, description="Plan pipelines for devices that need not be here.")
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
    meaning = "Make a plain file, or safetensors files, of a checkpoint, with the memory of one tensor."
    command = commands.add_parser(CONSOLIDATE, help=meaning, description=meaning)
    command.add_argument(
        "directory", help="which save_distributed_checkpoint=True has written; for safetensors a file too"
    )
    command.add_argument("out", help="the file to write; for safetensors a directory")
    form = "ckpt: a checkpoint of Lightning (default); safetensors: the weights, for from_pretrained and weights="
    command.add_argument("--format", choices=("ckpt", "safetensors"), default="ckpt", help=form)
    most = "of a safetensors file, as 5GB (default); more become several with an index"
    command.add_argument("--max-shard-size", default="5GB", metavar="BYTES", help=most)
    attribute = "write the weights of this attribute only, without its name, as model for self.model"
    command.add_argument("--prefix", default="", metavar="NAME", help=attribute)
    kinds = ("float64", "float32", "float16", "bfloat16")
    command.add_argument("--dtype", choices=kinds, help="convert floating-point weights")
    trusted = "unpickle objects of any class, as weights_only=False does; whoever wrote the checkpoint can run code"
    command.add_argument("--trusted", action="store_true", help=trusted)
    return parser


def _table(kind: type[Dataclass]) -> str:
    table = Table(box=box.SIMPLE)
    for heading in ("option", "default", "meaning"):
        table.add_column(heading, overflow="fold")
    for row in meanings(kind):
        table.add_row(*map(escape, row))
    return text_of(table, WIDTH).replace("%", "%%")
