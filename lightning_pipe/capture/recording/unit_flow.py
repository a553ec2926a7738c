"""Data flow between units: the units that each tensor derives from, by following every operation of the glue.

Sources belong to memory: what shares memory shares sources, and writing in place adds some. Inside a unit nothing is
followed; its outputs are marked with its number. Memory that a unit has made and did not return (a tensor that it keeps
in an attribute), or was given and has written to, is marked as well: glue that reads it reads past the unit, which is
then no unit.

Only what is made of samples is followed through units too: a buffer that they change has content of the samples, even
where all samples of the runs give it the same (a maximum that is reached already).
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from lightning_pipe.capture.operators import depends_on_values, draws, drops, makes_constant
from lightning_pipe.capture.python.users_code import is_library
from lightning_pipe.capture.recording.unit_state import held_by, prefixed_owners, tensors_in
from lightning_pipe.capture.recording.units import Escape, KeptChange, Source, Sources
from lightning_pipe.capture.steps.hazards import at, user_line
from lightning_pipe.capture.steps.module_tables import canonical_names
from lightning_pipe.capture.torch_private import TorchDispatchMode, has_storage, written_by
from lightning_pipe.lightning_names import pl

_NOTHING: Sources = frozenset()
_READ_AS_A_WHOLE = (torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.__dlpack__)
_DETACHING = (torch.Tensor.detach, torch.Tensor.detach_, torch.detach)
_MASKS = (torch.bool, torch.uint8)


class Provenance:
    """Know what memory is made of. Memory is named by weak references, whose names are not given twice."""

    def __init__(self) -> None:
        self._sources: dict[Any, Sources] = {}
        self._makers: dict[Any, int] = {}
        self._alive: list[torch.Tensor] = []

    def of(self, tensors: Iterable[torch.Tensor]) -> Sources:
        """Return what these tensors are made of."""
        return _NOTHING.union(*(self._sources.get(self._memory(tensor), _NOTHING) for tensor in tensors))

    def add(self, tensor: torch.Tensor, sources: Sources) -> None:
        """Record that a tensor is made of these too."""
        memory = self._memory(tensor)
        self._sources[memory] = self._sources.get(memory, _NOTHING) | sources

    def knows(self, tensor: torch.Tensor) -> bool:
        """Return whether glue has seen this memory."""
        return self._memory(tensor) in self._sources

    def note_maker(self, tensor: torch.Tensor, unit: int) -> None:
        """Note which unit has made this memory, unless it is known."""
        memory = self._memory(tensor)
        if memory not in self._sources:
            self._makers.setdefault(memory, unit)

    def maker(self, tensor: torch.Tensor) -> int | None:
        """Return the unit that has made this memory and has not returned it."""
        memory = self._memory(tensor)
        return None if memory in self._sources else self._makers.get(memory)

    def memory(self, tensor: torch.Tensor) -> Any:
        """Return the name of a tensor's memory."""
        return self._memory(tensor)

    def _memory(self, tensor: torch.Tensor) -> Any:
        if has_storage(tensor):
            return StorageWeakRef(tensor.untyped_storage())
        self._alive.append(tensor)  # it has no storage of its own; its identity must not be given again
        return id(tensor)


