"""Which objects are torchmetrics': by the ancestors of their class.

`isinstance` would ask every subclass of an abstract class, of which torchmetrics has more than a hundred, for each new
class of modules.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torchmetrics

_METRIC = frozenset({torchmetrics.Metric})
_ANY = _METRIC | {torchmetrics.MetricCollection}


def is_metric(value: Any) -> TypeGuard[torchmetrics.Metric]:
    """Tell whether a value is one metric."""
    return not _METRIC.isdisjoint(type(value).__mro__)


def is_metric_or_collection(value: Any) -> bool:
    """Tell whether a value is a metric or a collection of them."""
    return not _ANY.isdisjoint(type(value).__mro__)
