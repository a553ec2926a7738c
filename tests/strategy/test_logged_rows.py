"""The Trainer's loggers get the plan and rows of measured steps; whatever else users see stays what it is."""

from __future__ import annotations

import csv
import json
import math
import os
import struct
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import Logger

from lightning_pipe import DappleStrategy
from lightning_pipe.core.program import AnyCompute
from lightning_pipe.core.timeline import Timeline
from lightning_pipe.strategy.plans import logged_rows
from models.parity import LENGTH, make_loader, make_module
from ranks.world import World
from strategy.fits import dapple, make_trainer
from strategy.small import Small, loader

NAME = "gpt_tied"
NEEDS = {name: find_spec(name) is not None for name in ("tensorboard", "wandb")}
CLUSTER = """
hosts: [{name: here, devices: [{kind: small, count: 2, memory: 1 GiB, rates: {memory: 1 GB/s, tflops: {float32: 1},
                    peak: {float32: 2}}}], inside: {latency: 1 us, bandwidth: 1 GB/s}}]
"""


class Noting(Logger):
    """Keep what it is given."""

    name, version = "noting", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []
        self.parameters: list[dict[str, Any]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, params: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        self.parameters.append(dict(params))

    @property
    def of_pipe(self) -> list[tuple[int | None, dict[str, float]]]:
        """Return the rows of the pipeline."""
        return [(step, row) for step, row in self.rows if any(name.startswith("pipe/") for name in row)]


@dataclass(frozen=True)
class Logged:
    """What is left of a fit: figures of its comparison, rows and parameters that a logger was given."""

    expected: dict[str, float]
    rows: list[tuple[int | None, dict[str, float]]]
    parameters: list[dict[str, Any]]


def fit_with_loggers(folder: str) -> Logged | None:
    os.environ.update(WANDB_SILENT="true", WANDB_DISABLE_CODE="true")
    noting = Noting()
    loggers: list[Logger] = [noting]
    if NEEDS["tensorboard"]:
        loggers.append(TensorBoardLogger(folder, name="board", version=""))
    if NEEDS["wandb"] and dist.get_rank() == 0:
        loggers.append(WandbLogger(save_dir=folder, offline=True))
    strategy = DappleStrategy(
        layout="1-1", microbatches=2, cache=f"{folder}/cache", timeline_steps=3, watch_every=6, replan=False,
        measure_memory=True,
    )  # fmt: skip
    module = make_module(NAME)
    module.save_hyperparameters({"width": 3})
    make_trainer(strategy, max_epochs=2, logger=loggers, log_every_n_steps=1).fit(module, make_loader(NAME, samples=24))
    if isinstance(loggers[-1], WandbLogger):
        loggers[-1].experiment.finish()
    found = strategy.comparison
    if found is None:
        return None
    waiting = {f"pipe/waiting_rank{stage.rank}": stage.waiting.measured for stage in found.stages}
    memory = {f"pipe/memory_rank{figures.rank}": figures.total.measured for figures in found.memory}
    expected = {"pipe/step_s": found.step.measured, "pipe/bubble": found.bubble.measured, **waiting, **memory}
    assert strategy.pipe_metrics == noting.of_pipe[-1][1]
    return Logged(expected, noting.of_pipe, noting.parameters)


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Logged]:
    folder = tmp_path_factory.mktemp("logged")
    found, of_second = World(2).run(fit_with_loggers, str(folder))
    assert of_second is None, "rank 0 has the comparison, and logs"
    return folder, found


def test_the_first_row_is_the_comparison_of_the_first_steps(logged: tuple[Path, Logged]) -> None:
    _, found = logged
    (first, row), (second, other) = found.rows
    assert (first, second) == (2, 5), "the last of the first steps, and the sixth"
    assert len(found.expected) == 6
    assert {name: row[name] for name in found.expected} == pytest.approx(found.expected, rel=1e-6)
    assert row.keys() - other.keys() == {"pipe/memory_rank0", "pipe/memory_rank1"}, "measured once on a CPU"


