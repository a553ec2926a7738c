"""Does the probe find the bandwidth that a network really has? Two shaped hosts, one rank on each, probed over gloo.

    python -m benchmarks.links          # as root; needs `ip` and `tc`

Prints the bandwidth that was set against what was found, in both directions, and returns 1 if one deviates by more than
15 %, 2 if hosts cannot be made. Virtual cards do not cut messages into frames, so nearly all of the rate is payload.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.two_hosts import NoNamespacesError, run_on_both, two_hosts
from lightning_pipe.profiler.links import Handle, LinkFacts, probe_links
from lightning_pipe.runtime.transport.process_group import process_group_transport
from lightning_pipe.units import format_rate, format_seconds

RATES_BIT_S = (1e9, 1e8)
ALLOWED = 0.15  # deviation of the found from the set bandwidth
DEADLINE_S = 60.0
CPU = torch.device("cpu")


def probe(hosts: Sequence[int]) -> tuple[LinkFacts, float]:
    """Measure the links of this rank together with the others; return them and the seconds that it took."""
    transport = process_group_transport(CPU, deadline_s=DEADLINE_S)
    started = time.perf_counter()
    facts = probe_links(transport, hosts=hosts, device=CPU, wait=_settle)
    spent = time.perf_counter() - started
    transport.close()
    return facts, spent


def _settle(handle: Handle, what: str) -> None:
    if not handle.wait(DEADLINE_S):
        raise TimeoutError(f"waited {DEADLINE_S} s for {what}")


def main() -> int:
    """Print the table."""
    table = Table(box=box.SIMPLE, title="One rank on each of two hosts", title_justify="left")
    for heading in ("set", "from", "to", "found", "latency", "deviation", "probe took"):
        table.add_column(heading, justify="right")
    worst = 0.0
    for rate in RATES_BIT_S:
        try:
            with two_hosts(rate) as hosts:
                facts, spent = run_on_both(hosts, probe, (0, 1))[0]
        except NoNamespacesError as error:
            print(error, file=sys.stderr)
            return 2
        for pair in facts.links:
            deviation = pair.link.bytes_per_s * 8 / rate - 1
            worst = max(worst, abs(deviation))
            found = format_rate(pair.link.bytes_per_s), format_seconds(pair.link.latency_s), f"{deviation:+.1%}"
            ends = str(pair.sender), str(pair.receiver)
            table.add_row(format_rate(rate / 8), *ends, *found, format_seconds(spent))
    Console(width=120).print(table)
    print(f"largest deviation {worst:.1%}, allowed {ALLOWED:.0%}")
    return 0 if worst <= ALLOWED else 1


if __name__ == "__main__":
    sys.exit(main())
