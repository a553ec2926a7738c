"""Laws of kept memory: a large block that was freed is used again without new pages, and goes back at the end."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_pipe.config import read_config
from lightning_pipe.freed_memory import _glibc, freed_memory_kept, is_freed_memory_kept

LARGE = 2**26  # bytes, beyond what glibc keeps of itself
ON_GLIBC = pytest.mark.skipif(_glibc() is None, reason="the C library is not glibc")

SCRIPT = """
from statistics import median
from lightning_pipe.freed_memory import freed_memory_kept
from test_freed_memory import LARGE, new_pages, resident

with freed_memory_kept():
    inside = median(new_pages() for _ in range(15))  # the heap is cut anew until blocks have found their places
    held = resident()
print(inside, new_pages(), held - resident() > LARGE // 2)
"""


def new_pages() -> int:
    """Return how many pages were new to a large block that is freed again."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(LARGE // 4)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@ON_GLIBC
def test_large_blocks_have_their_pages_again_and_these_go_back_at_the_end() -> None:
    """In a process of its own: what else has been freed in this one may serve a block, too."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr
    inside, outside, returned = done.stdout.split()
    assert int(inside) < 100 < LARGE // resource.getpagesize() // 2 < int(outside) and returned == "True"


def test_it_is_known_whether_memory_is_kept_and_an_inner_block_ends_nothing() -> None:
    with freed_memory_kept(wanted=False):
        assert not is_freed_memory_kept()
    with freed_memory_kept():
        with freed_memory_kept():
            pass
        assert is_freed_memory_kept() == (_glibc() is not None)
    assert not is_freed_memory_kept()


@ON_GLIBC
def test_a_process_that_the_system_limits_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (2**40 if kind == resource.RLIMIT_DATA else -1, -1))
    with freed_memory_kept():
        assert not is_freed_memory_kept()


@pytest.mark.parametrize(
    ("options", "kept"), [({}, True), ({"keep_freed_memory": False}, False), ({"memory_limit": "2GiB"}, False)]
)
def test_a_limit_is_for_all_that_a_process_has(options: dict[str, object], kept: bool) -> None:
    assert read_config(options).keeps_freed_memory == kept
