"""What a look at one batch must leave as it was: the data set, its samplers and helpers, and what these hold.

Of each object its attributes count, of each collection its entries, of each generator of random numbers its state. What
a data set holds in tensors, arrays and large collections are samples, which stay as the look leaves them. Of a sampler
everything is put back, or it cannot be asked at all (`can_be_put_back`).
"""

from __future__ import annotations

import contextlib
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Set, Sized
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_pipe.capture.python.inner_states import generator_state, set_state, state_of
from lightning_pipe.capture.python.places import HOLDERS, SCALARS, Cells, ClassAttributes, Place, held_by
from lightning_pipe.capture.python.snapshot_parts import DictContent, ListContent
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
        for put_back in noted.actions:
            put_back()


def can_be_put_back(loader: DataLoader[Any]) -> bool:
    """Return whether the samplers of a loader can be iterated for a look, so that nobody sees it afterwards."""
    return _noted(loader).is_complete


def attributes_noted(owner: Any, names: Set[str]) -> Callable[[], None]:
    """Note some attributes of a module or data module, and what these hold; return what puts it back.

    Sub-modules are left out. Of a large collection its entries are put back, and not what they hold.
    """
    own = {name: value for name, value in vars(owner).items() if name in names}
    noted = _Noted(skipped=nn.Module, enters_large=False)
    noted.enter(own.values(), holds_samples=False)

    def put_back() -> None:
        for action in noted.actions:
            action()
        for name in names & {*vars(owner)}:
            if name not in own:
                delattr(owner, name)
        for name, value in own.items():
            if vars(owner).get(name) is not value:
                setattr(owner, name, value)

    return put_back


def _noted(loader: DataLoader[Any]) -> _Noted:
    noted = _Noted()
    noted.enter((loader.dataset, loader.collate_fn, loader.generator), holds_samples=True)
    noted.enter((loader.sampler, loader.batch_sampler), holds_samples=False)
    noted.enter_globals()
    return noted


class _Noted:
    """How to put objects back.

    Args:
        skipped: objects of this class, and what they hold, stay as they are.
        enters_large: whether entries of large collections count, too.

    Attributes:
        actions: put them back.
        is_complete: whether they put back all that was entered and holds no samples.
    """

    def __init__(self, skipped: type | tuple[()] = (), *, enters_large: bool = True) -> None:
        self.actions: list[Callable[[], object]] = []
        self._skipped, self._enters_large = skipped, enters_large
        self.is_complete = True
        self._seen: dict[int, Any] = {}
        self._codes: list[Code] = []

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
                read, write = generator
                self.actions.append(partial(write, read()))
            elif isinstance(value, Iterator):
                self.is_complete &= holds_samples
            else:
                for part in self._parts(value, holds_samples=holds_samples):
                    self.actions.append(part.restore)
                    if self._enters_large or not (isinstance(value, Sized) and len(value) > _MOST_ENTRIES):
                        waiting.extend(slot.read() for slot in part.slots())

    def enter_globals(self) -> None:
        """Note the globals that the code of the objects names."""
        for slot in list(global_slots(reached(self._codes))):
            value = slot.read()
            self.actions.append(partial(_put_back, slot, value))
            self.enter([value], holds_samples=True)

    def _copy(self, value: torch.Tensor | np.ndarray[Any, Any]) -> None:
        if value.nbytes <= _MOST_BYTES:
            self.actions.append(partial(set_state, value, state_of(value)))
        else:
            self.is_complete = False

    def _parts(self, value: Any, *, holds_samples: bool) -> Iterator[DictContent | ListContent]:
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
        for cls in filter(is_users, type(value).__mro__):
            self._codes.extend((f.__code__, f.__globals__) for f in functions_of(cls))
            if id(cls) not in self._seen:
                self._seen[id(cls)] = cls
                yield DictContent(ClassAttributes(cls), _NOWHERE, kind="attribute")
        if isinstance(attributes := getattr(value, "__dict__", None), dict):
            yield DictContent(attributes, _NOWHERE, kind="attribute")


def _put_back(slot: Place, value: Any) -> None:
    if slot.read() is not value:
        slot.write(value)
