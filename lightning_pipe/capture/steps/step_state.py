"""State that a step leaves behind, and whether the step depends on what earlier steps have left.

While a step is traced all state that it might change is as it was before, and is put back afterwards. What it has
changed is one of

    kept       it gave an attribute a value, or added to a list or dict, without looking at what was there: such values
               are results of the graph, and every rank keeps them after every batch (`record.KeptState`)
    state      anything else; the next step depends on it, which a graph cannot repeat: a hazard
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lightning_pipe.capture.output.late_texts import UNKNOWN_TEXT
from lightning_pipe.capture.python.inner_states import state_of
from lightning_pipe.capture.python.kept_collections import KeptDict, KeptList, kept_collections
from lightning_pipe.capture.python.places import ABSENT, Place
from lightning_pipe.capture.python.reads import Reads
from lightning_pipe.capture.python.snapshot_parts import StateChange
from lightning_pipe.capture.python.snapshots import Snapshot
from lightning_pipe.capture.python.state_slots import attribute_slots, hook_slots, shared_slots
from lightning_pipe.capture.python.users_code import assignment_line
from lightning_pipe.capture.steps.hazards import hazard, user_line
from lightning_pipe.capture.steps.metric_result import Deferred, is_result
from lightning_pipe.capture.steps.record import KeptState
from lightning_pipe.capture.steps.trees import can_be_told
from lightning_pipe.capture.torch_private import version_of
from lightning_pipe.errors import CaptureError, ChangedStateError
from lightning_pipe.lightning_names import pl, rank_zero_warn

_MOST_ELEMENTS = 2**18  # of a tensor that every rank keeps after every batch; what is larger stays where it is made


@dataclass
class StepState:
    """State around one run of a step.

    Args:
        module: the user's module.
        reads: what the step reads.

    Attributes:
        kept: what the run has left behind, with the values that the run has left.
    """

    module: pl.LightningModule
    reads: Reads
    kept: list[KeptState] = field(default_factory=list)
    _unread: list[tuple[Place, KeptList | KeptDict]] = field(default_factory=list)
    _changed: list[tuple[Place, KeptList | KeptDict]] = field(default_factory=list)
    _left: list[tuple[Place, Any]] = field(default_factory=list)

    @property
    def unread(self) -> list[Place]:
        """List the places of lists and dicts whose content nobody has looked at so far, in the backward neither."""
        return [slot for slot, collection in self._unread if not collection.is_read]

    @property
    def filled(self) -> list[tuple[Place, frozenset[Any]]]:
        """List the places of dicts that were looked at when all their entries were of the step, with their keys."""
        dicts = [(slot, one) for slot, one in self._unread if isinstance(one, KeptDict) and not one.is_read]
        return [(slot, one.filled) for slot, one in dicts if one.filled is not None]

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Run the step inside; everything is put back at the end.

        Raises:
            CaptureError: if the step keeps state that it reads again.
        """
        state = ModuleState(self.module)
        try:
            with kept_collections(state.slots, shared=state.shared) as collections:
                yield
                for slot, collection in collections:
                    self._note_collection(slot, collection)
                left = [(slot, collection) for slot, collection in collections if slot.read() is collection]
            for change in state.changes():
                self._note(change)
                left.append((change.slot, change.now))
            self._left = left
        finally:
            state.restore()

    @contextlib.contextmanager
    def left_in_place(self) -> Iterator[None]:
        """Show its backward the state that the run has left, collections that note who looks at them among it.

        Raises:
            CaptureError: if the backward reads what the run has added to what earlier steps have left.
        """
        with contextlib.ExitStack() as stack:
            for slot, value in self._left:
                stack.callback(slot.write, slot.read())
                slot.write(value)
            yield
        for slot, collection in self._changed:
            if collection.is_read:
                self._refuse(slot)

    def _note_collection(self, slot: Place, collection: KeptList | KeptDict) -> None:
        if slot.read() is not collection:
            return
        if collection.is_read:
            if collection.is_changed:
                self._refuse(slot)
            return
        self._unread.append((slot, collection))
        if not collection.is_changed:
            return
        self._changed.append((slot, collection))
        if isinstance(collection, KeptList):
            self._keep(slot, "refill" if collection.is_cleared else "extend", collection.added)
        elif collection.is_cleared:
            self._keep(slot, "refill", dict(dict.items(collection)))
        elif collection.only_grew:
            self._keep(slot, "update", {key: dict.__getitem__(collection, key) for key in collection.written})
        else:
            self._refuse(slot)

    def _note(self, change: StateChange) -> None:
        if change.now is ABSENT or len(change.slot.path) != 2 or not self.reads.is_fresh(change.slot):
            self._refuse(change.slot)
        self._keep(change.slot, "assign", change.now)

    def _keep(self, slot: Place, how: Any, value: Any) -> None:
        if not _is_plain(value):
            raise self._refusal(slot)
        self.kept.append(KeptState(slot.path, slot.name, how, value))

    def _refuse(self, slot: Place) -> None:
        error = self._refusal(slot, kind=ChangedStateError)
        assert isinstance(error, ChangedStateError), "of the kind that was asked for"
        error.state = slot.name
        raise error

    def _refusal(self, slot: Place, *, kind: type[CaptureError] = CaptureError) -> CaptureError:
        line = assignment_line(self.module, slot.name.removeprefix("self."))
        return hazard(f"it changes {slot.name} and reads it again in the next call (state)", line, kind=kind)


