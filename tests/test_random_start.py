"""A script that seeds nothing draws the same random numbers on every rank that runs it again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, random, subprocess, sys
import numpy as np
import torch
from lightning_pipe import random_start
random_start.begin()
print(random.random(), np.random.rand(), float(torch.rand(())), flush=True)
assert "LIGHTNING_PIPE_RANDOM_START" not in os.environ
if len(sys.argv) == 1:
    with random_start.handed_on():
        subprocess.run([sys.executable, __file__, "child"], check=True)
    assert "LIGHTNING_PIPE_RANDOM_START" not in os.environ
"""


def test_ranks_that_run_a_script_again_draw_its_random_numbers(tmp_path: Path) -> None:
    """Data that a script made of `torch.randn` differed on ranks, and replicas of the first stage refused it."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py")]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2)]
    first, second = (run.splitlines() for run in runs)
    assert first[0] == first[1] and second[0] == second[1]
    assert first != second, "each run of a script that seeds nothing draws others"
