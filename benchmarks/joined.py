"""Joined weight gradients of a GPT's stages against single ones: what one W of several micro-batches saves.

    python -m benchmarks.joined                         # the GPT of examples/, 8 micro-batches of 1, 2 and 4 samples
    python -m benchmarks.joined --width 512 --context 32

The stages live on one rank, in this process; what is timed is W of the middle stage, of all micro-batches of a batch,
copies of inputs and adding to `.grad` included. Joined and single batches run in turn. One thread.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable
from statistics import median, quantiles

import torch

from benchmarks.replay import CPU, cuts_of, make_gpt
from lightning_pipe.capture import Request, capture_step, flatten
from lightning_pipe.core.program import AnyCompute, Layout
from lightning_pipe.runtime.executor import Executor, run_together
from lightning_pipe.runtime.job import BatchInput
from lightning_pipe.runtime.stage import State
from lightning_pipe.runtime.transport.local import Hub
from lightning_pipe.schedule import order_of
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.verification.verify import verify
from lightning_pipe.units import format_seconds

MICROBATCHES, STAGES, WARM_UP = 8, 3, 3
MIDDLE = STAGES // 2


def batches(sizes: dict[str, int], samples: int) -> dict[int, Callable[[], float]]:
    """Return, by the most micro-batches that are joined, a run of a batch that returns the seconds of W."""
    module = make_gpt(**sizes)
    batch = torch.randint(256, (MICROBATCHES * samples, sizes["context"] + 1), dtype=torch.uint8)
    capture = capture_step(Request(module, "training_step", flatten([batch])[1], samples=max(2, samples)))
    split = capture.split(cuts_of(capture.graph, sizes["depth"], STAGES))
    assert MIDDLE in split.traffic.joinable, split.traffic.joinable
    layout, microbatches = Layout(((0,),) * STAGES), (samples,) * MICROBATCHES
    order = order_of("2bp", layout=layout, microbatches=MICROBATCHES, options={"base": "gpipe"})
    order = tuple(tuple(sorted(line, key=lambda c: (c.kind == "W") * (1 + c.stage))) for line in order)
    state = State(dict(module.named_parameters(remove_duplicate=False)), dict(module.named_buffers()), CPU)
    executor = Executor(split, layout, state=state, transport=Hub().endpoint(0), loss=capture.record.loss)
    job = BatchInput((batch,), (True,), tuple(range(0, len(batch), samples)))

    def run_of(join: int) -> Callable[[], float]:
        program = verify(lower(order, layout=layout, sizes=microbatches, traffic=split.traffic, join=join))

        def run() -> float:
            module.zero_grad()
            (outcome,) = run_together([executor], program, [job], record=True)
            events = ((e.instruction, e.end - e.start) for e in outcome.timeline.events)
            return sum(s for x, s in events if isinstance(x, AnyCompute) and (x.stage, x.kind) == (MIDDLE, "W"))

        return run

    return {join: run_of(join) for join in (1, MICROBATCHES)}


def main() -> int:
    """Print a line per size of micro-batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("width", 128), ("depth", 6), ("context", 16), ("rounds", 30)):
        parser.add_argument(f"--{name}", type=int, default=default)
    sizes = vars(parser.parse_args())
    rounds = sizes.pop("rounds")
    torch.set_num_threads(1)
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, {sizes}")
    for samples in (1, 2, 4):
        runs = batches(sizes, samples)
        taken = [{join: run() for join, run in runs.items()} for _ in range(WARM_UP + rounds)][WARM_UP:]
        alone, together = ([one[join] for one in taken] for join in runs)
        low, _, high = quantiles([a / b for a, b in zip(alone, together, strict=True)])
        print(
            f"W of {MICROBATCHES} micro-batches of {samples}: one by one {format_seconds(median(alone))}, "
            f"joined {format_seconds(median(together))}, {median(alone) / median(together):.2f} times "
            f"(quartiles {low:.2f} to {high:.2f})",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
