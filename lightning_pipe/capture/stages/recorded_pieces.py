"""Recorded pieces: kernels of a stage whose launches are recorded once, and are one launch from then on.

    slots = Slots(CudaRecorder(device))                       of one stage
    piece = slots.piece(kernel, fixed=..., stays=..., name=...)
    with slots.of("F", (batch, microbatch)):
        outputs = piece(*tensors)

A recording reads and writes memory at the addresses that it was made with. So a micro-batch has a slot from its F to
its W: memory for what F leaves for I and W, and I for W, with recordings that find it there. What the stage is given
otherwise (messages, batches, masks) is copied in before a launch, and what leaves the stage (messages, results,
gradients, what is offloaded) is copied out after it, so that outside this module a value is a tensor like any other.
Parameters and buffers are read where they are.

Memory of a slot is written to only while no tensor outside refers to it: the memory itself is asked, and no schedule is
relied on. Where it is referred to, or a micro-batch has no slot, the kernel runs unrecorded, with the same numbers.
"""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_pipe.capture.stages.cuda_recorder import LaunchRecorder
from lightning_pipe.capture.torch_private import copy_each, storage_users

log = logging.getLogger(__name__)

Kernel = Callable[..., Sequence[Any]]
MicroBatch = tuple[int, int]  # numbers of its batch, and in it: those of a round come again while some are in flight
_ALIGNED = 512  # bytes, as the allocator of CUDA aligns


class Slots:
    """The slots of one stage.

    Args:
        recorder: of its device.

    Attributes:
        now: the slot of the micro-batch that is computed; None if there is none.
    """

    def __init__(self, recorder: LaunchRecorder) -> None:
        self.recorder = recorder
        self.now: Slot | None = None
        self._slots: list[Slot] = []
        self._of: dict[MicroBatch, Slot] = {}

    @contextlib.contextmanager
    def of(self, kind: str, microbatch: MicroBatch) -> Iterator[None]:
        """Run F, I or W of a micro-batch in its slot; without one, if others use that."""
        if kind == "F":
            slot = next((one for one in self._slots if not one.is_in_use()), None)
            if slot is None:
                slot = Slot(self.recorder.device)
                self._slots.append(slot)
            self._of = {other: its for other, its in self._of.items() if its is not slot}
            self._of[microbatch] = slot
        else:
            slot = self._of.get(microbatch)
            if slot is not None and slot.owner != microbatch and slot.is_in_use():
                slot = None
        if slot is not None:
            slot.owner = microbatch
        self.now = slot
        try:
            yield
        finally:
            self.now = None

    def piece(self, kernel: Kernel, *, fixed: Sequence[bool], stays: Sequence[bool], name: str) -> RecordedPiece:
        """Return a function that does what a kernel does.

        Args:
            kernel: a function of tensors, to none of which it writes; it launches the same whatever they hold.
            fixed: by input, whether it is a parameter or buffer.
            stays: by output, whether only functions of this stage read it.
            name: for the log.
        """
        return RecordedPiece(kernel, self, fixed=fixed, stays=stays, name=name)


