"""Remember how tensors are made, without making them; make any of them later, with the numbers that they would have.

    tape.run(operator, args, kwargs)   what a dispatch mode calls: the operator runs on tensors of the meta device, and
                                       is written down
    tape.values([tensor, ...])         plays what these depend on, and nothing else

A tensor is known by its storage and its place in it, so views need no playing: they are the same bytes. Random
operators draw into scratch that is dropped while they are written down, so that generators advance as if the
tensors were made; the generator's state before is kept, and playing begins with it. What Python reads (`item()`, shapes
that depend on values) is played at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection

from lightning_pipe.capture.torch_private import OpOverload, without_modes, without_overrides, written_by
from lightning_pipe.errors import UnsupportedError

_HOST = torch.device("cpu")
_HERE = frozenset({"cpu", "meta"})  # where tensors of the tape would be: what is made on other devices is made at once
_READS_VALUES = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
_FILLS = frozenset(
    "copy_ fill_ zero_ normal_ uniform_ exponential_ log_normal_ cauchy_ geometric_ random_ bernoulli_".split()
)  # they write all of a tensor, whatever was there


@dataclass(frozen=True)
class TapePlace:
    """Where a tensor lies: in which storage of the tape, and how."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the tensor that lies so in a storage with values."""
        empty = torch.empty(0, dtype=self.dtype, device=_HOST)
        return empty.set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True)
class Given:
    """A tensor with values that an operator has read; it must not be changed before it is played."""

    tensor: torch.Tensor
    version: int


@dataclass(frozen=True)
class Later:
    """A tensor that is read from somewhere when it is played."""

    read: Callable[[], torch.Tensor]


@dataclass
class Act:
    """One operator that was written down.

    Attributes:
        operator, args, kwargs: the call, with `TapePlace`, `Given` and `Later` in the place of tensors.
        reads, writes: storages whose content it reads and changes.
        makes: its results that have a storage of their own.
        state: of the generator before it drew; None if it draws nothing.
    """

    operator: Any
    args: Any
    kwargs: dict[str, Any]
    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    makes: tuple[TapePlace | None, ...] = ()
    state: torch.Tensor | None = None

    @property
    def generator(self) -> torch.Generator:
        """Return what it draws from."""
        return self.kwargs.get("generator") or torch.default_generator

    def described(self) -> str:
        """Spell what every rank must have written down alike."""
        kinds = (TapePlace, Given, Later)
        args = apply_to_collection(
            self.args, kinds, lambda at: str(at) if isinstance(at, TapePlace) else type(at).__name__
        )
        return f"{self.operator} {args} {sorted(self.writes)} {self.makes} {self.state is not None}"


