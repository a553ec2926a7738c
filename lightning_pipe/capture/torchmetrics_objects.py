"""Which objects are torchmetrics', by the ancestors of their class; where they are, and what is known of their values.

`isinstance` would ask every subclass of an abstract class, of which torchmetrics has more than a hundred, for each new
class of modules.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, TypeGuard

import torchmetrics
from torch import nn
from torchmetrics.classification import MulticlassStatScores, MultilabelStatScores
from torchmetrics.metric import CompositionalMetric
from torchmetrics.wrappers import ClasswiseWrapper

from lightning_pipe.capture.python.users_code import is_users

_METRIC = frozenset({torchmetrics.Metric})
_ANY = _METRIC | {torchmetrics.MetricCollection}
_OF_ARGUMENTS = (torchmetrics.Metric.forward, CompositionalMetric.forward, ClasswiseWrapper.forward)
PLAIN = (bool, int, float, str, bytes, type(None), os.PathLike)  # types that hold nothing else
TABLES = frozenset(vars(nn.Module())) | {"_trainer", "_fabric", "_hparams"}  # attributes that hold no metric directly


def items_of(metric: Any) -> int | None:
    """Return how many items the result of a metric has, if it has one for each class or label; None if not known."""
    kinds = {MulticlassStatScores: "num_classes", MultilabelStatScores: "num_labels"}
    counted = next((kinds[kind] for kind in type(metric).__mro__ if kind in kinds), None)
    is_by_item = counted is not None and metric.average in (None, "none") and metric.multidim_average == "global"
    return int(getattr(metric, counted)) if is_by_item and counted is not None else None


def is_metric(value: Any) -> TypeGuard[torchmetrics.Metric]:
    """Tell whether a value is one metric."""
    return not _METRIC.isdisjoint(type(value).__mro__)


def is_metric_or_collection(value: Any) -> bool:
    """Tell whether a value is a metric or a collection of them."""
    return not _ANY.isdisjoint(type(value).__mro__)


def is_of_arguments(metric: nn.Module) -> bool:
    """Return whether what `forward` returns is a function of its arguments."""
    if not is_metric(metric):  # a collection
        return all(is_of_arguments(part) for part in parts_of(metric) if part is not metric)
    nested = [part for part in parts_of(metric) if part is not metric]
    is_plain = not nested or isinstance(metric, (CompositionalMetric, ClasswiseWrapper))
    return type(metric).forward in _OF_ARGUMENTS and is_plain and all(map(is_of_arguments, nested))


def is_differentiable(metric: nn.Module) -> bool:
    """Return whether the value of a torchmetrics object may have a gradient."""
    return all(getattr(part, "is_differentiable", None) is not False for part in parts_of(metric))


def parts_of(metric: nn.Module) -> list[nn.Module]:
    """Return a torchmetrics object with all those inside of it, in plain collections too."""
    parts: dict[int, nn.Module] = {}
    waiting = [metric]
    while waiting:
        for part in waiting.pop().modules():
            if is_metric_or_collection(part) and id(part) not in parts:
                parts[id(part)] = part
                waiting += [one for name, value in vars(part).items() for _, one in _loose(value, name)]
    return [*parts.values()]


def metrics_in(module: nn.Module) -> dict[str, nn.Module]:
    """Return the torchmetrics objects of a module by path: those of sub-modules, then those in plain collections."""
    found = {name: part for name, part in module.named_modules() if is_metric_or_collection(part)}
    known = {id(metric) for metric in found.values()}
    for path, owner in module.named_modules():
        for name, value in vars(owner).items():
            place = f"self.{f'{path}.' * bool(path)}{name}"
            found |= {where: one for where, one in _loose(value, place) if id(one) not in known}
    return found


def metric_at(module: nn.Module, path: str) -> Any:
    """Return the torchmetrics object at a path of `metrics_in`."""
    return metrics_in(module)[path] if path.startswith("self.") else module.get_submodule(path)


def _loose(value: Any, place: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the torchmetrics objects in an attribute: in a collection, or among the attributes of a user's object."""
    if place.rpartition(".")[2] in TABLES or isinstance(value, PLAIN):
        return
    if is_metric_or_collection(value):
        inside = [(place, value)]
    elif isinstance(value, nn.Module):
        return
    elif isinstance(value, dict):
        inside = [
            (f"{place}[{key!r}]", item) for key, item in dict.items(value)
        ]  # as they are: some note who reads them
    elif isinstance(value, list):
        inside = [(f"{place}[{index}]", item) for index, item in enumerate(list.__iter__(value))]
    elif is_users(type(value)):
        inside = [(f"{place}.{name}", item) for name, item in getattr(value, "__dict__", {}).items()]
    else:
        return
    for where, item in inside:
        if is_metric_or_collection(item):
            yield where, item
