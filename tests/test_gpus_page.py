"""The script of docs/gpus.md trains by the command of that page: on two GPUs, or on two ranks of a CPU."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from test_installed import blocks

PAGE = Path(__file__).parents[1] / "docs" / "gpus.md"


@pytest.mark.slow
def test_the_script_for_two_gpus_trains_by_its_command(tmp_path: Path) -> None:
    script, command, *_ = blocks(PAGE)
    (tmp_path / "train.py").write_text(script.body)
    program, *words = shlex.split(command.body)
    assert program == "torchrun"
    run = [sys.executable, "-m", "torch.distributed.run", *words]
    ended = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert re.search(r"^trained 16 steps on (cpu|cuda)$", ended.stdout, re.MULTILINE), ended.stdout[-3000:]
