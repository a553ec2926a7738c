"""Cases of a law that run every time, and cases that run with the slow tests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable
from typing import Any

import pytest


def slow_but(quick: Container[Any], cases: Iterable[Any]) -> list[Any]:
    """Return the cases of a parametrised test; all but the quick ones are marked as slow. Tuples are several values."""
    return [case if case in quick else _slow(*case if isinstance(case, tuple) else (case,)) for case in cases]


def leave_out_of_samples(items: Iterable[pytest.Item]) -> None:
    """Mark as slow what `@pytest.mark.sampled(every=1)` leaves out of a test's combinations of parameters.

    Combination k of the sample has case k of every parameter, from the first again where there are fewer: each case of
    each parameter is in it. With `every=n` it has every n-th of these.
    """
    laws: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("sampled"):
            laws[item.nodeid.partition("[")[0]].append(item)
    for law in laws.values():
        combinations = {_cases(item): item for item in law if not item.get_closest_marker("slow")}
        parameters = [list(dict.fromkeys(cases)) for cases in zip(*combinations, strict=True)]
        (marker,) = law[0].iter_markers("sampled")
        numbers = range(0, max(map(len, parameters), default=0), marker.kwargs.get("every", 1))
        sample = {tuple(cases[k % len(cases)] for cases in parameters) for k in numbers}
        for left_out in combinations.keys() - sample:
            combinations[left_out].add_marker(pytest.mark.slow)


def _cases(item: pytest.Function) -> tuple[tuple[int, ...], ...]:
    """Return the identity of what each `parametrize` of the test gives it."""
    together = [marker.args[0] for marker in item.iter_markers("parametrize")]
    names = [one.split(",") if isinstance(one, str) else one for one in together]
    return tuple(tuple(id(item.callspec.params[name.strip()]) for name in those) for those in names)


def _slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)
