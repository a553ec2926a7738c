"""Optimizer state shared by the ranks that hold the same parameters (ZeRO-1), around the user's optimizer.

    gradients are summed, hooks and clipping see them as ever
    drop()      gradients of parameters that other ranks step are dropped, so the optimizer passes over them
    step        by Lightning; the optimizer makes state for what it steps only
    gather      owners tell the other holders what they stepped, in flat pieces, two under way at a time

After Rajbhandari et al., SC 2020 (ZeRO, P_os); who owns what is dealt out by `core.sharding`. Owners step whole
parameters from the same gradients, so parameters are those of unshared state to the last bit. A precision plug-in that
steps without the usual hooks drops nothing: then every holder steps everything, which is right too.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_pipe.core.sharding import GATHERED, UNDER_WAY
from lightning_pipe.errors import UnsupportedError
from lightning_pipe.runtime.exchanges.gradients import flat_runs
from lightning_pipe.runtime.transport.protocol import Group
from lightning_pipe.runtime.waiting import Handle, Wait
from lightning_pipe.strategy.parameters.inner_optimizers import SWITCHES
from lightning_pipe.strategy.parameters.weights import Weights
from lightning_pipe.strategy.ranks.connections import Connections


@dataclass(frozen=True)
class _Piece:
    """Parameters of one owner, one type and one group of holders; `flat` holds them one after another."""

    parameters: tuple[torch.Tensor, ...]
    flat: torch.Tensor
    handle: Handle
    arrives: bool


class SharedState:
    """The optimizer state that this rank shares with the other holders of its parameters, once weights are placed so.

    Args:
        optimizer: the user's.
        weights: where parameters live, and who steps them.
        links: to the other ranks.
    """

    def __init__(self, optimizer: Optimizer, weights: Weights, links: Connections) -> None:
        self._optimizer, self._weights, self._links = optimizer, weights, links
        self._hook: RemovableHandle | None = None

    def connect(self) -> None:
        """Open the groups in which owners tell what they stepped; on all ranks together, after weights are placed.

        Raises:
            UnsupportedError: if the optimizer writes weights in other methods than a step that can be followed.
        """
        groups = sorted(set(self._weights.sharing().values()))
        self._links.transport.open(channels=(), groups=groups)
        self.end()
        if groups:
            self._refuse_weights_of_owners()
            self._hook = self._optimizer.register_step_post_hook(self._gather)

    def _refuse_weights_of_owners(self) -> None:
        name = type(self._optimizer).__name__
        writers = [method for method in SWITCHES if callable(getattr(self._optimizer, method, None))]
        if not getattr(self._optimizer.step, "hooked", False):  # by the constructor of torch.optim.Optimizer
            writers = ["step (its constructor does not call that of torch.optim.Optimizer)"]
        if writers:
            raise UnsupportedError(
                f"{name} writes weights in {' and '.join(writers)}, of which the other ranks that hold them would not "
                'learn, as ranks share optimizer state. Set shard_optimizer="off".'
            )

    def drop(self) -> None:
        """Drop the gradients of parameters that other ranks step."""
        for name in self._weights.sharing():
            if not self._weights.steps(name):
                self._weights.parameters[name].grad = None

    def end(self) -> None:
        """Leave the optimizer alone."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _gather(self, *_: Any) -> None:
        """Have the parameters that other ranks have stepped."""
        under_way: deque[_Piece] = deque()
        with torch.no_grad():
            for owner, group, run in self._runs():
                under_way.append(self._post(owner, group, run))
                if len(under_way) == UNDER_WAY:
                    self._finish(under_way.popleft())
            while under_way:
                self._finish(under_way.popleft())

    def _runs(self) -> Iterator[tuple[int, Group, tuple[torch.Tensor, ...]]]:
        """Yield owners with parameters of theirs that fit a piece, owners of a group in turns; alike on all holders."""
        parameters, rank = self._weights.parameters, self._links.control.rank
        by_group: dict[Group, dict[int, list[torch.Tensor]]] = {}
        for name, group in self._weights.sharing().items():
            if rank in group and parameters[name].requires_grad:
                by_group.setdefault(group, {}).setdefault(self._weights.owner(name), []).append(parameters[name])
        for group in sorted(by_group):
            runs = [
                [(owner, group, run) for run in flat_runs(owned, most_bytes=GATHERED)]
                for owner, owned in sorted(by_group[group].items())
            ]
            for turn in itertools.zip_longest(*runs):
                yield from (one for one in turn if one is not None)

    def _post(self, owner: int, group: Group, parameters: tuple[torch.Tensor, ...]) -> _Piece:
        is_mine = owner == self._links.control.rank
        flats = [parameter.detach().reshape(-1) for parameter in parameters] if is_mine else []
        flat = torch.cat(flats) if is_mine else parameters[0].new_empty(sum(p.numel() for p in parameters))
        handle = self._links.transport.broadcast(flat, source=owner, group=group)
        return _Piece(parameters, flat, handle, arrives=not is_mine)

    def _finish(self, piece: _Piece) -> None:
        self._links.control.wait(Wait(piece.handle, "parameters that another rank steps"))
        if piece.arrives:
            sizes = [parameter.numel() for parameter in piece.parameters]
            for parameter, content in zip(piece.parameters, torch.split(piece.flat, sizes), strict=True):
                parameter.copy_(content.view_as(parameter))
