"""What hooks of the transfer leave on the module, or on the data module, on ranks that load nothing.

`on_after_batch_transfer` may set an attribute that the step reads (the share of a mixup). A rank that does not load
calls no such hook, so that the first rank that loads tells the others with every batch what hooks have changed of the
two (numbers, texts, collections of them, and small tensors), and the state of the generators if they have drawn
random numbers. The look at the first batch, before the plan, calls the hooks too; the step is captured with what they
leave, which is undone then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from lightning_pipe.capture.python.state_slots import data_module_slots, shared_slots
from lightning_pipe.capture.steps.keyed_random import Randomness
from lightning_pipe.capture.steps.record import KeptState
from lightning_pipe.capture.steps.step_state import ModuleState
from lightning_pipe.capture.steps.trees import mapped
from lightning_pipe.lightning_names import pl
from lightning_pipe.strategy.loading.batch_loading import Feed
from lightning_pipe.strategy.ranks.control_plane import ControlPlane
from lightning_pipe.strategy.steps.kept_state import keep_all, keep_told

_MOST_ELEMENTS = 2**18  # of a tensor that is told


class LeftByHooks:
    """Changes of the module between the beginning of a transfer and its end.

    Args:
        module: the module.
        control: connections to the other ranks.
        feed: who loads.
        device: where tensors are that others get.
    """

    def __init__(self, module: pl.LightningModule, control: ControlPlane, feed: Feed, *, device: torch.device) -> None:
        self._module, self._control, self._feed, self._device = module, control, feed, device
        self._shared = (*shared_slots(module), *data_module_slots(module.trainer))
        self._before: ModuleState | None = None
        self._random: Randomness | None = None

    def begin(self) -> None:
        """Note what there is before hooks run."""
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
        mine = (self.taken(), feed.random.since(self._random)) if feed.leads else ((), None)
        left, drawn = self._control.broadcast(mine, source=feed.source, what="what batch hooks have left")
        self._before = None
        if not feed.loads:
            feed.random.follow(drawn)
            for one in left:
                keep_told(one, self._module, self._device)

    def shown(self, left: Sequence[KeptState]) -> contextlib.AbstractContextManager[Any]:
        """Have the module inside as hooks would leave it."""
        return keep_all(left, self._module, self._device)


def _is_small(value: Any) -> bool:
    sizes = list[int]()
    mapped(value, torch.Tensor, lambda tensor: sizes.append(tensor.numel()))
    return max(sizes, default=0) <= _MOST_ELEMENTS


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu()
