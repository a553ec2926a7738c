"""Handlers of milestones (`core.milestones`), which whoever runs a program gives for every run.

    executor.run(program, job, milestones={Confirm: confirm, Publish: at_once(tell), Rollback: at_once(take_back)})

A handler takes the results of this rank so far and says, once it knows, whether the program goes on; all ranks say the
same. Where one says no, the rank leaves the program and runs what is left of it (`runtime.abort_program`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from lightning_pipe.core.milestones import Milestone
from lightning_pipe.errors import ProgramError
from lightning_pipe.runtime.job import ResultSlice
from lightning_pipe.runtime.waiting import Walk

Pieces: TypeAlias = Mapping[str, Sequence[ResultSlice]]
MilestoneHandler: TypeAlias = Callable[[Pieces], Walk[bool]]
MilestoneHandlers: TypeAlias = Mapping[type[Milestone], MilestoneHandler]


def at_once(function: Callable[[Pieces], None]) -> MilestoneHandler:
    """Return the handler that calls a function and goes on."""

    def handle(pieces: Pieces) -> Walk[bool]:
        function(pieces)
        yield from ()
        return True

    return handle


def milestone_handler(handlers: MilestoneHandlers, milestone: Milestone) -> MilestoneHandler:
    """Return the handler of a milestone.

    Raises:
        ProgramError: if there is none.
    """
    handler = handlers.get(type(milestone))
    if handler is None:
        name = type(milestone).__name__
        raise ProgramError(
            f"The milestone {name} ({milestone}) has no handler; whoever runs a program that has it gives "
            f"milestones={{{name}: ...}}."
        )
    return handler