def test_the_plan_is_given_before_the_users_hyperparameters_and_beside_them(logged: tuple[Path, Logged]) -> None:
    _, found = logged
    plan, users = found.parameters
    assert users == {"width": 3}
    assert plan.items() >= {"pipe/layout": "1-1", "pipe/microbatches": 2, "pipe/samples": 8}.items()
    assert min(plan["pipe/predicted_step_s"], plan["pipe/predicted_memory"]) > 0 <= plan["pipe/predicted_bubble"] < 1


@pytest.mark.skipif(not NEEDS["tensorboard"], reason="tensorboard is not installed (extra `loggers`)")
def test_tensorboard_has_the_rows_and_keeps_the_users_hyperparameters(logged: tuple[Path, Logged]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, found = logged
    board = EventAccumulator(str(folder / "board"))
    board.Reload()
    for name in {name for _, row in found.rows for name in row}:
        expected = [(step, row[name]) for step, row in found.rows if name in row]
        assert [(event.step, event.value) for event in board.Scalars(name)] == [
            (step, pytest.approx(value, rel=1e-6)) for step, value in expected
        ], name
    (text,) = board.Tensors("pipe/plan/text_summary")
    assert b"| pipe/layout | 1-1 |" in text.tensor_proto.string_val[0]
    content = board.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert b"width" in content and b"pipe" not in content
    assert len(board.Scalars("hp_metric")) == 1


def records(path: Path) -> Iterator[bytes]:
    """Yield the records of a file of W&B: LevelDB's log format after a header of 7 bytes."""
    data, position, whole, block = path.read_bytes(), 7, b"", 2**15
    while position + 7 <= len(data):
        if (left := block - position % block) < 7:
            position += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, position)
        whole, position = whole + data[position + 7 : position + 7 + size], position + 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""


@pytest.mark.skipif(not NEEDS["wandb"], reason="wandb is not installed (extra `loggers`)")
def test_wandb_offline_has_the_rows_and_the_plan(logged: tuple[Path, Logged]) -> None:
    from wandb.proto.wandb_internal_pb2 import Record

    folder, found = logged
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    read = [Record.FromString(record) for record in records(path)]
    rows = [{"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in one.history.item}
            for one in read if one.HasField("history")]  # fmt: skip
    rows = [row for row in rows if "pipe/step_s" in row]
    for (step, expected), row in zip(found.rows, rows, strict=True):
        assert row["trainer/global_step"] == step
        assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-9)
    config = {item.key or "/".join(item.nested_key): item.value_json for one in read for item in one.config.update}
    assert config["pipe/layout"] == '"1-1"' and config["width"] == "3"


@dataclass(frozen=True)
class Watched:
    """What is left of a fit whose steps were watched."""

    rows: list[tuple[int | None, dict[str, float]]]
    timelines: list[Timeline]
    others: set[str]


def watched(folder: str, options: dict[str, Any], trainers: dict[str, Any]) -> Watched:
    """Fit with counted costs, so that no first steps are recorded; return what was logged."""
    timelines: list[Timeline] = []
    log_steps = logged_rows.PipeLog.log_steps

    def noting_timelines(self: Any, found: Any, **rest: Any) -> None:
        timelines.extend(found)
        log_steps(self, found, **rest)

    cluster = Path(folder, f"cluster{dist.get_rank()}.yaml")
    cluster.write_text(CLUSTER)
    noting = Noting()
    trainer = make_trainer(
        dapple(cluster=str(cluster), microbatches=2, **options), max_epochs=2, logger=noting, log_every_n_steps=1,
        **trainers,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logged_rows.PipeLog, "log_steps", noting_timelines)
        trainer.fit(make_module(NAME), make_loader(NAME, samples=24))
    others = {*trainer.callback_metrics, *trainer.logged_metrics, *trainer.progress_bar_metrics}
    return Watched(noting.of_pipe, timelines, others)


