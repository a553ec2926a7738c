"""Tensors of an optimizer's state in a directory: each rank writes its own, and rank 0 a state dict without them.

    NAME.KEY      of the parameter NAME
    #n.NAME.KEY   in the n-th of several state tables, as a wrapper and the optimizer inside it have them

The state dict may be any tree. Rank 0 asks the optimizer for it with tensors of the meta device in the places of those
that other ranks write, and finds these again in the tree.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection

from lightning_pipe.strategy.parameters.inner_optimizers import reachable
from lightning_pipe.strategy.parameters.optimizer import Groups
from lightning_pipe.strategy.ranks.control_plane import ControlPlane

log = logging.getLogger(__name__)

_ABSENT = "lightning_pipe_written_as"  # on a tensor of the meta device: under which name another rank writes it


def own_tensors(groups: Groups) -> dict[str, torch.Tensor]:
    """Return the tensors of the state that this rank writes, by name."""
    names = groups.names()
    return {
        name: tensor
        for parameter, entries in groups.owned().items()
        for name, tensor in _named(entries, names[parameter]).items()
    }


def state_dict_of_all(
    groups: Groups, control: ControlPlane, *, whole: Callable[[], AbstractContextManager[None]]
) -> dict[str, Any]:
    """Return an optimizer's state dict on rank 0, with absent tensors where other ranks write; on all ranks together.

    Args:
        groups: of the optimizer.
        control: to the other ranks.
        whole: lets rank 0 have all weights inside, where the state dict is computed from tensors; it gets all then.

    Returns:
        On other ranks their own state.
    """
    what, names = "what ranks keep of the optimizer", groups.names()
    mine = {names[parameter]: _forms(entries, names[parameter]) for parameter, entries in groups.owned().items()}
    told = [control.to_first(mine, source=rank, what=what) for rank in range(control.ranks)]
    tree = None
    if control.rank == 0:
        parameters = {name: parameter for parameter, name in names.items()}
        others = {parameters[name]: forms for one in told[1:] for name, forms in (one or {}).items()}
        tree = _with_absent(groups, others)
    if control.broadcast(tree is not None, source=0, what=what):
        return groups.local_state() if tree is None else tree
    if control.rank == 0:
        log.info("%s.state_dict() computes with tensors: rank 0 writes them.", type(groups.optimizer).__name__)
    with whole():
        return groups.gather(control)


def without_tensors(tree: Mapping[str, Any], own: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return a state dict without the tensors that ranks write, and their names in the order in which they were met.

    Args:
        tree: the state dict; tensors that no rank writes stay in it.
        own: what this rank writes.
    """
    by_id = {id(tensor): name for name, tensor in own.items()}
    names: list[str | None] = []

    def taken(tensor: torch.Tensor) -> torch.Tensor:
        names.append(getattr(tensor, _ABSENT, by_id.get(id(tensor))))
        return tensor if names[-1] is None else torch.empty(0)

    return {"tree": apply_to_collection(dict(tree), torch.Tensor, taken), "names": names}


@dataclass(frozen=True)
class _Form:
    """What rank 0 knows of a tensor that another rank writes."""

    name: str
    shape: torch.Size
    dtype: torch.dtype

    def absent(self) -> torch.Tensor:
        tensor = torch.empty(self.shape, dtype=self.dtype, device="meta")
        setattr(tensor, _ABSENT, self.name)
        return tensor


def _forms(entries: list[Any], parameter: str) -> list[Any]:
    names = {id(tensor): name for name, tensor in _named(entries, parameter).items()}
    return [
        apply_to_collection(entry, torch.Tensor, lambda one: _Form(names[id(one)], one.shape, one.dtype))
        for entry in entries
    ]


def _with_absent(groups: Groups, others: Mapping[torch.Tensor, list[Any]]) -> dict[str, Any] | None:
    """Return the state dict with absent tensors of others; None if it is made of their values."""
    brought = {p: [apply_to_collection(entry, _Form, _Form.absent) for entry in forms] for p, forms in others.items()}
    try:
        tree = groups.state_dict(brought)
    except Exception:  # of the user's own class; what is wrong for other reasons is raised when all values are there
        return None
    tensors = (item for item in reachable(tree) if isinstance(item, torch.Tensor))
    return None if any(tensor.is_meta and not hasattr(tensor, _ABSENT) for tensor in tensors) else tree


def _named(entries: list[Any], parameter: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a parameter's state by name."""
    found: dict[str, torch.Tensor] = {}
    waiting = [(entry, f"#{number}.{parameter}" if number else parameter) for number, entry in enumerate(entries)]
    while waiting:
        entry, name = waiting.pop()
        if isinstance(entry, torch.Tensor):
            found[name] = entry
        elif isinstance(entry, Mapping):
            waiting += [(value, f"{name}.{key}") for key, value in entry.items()]
        elif isinstance(entry, (list, tuple)):
            waiting += [(value, f"{name}.{number}") for number, value in enumerate(entry)]
    return found
