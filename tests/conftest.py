"""One thread per process: the machine may have two cores and four ranks, and sums must not depend on the threads.

Tests keep captured graphs, checks and measured links in a cache of their run: they find nothing of earlier runs, leave
nothing behind, and a step that many of them train is captured once.

Limits of tests are for an idle machine; where others compute too, they are longer by as much as cores are shared.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile

import pytest

from ranks.world import Crowding
from slow import leave_out_of_samples

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"
if "PYTEST_XDIST_WORKER" not in os.environ:  # workers have the cache of the process that starts them
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="lightning_pipe_tests")


SHARING = ("zoo", "parity")  # folders of tests that train the same captured steps


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let one process run the tests of a file, or of a folder that shares what it captures; leave some to slow runs.

    Folders come first: what takes longest must not begin when the other processes have nothing left to do.
    """
    for item in items:
        folder = item.path.parent.name
        item.add_marker(pytest.mark.xdist_group(folder if folder in SHARING else item.nodeid.partition("::")[0]))
    items.sort(key=lambda item: item.path.parent.name not in SHARING)
    leave_out_of_samples(items)


def pytest_collection_finish() -> None:
    """Leave what was imported to itself: a collection looks through the objects of tests alone, and less often."""
    gc.freeze()
    gc.set_threshold(2_000_000, 20, 100)


def pytest_unconfigure() -> None:
    """Remove the cache of this run."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Give a test more time on a crowded machine."""
    if (shared := Crowding.look()) > 1 and item.get_closest_marker("timeout") is None:
        limit = float(item.config.getoption("timeout", None) or item.config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(limit * shared))
