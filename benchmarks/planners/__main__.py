"""Hold planners against what their papers print.

    python -m benchmarks.planners dapple

Every file beside this one is a benchmark with a `main(arguments)`.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

NAMES = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith("_"))


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in NAMES:
        raise SystemExit(f"usage: python -m benchmarks.planners {{{','.join(NAMES)}}} [...]")
    importlib.import_module(f"benchmarks.planners.{sys.argv[1]}").main(sys.argv[2:])


main()
