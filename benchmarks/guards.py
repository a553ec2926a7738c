"""What guards and the witness cost, beside the step that they guard: the GPT of examples/01, and a longer one.

    python -m benchmarks.guards
    python -m benchmarks.guards --blocks 24 --repeat 50

Per batch a rank compares what the step's Python read with what it was (guards); now and then it runs that Python again
without computing (witness, before batches 0, 1, 4, 16, 64, ...). Printed are medians of seconds, and the guards' share
of the step. Seconds are those of the processor, as others may use the machine too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.shapes import GPT
from lightning_pipe.capture import Request, capture_step, flatten
from lightning_pipe.capture.tracked.number_expressions import Situation


def main() -> None:
    """Capture, time and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, nargs="*", default=[4, 12, 24])
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=20)
    given = parser.parse_args()
    print("blocks  guards  step s    guards s  share   capture s  witness s")
    for blocks in given.blocks:
        module = GPT(blocks, given.length)
        batch = torch.randint(0, 100, (given.samples, given.length + 1))
        request = Request(module, "training_step", flatten(batch)[1], samples=given.samples)
        begin = time.process_time()
        capture = capture_step(request)
        captured = time.process_time() - begin
        situation = Situation((0,))
        assert not capture.changed(situation), "nothing has changed"
        guards = _median(lambda capture=capture, now=situation: capture.changed(now), given.repeat)
        step = _median(lambda module=module, batch=batch: _train(module, batch), max(3, given.repeat // 5))
        witness = _median(lambda capture=capture, request=request: capture.testimony(request), 3)
        watched = len(capture.joint.guards.read)
        costs = f"{step:6.4f}  {guards:8.6f}  {guards / step:6.2%}  {captured:9.2f}  {witness:9.3f}"
        print(f"{blocks:6d}  {watched:6d}  {costs}")


def _train(module: GPT, batch: torch.Tensor) -> None:
    module.log = lambda *_: None  # type: ignore[method-assign,assignment]
    module.training_step(batch, 0).backward()
    module.zero_grad()


def _median(run: Callable[[], object], repeat: int) -> float:
    seconds = []
    for _ in range(repeat):
        begin = time.process_time()
        run()
        seconds.append(time.process_time() - begin)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
