"""Train the GPT of examples/01 on two ranks as planned; then measure the best pipeline and Lightning's DDP beside it.

    python -m benchmarks.demo --steps 500 --beside 60        # make demo

All three are timed by the same callback of the example, on the same batches of 32 samples: under DDP each of the two
ranks loads 16. What stands at the end are medians of wall seconds per optimizer step. They come one after the other, so
whatever else the machine does in between is part of them.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

EXAMPLE = Path(__file__).parent.parent / "examples" / "01_gpt_on_real_text.py"
TRACE = "runs/gpt_on_real_text/timeline.json"
DDP = ("--strategy", "ddp", "--batch-size", "16")
QUIET = {"PYTHONWARNINGS": "ignore::FutureWarning"}  # of torch, about what Lightning calls
_SECONDS = re.compile(r"^after \d+ steps of (\d+) ms", re.MULTILINE)
_PLAN = re.compile(r"^(.+): \d+ samples in (\d+ micro-batch\w*)$", re.MULTILINE)


def run(options: Sequence[str], *, steps: int, show: bool) -> str:
    """Run the example on two ranks; return all that it printed, and show it as it comes if wanted.

    Raises:
        SystemExit: if it fails.
    """
    command = [sys.executable, str(EXAMPLE), "--devices", "2", "--steps", str(steps), *options]
    printed = bytearray()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, **QUIET}
    ) as process:
        assert process.stdout is not None
        while piece := process.stdout.read1():
            printed += piece
            if show:
                sys.stdout.buffer.write(piece)
                sys.stdout.flush()
    text = printed.decode(errors="replace")
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} has failed:\n{'' if show else text}")
    return text


def summary(text: str) -> tuple[str, int]:
    """Return the plan that a run printed ("" if none), and the milliseconds of a step."""
    seconds, plan = _SECONDS.search(text), _PLAN.search(text)
    assert seconds is not None, text
    return ("" if plan is None else f"{plan[1]}, {plan[2]}"), int(seconds[1])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo")
    parser.add_argument("--steps", type=int, default=500, help="steps of the training")
    parser.add_argument("--beside", type=int, default=60, help="steps of each of the two that are only measured")
    args = parser.parse_args()
    chosen, chosen_ms = summary(run(["--strategy", "dapple", "--timeline", TRACE], steps=args.steps, show=True))
    print("Measuring the best pipeline, and DDP ...", flush=True)
    pipeline, pipeline_ms = summary(run(["--strategy", "dapple", "--layout", "1-1"], steps=args.beside, show=False))
    _, ddp_ms = summary(run(DDP, steps=args.beside, show=False))
    print(
        f"Measured per step: {chosen_ms} ms as chosen ({chosen}); {pipeline_ms} ms as the best pipeline ({pipeline}); "
        f"{ddp_ms} ms as Lightning's DDP."
    )
    if ddp_ms < min(chosen_ms, pipeline_ms):
        print(
            "DDP is the fastest here, as the model is small and both ranks share a host: a pipeline pays off where a "
            "model does not fit, or links are slow (docs/slow.md)."
        )


if __name__ == "__main__":
    main()
