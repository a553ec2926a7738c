"""Train a GPT on real text by every policy of `versions`, and by optimizers that answer to delays; compare the losses.

    python -m benchmarks.learning                                   # all rows; call it again after an interrupt
    python -m benchmarks.learning --policies sync 2bw --seeds 1     # some of them
    python -m benchmarks.learning --microbatches 1                  # the longest delays: 3, 2, 1 and 0 updates
    python -m benchmarks.learning --policies sync --lr 1e-3         # a point of a sweep

Each row trains the GPT of examples/01 (its output layer has a weight of its own) on four gloo ranks through
`Trainer.fit`, on the source of the standard library. A row is a policy, and an optimizer where it is not AdamW:
`pipedream+nesterov`. Each finished run is a line of RESULTS, and is not run again; then the table is printed.

    adamw       torch's AdamW
    sgd         torch's SGD with momentum, for the policies of Pipelined Backpropagation, which correct it
    nesterov    torch's NAdam as Ajanthan et al. use it, "Nesterov Method for Asynchronous Pipeline Parallel
                Optimization" (ICML 2025, arXiv 2505.01099)
    rotation    examples/10: Jung, Shin, Lee, basis rotation (ICML 2026, arXiv 2602.03515)

Seconds are those of the training steps without the first, on ranks that share the cores of this machine.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import lightning.pytorch as pl
import torch
from torch import nn

from benchmarks.demo import example
from benchmarks.fits import fit_module
from benchmarks.ranks import run_ranks
from lightning_pipe import DappleStrategy
from lightning_pipe.config import WeightVersions
from lightning_pipe.core.program import Layout
from lightning_pipe.schedule.weights import POLICIES
from lightning_pipe.units import counted_noun

RANKS, BATCH, CONTEXT, WIDTH = 4, 16, 64, 64
VALIDATION_BATCHES = 64
RESULTS = Path("runs/learning.jsonl")
STEP_DEADLINE_S, START_DEADLINE_S = 2.0, 300.0

# how an optimizer is made, and its learning rate: the best of a sweep with versions="sync" (docs/weights.md)
OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], float]] = {
    "adamw": (lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95)), 3e-3),
    "sgd": (lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9), 0.1),
    "nesterov": (
        lambda parameters, lr: torch.optim.NAdam(
            parameters, lr=lr, betas=(0.99, 0.999), weight_decay=0.01, momentum_decay=0.004, decoupled_weight_decay=True
        ),
        3e-3,
    ),
    "rotation": (
        lambda parameters, lr: example("10_basis_rotation").BasisRotation(parameters, lr=lr, betas=(0.9, 0.95)),
        1e-2,
    ),
}
BY_SGD = "pb"  # Pipelined Backpropagation is defined for SGD with momentum: so its policies begin

CLAIMS = {
    "pipedream": "accuracy of data parallel training",
    "2bw": "converges as without a delay",
    "spectrain": "no loss of accuracy, which stale weights have",
    "xpipe": "accuracy of sync, or slightly better",
    "pipemare": "quality of sync",
    "pb": "loses accuracy where pipelines are long",
    "pb_sc": "accuracy of SGD without tuning",
    "pb_lwpv": "accuracy of SGD without tuning",
    "pb_lwpv_sc": "accuracy of SGD without tuning, best of all",
    "timeprest": "accuracy of PipeDream",
    "pipedream+nesterov": "better than other asynchronous methods, and than sync",
    "pipedream+rotation": "81.7 % fewer steps than the best asynchronous method (3 billion parameters, 32 stages)",
}


@dataclass(frozen=True)
class Run:
    """A training, and what came out of it.

    Attributes:
        policy: of the weights, and an optimizer: "pipedream+nesterov".
        seed: of initial weights and the order of batches.
        steps: of the optimizer.
        microbatches: of a batch.
        lr: learning rate.
        val_loss: in nats per byte after the last step; nan if it diverged.
        seconds: of the steps, without the first.
        date: when it ended.
    """

    policy: str
    seed: int
    steps: int
    microbatches: int
    lr: float
    val_loss: float = math.nan
    seconds: float = math.nan
    date: str = ""

    @property
    def question(self) -> Run:
        """Return the run without what came out of it, by which finished runs are known."""
        return Run(self.policy, self.seed, self.steps, self.microbatches, self.lr)


def versions_and_optimizer(policy: str) -> tuple[str, str]:
    """Return the value of `versions` and the name of the optimizer of a row."""
    versions, _, optimizer = policy.partition("+")
    return versions, optimizer or ("sgd" if versions.startswith(BY_SGD) else "adamw")


def all_policies() -> list[str]:
    """Return the rows: every value of `versions`, and optimizers that answer to delay beside the same in sync."""
    versions = list(get_args(WeightVersions))
    by_sgd = ["sync+sgd"] if any(policy.startswith(BY_SGD) for policy in versions) else []
    answers = [f"{policy}+{optimizer}" for optimizer in ("nesterov", "rotation") for policy in ("sync", "pipedream")]
    return [*versions, *by_sgd, *answers]


def delays(policy: str, microbatches: int) -> tuple[int, ...]:
    """Return by stage how many updates the weights of a batch's first forward are late, at most."""
    versions, _ = versions_and_optimizer(policy)
    if (known := POLICIES.get(versions)) is None:
        return (0,) * RANKS
    late = [-(-ahead // microbatches) for ahead in known.ahead(Layout(tuple((r,) for r in range(RANKS))), microbatches)]
    return tuple([max(late)] * RANKS if known.promise in ("batch", "micro-batch on all stages") else late)


def learner(policy: str, lr: float) -> pl.LightningModule:
    """Return the GPT of examples/01 without the tie, whose ends would be on two stages."""
    make, _ = OPTIMIZERS[versions_and_optimizer(policy)[1]]

    class Learner(example().GPT):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__(context=CONTEXT, width=WIDTH, depth=RANKS)
            self.head.weight = nn.Parameter(self.bytes.weight.detach().clone())

        def configure_optimizers(self) -> Any:
            optimizer = make(self.parameters(), lr=lr)
            warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}

    return Learner()


class Outcome(pl.Callback):
    """Take the time of the steps and the last loss of validation; a policy that does not run ahead is an error."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.val_loss = math.nan

    def on_train_start(self, *_: Any) -> None:
        warnings.filterwarnings("error", message=".*changes nothing for this training step")

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append(time.perf_counter())

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.val_loss = float(trainer.callback_metrics["val_loss"])


def train(run: Run) -> tuple[float, float]:
    """Do a run on this rank; return its loss and its seconds."""
    pl.seed_everything(run.seed, verbose=False)
    outcome = Outcome()
    versions, _ = versions_and_optimizer(run.policy)
    options = {"versions_options": {"anneal": run.steps // 4}} if versions == "pipemare" else {}
    strategy = DappleStrategy(
        layout="-".join("1" * RANKS),
        microbatches=run.microbatches,
        versions=versions,
        **options,
        planner="uniform",  # the same stages in every row, whatever the machine is busy with
        costs="counted",
        watch_every=0,
        verbose=False,
    )
    fit_module(
        learner(run.policy, run.lr),
        example().PythonSource(CONTEXT, BATCH),
        strategy,
        callback=outcome,
        max_steps=run.steps,
        val_check_interval=run.steps,
        check_val_every_n_epoch=None,
        limit_val_batches=VALIDATION_BATCHES,
        num_sanity_val_steps=0,
    )
    return outcome.val_loss, outcome.ends[-1] - outcome.ends[0]


def finished(file: Path) -> dict[Run, Run]:
    """Return the runs of a file, by what they asked."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    runs = [Run(**json.loads(line)) for line in lines]
    return {run.question: run for run in runs}


def do_runs(questions: Sequence[Run], file: Path) -> list[str]:
    """Do the runs that are not in the file, and add each when it ends; return what failed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    failures: list[str] = []
    done = finished(file)
    for number, run in enumerate(questions, start=1):
        if run in done:
            continue
        print(f"{number} of {len(questions)}: {run.policy}, seed {run.seed}", end=" ", flush=True)
        deadline_s = START_DEADLINE_S + STEP_DEADLINE_S * run.steps
        try:
            val_loss, seconds = run_ranks(RANKS, train, run, deadline_s=deadline_s)[0]
        except RuntimeError as error:
            failures.append(f"{run.policy}, seed {run.seed}: {str(error).strip().splitlines()[-1]}")
            print("failed", flush=True)
            continue
        ended = replace(run, val_loss=val_loss, seconds=seconds, date=time.strftime("%Y-%m-%d"))
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(asdict(ended)) + "\n")
        print(f"loss {val_loss:.4f}, {seconds:.1f} s", flush=True)
    return failures


def table(runs: Sequence[Run]) -> str:
    """Return the rows of a table of Markdown, with their distance from sync by the same optimizer."""
    by_row: dict[str, list[Run]] = {}
    for run in runs:
        by_row.setdefault(run.policy, []).append(run)
    means = {policy: statistics.fmean(run.val_loss for run in same) for policy, same in by_row.items()}
    lines = [
        "| policy | lr | delay by stage | validation loss, mean (range) | above sync | seconds | the paper's claim |",
        "|---|---|---|---|---|---|---|",
    ]
    for policy, same in by_row.items():
        versions, optimizer = versions_and_optimizer(policy)
        sync = means.get("sync" if optimizer == "adamw" else f"sync+{optimizer}")
        losses = [run.val_loss for run in same]
        cells = [
            f"`{policy}`" + ("" if optimizer in policy or optimizer == "adamw" else f" ({optimizer})"),
            f"{same[0].lr:g}",
            " ".join(map(str, delays(policy, same[0].microbatches))),
            f"{means[policy]:.3f} ({min(losses):.3f} to {max(losses):.3f}, {counted_noun(len(same), 'seed')})",
            "" if versions == "sync" or sync is None else f"{means[policy] - sync:+.3f}",
            f"{statistics.median(run.seconds for run in same):.0f}",
            CLAIMS.get(policy, ""),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning")
    parser.add_argument("--policies", nargs="+", default=all_policies(), help="rows, such as sync pipedream+nesterov")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each row")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--microbatches", type=int, default=RANKS, help="of a batch; 1 makes the longest delays")
    parser.add_argument("--lr", type=float, help="learning rate, instead of the optimizer's own")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file to which each finished run is added")
    args = parser.parse_args()
    questions = [
        Run(policy, seed, args.steps, args.microbatches, args.lr or OPTIMIZERS[versions_and_optimizer(policy)[1]][1])
        for seed in range(args.seeds)
        for policy in args.policies
    ]
    failures: list[str] = []
    try:
        failures = do_runs(questions, args.results)
    except KeyboardInterrupt:
        print("\nInterrupted. Call the command again, and it goes on.")
    done = finished(args.results)
    print(table([done[run] for policy in args.policies for run in questions if run.policy == policy and run in done]))
    if failures:
        raise SystemExit("\n".join(failures))


if __name__ == "__main__":
    main()
