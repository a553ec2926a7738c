"""Which objects are torchmetrics': by the ancestors of their class.

`isinstance` would ask every subclass of an abstract class, of which torchmetrics has more than a hundred, for each new
class of modules.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torchmetrics
from torchmetrics.classification import MulticlassStatScores, MultilabelStatScores

_METRIC = frozenset({torchmetrics.Metric})
_ANY = _METRIC | {torchmetrics.MetricCollection}


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
