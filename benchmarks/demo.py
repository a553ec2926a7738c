"""Train a GPT by two processes whose memory is too small for data parallel training; then compare memory and time.

    python -m benchmarks.demo        # make demo

Three runs of the GPT of examples/01, each by processes of its own:

    pipeline    under LIMIT, as the planner wants it; then the same steps from the same seed on one device
    unlimited   the planner's choice without a limit
    ddp         Lightning's DDP, each process with half of the batch

Times are medians of wall seconds per optimizer step, all by the callback of the example. The runs come one after the
other, so whatever else the machine does in between is part of them. Memory is the measured peak of all tensors of a
process: of a recorded step for plans, from the setup to the third step for DDP. Numbers are float64, so that rounding
hides no difference of losses. The exit status is 1 if the pipeline or DDP does not need what is said here.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import Strategy

from lightning_pipe import DappleStrategy
from lightning_pipe.core.plan import Plan
from lightning_pipe.runtime.memory import PeakMemory, state_bytes
from lightning_pipe.units import counted_noun, format_bytes, format_seconds, format_share, parse_bytes

LIMIT = "24MiB"
BATCH, RANKS = 16, 2
EQUAL = 1e-6  # most that losses may differ by
SLACK = 1.02  # of the limit: what a late neighbour has not received yet stays where it is
FOLDER = Path("runs/demo")
REPORT = FOLDER / "report.html"
RUNS = {"pipeline": "pipeline", "unlimited": "best without a limit", "ddp": "Lightning's DDP"}
QUIET = {"PYTHONWARNINGS": "ignore::FutureWarning,ignore::UserWarning", "TORCH_CPP_LOG_LEVEL": "ERROR"}
_EXAMPLES = Path(__file__).parent.parent / "examples"


@dataclass(frozen=True)
class Outcome:
    """What a run has measured.

    Attributes:
        plan: its plan, "" of DDP.
        step_s: median seconds per optimizer step.
        peak_bytes: peak memory of the tensors of a process, at most.
        loss: of the last batch, and that of one device after the same steps, if that was trained.
    """

    plan: str
    step_s: float
    peak_bytes: int
    loss: float
    one_device_loss: float | None = None


def example(name: str = "01_gpt_on_real_text") -> ModuleType:
    """Import an example, whose name begins with a number."""
    spec = importlib.util.spec_from_file_location(name.partition("_")[2], _EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class PlanAndLosses(pl.Callback):
    """Show the plan and some losses on rank 0, and nothing else of what is logged."""

    def __init__(self, every: int) -> None:
        self._every = every

    def setup(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        _show_messages(True)  # until the first batch, for which the plan is made

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        _show_messages(False)
        if trainer.is_global_zero and trainer.global_step % self._every == 0:
            print(f"step {trainer.global_step}: loss {trainer.callback_metrics['train_loss']:.3f}", flush=True)


class FirstStepsMemory(pl.Callback):
    """Measure the peak memory of the tensors of this process, from the setup of a fit to the end of its third step."""

    def __init__(self) -> None:
        self._peak, self._parameters = PeakMemory(torch.device("cpu")), 0
        self.bytes = 0

    def setup(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        self._parameters = state_bytes([*module.parameters(), *module.buffers()])
        self._peak.__enter__()

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 2:
            self._peak.__exit__(None, None, None)
            self.bytes = self._parameters + (self._peak.bytes or 0)


def _show_messages(shown: bool) -> None:
    for package in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(package).setLevel(logging.INFO if shown else logging.WARNING)


def fit(
    strategy: str | Strategy, *, devices: int, steps: int, callbacks: list[pl.Callback], batch: int = BATCH
) -> tuple[pl.Trainer, float]:
    """Train from the same seed; return the trainer and the median seconds of a step."""
    gpt, step_seconds = example(), example().StepSeconds()
    _show_messages(False)
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        strategy=strategy,
        devices=devices,
        accelerator="cpu",
        precision="64-true",
        max_steps=steps,
        gradient_clip_val=1.0,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[step_seconds, *callbacks],
    )
    trainer.fit(gpt.GPT(), gpt.PythonSource(batch_size=batch))
    return trainer, step_seconds.median


def run(name: str, steps: int) -> Outcome | None:
    """Do one of the runs on this rank; return its outcome on rank 0."""
    if name == "ddp":
        memory = FirstStepsMemory()
        trainer, step_s = fit("ddp", devices=RANKS, steps=steps, callbacks=[memory], batch=BATCH // RANKS)
        return Outcome("", step_s, memory.bytes, _loss(trainer)) if trainer.is_global_zero else None
    is_limited = name == "pipeline"
    strategy = DappleStrategy(
        memory_limit=LIMIT if is_limited else None,
        stages_per_device=1 if is_limited else None,  # a table that fits a screen
        report=str(REPORT) if is_limited else None,
        measure_memory=True,
        verbose=False,
    )
    shown = [PlanAndLosses(every=max(1, steps // 2))] if is_limited else []
    trainer, step_s = fit(strategy, devices=RANKS, steps=steps, callbacks=shown)
    if not trainer.is_global_zero:
        return None
    assert strategy.plan is not None and strategy.comparison is not None
    peak = max(int(rank.total.measured) for rank in strategy.comparison.memory)
    one_device = _loss(fit("auto", devices=1, steps=steps, callbacks=[])[0]) if is_limited else None
    return Outcome(plan_text(strategy.plan), step_s, peak, _loss(trainer), one_device)


def plan_text(plan: Plan) -> str:
    """Return a plan in a few words."""
    stages = len(plan.stages)
    kind = "data parallel" if stages == 1 else f"{counted_noun(stages, 'stage')}, {plan.schedule}"
    return f"{kind}, {counted_noun(plan.microbatches, 'micro-batch')}"


def _loss(trainer: pl.Trainer) -> float:
    return float(trainer.callback_metrics["train_loss"])


def run_apart(name: str, steps: int) -> Outcome:
    """Do one of the runs in processes of its own.

    Raises:
        SystemExit: if it fails.
    """
    file = FOLDER / f"{name}.json"
    command = [sys.executable, "-m", "benchmarks.demo", "--run", name, "--steps", str(steps)]
    if subprocess.run(command, env={**os.environ, **QUIET}, check=False).returncode:
        raise SystemExit(f"{' '.join(command)} has failed.")
    return Outcome(**json.loads(file.read_text(encoding="utf-8")))


def table(outcomes: dict[str, Outcome]) -> str:
    """Return what was measured, a run per row."""
    limit = parse_bytes(LIMIT)
    rows = [("measured", "step", "memory per process", f"of {format_bytes(limit)}")]
    for name, outcome in outcomes.items():
        title = f"{RUNS[name]} ({outcome.plan})" if outcome.plan else RUNS[name]
        share = format_share(outcome.peak_bytes / limit, 0)
        rows.append((title, format_seconds(outcome.step_s), format_bytes(outcome.peak_bytes), share))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    first, *others = widths
    lines = (
        [row[0].ljust(first), *(text.rjust(width) for text, width in zip(row[1:], others, strict=True))] for row in rows
    )
    return "\n".join("   ".join(line) for line in lines)


def failure(outcomes: dict[str, Outcome]) -> str:
    """Return what is not as this demo says, "" if all is."""
    pipeline, limit = outcomes["pipeline"], parse_bytes(LIMIT)
    assert pipeline.one_device_loss is not None
    if abs(pipeline.loss - pipeline.one_device_loss) > EQUAL:
        return f"The losses of the pipeline and of one device differ by more than {EQUAL:g}."
    if pipeline.peak_bytes > SLACK * limit:
        return f"The pipeline took {format_bytes(pipeline.peak_bytes)}, more than {format_bytes(limit)}."
    if outcomes["ddp"].peak_bytes <= limit:
        return f"DDP needs {format_bytes(outcomes['ddp'].peak_bytes)}, which fits {format_bytes(limit)}."
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo")
    parser.add_argument("--steps", type=int, default=40, help="steps of the pipeline")
    parser.add_argument("--timed", type=int, default=20, help="steps of the two runs that are only timed")
    parser.add_argument("--run", choices=RUNS, help=argparse.SUPPRESS)  # one of them, in this process
    args = parser.parse_args()
    if args.run is not None:
        if outcome := run(args.run, args.steps):
            (FOLDER / f"{args.run}.json").write_text(json.dumps(asdict(outcome)), encoding="utf-8")
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    parameters = sum(parameter.numel() for parameter in example().GPT().parameters())
    print(f"A GPT of {parameters:,} parameters (float64) on {RANKS} processes of at most {LIMIT} each.")
    print("Capturing the step, timing its operations, planning ...", flush=True)
    outcomes = {"pipeline": run_apart("pipeline", args.steps)}
    pipeline = outcomes["pipeline"]
    print(
        f"Loss after {args.steps} steps from the same seed: one device: {pipeline.one_device_loss:.8f}, pipeline: "
        f"{pipeline.loss:.8f}"
    )
    print(f"Report: {REPORT.resolve()}")
    print("Timing the best plan without a limit, and Lightning's DDP ...\n", flush=True)
    outcomes |= {name: run_apart(name, args.timed) for name in ("unlimited", "ddp")}
    print(table(outcomes))
    if why := failure(outcomes):
        raise SystemExit(why)


if __name__ == "__main__":
    main()
