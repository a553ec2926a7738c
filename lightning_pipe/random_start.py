"""Random numbers of a script that seeds nothing: ranks that run it again draw those of rank 0.

Each process seeds its generators from the system, so a data set of `torch.randn` would be another one on every rank.
The states that generators have when the strategy is registered are handed to the ranks which this process starts.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
from collections.abc import Iterator
from typing import Any

_VARIABLE = "LIGHTNING_PIPE_RANDOM_START"
_noted: dict[str, Any] = {}


def begin() -> None:
    """Note the states of the generators of Python, NumPy and torch, or take those of the process that started this."""
    if _noted:
        return
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    given = os.environ.pop(_VARIABLE, None)  # which is not meant for what this rank starts
    if given is not None and (states := json.loads(given)):
        _noted.update(states)
        version, words, gauss = _noted["python"]
        random.setstate((version, tuple(words), gauss))
        if numpy is not None and "numpy" in _noted:
            numpy.random.set_state(tuple(_noted["numpy"]))
        if torch is not None and "torch" in _noted:
            torch.set_rng_state(torch.frombuffer(bytearray.fromhex(_noted["torch"]), dtype=torch.uint8))
        return
    _noted["python"] = random.getstate()
    if numpy is not None:
        name, words, *rest = numpy.random.get_state()
        _noted["numpy"] = [name, words.tolist(), *rest]
    if torch is not None:
        _noted["torch"] = bytes(torch.get_rng_state().tolist()).hex()


@contextlib.contextmanager
def handed_on() -> Iterator[None]:
    """Hand the noted states to the processes that are started inside."""
    os.environ[_VARIABLE] = json.dumps(_noted)
    try:
        yield
    finally:
        del os.environ[_VARIABLE]