class DataWriter(TorchFunctionMode):
    """Let `tensor.data = value` write to the tensor, which can be followed; entered after what follows."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the call, or what writes the same.

        Raises:
            CaptureError: if the tensor has another form then.
        """
        if func == _DATA.__set__:
            tensor, value = args
            if tensor.shape != value.shape or tensor.dtype != value.dtype:
                raise hazard("it gives a tensor another shape or type by `.data`", user_line(2))
            return tensor.data.copy_(value)
        return func(*args, **(kwargs or {}))


_DATA: Any = torch.Tensor.data  # a property, which types take for what it returns


def _is_plain(value: Any) -> bool:
    """Return whether a value is made of numbers, texts and small tensors, so that every rank can keep it."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, (*value, *value.values())))
    if isinstance(value, str):
        return not str.__contains__(value, UNKNOWN_TEXT)  # of a marked text, without a look at it
    if is_result(value):
        return False
    if isinstance(value, torch.Tensor):
        return math.prod(size if isinstance(size, int) else size.node.hint for size in value.shape) <= _MOST_ELEMENTS
    numbers = (bool, int, float, type(None), torch.SymInt, torch.SymFloat)
    return isinstance(value, numbers) or type(value).__name__ == "TracedNumber"


class ModuleState:
    """The Python state that a step might change, as it is now.

    Args:
        module: the user's module.
        shared: its `shared_slots`, where they are known.
        copies: whether the content of tensors can be put back, too.
    """

    def __init__(
        self, module: pl.LightningModule, *, shared: Sequence[Place] | None = None, copies: bool = False
    ) -> None:
        self._module = module
        self._shared = tuple(shared_slots(module)) if shared is None else shared
        self.slots = (*attribute_slots(module), *hook_slots(module), *self._shared)
        self._known = {slot.place for slot in self.slots}
        self._snapshot = Snapshot(self.slots, tree=module, copies=copies)

    @property
    def shared(self) -> Set[int]:
        """Return the identities of objects that several places have."""
        return self._snapshot.shared

    def changes(self) -> Iterator[StateChange]:
        """Yield every place that is not what it was, new attributes among them."""
        yield from self._snapshot.changes()
        for slot in self._new():
            yield StateChange(slot, ABSENT, slot.read())

    def restore(self) -> None:
        """Put everything back."""
        for slot in self._new():
            slot.write(ABSENT)
        self._snapshot.restore()

    def now(self) -> ModuleState:
        """Return the state of the same module as it is now, with copies."""
        return ModuleState(self._module, shared=self._shared, copies=True)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Have this state inside, and outside the one that is there now with what the code inside has changed."""
        outside = self.now()
        self.restore()
        try:
            yield
            changes = [*self.changes()]
        finally:
            outside.restore()
        for change in changes:
            change.repeat()

    def kept(self) -> list[KeptState]:
        """List what has changed, as what a step leaves behind; classes that it made are made again where missed."""
        kept = [_as_kept(change) for change in self.changes() if not isinstance(change.now, type)]
        return [
            one if can_be_told(one.value, (torch.Tensor, Deferred)) else replace(one, path=(), value=None)
            for one in kept
        ]

    def _new(self) -> list[Place]:
        return [slot for slot in attribute_slots(self._module) if slot.place not in self._known]