@dataclass
class Tape:
    """What was done with tensors that are not made yet.

    Attributes:
        acts: what was written down.
        read: digest of the values that Python has read on the way.
    """

    acts: list[Act] = field(default_factory=list)
    read: Any = field(default_factory=hashlib.sha256)
    _storages: list[torch.UntypedStorage] = field(default_factory=list)  # of the meta device, without memory
    _numbers: dict[int, int] = field(default_factory=dict)  # id of a storage -> its number
    _writers: dict[int, list[int]] = field(default_factory=dict)  # storage -> acts that changed it, rising

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether the tape makes this tensor."""
        has_storage = tensor.is_meta and tensor.layout == torch.strided
        return has_storage and id(tensor.untyped_storage()) in self._numbers

    def storage(self, tensor: torch.Tensor) -> int:
        """Return the number of a tensor's storage."""
        return self._numbers[id(tensor.untyped_storage())]

    def run(self, operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator on tensors that are not made yet; on others as it is."""
        with without_overrides():
            return self._run(operator, args, kwargs)

    def _run(self, operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = _tensors_in((args, kwargs))
        ours = [tensor for tensor in tensors if self.holds(tensor)]
        if not ours and (tensors or not _makes_on_host(operator, kwargs)):
            return operator(*args, **kwargs)
        name, written = _name(operator), written_by(operator, args, kwargs)
        if name == "set_":  # a tensor gets another storage, which is known
            return operator(*args, **kwargs)
        draws = torch.Tag.nondeterministic_seeded in operator.tags
        weighs = (
            draws and not name.endswith("_like") and any(tensor is not args[0] or not written for tensor in tensors)
        )
        needs_values = _READS_VALUES & set(operator.tags) or any(not self.holds(tensor) for tensor in written)
        if weighs or needs_values or _moves(operator, kwargs):
            return self._at_once(operator, args, kwargs, written)
        if draws:
            return self._drawn(operator, args, kwargs, written)
        try:
            result = operator(*_on_meta(args), **_on_meta(_with_device(args, kwargs, "meta")))
        except NotImplementedError:  # there is no such operator without values
            return self._at_once(operator, args, kwargs, written)
        self._write(operator, args, kwargs, written, result)
        return result

    def load(self, tensor: torch.Tensor, read: Callable[[], torch.Tensor]) -> None:
        """Let a tensor have the values that `read` returns, when it is made."""
        place, copy = self._place(tensor), torch.ops.aten.copy_.default
        storages = frozenset({place.storage})
        reads = frozenset() if self._fills(copy, tensor) else storages
        self._add(Act(copy, (place, Later(read)), {}, reads, storages, (None,)))

    def values(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Make tensors; those that share a storage share it."""
        made: dict[int, torch.UntypedStorage] = {}
        places = [self._place(tensor) for tensor in tensors]
        with without_modes(), torch.inference_mode(False), torch.no_grad():
            for place in places:
                if place.storage not in made:
                    made[place.storage] = self._played(place.storage)
            return [place.of(made[place.storage]) for place in places]

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make one tensor, for code that reads it."""
        (value,) = self.values([tensor])
        with without_modes():
            self.read.update(value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return value

    def hold(self, tensor: torch.Tensor) -> None:
        """Make a tensor of the meta device, from what will be written to it."""
        self._register(tensor)

    def is_bare(self, tensor: torch.Tensor) -> bool:
        """Return whether nothing was written to a tensor that the tape only holds."""
        return not self._writers.get(self.storage(tensor))

    def fingerprint(self) -> str:
        """Return what two tapes have in common that make the same tensors from the same random numbers."""
        digest = hashlib.sha256("\n".join(act.described() for act in self.acts).encode())
        return digest.hexdigest()

    def states(self) -> list[torch.Tensor]:
        """Return the states of generators before every act that draws."""
        return [act.state for act in self.acts if act.state is not None]

    def begin_from(self, states: Sequence[torch.Tensor]) -> None:
        """Draw from these states instead of those that were found here."""
        drawing = [act for act in self.acts if act.state is not None]
        for act, state in zip(drawing, states, strict=True):
            act.state = state

    def _place(self, tensor: torch.Tensor) -> TapePlace:
        if tensor.is_conj() or tensor.is_neg():
            raise UnsupportedError("A lazily conjugated tensor cannot be made later. Call resolve_conj() on it.")
        return TapePlace(
            self.storage(tensor),
            tensor.dtype,
            tuple(tensor.size()),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
        )

    def _register(self, tensor: torch.Tensor) -> TapePlace | None:
        """Return where a result lies if it has a storage that is new."""
        storage = tensor.untyped_storage()
        if id(storage) in self._numbers:
            return None
        self._numbers[id(storage)] = len(self._storages)
        self._storages.append(storage)
        return self._place(tensor)

    def _add(self, act: Act) -> None:
        for storage in {*act.writes, *(place.storage for place in act.makes if place is not None)}:
            self._writers.setdefault(storage, []).append(len(self.acts))
        self.acts.append(act)

    def _write(
        self,
        operator: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        written: Sequence[torch.Tensor],
        result: Any,
        state: torch.Tensor | None = None,
    ) -> None:
        """Write down what was done; nothing where only a view was made."""
        writes = frozenset(self.storage(tensor) for tensor in written)
        results = result if isinstance(result, (list, tuple)) else (result,)
        call = (args, _with_device(args, kwargs, "cpu"))
        spoken_args, spoken_kwargs = apply_to_collection(call, torch.Tensor, self._spoken)
        reads = {self.storage(t) for t in _tensors_in((args, kwargs)) if self.holds(t)}
        if written and self._fills(operator, args[0]):
            reads -= {self.storage(args[0])} - {self.storage(t) for t in _tensors_in(args[1:]) if self.holds(t)}
        makes = tuple(self._register(t) if isinstance(t, torch.Tensor) else None for t in results)
        if writes or any(place is not None for place in makes):
            self._add(Act(operator, spoken_args, spoken_kwargs, frozenset(reads), writes, makes, state))

    def _spoken(self, tensor: torch.Tensor) -> TapePlace | Given:
        return self._place(tensor) if self.holds(tensor) else Given(tensor, tensor._version)

    def _fills(self, operator: OpOverload, tensor: torch.Tensor) -> bool:
        """Return whether nothing is left of the storage that is written to."""
        return _name(operator) in _FILLS and tensor.numel() * tensor.itemsize == tensor.untyped_storage().nbytes()

    def _drawn(
        self, operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], written: Sequence[torch.Tensor]
    ) -> Any:
        """Draw into scratch, which is dropped, and write down with which state of the generator."""
        generator = kwargs.get("generator") or torch.default_generator
        if generator.device.type != "cpu":
            raise UnsupportedError("Numbers drawn on another device than the host cannot be drawn later.")
        state = generator.get_state()
        scratch = apply_to_collection(args, torch.Tensor, _scratch)
        drawn = operator(*scratch, **_with_device(args, kwargs, "cpu"))
        if written:
            result: Any = args[0]
        else:
            result = torch.empty_strided(drawn.size(), drawn.stride(), dtype=drawn.dtype, device="meta")
        del drawn, scratch
        self._write(operator, args, kwargs, written, result, state)
        return result

    def _at_once(
        self, operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], written: Sequence[torch.Tensor]
    ) -> Any:
        """Make what an operator reads, and run it with values."""
        made: dict[int, torch.Tensor] = {}

        def real(tensor: torch.Tensor) -> torch.Tensor:
            if not self.holds(tensor):
                return tensor
            if id(tensor) not in made:
                made[id(tensor)] = self.value(tensor)
            return made[id(tensor)]

        is_elsewhere = _moves(operator, kwargs)
        given = apply_to_collection(
            (args, kwargs if is_elsewhere else _with_device(args, kwargs, "cpu")), torch.Tensor, real
        )
        result = operator(*given[0], **given[1])
        for tensor in written:
            if self.holds(tensor):
                copied = torch.ops.aten.copy_.default
                self._write(copied, (tensor, made[id(tensor)].clone()), {}, [tensor], tensor)
        back = {id(value): tensor for tensor in written for value in [made.get(id(tensor))] if value is not None}
        return apply_to_collection(result, torch.Tensor, lambda tensor: back.get(id(tensor), tensor))

    def _played(self, wanted: int) -> torch.UntypedStorage:
        """Play what a storage depends on."""
        needed = self._needed(wanted)
        last = {storage: act for act in needed for storage in self._touched(self.acts[act])}
        made: dict[int, torch.UntypedStorage] = {}
        for number in needed:
            self._play(self.acts[number], made)
            for storage in [s for s, end in last.items() if end == number and s != wanted]:
                made.pop(storage, None)
        return self._made(wanted, made)

    def _needed(self, wanted: int) -> list[int]:
        """Return the acts that the content of a storage depends on, in order."""
        needed: set[int] = set()
        waiting = [-number for number in self._writers.get(wanted, ())[-1:]]
        while waiting:
            number = -heapq.heappop(waiting)
            if number in needed:
                continue
            needed.add(number)
            for storage in self.acts[number].reads:
                before = self._writers.get(storage, [])
                at = bisect_left(before, number) - 1
                if at >= 0:
                    heapq.heappush(waiting, -before[at])
        return sorted(needed)

    @staticmethod
    def _touched(act: Act) -> Iterator[int]:
        yield from act.reads
        yield from act.writes
        yield from (place.storage for place in act.makes if place is not None)

    def _made(self, storage: int, made: dict[int, torch.UntypedStorage]) -> torch.UntypedStorage:
        """Return a storage; nobody has written to one that is not there yet."""
        if storage not in made:
            made[storage] = torch.UntypedStorage(self._storages[storage].nbytes(), device=_HOST)
        return made[storage]

    def _play(self, act: Act, made: dict[int, torch.UntypedStorage]) -> None:
        def real(spoken: TapePlace | Given | Later) -> torch.Tensor:
            match spoken:
                case TapePlace():
                    return spoken.of(self._made(spoken.storage, made))
                case Later():
                    return spoken.read()
                case Given():
                    if spoken.tensor._version != spoken.version:
                        raise UnsupportedError(
                            f"A tensor of shape {tuple(spoken.tensor.shape)} that parameters were made from has "
                            "changed before they were made. Copy it (.clone()) before it is changed."
                        )
                    return spoken.tensor

        args, kwargs = apply_to_collection((act.args, act.kwargs), (TapePlace, Given, Later), real)
        with _drawing_from(act):
            result = act.operator(*args, **kwargs)
        results = result if isinstance(result, (list, tuple)) else (result,)
        for place, tensor in zip(act.makes, results, strict=True):
            if place is not None:
                lies = (tuple(tensor.stride()), tensor.storage_offset()) == (place.stride, place.offset)
                if lies and tensor.untyped_storage().nbytes() == self._storages[place.storage].nbytes():
                    made[place.storage] = tensor.untyped_storage()
                else:
                    place.of(self._made(place.storage, made)).copy_(tensor)


@contextlib.contextmanager
def _drawing_from(act: Act) -> Iterator[None]:
    if act.state is None:
        yield
        return
    now = act.generator.get_state()
    act.generator.set_state(act.state)
    try:
        yield
    finally:
        act.generator.set_state(now)


def _tensors_in(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    apply_to_collection(value, torch.Tensor, found.append)
    return found


def _makes_on_host(operator: OpOverload, kwargs: dict[str, Any]) -> bool:
    """Return whether an operator makes a tensor from nothing, on the host (or nowhere)."""
    if not any(argument.name == "device" for argument in operator._schema.arguments):
        return False
    return torch.device(kwargs.get("device") or "cpu").type in _HERE


def _name(operator: OpOverload) -> str:
    return str(operator.__name__).partition(".")[0]


def _moves(operator: OpOverload, kwargs: dict[str, Any]) -> bool:
    """Return whether tensors are copied to a device: the host (Python reads them so, too) or another one."""
    device = kwargs.get("device")
    return _name(operator) == "_to_copy" and device is not None and torch.device(device).type != "meta"


def _with_device(args: Any, kwargs: dict[str, Any], device: str) -> dict[str, Any]:
    """Return the arguments of an operator with another device, if they name one or it makes a tensor from nothing."""
    if kwargs.get("device") is None and _tensors_in((args, kwargs)):
        return kwargs
    return {**kwargs, "device": torch.device(device)}


def _on_meta(value: Any) -> Any:
    return apply_to_collection(value, torch.Tensor, _without_values)


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        return tensor
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _scratch(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=_HOST)
