"""Captured graphs that all tests of a run share: a module that several files capture is traced once."""

from __future__ import annotations

import os
from pathlib import Path

GRAPHS = Path(os.environ["XDG_CACHE_HOME"]) / "graphs_of_tests"