def _as_kept(change: StateChange) -> KeptState:
    slot, now = change.slot, change.now
    if not change.is_content:
        return KeptState(slot.path, slot.name, "remove" if now is ABSENT else "assign", None if now is ABSENT else now)
    if not isinstance(slot.read(), (list, set, deque)):
        state = state_of(slot.read())
        return KeptState(slot.path if state is not None else (), slot.name, "state", state)
    before = len(change.before)
    grew = isinstance(slot.read(), list) and all(a is b for a, b in zip(change.before, now[:before], strict=False))
    if grew and len(now) >= before:
        return KeptState(slot.path, slot.name, "extend", now[before:])
    return KeptState(slot.path, slot.name, "refill", now)


@contextlib.contextmanager
def state_put_back(module: pl.LightningModule) -> Iterator[ModuleState]:
    """Put back what the code inside changes of Python state; what is yielded tells what that is."""
    state = ModuleState(module)
    try:
        yield state
    finally:
        state.restore()


class CheckpointedChanges:
    """State that a region under `torch.utils.checkpoint` changes: the backward of one device changes it once more.

    A captured step runs such a region once, so that a BatchNorm inside counts each batch once.

    Args:
        module: the user's module.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module
        self._names: dict[str, None] = {}

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note what the region that runs inside changes; nothing where it will not run again."""
        if not torch.is_grad_enabled():
            yield
            return
        buffers, state = self._buffers(), Snapshot(attribute_slots(self._module), tree=self._module)
        yield
        now = self._buffers()
        owners = (f"self.{name}".rpartition(".")[0] for name in now if buffers.get(name) != now[name])
        self._names |= {f"buffers of {owner}": None for owner in owners}  # kernels write to some of them unseen
        self._names |= {change.slot.name: None for change in state.changes() if _accumulates(change)}

    def _buffers(self) -> dict[str, Any]:
        known = self._module.named_buffers()
        return {name: (id(tensor), version_of(tensor)) for name, tensor in known if not tensor.is_inference()}

    @property
    def names(self) -> tuple[str, ...]:
        """Return what has changed, as the user would write it."""
        return (*self._names,)


def warn_of_checkpointed(method: str, names: tuple[str, ...]) -> None:
    """Warn of state that checkpointed regions change.

    Args:
        method: of the module, such as `training_step`.
        names: of the state, as the user would write it.
    """
    if names:
        others = f" and {len(names) - 3} others" if len(names) > 3 else ""
        rank_zero_warn(
            f"{method} changes {', '.join(names[:3])}{others} under torch.utils.checkpoint. One device runs that "
            "region again in the backward, which changes it once more; a captured step runs it once. Change it outside "
            "of the region to have the same everywhere."
        )


def _accumulates(change: StateChange) -> bool:
    """Return whether a second run makes another difference than the first: it counts, or adds to a collection."""
    return change.is_content or all(type(value) in (int, float) for value in (change.before, change.now))
