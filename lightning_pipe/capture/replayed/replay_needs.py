"""Cut positions between units, and the inputs that each stage of units needs. Pure functions of a unit trace.

A stage owns the units from `begin` to `end`. It runs the step's Python until the next unit is called (the last stage:
to the end), so it meets all glue before that. It must be given

    1  the outputs of earlier units that its own units read, through glue
    2  those that glue on its way reads into Python (`Escape`), since what comes after may depend on them
    3  those that state is made of which its units read, or of which nobody knows who reads it (`KeptChange`)
    4  in the last stage, those that loss, logs and results are made of

and the tensors of the batch of which the same are made, and has the parameters that it reads itself, in its units or in
this glue. What it is not given it need not compute: fake tensors go through the glue in its place.

Cuts are impossible where a stage would need a unit that comes after it, or one whose outputs have a shape that only
the unit's owner knows, unless batches are not cut, whose messages bring their sizes (`replay_values`). They are
impossible, too, between units, or glue, that use state which the step changes (a BatchNorm that is called twice), since
each stage would have its own.

Legend: k, r units; a position p puts units 0..p-1 before a cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lightning_pipe.capture.recording.units import MOST_SAID, KeptChange, Source, Sources, UnitTrace


@dataclass(frozen=True)
class StageNeeds:
    """What a stage must be given, or have.

    Attributes:
        units: earlier units whose outputs it is given, rising.
        leaves: tensors of the batch that it reads, rising.
        parameters: canonical names of the parameters that it reads, in its units or in glue.
        state: buffers and attributes that its glue reads.
    """

    units: tuple[int, ...]
    leaves: tuple[int, ...]
    parameters: tuple[str, ...]
    state: tuple[str, ...]

    def joined(self, other: StageNeeds, *, begin: int) -> StageNeeds:
        """Return what both need of other stages, on a stage that begins with a unit."""
        units = (k for k in other.units if k < begin)
        return StageNeeds(
            tuple(sorted({*self.units, *units})),
            tuple(sorted({*self.leaves, *other.leaves})),
            tuple(sorted({*self.parameters, *other.parameters})),
            tuple(sorted({*self.state, *other.state})),
        )


def needs_of(trace: UnitTrace, begin: int, end: int, *, is_last: bool) -> StageNeeds:
    """Return what the stage of units `begin` to `end` needs; a stage may have none."""
    reads: set[Source] = set()
    for unit in trace.units[begin:end]:
        reads |= unit.reads
    for escape in trace.escapes:
        if escape.before <= end:
            reads |= escape.reads
    for change in trace.changes:
        if change.before <= end and not change.is_tensor:
            reads |= change.reads
    if is_last:
        reads |= trace.tail
    reads = _with_state(trace, reads)
    own = {name for unit in trace.units[begin:end] for name in unit.parameters}
    glue = {str(name) for kind, name in reads if kind == "parameter"}
    units = sorted(int(k) for kind, k in reads if kind == "unit" and int(k) < begin)
    leaves = sorted(int(i) for kind, i in reads if kind == "leaf")
    state = sorted(str(name) for kind, name in reads if kind == "state")
    return StageNeeds(tuple(units), tuple(leaves), tuple(sorted(own | glue)), tuple(state))


def head_needs(trace: UnitTrace, asked: Iterable[int]) -> StageNeeds:
    """Return what the head of a step needs, which calls no unit itself and compares what some are given."""
    end = len(trace.units)
    inputs = frozenset[Source]().union(*(trace.units[k].reads for k in asked))
    return needs_of(replace(trace, tail=trace.tail | inputs), end, end, is_last=True)


def compared_units(trace: UnitTrace, leaf_sizes: Sequence[float]) -> tuple[int, ...]:
    """Return the units whose inputs a head makes again, to compare them: of what it reads, and of small tensors.

    Args:
        trace: the units.
        leaf_sizes: numbers of each tensor of the batch, by sample.
    """
    known = head_needs(trace, ())
    have: set[Source] = {("leaf", i) for i, size in enumerate(leaf_sizes) if i in known.leaves or size <= MOST_SAID}
    have |= {("unit", k) for k in known.units} | {("parameter", name) for name in known.parameters}
    have |= {("state", name) for name in known.state}
    made = (k for k, unit in enumerate(trace.units) if not unit.is_given_as_is)
    return tuple(k for k in made if trace.units[k].reads <= have)


def _with_state(trace: UnitTrace, reads: Iterable[Source]) -> set[Source]:
    """Add what the state among the sources is made of in the step itself, for its next call."""
    found = set(reads)
    made = {change.name: change.reads for change in trace.changes if change.is_tensor}
    waiting = [name for kind, name in found if kind == "state"]
    while waiting:
        for source in made.pop(str(waiting.pop()), frozenset()):
            if source[0] == "state":
                waiting.append(source[1])
            found.add(source)
    return found


def uncuttable(trace: UnitTrace, *, sizes_travel: bool = False) -> dict[int, str]:
    """Return the positions at which the units cannot be separated, and why; that of their number is behind them all.

    Args:
        trace: the units.
        sizes_travel: whether stages tell each other how large what units return is.
    """
    last = len(trace.units) - 1
    found: dict[int, str] = {}
    for change in trace.changes:
        for reader in _readers(trace, change):
            behind = [change.before - 1, *_units(_with_state(trace, change.reads))]
            why = f"{change.name}, which {trace.units[reader].path} is given, changes{_at(change.line)}"
            found |= dict.fromkeys(range(reader + 1, min(last, max(behind)) + 1), why)
    written = [name for unit in trace.units for name in unit.mutations]
    for name in dict.fromkeys([*written, *(change.name for change in trace.changes if change.is_tensor)]):
        if name in trace.once:  # every stage that uses it changes it alike
            continue
        if users := _users(trace, name):
            first, end = (trace.units[k].path for k in (min(users), max(users)))
            why = f"{name}, which {first} uses and {end} uses last, is changed by the step"
            found |= dict.fromkeys(range(min(users) + 1, max(users) + 1), why)
    for k, unit in enumerate(trace.units):
        if unit.template is None:  # Python of every later stage would have nothing in its place (a packed sequence)
            why = f"what {unit.path} returns is no tensor and cannot be sent"
            found |= dict.fromkeys(range(k + 1, last + 1), why)
        elif not unit.is_fixed and not sizes_travel:
            shapes = ", ".join(str(output.shape) for output in unit.outputs)
            why = f"what {unit.path} returns has a shape that depends on data ({shapes} here)"
            found |= dict.fromkeys(range(k + 1, _last_reader(trace, k) + 1), why)
    return found


def _at(line: str) -> str:
    return f" at {line}" if line else ""


def _users(trace: UnitTrace, name: str) -> list[int]:
    """Return the units that have a buffer inside, or for which glue reads it; the last one for what comes behind."""
    source: Source = ("state", name)
    last = len(trace.units) - 1
    found = [k for k, u in enumerate(trace.units) if name in u.buffers or source in _with_state(trace, u.reads)]
    read_by_glue = [escape for escape in trace.escapes if source in _with_state(trace, escape.reads)]
    found += [min(escape.before, last) for escape in read_by_glue]
    return [*found, last] if read_by_glue or source in _with_state(trace, trace.tail) else found


def _readers(trace: UnitTrace, change: KeptChange) -> list[int]:
    """Return the units before which changed state is read; all, where it is not known."""
    if not change.is_tensor:
        return [0]
    source: Source = ("state", change.name)
    found = [k for k, unit in enumerate(trace.units) if source in unit.reads]
    found += [min(escape.before, len(trace.units) - 1) for escape in trace.escapes if source in escape.reads]
    if source in trace.tail:
        found.append(len(trace.units) - 1)
    return found


def _last_reader(trace: UnitTrace, k: int) -> int:
    """Return the last unit whose stage must be given the outputs of unit k; their number for what comes behind."""
    source: Source = ("unit", k)
    last = len(trace.units)
    if source in _with_state(trace, trace.tail) or any(source in escape.reads for escape in trace.escapes):
        return last
    if any(source in change.reads for change in trace.changes):
        return last
    return max((r for r, unit in enumerate(trace.units) if source in unit.reads), default=k)


def _units(sources: Iterable[Source]) -> list[int]:
    return [int(k) for kind, k in sources if kind == "unit"]


def readers_of(trace: UnitTrace, source: Source) -> tuple[int, ...]:
    """Return the other units that read a source; the last one also for what comes behind all units."""
    found = {r for r, unit in enumerate(trace.units) if source in unit.reads}
    behind: Sources = trace.tail.union(*(escape.reads for escape in trace.escapes))
    if source in behind:
        found.add(len(trace.units) - 1)
    return tuple(sorted(r for r in found if source != ("unit", r)))
