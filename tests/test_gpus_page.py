"""The script of docs/gpus.md trains, by the command of that page: with GPUs where there are two, else on two CPU ranks."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from test_installed import Block, blocks

PAGE = Path(__file__).parents[1] / "docs" / "gpus.md"


def script_and_command() -> tuple[Block, Block]:
    """Return the page's first blocks."""
    script, command, *_ = blocks(PAGE)
    return script, command


@pytest.mark.slow
def test_the_script_for_two_gpus_trains_by_its_command(tmp_path: Path) -> None:
    script, command = script_and_command()
    (tmp_path / "train.py").write_text(script.body)
    program, *words = shlex.split(command.body)
    assert program == "torchrun"
    run = [sys.executable, "-m", "torch.distributed.run", *words]
    ended = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert re.search(r"^trained 16 steps on (cpu|cuda)$", ended.stdout, re.MULTILINE), ended.stdout[-3000:]
