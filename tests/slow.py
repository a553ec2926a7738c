"""Cases of a law that run every time, and cases that run with the slow tests."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def slow_but(quick: Container[Any], cases: Iterable[Any]) -> list[Any]:
    """Return the cases of a parametrised test; all but the quick ones are marked as slow. Tuples are several values."""
    return [case if case in quick else _slow(*case if isinstance(case, tuple) else (case,)) for case in cases]


def _slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)
