"""Handlers of own work (`core.effects`): what a rank does when its program comes to it.

    @handles(Remake)
    def remake(rank: RankParts, work: OwnWork) -> None: ...

A handler returns when the work is started; what later computes wait for, they wait for by themselves. Work that takes
the rank's own time is done when its handler returns, and is recorded as it ran. A handler that has to wait first is a
generator of what it waits for (`runtime.waiting`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from lightning_pipe.core.effects import OwnWork
from lightning_pipe.core.program import Evict, Fetch, Free, Load, Vacate
from lightning_pipe.errors import ProgramError
from lightning_pipe.runtime.activations.offloads import Offloads
from lightning_pipe.runtime.stage import Slices, Stage
from lightning_pipe.runtime.waiting import Walk

if TYPE_CHECKING:
    from lightning_pipe.runtime.versions import Versions


@dataclass(frozen=True)
class RankParts:
    """What handlers work on.

    Attributes:
        stages: stages of this rank by number.
        offloads: copies to the host and back.
        slices: by micro-batch, what the rank has loaded of it.
        load: takes the samples of a stage and micro-batch from the batch.
        versions: what computes read instead of the parameters.
    """

    stages: Mapping[int, Stage]
    offloads: Offloads
    slices: Mapping[int, Slices]
    load: Callable[[int, int], None]
    versions: Versions


Handler: TypeAlias = Callable[[RankParts, OwnWork], Walk[None] | None]
H = TypeVar("H", bound=Handler)
HANDLERS: dict[type[OwnWork], Handler] = {}


def handles(kind: type[OwnWork]) -> Callable[[H], H]:
    """Make a function the handler of a kind of own work."""

    def register(handler: H) -> H:
        HANDLERS[kind] = handler
        return handler

    return register


def handler_of(work: OwnWork) -> Handler:
    """Return the handler of own work.

    Raises:
        ProgramError: if it has none.
    """
    handler = HANDLERS.get(type(work))
    if handler is None:
        name = type(work).__name__
        raise ProgramError(f"The instruction {name} ({work}) has no handler; decorate one with handles({name}).")
    return handler


@handles(Load)
def _load(rank: RankParts, work: OwnWork) -> None:
    rank.load(work.stage, work.microbatch)


@handles(Free)
def _free(rank: RankParts, work: OwnWork) -> None:
    rank.stages[work.stage].free(work.microbatch)


@handles(Evict)
def _evict(rank: RankParts, work: OwnWork) -> None:
    rank.offloads.evict(work, rank.slices[work.microbatch])


@handles(Vacate)
def _vacate(rank: RankParts, work: OwnWork) -> Walk[None]:
    return rank.offloads.vacate(work)


@handles(Fetch)
def _fetch(rank: RankParts, work: OwnWork) -> None:
    rank.offloads.fetch(work)
