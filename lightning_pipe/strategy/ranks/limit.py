"""The memory that was foreseen for this rank: said beside an error, where it turns out not to suffice."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_pipe.errors import OutOfMemoryError, PipeError
from lightning_pipe.planner.evaluation.evaluate import Judged
from lightning_pipe.planner.problem import Problem
from lightning_pipe.runtime.memory import is_out_of_memory, out_of_memory
from lightning_pipe.units import format_bytes

_UNKNOWN = 1 << 60  # bytes from which on a memory is that of a nominal device, of which nothing is known


@dataclass(frozen=True)
class Foreseen:
    """What the simulator says of one rank.

    Attributes:
        rank: its number.
        peak_bytes: the most that it takes.
        memory_bytes: what it may take.
    """

    rank: int
    peak_bytes: int
    memory_bytes: int

    def __str__(self) -> str:
        limit = "" if self.memory_bytes >= _UNKNOWN else f" of {format_bytes(self.memory_bytes)} that it may take"
        return f"The plan foresees {format_bytes(self.peak_bytes)} on rank {self.rank}{limit}."


def foreseen(problem: Problem, judged: Judged) -> tuple[Foreseen, ...]:
    """Return what is foreseen of every rank."""
    memory = [problem.cluster.device(rank).memory_bytes for rank in range(problem.cluster.ranks)]
    return tuple(Foreseen(rank, *both) for rank, both in enumerate(zip(judged.peak_bytes, memory, strict=True)))


@contextlib.contextmanager
def shortage_told(where: str, of_ranks: Sequence[Foreseen], rank: int) -> Iterator[None]:
    """Raise an error for people where memory does not suffice inside, once, with what was foreseen.

    Args:
        where: what is done inside, for errors that do not say it.
        of_ranks: what was foreseen; () before there is a plan.
        rank: this one.
    """
    try:
        yield
    except OutOfMemoryError as error:
        if error.is_complete:
            raise
        raise _completed(error, of_ranks, rank) from error
    except Exception as error:
        if isinstance(error, PipeError) or not is_out_of_memory(error):
            raise
        raise _completed(out_of_memory(f"Rank {rank} failed in {where}", error), of_ranks, rank) from error


def _completed(error: OutOfMemoryError, of_ranks: Sequence[Foreseen], rank: int) -> OutOfMemoryError:
    completed = OutOfMemoryError(" ".join([str(error), *(str(one) for one in of_ranks[rank : rank + 1])]))
    completed.is_complete = True
    return completed
