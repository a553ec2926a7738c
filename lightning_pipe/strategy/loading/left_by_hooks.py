"""What hooks of the transfer leave on the module, or on the data module, on ranks that load nothing.

`on_after_batch_transfer` may set an attribute that the step reads (the share of a mixup). A rank that does not load
calls no such hook, so that the first rank that loads tells the others with every batch what hooks have changed of the
two (numbers, texts, collections of them, and small tensors), and the state of the generators if they have drawn
random numbers. The look at the first batch, before the plan, calls the hooks too; the step is captured with what they
leave, which is undone then.

Hooks of a batch that is loaded before its turn see what those of the batches before it have left, and what they leave
is put by: the steps in between find the module as it is. Where something else writes to the same places between two
batches that would be lost, so nothing is loaded before its turn any more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_pipe.capture.python.places import Place, same
from lightning_pipe.capture.python.snapshot_parts import StateChange
from lightning_pipe.capture.python.state_slots import data_module_slots, shared_slots
from lightning_pipe.capture.steps.keyed_random import Randomness
from lightning_pipe.capture.steps.record import KeptState
from lightning_pipe.capture.steps.step_state import ModuleState
from lightning_pipe.capture.steps.trees import mapped
from lightning_pipe.lightning_names import pl
from lightning_pipe.strategy.loading.batch_loading import Feed
from lightning_pipe.strategy.ranks.control_plane import ControlPlane
from lightning_pipe.strategy.steps.kept_state import keep_all, keep_state, keep_told

_MOST_ELEMENTS = 2**18  # of a tensor that is told


@dataclass(frozen=True)
class LeftForTurn:
    """What hooks of the transfer have left for the step of one batch.

    Attributes:
        told: as every rank knows it.
        changes: the same on a rank that loads, with what others cannot be told.
        overwritten: what else was seen to write to such a place until then; "" for nothing.
    """

    told: tuple[KeptState, ...] = ()
    changes: tuple[tuple[StateChange, KeptState | None], ...] = ()
    overwritten: str = ""


class LeftByHooks:
    """Changes of the module between the beginning of a transfer and its end.

    Args:
        module: the module.
        control: connections to the other ranks.
        feed: who loads.
        device: where tensors are that others get.

    Attributes:
        last: what the transfer that was told last has left.
        why_not_ahead: why no batch may be loaded before its turn; "" if it may.
    """

    def __init__(self, module: pl.LightningModule, control: ControlPlane, feed: Feed, *, device: torch.device) -> None:
        self._module, self._control, self._feed, self._device = module, control, feed, device
        self._shared = (*shared_slots(module), *data_module_slots(module.trainer))
        self._before: ModuleState | None = None
        self._random: Randomness | None = None
        self.last = LeftForTurn()
        self._places: list[tuple[Place, Any]] = []  # that hooks of the last training batch wrote to, as they left them
        self._epoch = -1  # of that batch
        self._transfers = 0  # of training batches
        self._overwritten = ""  # what somebody else writes to as well
        self.why_not_ahead = ""

    @property
    def is_observed(self) -> bool:
        """Return whether transfers of two batches have shown what else writes to what hooks leave."""
        return self._transfers > 1

    def begin(self) -> None:
        """Note what there is before hooks run."""
        if self._module.trainer.training and self._epoch == self._module.trainer.current_epoch:
            self._compare(self._places)
        self._before = ModuleState(self._module, shared=self._shared, copies=True)
        self._random = self._feed.random.now()

    def taken(self) -> tuple[KeptState, ...]:
        """Return what hooks have changed since, as far as others can be told."""
        if self._before is None:
            return ()
        told = (one for one in self._before.kept() if one.path and _is_small(one.value))
        return tuple(replace(one, value=mapped(one.value, torch.Tensor, _on_host)) for one in told)

    def put_back(self) -> None:
        """Undo what hooks have changed."""
        if self._before is not None:
            self._before.restore()
            self._before = None

    def tell(self) -> None:
        """Let ranks that do not load have what hooks of the leading rank have changed; on all ranks together."""
        feed = self._feed
        mine = (self.taken(), feed.random.since(self._random), self._overwritten) if feed.leads else ((), None, "")
        left, drawn, overwritten = feed.broadcast(mine, what="what batch hooks have left")
        feed.random.are_drawn |= drawn is not None
        self.last = LeftForTurn(left, self._changes(), overwritten)
        self._before = None
        if self._module.trainer.training:
            self._note(self.last)
        if not feed.loads:
            feed.random.follow(drawn)
            for one in left:
                keep_told(one, self._module, self._device)

    @contextlib.contextmanager
    def put_by(self, earlier: Sequence[LeftForTurn]) -> Iterator[list[LeftForTurn]]:
        """Move a batch to the device before its turn inside; on all ranks together.

        Args:
            earlier: what hooks have left for the batches before it that have not had their turn either.

        Yields:
            A list that has what its own hooks have left at the end, which is undone then.
        """
        present, left = ModuleState(self._module, shared=self._shared, copies=True), list[LeftForTurn]()
        try:
            for one in earlier:
                self._put(one)
            self._places.clear()
            yield left
            left.append(self.last)
            self._places.clear()
        finally:
            present.restore()

    def put_in_place(self, left: LeftForTurn) -> None:
        """Have the module as hooks have left it for a batch whose turn has come."""
        self._compare([(change.slot, change.before) for change, _ in left.changes if not change.is_content])
        self._put(left)
        self._note(left)

    def heed(self, left: LeftForTurn) -> None:
        """Take no batch before its turn any more if what came with a batch says why; on all ranks alike."""
        if left.overwritten and not self.why_not_ahead:
            self.why_not_ahead = (
                f"hooks that move batches to the device leave {left.overwritten}, which changes between two batches as "
                "well"
            )

    def _put(self, left: LeftForTurn) -> None:
        if not self._feed.loads:
            for one in left.told:
                keep_told(one, self._module, self._device)
        for change, kept in left.changes:
            if kept is None or not kept.path:
                change.repeat()
            else:
                keep_state(kept, kept.value, self._module)

    def _changes(self) -> tuple[tuple[StateChange, KeptState | None], ...]:
        """Return all that hooks have changed, on a rank that loads."""
        if self._before is None:
            return ()
        changes = [*self._before.changes()]
        kept = iter(self._before.kept())
        return tuple((change, None if isinstance(change.now, type) else next(kept)) for change in changes)

    def _note(self, left: LeftForTurn) -> None:
        self._epoch, self._transfers = self._module.trainer.current_epoch, self._transfers + 1
        self._places = [(change.slot, change.now) for change, _ in left.changes if not change.is_content]

    def _compare(self, places: Sequence[tuple[Place, Any]]) -> None:
        """Look whether anybody has written to places since they had these values."""
        for slot, value in places:
            if not same(slot.read(), value):
                self._overwritten = slot.name

    def shown(self, left: Sequence[KeptState]) -> contextlib.AbstractContextManager[Any]:
        """Have the module inside as hooks would leave it."""
        return keep_all(left, self._module, self._device)


def _is_small(value: Any) -> bool:
    sizes = list[int]()
    mapped(value, torch.Tensor, lambda tensor: sizes.append(tensor.numel()))
    return max(sizes, default=0) <= _MOST_ELEMENTS


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu()