class Follower(TorchDispatchMode):
    """Follow the operations of one run.

    Args:
        module: whose parameters, buffers and attributes are sources.

    Attributes:
        made_of: sources of all memory.
        of_samples: memory that is made of the batch's samples, in units too.
        inside: number of the unit that runs; None in glue.
        begun: number of units that have begun.
        escapes, writes: what glue has read into Python, and what it has written to parameters and buffers.
        mutated: names of parameters and buffers that each unit has written to.
        overwritten: units' outputs whose memory is written to later, as (unit, number of the output).
        read_past: units that have made, or written to, what glue reads but did not return it.
        flops: of each unit.
        first_draw: how many units had begun when glue drew random numbers first; None if it has not.
        drawn: random operations, dropout aside, each with the user's line.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self.made_of, self.of_samples = Provenance(), Provenance()
        self.inside: int | None = None
        self.begun = 0
        self.escapes: dict[Escape, None] = {}
        self.writes: list[KeptChange] = []
        self.mutated: dict[int, dict[str, None]] = {}
        self.overwritten: set[tuple[int, int]] = set()
        self.read_past: set[int] = set()
        self.flops: dict[int, int] = {}
        self.first_draw: int | None = None
        self.drawn: dict[str, None] = {}
        self._rewritten: dict[Any, int] = {}  # memory of glue -> the last unit that has written to it
        self._names: dict[Any, Source] = {}
        self._outputs: dict[Any, list[tuple[int, int]]] = {}
        for tensor, source in _state_of(module):
            if not self.made_of.knows(tensor):
                self.made_of.add(tensor, frozenset({source}))
                self._names[self.made_of.memory(tensor)] = source

    def reads(self, tensors: Iterable[torch.Tensor]) -> Sources:
        """Return the sources of what glue reads, or hands to a unit."""
        tensors = list(tensors)
        for tensor in tensors:
            makers = (self.made_of.maker(tensor), self._rewritten.get(self.made_of.memory(tensor)))
            self.read_past.update(unit for unit in makers if unit is not None)
        return self.made_of.of(tensors)

    def escape(self, reads: Sources) -> None:
        """Note that glue reads values into Python."""
        self.escapes[Escape(self.begun, reads, user_line(2))] = None

    def returned(self, tensor: torch.Tensor, unit: int, number: int) -> None:
        """Mark an output of a unit."""
        self.made_of.add(tensor, frozenset({("unit", unit)}))
        self._outputs.setdefault(self.made_of.memory(tensor), []).append((unit, number))

    def is_state(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is memory of a parameter, a buffer or an attribute."""
        return self.made_of.memory(tensor) in self._names

    def mutated_names(self) -> dict[int, tuple[str, ...]]:
        """Return the names of what each unit has written to."""
        return {unit: tuple(names) for unit, names in self.mutated.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and note what its results are made of."""
        kwargs = kwargs or {}
        written = written_by(func, args, kwargs)
        if draws(func, args, kwargs) and not _drops(func):
            self.drawn[f"{func._opname.removesuffix('_')}{at(user_line(2))}"] = None
        result = self._run(func, args, kwargs, written)
        if not makes_constant(func) and (leaves := self.of_samples.of(tensors_in((args, kwargs)))):
            for tensor in (*tensors_in(result), *written):
                self.of_samples.add(tensor, leaves)
        return result

    def _run(self, func: Any, args: Any, kwargs: Any, written: list[torch.Tensor]) -> Any:
        if self.inside is not None:
            result = func(*args, **kwargs)
            self._within(self.inside, func, written, result, (args, kwargs))
            return result
        reads = self.reads(tensors_in((args, kwargs)))
        if _needs_values(func, args):
            self.escape(reads)
        elif draws(func, args, kwargs):
            self.first_draw = self.begun if self.first_draw is None else self.first_draw
            if leaves := _leaves(reads):
                self.escape(leaves)
        result = func(*args, **kwargs)
        for tensor in (*tensors_in(result), *written):
            self.made_of.add(tensor, reads)
        for tensor in written:
            self._note_write(tensor)
        return result

    def _within(self, unit: int, func: Any, written: list[torch.Tensor], result: Any, given: Any) -> None:
        for tensor in tensors_in(result):
            self.made_of.note_maker(tensor, unit)
        for tensor in written:
            memory = self.made_of.memory(tensor)
            self.overwritten.update(self._outputs.get(memory, ()))
            if memory in self._names:
                self.mutated.setdefault(unit, {})[str(self._names[memory][1])] = None
            elif self.made_of.knows(tensor):
                self.made_of.add(tensor, frozenset({("unit", unit)}))
                self._rewritten[memory] = unit
        if (count := flop_registry.get(func.overloadpacket)) is not None:
            args, kwargs = given
            self.flops[unit] = self.flops.get(unit, 0) + int(count(*args, **kwargs, out_val=result))

    def _note_write(self, tensor: torch.Tensor) -> None:
        memory = self.made_of.memory(tensor)
        self.overwritten.update(self._outputs.get(memory, ()))
        if memory in self._names:
            kind, name = self._names[memory]
            is_followed = kind == "state"  # nobody follows which units read a parameter
            self.writes.append(
                KeptChange(str(name), self.begun, self.made_of.of([tensor]), is_tensor=is_followed, line=user_line(2))
            )


class EscapeReader(TorchFunctionMode):
    """Tell a follower of values that leave torch as a whole, by no operation, and of derivatives taken in glue.

    Derivatives through a unit need its inside: it is read past.

    Attributes:
        detached: the last line at which a tensor with a gradient is detached; "" if there is none.
    """

    def __init__(self, follower: Follower) -> None:
        super().__init__()
        self._follower = follower
        self.detached = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the call."""
        if func in _DETACHING and args[0].requires_grad and (line := user_line(2)):
            self.detached = line
        if self._follower.inside is None:
            if func in _READ_AS_A_WHOLE:
                self._follower.escape(self._follower.reads(args[:1]))
            elif func is torch.autograd.grad:
                sources = self._follower.reads(tensors_in(args[0] if args else (kwargs or {})["outputs"]))
                self._follower.read_past.update(int(k) for kind, k in sources if kind == "unit")
        return func(*args, **(kwargs or {}))


def _state_of(module: pl.LightningModule) -> Iterator[tuple[torch.Tensor, Source]]:
    """Yield what is there before the step: parameters, then buffers, then tensors in attributes."""
    canonical: Mapping[str, str] = canonical_names(module)
    yield from ((p, ("parameter", canonical[name])) for name, p in module.named_parameters())
    yield from ((b, ("state", name)) for name, b in module.named_buffers())
    for prefix, owner in prefixed_owners(module):
        for name, value in held_by(owner).content.items():
            yield from ((tensor, ("state", prefix + name)) for tensor in tensors_in(value))


def _leaves(sources: Sources) -> Sources:
    return frozenset(source for source in sources if source[0] == "leaf")


def _drops(func: Any) -> bool:
    """Return whether an operator draws for dropout, which draws like anything else on a host."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and is_library(frame.f_code.co_filename):
        if "dropout" in frame.f_code.co_name:
            return True
        frame = frame.f_back
    return drops(func._opname)


def _needs_values(func: Any, args: Any) -> bool:
    """Return whether Python, or a shape, depends on the values of an operation's arguments."""
    if func is torch.ops.aten.index.Tensor:
        return any(index is not None and index.dtype in _MASKS for index in args[1])
    return depends_on_values(func)
