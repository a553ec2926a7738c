"""One thread per process: the machine may have two cores and four ranks, and sums must not depend on the threads.

Limits of tests are for an idle machine; where others compute too, they are longer by as much as cores are shared.
"""

from __future__ import annotations

import os

import pytest

from ranks.world import Crowding

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Give a test more time on a crowded machine."""
    if (shared := Crowding.look()) > 1 and item.get_closest_marker("timeout") is None:
        limit = float(item.config.getoption("timeout", None) or item.config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(limit * shared))
