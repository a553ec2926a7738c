"""What the package logs is seen on rank 0, once, and only where it is wanted."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import logging, sys
from lightning_pipe.strategy.start.log_output import show_log
{before}
show_log(rank={rank}, verbose={verbose})
show_log(rank={rank}, verbose={verbose})
logging.getLogger("lightning_pipe.strategy.plan_maker").info("how it is captured")
logging.getLogger("lightning_pipe.strategy.plan_maker").warning("what is not as asked")
"""
BOTH, WARNING, NONE = ["how it is captured", "what is not as asked"], ["what is not as asked"], list[str]()


@pytest.mark.parametrize(
    ("rank", "verbose", "before", "shown"),
    [
        (0, True, "", BOTH),
        (1, True, "", WARNING),
        (0, False, "", WARNING),
        (0, True, "logging.basicConfig(format='%(message)s')", BOTH),
        (0, True, "logging.getLogger('lightning_pipe').setLevel('ERROR')", NONE),
        (0, True, "show_log(rank=0, verbose=False)", BOTH),
    ],
)
def test_lines_are_shown_once_where_they_are_wanted(rank: int, verbose: bool, before: str, shown: list[str]) -> None:
    script = SCRIPT.format(rank=rank, verbose=verbose, before=before)
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stderr.splitlines() == shown