@pytest.mark.parametrize(
    ("options", "trainers", "steps"),
    [
        pytest.param({"layout": "1-1", "watch_every": 5}, {}, [4], marks=pytest.mark.slow),
        ({"layout": "2", "watch_every": 2}, {"accumulate_grad_batches": 2}, [1, 3]),
        ({"layout": "1-1", "watch_every": 1, "post_validation": True}, {}, [0, 1, 2, 3, 4, 5]),
    ],
    ids=["every fifth", "accumulated", "every step, ahead"],
)  # fmt: skip
def test_one_step_in_many_is_recorded_whole_on_all_ranks(options, trainers, steps, tmp_path) -> None:
    found, other = World(2).run(watched, str(tmp_path), options, trainers)
    assert not other.rows and not other.timelines, "rank 0 logs"
    assert [step for step, _ in found.rows] == steps
    assert not any(name.startswith("pipe/") for name in found.others)
    for (_, row), timeline in zip(found.rows, found.timelines, strict=True):
        computes = {(e.rank, e.instruction) for e in timeline.events if isinstance(e.instruction, AnyCompute)}
        assert sum(compute.kind == "F" for _, compute in computes) == 4, "two stages or replicas, two micro-batches"
        busy = [timeline.busy(rank) for rank in timeline.ranks]
        assert timeline.ranks == (0, 1) and 0 < max(busy) <= row["pipe/step_s"] <= timeline.makespan + 1e-6
        for rank in (0, 1):
            idle = timeline.bubble(rank) * timeline.span(rank)
            assert row[f"pipe/waiting_rank{rank}"] == pytest.approx(idle, abs=1e-6)
        if "pipe/samples_per_s" in row:  # a batch has ended since the last row
            assert row["pipe/tokens_per_s"] == pytest.approx(row["pipe/samples_per_s"] * LENGTH)
            assert 0 < row["pipe/mfu"] < 1
    ends = [one.since for one, step in zip(found.timelines, steps, strict=True) if step]
    assert all(map(math.isfinite, ends)), "a step counts from the end of the one before"


class Refusing(Noting):
    """Take what it knows."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if any(name.startswith("pipe/") for name in metrics):
            raise KeyError("no such column")
        super().log_metrics(metrics, step)

    def log_hyperparams(self, params: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError


def fit_alone(loggers: list[Logger], *, watch_every: int = 1, **trainers: Any) -> list[str]:
    """Fit on one rank, and return what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        trainer = make_trainer(dapple(watch_every=watch_every), max_epochs=1, logger=loggers, **trainers)
        warnings.simplefilter("always")
        trainer.fit(Small(), loader(12))
    return [text for one in caught if "of the pipeline" in (text := str(one.message))]


def test_a_logger_that_refuses_is_named_once_and_the_others_get_their_rows(tmp_path: Path) -> None:
    noting = Noting()
    told = fit_alone([Refusing(), CSVLogger(tmp_path, version=""), noting])
    with (tmp_path / "lightning_logs" / "metrics.csv").open() as file:
        table = [row for row in csv.DictReader(file) if row.get("pipe/step_s")]
    assert [step for step, _ in noting.of_pipe] == [0, 1, 2]
    assert [(int(row["step"]), float(row["pipe/step_s"])) for row in table] == [
        (step, pytest.approx(row["pipe/step_s"])) for step, row in noting.of_pipe
    ]
    assert [text.partition(" does not take ")[2].partition(" of the")[0] for text in told] == ["the plan", "rows"]
    assert all("Refusing" in text for text in told)


@pytest.mark.parametrize("quiet", [{"watch_every": 0}, {"log_every_n_steps": 0}, {"fast_dev_run": 2}], ids=str)
def test_no_rows_are_logged_where_none_are_wanted(quiet: dict[str, Any]) -> None:
    noting = Noting()
    fit_alone([noting], **quiet)
    assert not noting.of_pipe
    assert bool(noting.parameters) == ("log_every_n_steps" in quiet)
