"""What a look at one batch must leave as it was: the data set, its samplers and helpers, and what these hold.

Of each object its attributes count, of each collection its entries, of each generator of random numbers its state. What
a data set holds in tensors, arrays and large collections are samples, which stay as the look leaves them. Of a sampler
everything is put back, or it cannot be asked at all (`can_be_put_back`).
"""

from __future__ import annotations

import contextlib
import types
from collections import deque
from collections.abc import Iterable, Iterator, Set, Sized
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_pipe.capture.python.inner_states import generator_state, set_state, state_of
from lightning_pipe.capture.python.places import ABSENT, HOLDERS, SCALARS, Cells, ClassAttributes, Place, held_by, same
from lightning_pipe.capture.python.snapshot_parts import DictContent, InnerContent, ListContent
from lightning_pipe.capture.python.state_slots import global_slots
from lightning_pipe.capture.python.users_code import Code, functions_of, is_users, reached
from lightning_pipe.lightning_names import pl

_MOST_OBJECTS = 10_000
_MOST_ENTRIES = 1_000  # of a collection of a data set; what is larger holds samples
_MOST_BYTES = 2**26  # of an array or tensor of a sampler
_NOT_ENTERED = (*SCALARS, types.ModuleType, type, pl.Trainer, pl.LightningModule)
_NOWHERE = Place({}, "", "")


@contextlib.contextmanager
def untouched_data(loader: DataLoader[Any]) -> Iterator[None]:
    """Put back what the code inside changes of a loader's data set, samplers, collate function and generator."""
    noted = _noted(loader)
    try:
        yield
    finally:
        noted.restore()


def can_be_put_back(loader: DataLoader[Any]) -> bool:
    """Return whether the samplers of a loader can be iterated for a look, so that nobody sees it afterwards."""
    return _noted(loader).is_complete


class NotedAttributes:
    """Some attributes of a module or data module, what these hold, and what the code of its methods names.

    Sub-modules are left out. Of a large collection its entries count, and not what they hold.

    Args:
        owner: the module or data module.
        names: of the attributes.
        functions: the code that may change them, whose globals count too.
    """

    def __init__(self, owner: Any, names: Set[str], functions: Iterable[Code]) -> None:
        self._owner, self._names = owner, names
        self._values = self._now()
        self._noted = _Noted(skipped=nn.Module, enters_large=False)
        self._noted.enter([value for value in self._values.values() if value is not ABSENT], holds_samples=False)
        self._noted.enter_classes(type(owner))
        self._noted.enter_globals(functions)

    def _now(self) -> dict[str, Any]:
        return {name: vars(self._owner).get(name, ABSENT) for name in sorted(self._names)}

    def is_same(self) -> bool:
        """Return whether all is as it was noted."""
        now = self._now()
        return all(same(now[name], value) for name, value in self._values.items()) and self._noted.is_same()

    def restore(self) -> None:
        """Put everything back."""
        self._noted.restore()
        now = self._now()
        for name, value in self._values.items():
            if now[name] is value:
                continue
            if value is ABSENT:
                delattr(self._owner, name)
            else:
                setattr(self._owner, name, value)


def _noted(loader: DataLoader[Any]) -> _Noted:
    noted = _Noted()
    noted.enter((loader.dataset, loader.collate_fn, loader.generator), holds_samples=True)
    noted.enter((loader.sampler, loader.batch_sampler), holds_samples=False)
    noted.enter_globals(())
    return noted


