"""Link probe and plan over gloo between two hosts whose network is shaped to a known bandwidth.

    python -m benchmarks.links          # as root; needs `ip` and `tc`

Prints the bandwidth that was set against what was found, in both directions, and what a fit of a CNN with one rank on
each host then plans, predicts and takes. Returns 1 if a bandwidth deviates by more than 15 % or the plans are the same,
2 if hosts cannot be made. Virtual cards do not cut messages into frames, so nearly all of the rate is payload.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.fits import fit
from benchmarks.two_hosts import NoNamespacesError, run_on_both, two_hosts
from lightning_pipe import DappleStrategy
from lightning_pipe.profiler.network.link_probe import LinkFacts, ProbeHandle, probe_links
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


@dataclass(frozen=True)
class Planned:
    """What a fit planned, and how its first steps went."""

    begin: str
    microbatches: int
    predicted_s: float
    measured_s: float


def plan() -> Planned | None:
    """Fit a CNN with one rank on each host; return the plan on rank 0."""
    strategy = DappleStrategy(cache="off", layout="1-1")
    fit("cnn", strategy, batch_size=32, steps=6)
    if strategy.plan is None or strategy.comparison is None:
        return None
    step = strategy.comparison.step
    return Planned(strategy.plan.stages[1].at, strategy.plan.microbatches, step.predicted, step.measured)


def _settle(handle: ProbeHandle, what: str) -> None:
    if not handle.wait(DEADLINE_S):
        raise TimeoutError(f"waited {DEADLINE_S} s for {what}")


def main() -> int:
    """Print the tables."""
    links = Table("set", "from", "to", "found", "latency", "deviation", "probe took", box=box.SIMPLE, title="Links")
    plans = Table("set", "stage 1 begins at", "micro-batches", "predicted", "measured", box=box.SIMPLE, title="Plans")
    worst, found = 0.0, []
    for rate in RATES_BIT_S:
        try:
            with two_hosts(rate) as hosts:
                facts, spent = run_on_both(hosts, probe, (0, 1))[0]
                planned = run_on_both(hosts, plan)[0]
        except NoNamespacesError as error:
            print(error, file=sys.stderr)
            return 2
        name = format_rate(rate / 8)
        for pair in facts.links:
            deviation = pair.link.bytes_per_s * 8 / rate - 1
            worst = max(worst, abs(deviation))
            what = format_rate(pair.link.bytes_per_s), format_seconds(pair.link.latency_s), f"{deviation:+.1%}"
            links.add_row(name, str(pair.sender), str(pair.receiver), *what, format_seconds(spent))
        times = format_seconds(planned.predicted_s), format_seconds(planned.measured_s)
        plans.add_row(name, planned.begin, str(planned.microbatches), *times)
        found.append((planned.begin, planned.microbatches))
    console = Console(width=120)
    console.print(links)
    console.print(plans)
    print(f"largest deviation {worst:.1%}, allowed {ALLOWED:.0%}; plans {'differ' if len(set(found)) > 1 else 'agree'}")
    return 0 if worst <= ALLOWED and len(set(found)) > 1 else 1


if __name__ == "__main__":
    sys.exit(main())
