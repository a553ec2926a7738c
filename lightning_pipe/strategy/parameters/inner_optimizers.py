"""Optimizers inside an optimizer, the tables in which they keep state by parameter, and copies of all of it.

    Lookahead(AdamW)            a wrapper: its state is in the inner optimizer, or in both
    Chained(Muon, AdamW)        each inner optimizer steps some of the parameters
    table                       `.state` of one of them: parameter -> values

Inner optimizers are found in attributes: in containers, bound methods and plain objects, at any depth.
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer

SWITCHES = ("train", "eval")
"""Methods by which an optimizer whose weights differ in evaluation (schedule-free) changes them between steps."""

_LEAVES = (torch.Tensor, type, FunctionType, ModuleType, str, bytes, int, float)
_NOT_ENTERED = ("lightning.", "pytorch_lightning.", "lightning_pipe.", "torch.distributed.", "logging", "threading")


def reachable(root: Any) -> list[Any]:
    """List all that an optimizer or a container has in it, itself first, in an order that all ranks share.

    Functions and sets are not looked into, nor the groups and states of optimizers; of modules, tensors are listed.
    """
    found: dict[int, Any] = {}
    waiting = deque([root])
    while waiting:
        item = waiting.popleft()
        if id(item) not in found:
            found[id(item)] = item
            waiting.extend(_items(item))
    return [*found.values()]


def _items(item: Any) -> Iterable[Any]:
    """Return what is directly in an object."""
    if isinstance(item, _LEAVES):
        return ()
    if isinstance(item, nn.Module):
        return [*item.parameters(), *item.buffers()]
    if isinstance(item, Optimizer):
        return [value for name, value in attributes(item).items() if name not in ("state", "param_groups")]
    if isinstance(item, Mapping):
        return [*item.keys(), *item.values()]
    if isinstance(item, (list, tuple, deque)):
        return item
    if isinstance(item, MethodType):
        return (item.__self__,)
    if isinstance(item, functools.partial):
        return (item.func, *item.args, *item.keywords.values())
    return () if type(item).__module__.startswith(_NOT_ENTERED) else getattr(item, "__dict__", {}).values()


def attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Return the attributes of an optimizer, without hooks and a `step` that a scheduler has put around its own."""
    return {name: value for name, value in vars(optimizer).items() if name != "step" and "_hooks" not in name}


def is_torchs(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is one of torch's that steps every parameter by itself and runs its closure once."""
    return type(optimizer).__module__.startswith("torch.optim") and not isinstance(optimizer, LBFGS)


def inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """List an optimizer and those inside it, itself first; in the same order on all ranks."""
    return [item for item in reachable(optimizer) if isinstance(item, Optimizer)]


def state_tables(optimizer: Optimizer) -> list[dict[Any, Any]]:
    """List the states of an optimizer and of those inside it; what several of them share is listed once."""
    states = [getattr(inner, "state", None) for inner in inner_optimizers(optimizer)]
    return [*{id(state): state for state in states if isinstance(state, dict)}.values()]


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """List the parameters of an optimizer and of those inside it, each once, in the order of their groups."""
    groups = [group for inner in inner_optimizers(optimizer) for group in inner.param_groups]
    return [*{id(p): p for group in groups for p in group["params"]}.values()]


def copied(optimizer: Optimizer, tensor: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Optimizer, dict[int, Any]]:
    """Return a copy of an optimizer, with copies of those inside it and of what they keep.

    Args:
        optimizer: the original; functions and what cannot be copied are shared with it, and hooks are left out.
        tensor: returns the copy of a tensor.

    Returns:
        The copy, and copies by the ids of originals.
    """
    inner = inner_optimizers(optimizer)
    items = reachable([attributes(item) for item in inner])
    memo: dict[int, Any] = {id(item): tensor(item) for item in items if isinstance(item, torch.Tensor)}
    memo |= {id(item): object.__new__(type(item)) for item in inner}
    for item in inner:
        own = attributes(item)
        vars(memo[id(item)]).update({name: OrderedDict() for name in vars(item) if "_hooks" in name})
        for name, value in own.items():
            vars(memo[id(item)])[name] = _deepcopied(value, memo)
    return memo[id(optimizer)], memo


def with_tensors(tree: Any, change: Callable[[Any], Any], *, kind: type = torch.Tensor) -> Any:
    """Return a copy of a tree of containers, of whatever classes, with tensors (or objects of a kind) changed."""
    memo = {id(item): change(item) for item in reachable(tree) if isinstance(item, kind)}
    return deepcopy(tree, memo)


def _deepcopied(value: Any, memo: dict[int, Any]) -> Any:
    with contextlib.suppress(Exception):  # of the user's own class, maybe
        return deepcopy(value, memo)
    return value