class _Noted:
    """How to put objects back.

    Args:
        skipped: objects of this class, and what they hold, stay as they are.
        enters_large: whether entries of large collections count, too.

    Attributes:
        is_complete: whether all that was entered and holds no samples can be put back.
    """

    def __init__(self, skipped: type | tuple[()] = (), *, enters_large: bool = True) -> None:
        self._parts: list[DictContent | ListContent | InnerContent | _SlotContent] = []
        self._skipped, self._enters_large = skipped, enters_large
        self.is_complete = True
        self._seen: dict[int, Any] = {}
        self._codes: list[Code] = []

    def is_same(self) -> bool:
        """Return whether all objects are as they were."""
        return all(part.is_same() for part in self._parts)

    def restore(self) -> None:
        """Put all objects back."""
        for part in self._parts:
            part.restore()

    def enter(self, values: Iterable[Any], *, holds_samples: bool) -> None:
        """Note these objects and what they hold."""
        waiting = deque(values)
        while waiting:
            value = waiting.popleft()
            if isinstance(value, (_NOT_ENTERED, self._skipped)) or id(value) in self._seen:
                continue
            if len(self._seen) >= _MOST_OBJECTS:
                self.is_complete &= holds_samples
                return
            self._seen[id(value)] = value
            if isinstance(value, (torch.Tensor, np.ndarray)):
                if not holds_samples:
                    self._copy(value)
            elif (generator := generator_state(value)) is not None:
                self._parts.append(InnerContent(_NOWHERE, *generator))
            elif isinstance(value, Iterator):
                self.is_complete &= holds_samples
            else:
                for part in self._parts_of(value, holds_samples=holds_samples):
                    self._parts.append(part)
                    if self._enters_large or not (isinstance(value, Sized) and len(value) > _MOST_ENTRIES):
                        waiting.extend(slot.read() for slot in part.slots())

    def enter_classes(self, cls: type) -> None:
        """Note the attributes of a user's class, and of those that it inherits from."""
        for part in self._class_parts(cls):
            self._parts.append(part)
            self.enter((slot.read() for slot in part.slots()), holds_samples=False)

    def enter_globals(self, functions: Iterable[Code]) -> None:
        """Note the globals that the code of the objects, and of some functions, names."""
        for slot in list(global_slots(reached([*self._codes, *functions]))):
            value = slot.read()
            self._parts.append(_SlotContent(slot, value))
            self.enter([value], holds_samples=True)

    def _copy(self, value: torch.Tensor | np.ndarray[Any, Any]) -> None:
        if value.nbytes <= _MOST_BYTES:
            self._parts.append(InnerContent(_NOWHERE, partial(state_of, value), partial(set_state, value)))
        else:
            self.is_complete = False

    def _parts_of(self, value: Any, *, holds_samples: bool) -> Iterator[DictContent | ListContent]:
        """Yield what is to be put back of an object."""
        if isinstance(value, (dict, list, deque, set, tuple, frozenset)):
            if holds_samples and len(value) > _MOST_ENTRIES:
                return
            if isinstance(value, (list, deque, set)):
                yield ListContent(value, _NOWHERE)
            else:
                entries = value if isinstance(value, dict) else types.MappingProxyType(dict(enumerate(value)))
                yield DictContent(entries, _NOWHERE)
        elif isinstance(value, types.FunctionType):
            self._codes.append((value.__code__, value.__globals__))
            yield DictContent(Cells(value), _NOWHERE)
        elif isinstance(value, tuple(HOLDERS)):
            yield DictContent(held_by(value), _NOWHERE)
        yield from self._class_parts(type(value))
        if isinstance(attributes := getattr(value, "__dict__", None), dict):
            yield DictContent(attributes, _NOWHERE, kind="attribute")

    def _class_parts(self, kind: type) -> Iterator[DictContent]:
        for cls in filter(is_users, kind.__mro__):
            self._codes.extend((f.__code__, f.__globals__) for f in functions_of(cls))
            if id(cls) not in self._seen:
                self._seen[id(cls)] = cls
                yield DictContent(ClassAttributes(cls), _NOWHERE, kind="attribute")


class _SlotContent:
    """What a place had."""

    def __init__(self, slot: Place, value: Any) -> None:
        self._slot, self._value = slot, value

    def is_same(self) -> bool:
        """Return whether the place has it."""
        return same(self._slot.read(), self._value)

    def restore(self) -> None:
        """Put it back."""
        if self._slot.read() is not self._value:
            self._slot.write(self._value)