class Slot:
    """Memory for the values of one micro-batch at a time, and the recordings that read and write it.

    Attributes:
        owner: the micro-batch.
        recordings: of the stage's pieces.
    """

    def __init__(self, device: torch.device) -> None:
        self.owner: MicroBatch | None = None
        self.recordings: dict[RecordedPiece, _Recording] = {}
        self._device = device
        self._arenas: list[_Arena] = []

    def is_in_use(self) -> bool:
        """Return whether a tensor outside refers to its memory."""
        return any(arena.is_in_use() for arena in self._arenas)

    def allocate(self, forms: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
        """Return tensors in new memory of this slot, with one dimension of so many elements each."""
        if not forms:
            return []
        self._arenas.append(_Arena(forms, self._device))
        return self._arenas[-1].tensors

    def own(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a tensor of the same memory that is the slot's own; None if the memory is not."""
        arena = next((one for one in self._arenas if one.has(tensor)), None)
        return None if arena is None else arena.alias(tensor)

    def forget(self) -> None:
        """Give all memory and recordings up; tensors outside keep theirs."""
        self.recordings.clear()
        self._arenas.clear()


class _Arena:
    """One piece of memory for several tensors, which knows whether others than its own refer to it."""

    def __init__(self, forms: Sequence[tuple[int, torch.dtype]], device: torch.device) -> None:
        sizes = [count * dtype.itemsize for count, dtype in forms]
        begins = [0]
        for size in sizes:
            begins.append(begins[-1] + -(-size // _ALIGNED) * _ALIGNED)
        memory = torch.empty(begins[-1], dtype=torch.uint8, device=device)
        where = zip(begins, sizes, forms, strict=False)
        self.tensors = [memory[begin : begin + size].view(dtype) for begin, size, (_, dtype) in where]
        self._aliases: list[torch.Tensor] = []
        self._storage = memory.untyped_storage()
        del memory
        self._own = storage_users(self._storage)

    def has(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() == self._storage.data_ptr()

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the same memory that does not count as use of it."""
        before = storage_users(self._storage)
        self._aliases.append(tensor.detach())
        self._own += storage_users(self._storage) - before
        return self._aliases[-1]

    def is_in_use(self) -> bool:
        return storage_users(self._storage) > self._own


class RecordedPiece:
    """A function that is recorded once per slot. Arguments: see `Slots.piece`."""

    def __init__(
        self, kernel: Kernel, slots: Slots, *, fixed: Sequence[bool], stays: Sequence[bool], name: str
    ) -> None:
        self._kernel, self._slots, self._stays, self._name = kernel, slots, stays, name
        self._fixed = list(fixed)
        self._is_recorded = True

    def __call__(self, *tensors: torch.Tensor) -> Sequence[Any]:
        """Return what the kernel returns."""
        slot = self._slots.now
        if slot is None or not self._is_recorded:
            return self._kernel(*tensors)
        recording = slot.recordings.get(self)
        if recording is not None and (moved := recording.moved(tensors)):
            for index in moved:  # they do not stay where they are, after all
                self._fixed[index] = False
            slot.forget()
            recording = None
        if recording is None:
            try:
                recording = self._record(slot, tensors)
            except RuntimeError as error:
                self._is_recorded = False
                why = (str(error).strip() or type(error).__name__).partition("\n")[0]
                log.warning("%s runs without a CUDA graph: %s", self._name, why)
                return self._kernel(*tensors)
            slot.recordings[self] = recording
        return recording.run(tensors)

    def _record(self, slot: Slot, tensors: Sequence[torch.Tensor]) -> _Recording:
        device = self._slots.recorder.device
        if elsewhere := [tensor for tensor in tensors if tensor.device != device]:
            raise RuntimeError(f"it reads a tensor of {elsewhere[0].device}")
        inputs = _Inputs(tensors, self._fixed, slot)
        outputs = self._slots.recorder.try_out(lambda: self._kernel(*inputs.static))
        if any(one.is_conj() or one.is_neg() for one in (*tensors, *outputs) if isinstance(one, torch.Tensor)):
            raise RuntimeError("a tensor is conjugated or negated when it is read")
        results = _Results(outputs, self._stays, inputs.static, device)
        del outputs
        kept = slot.allocate(results.forms(stays=True))

        def launches() -> list[torch.Tensor]:
            made = self._kernel(*inputs.static)
            copy_each(kept, results.flat(made, stays=True))
            return results.flat(made, stays=False)

        return _Recording(inputs, results, kept, self._slots.recorder.record(launches))


class _Recording:
    """What a kernel launches for inputs and outputs at fixed addresses."""

    def __init__(
        self,
        inputs: _Inputs,
        results: _Results,
        kept: Sequence[torch.Tensor],
        launch: Callable[[], list[torch.Tensor]],
    ) -> None:
        self._inputs, self._results, self._kept, self._launch = inputs, results, kept, launch

    def moved(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Return the inputs that are read in place and are at other addresses now."""
        return [index for index, address in self._inputs.addresses.items() if tensors[index].data_ptr() != address]

    def run(self, tensors: Sequence[torch.Tensor]) -> Sequence[Any]:
        self._inputs.copy_in(tensors)
        left = self._launch()
        copies = [torch.empty_like(one) for one in left]
        copy_each(copies, left)
        return self._results.of(tensors, self._kept, copies)


class _Inputs:
    """The tensors that a recording reads.

    Attributes:
        static: where it reads them.
        addresses: of those that are read where they are given.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], fixed: Sequence[bool], slot: Slot) -> None:
        self.static: list[torch.Tensor] = []
        self.addresses: dict[int, int] = {}
        self._targets: dict[int, torch.Tensor] = {}
        for index, tensor in enumerate(tensors):
            own = tensor.detach() if fixed[index] else slot.own(tensor)
            if own is None:
                flat = tensor.new_empty(_extent(tensor))
                own, self._targets[index] = flat.as_strided(tensor.shape, tensor.stride()), flat
            else:
                self.addresses[index] = tensor.data_ptr()
            self.static.append(own)
        self.copy_in(tensors)

    def copy_in(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy what is not read where it is given."""
        sources = [tensors[index].as_strided((len(flat),), (1,)) for index, flat in self._targets.items()]
        copy_each([*self._targets.values()], sources)


@dataclass(frozen=True)
class _Made:
    """Memory that a kernel makes: the output that shows it, its elements, and whether all of it stays in the stage."""

    output: int
    count: int
    dtype: torch.dtype
    stays: bool


@dataclass(frozen=True)
class _Form:
    """How an output lies in the memory of an input, or in memory that was made (kept, or copied out), by its number."""

    memory: str
    number: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Results:
    """How outputs are made of memory: those that share some share it here, too.

    Args:
        outputs: of a kernel.
        stays: by output, whether only functions of the stage read it.
        inputs: of the kernel.
        device: where it runs; outputs elsewhere are constants, as the kernel waits for nothing.
    """

    def __init__(
        self, outputs: Sequence[Any], stays: Sequence[bool], inputs: Sequence[torch.Tensor], device: torch.device
    ) -> None:
        given = {(_storage(tensor), tensor.dtype): index for index, tensor in enumerate(inputs) if tensor.numel()}
        tensors = {i: o for i, o in enumerate(outputs) if isinstance(o, torch.Tensor) and o.device == device}
        made: dict[tuple[int, torch.dtype], list[int]] = defaultdict(list)
        for index, tensor in tensors.items():
            where = (_storage(tensor), tensor.dtype) if tensor.numel() else (-1 - index, tensor.dtype)
            if where not in given:
                made[where].append(index)
        self._constants = {i: o for i, o in enumerate(outputs) if i not in tensors}
        self._made: list[_Made] = []
        self._forms: dict[int, _Form] = {}
        numbers = {True: 0, False: 0}
        for (_, dtype), members in made.items():
            is_kept = all(stays[member] for member in members)
            first = tensors[members[0]]
            count = first.untyped_storage().nbytes() // dtype.itemsize if first.numel() else 0
            self._made.append(_Made(members[0], count, dtype, is_kept))
            for member in members:
                self._forms[member] = _form("kept" if is_kept else "left", numbers[is_kept], tensors[member])
            numbers[is_kept] += 1
        for index, tensor in tensors.items():
            if index not in self._forms:
                number = given[_storage(tensor), tensor.dtype]
                self._forms[index] = _form("given", number, tensor, begin=int(inputs[number].storage_offset()))
        self._count = len(outputs)

    def forms(self, *, stays: bool) -> list[tuple[int, torch.dtype]]:
        """Return elements and type of the memory that stays, or leaves the stage."""
        return [(made.count, made.dtype) for made in self._made if made.stays == stays]

    def flat(self, outputs: Sequence[torch.Tensor], *, stays: bool) -> list[torch.Tensor]:
        """Return that memory of outputs of the kernel."""
        shown = (made for made in self._made if made.stays == stays)
        return [outputs[made.output].as_strided((made.count,), (1,), 0) for made in shown]

    def of(
        self, given: Sequence[torch.Tensor], kept: Sequence[torch.Tensor], left: Sequence[torch.Tensor]
    ) -> list[Any]:
        """Return the outputs, made of the inputs and of memory that was made."""
        memory = {"given": given, "kept": kept, "left": left}
        return [
            self._constants[index] if index in self._constants else _placed(self._forms[index], memory)
            for index in range(self._count)
        ]


def _form(memory: str, number: int, tensor: torch.Tensor, begin: int = 0) -> _Form:
    return _Form(memory, number, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()) - begin)


def _placed(form: _Form, memory: dict[str, Sequence[torch.Tensor]]) -> torch.Tensor:
    tensor = memory[form.memory][form.number]
    return tensor.as_strided(form.size, form.stride, tensor.storage_offset() + form.offset)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _extent(tensor: torch.Tensor) -> int:
    """Return the number of elements from a tensor's first to its last."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
