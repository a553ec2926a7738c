"""Schedules against their closed forms, and the time that long programs take.

    python -m benchmarks.schedules

Every form of `benchmarks.closed_forms` for p = 2 to 16 devices and up to 64 micro-batches; every program is proved.
Then a program of about 50,000 instructions: seconds to lower, verify and simulate it.
"""

from __future__ import annotations

import itertools
import sys
import time
from concurrent.futures import ProcessPoolExecutor

from benchmarks.closed_forms import FORMS, Row, chain, deviations
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.verification.verify import verify
from lightning_pipe.simulator import UnitPrices, simulate

DEVICES = range(2, 17)
MICROBATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
LONG = Row("1f1b", 16, 400)


def check(number: int) -> tuple[int, list[str]]:
    """Return how many cases of a form were compared, and the deviations."""
    form = FORMS[number]
    cases = [(p, m) for p in DEVICES for m in MICROBATCHES if form.holds(p, m)]
    return len(cases), [one for p, m in cases for one in deviations(form, p, m)]


def main() -> int:
    """Print a line per form, and the seconds of a long program."""
    failed = 0
    with ProcessPoolExecutor() as pool:
        for form, (count, found) in zip(FORMS, pool.map(check, range(len(FORMS))), strict=True):
            print(f"{form!s:32} {count:4} cases, {len(found)} deviations", flush=True)
            print("".join(f"    {one}\n" for one in found[:5]), end="")
            failed += len(found)
    _time_a_long_program()
    return int(failed > 0)


def _time_a_long_program() -> None:
    layout, order = LONG.layout, LONG.order
    moments = [time.perf_counter()]
    lowered = lower(order, layout=layout, sizes=(1,) * LONG.m, traffic=chain(len(layout.stages)))
    moments.append(time.perf_counter())
    program = verify(lowered)
    moments.append(time.perf_counter())
    simulate(program, UnitPrices())
    moments.append(time.perf_counter())
    seconds = [b - a for a, b in itertools.pairwise(moments)]
    count = sum(map(len, program.ranks))
    print(f"{count} instructions: lowered in {seconds[0]:.2f} s, verified in {seconds[1]:.2f} s, "
          f"simulated in {seconds[2]:.2f} s")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
