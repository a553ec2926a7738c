"""How what a replayed step logs, returns or gives to metrics makes that of the batch, found by its values.

A replayed step sees one micro-batch, and nothing tells whether a tensor without samples is a mean over them, a count or
an extreme. So the step runs without randomness: on some samples, on others, and on both together, twice. At first the
samples are sorted, so that the two parts are as unlike each other as they can be; then they are as alike as that goes,
in another order. A tensor that has the same shape in the parts and in both together has no samples.

    mean   the mean of the parts, weighted by samples, is what both together have, both times
    sum, max, min   so are they
    mixed  nothing of that: a standard deviation, a ratio of two sums, the value of one sample

Where several fit, `reduce_fx` of a log decides, then a tensor of whole numbers is taken for a sum, and all else for the
first of this list. What is the same in the parts and in both together is `unknown`: it may be constant, or a share that
is zero so far. When it begins to differ between micro-batches, a warning says so.

Tensors with samples are joined along the dimension along which the parts make what both together have.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from lightning_pipe.capture.recording.parts_and_whole import (
    ENDS,
    FoundRole,
    PartsAndWhole,
    found_role,
    uneven_parts,
    unlike_order,
)
from lightning_pipe.capture.recording.said_of_parts import parts_say_otherwise
from lightning_pipe.capture.steps.call_recording import StepRecording
from lightning_pipe.capture.steps.numbers import (
    VALUE,
    Place,
    SaidLeaf,
    call_keys,
    is_number,
    is_under,
    leaves_said,
    lists_said,
)
from lightning_pipe.capture.steps.record import LogCall, Ref

log = logging.getLogger(__name__)

Number: TypeAlias = "torch.Tensor | int | float"


@dataclass(frozen=True)
class Said:
    """What is known of the numbers and tensors that a step says, but for the loss.

    Attributes:
        roles: of those without samples, by place.
        joins: dimensions along which those with samples are joined, by place; that of others is the first.
        lists: places of those that have an item for every sample.
        shapes: of tensors that are of single samples, by place.
        mixed: where what is mixed is said, in words.
        places: of all that was said; None if it was not tried.
        by_count: why micro-batches cannot say what the whole batch says (`said_of_parts`); "" if they may.
    """

    roles: Mapping[Place, FoundRole] = field(default_factory=dict)
    joins: Mapping[Place, int] = field(default_factory=dict)
    lists: frozenset[Place] = frozenset()
    shapes: Mapping[Place, torch.Size] = field(default_factory=dict)
    mixed: tuple[str, ...] = ()
    places: frozenset[Place] | None = None
    by_count: str = ""


NOTHING_SAID = Said()
LENGTH = "number of items"


def by_place(said: StepRecording) -> dict[Place, torch.Tensor]:
    """Return the numbers and tensors that a step says, but for its loss, on the host, and the lengths of lists."""
    found = {leaf.place: torch.as_tensor(number).detach().cpu() for leaf, number in _numbers_of(said)}
    lengths = {(*place, LENGTH): torch.tensor(len(one)) for place, one in lists_said(said.returned, said.calls)}
    return found | lengths


def said_of_parts(run: Callable[[torch.Tensor], StepRecording], *, total: int, count: int, has_lists: bool) -> Said:
    """Return how what a step says is combined, by runs on two parts of some samples and on both, twice.

    Args:
        run: runs the step without randomness on samples with these indices.
        total: number of all samples.
        count: that of a part.
        has_lists: whether the batch has lists with an item per sample.
    """
    count = min(count, total - 1)
    many = min(2 * count, total)
    if not count:
        return NOTHING_SAID
    rows = torch.linspace(0, total - 1, many).long()  # of all kinds, in their order
    other = unlike_order(rows)

    def trial(order: torch.Tensor, counts: tuple[int, int], whole: StepRecording) -> PartsAndWhole[Place]:
        return PartsAndWhole(tuple(map(by_place, parts_of(order, counts))), counts, by_place(whole))

    def parts_of(order: torch.Tensor, counts: tuple[int, int]) -> list[StepRecording]:
        return [run(part) for part in order.split(counts)]

    try:
        said = run(rows)
        if not said.calls and isinstance(said.returned, Ref | None):
            return Said(places=frozenset())
        counts = (count, many - count)
        parts = parts_of(rows, counts)
        by_count = parts_say_otherwise(parts, said, has_lists=has_lists)
        if by_count or not by_place(said):
            return Said(places=frozenset(), by_count=by_count)
        unlike = PartsAndWhole(tuple(map(by_place, parts)), counts, by_place(said))
        alike = trial(other, (many // 2, many - many // 2), run(other))
        turned = unlike.turned(by_place(run(rows.roll(-count))))
    except Exception as error:  # whatever the step raises for samples in this order
        log.debug("How what is logged is combined is not known: %s", error)
        return NOTHING_SAID
    found = said_roles((unlike, alike, turned), said)
    if not found.shapes:  # nothing that may be of single samples
        return found
    try:
        more = [trial(order, sizes, run(order)) for order, sizes in uneven_parts(rows)]
    except Exception as error:  # whatever the step raises for so few samples
        log.debug("Whether what is logged is of single samples is not known: %s", error)
        return said_roles((unlike, alike, turned), said, is_sure=False)
    return said_roles((unlike, alike, turned, *more), said)


def said_roles(trials: Sequence[PartsAndWhole[Place]], said: StepRecording, *, is_sure: bool = True) -> Said:
    """Find how all is combined that every run has said.

    Args:
        trials: what was said of parts of some samples and of all, in several orders.
        said: what was said of all, once.
        is_sure: whether what looks like single samples at an end of the batch is nothing else.
    """
    wanted, roles, joins = _asked_reductions(said), dict[Place, FoundRole](), dict[Place, int]()
    mixed: dict[str, None] = {}
    lists = frozenset(p for p, _ in lists_said(said.returned, said.calls) if _is_by_sample((*p, LENGTH), trials))
    shapes: dict[Place, torch.Size] = {}
    for leaf, number in _numbers_of(said):
        place = leaf.place
        if is_under(place, lists) or not all(trial.has(place) for trial in trials):
            continue
        if all(trial.has_samples(place) for trial in trials):
            dim, *others = (trial.joined_along(place) for trial in trials)
            if dim is not None and {*others} <= {dim}:
                joins[place] = dim
            else:
                mixed[str(leaf)] = None
            continue
        is_count = isinstance(number, torch.Tensor) and not number.is_floating_point()
        roles[place] = found_role(trials, place, wanted=wanted.get(place) or ("sum" if is_count else None))
        if roles[place] in ENDS and not is_sure:
            roles[place] = "mixed"
        if roles[place] == "mixed":
            mixed[str(leaf)] = None
        elif roles[place] in ENDS:
            shapes[place] = torch.as_tensor(number).shape
    return Said(roles, joins, lists, shapes, tuple(mixed), frozenset(by_place(said)))


def _is_by_sample(length: Place, trials: Sequence[PartsAndWhole[Place]]) -> bool:
    """Return whether a list is as long as there are samples, in all runs."""
    return all(
        trial.has(length)
        and [int(part[length]) for part in trial.parts] == [*trial.counts]
        and int(trial.whole[length]) == sum(trial.counts)
        for trial in trials
    )


def _asked_reductions(said: StepRecording) -> Mapping[Place, str | None]:
    """Return what `reduce_fx` says, by place of the value of a log."""
    calls = zip(call_keys(said.calls), said.calls, strict=True)
    named = {(*key, VALUE): call.kwargs.get("reduce_fx") for key, call in calls if isinstance(call, LogCall)}
    return {place: getattr(how, "__name__", how) for place, how in named.items()}


def _numbers_of(said: StepRecording) -> Iterator[tuple[SaidLeaf, Number]]:
    """Yield the tensors and numbers that were returned, logged or given to metrics; the loss is left to others."""
    for leaf in leaves_said(said.returned, said.calls):
        if isinstance(leaf.value, Ref):
            if leaf.value.name.isdigit() and not (tensor := said.results[int(leaf.value.name)]).is_complex():
                yield leaf, tensor
        elif is_number(leaf.value):
            yield leaf, leaf.value
