"""What was measured of devices and links is found by a start where everything is the same, and measured otherwise."""

from __future__ import annotations

import json
import os
from pathlib import Path
from unittest import mock

import lightning.pytorch as pl
import pytest

from lightning_pipe import DappleStrategy, cache_files
from lightning_pipe.core.cluster import Cluster
from lightning_pipe.profiler.processor_time import ProcessorTime
from lightning_pipe.report.comparison import Comparison, Figure, LinkFigures, RankFigures, StageFigures
from lightning_pipe.strategy.plans import surroundings
from lightning_pipe.strategy.plans.stale_times import forget_stale_times
from lightning_pipe.strategy.plans.surroundings import folder_of
from models.parity import make_loader, make_module
from ranks.world import World
from strategy.fits import make_trainer

NAME = "gpt_tied"
Found = tuple[Cluster, float]


class Costs(pl.Callback):
    """Keep the cluster and the overhead of a compute that the plan was made for; on rank 0."""

    found: Found | None = None

    def on_validation_end(self, trainer: pl.Trainer, *_: object) -> None:
        planned = trainer.strategy._session._pipeline.proposal
        if planned is not None:
            self.found = planned.problem.cluster, planned.problem.profile.call_s


def costs(cache: str, environment: dict[str, str]) -> Found | None:
    """Return what a validation has measured or found, as if nothing else took the processor."""
    seen = Costs()
    with mock.patch.dict(os.environ, environment), mock.patch.object(ProcessorTime, "is_short", return_value=False):
        trainer = make_trainer(DappleStrategy(cache=cache, layout="1-1"), callbacks=[seen])
        trainer.validate(make_module(NAME), make_loader(NAME), verbose=False)
    return seen.found


def start(cache: Path, **environment: str) -> Found:
    first, second = World(2).run(costs, str(cache), environment)
    assert second is None
    return first


def without_memory(found: Found) -> tuple[object, ...]:
    """Return what does not depend on the memory that is free at the moment."""
    cluster, call_s = found
    speeds = [device.speed for host in cluster.hosts for device in host.devices]
    return call_s, speeds, [(host.inside, host.network, host.swap) for host in cluster.hosts], cluster.links


def test_the_next_start_finds_what_was_measured_until_something_differs(tmp_path: Path):
    measured = without_memory(start(tmp_path))
    (file,) = folder_of(tmp_path).iterdir()
    assert without_memory(start(tmp_path)) == measured
    assert without_memory(start(tmp_path, NCCL_SOCKET_IFNAME="another")) != measured, "another network"
    assert len([*folder_of(tmp_path).iterdir()]) == 2
    known = cache_files.read(file, json.loads, version=surroundings._FORMAT)
    old = json.dumps({**known, "time_s": known["time_s"] - 25 * 3600}).encode()
    cache_files.write(file, old, version=surroundings._FORMAT)
    assert without_memory(start(tmp_path)) != measured and file.read_bytes().partition(b"\n")[2] != old


@pytest.mark.slow
def test_a_file_that_cannot_be_read_is_written_anew(tmp_path: Path):
    start(tmp_path)
    (file,) = folder_of(tmp_path).iterdir()
    for content in ("{", json.dumps({"facts": 3})):
        file.write_text(content)
        start(tmp_path)
        assert set(cache_files.read(file, json.loads, version=surroundings._FORMAT)) == {"time_s", "surroundings"}


@pytest.mark.parametrize(
    ("predicted", "measured", "kept"),
    [(0.3, 0.3, True), (0.3, 0.5, True), (0.001, 0.005, True), (0.1, 0.5, False), (0.5, 0.1, False)],
)
def test_links_that_a_run_shows_to_be_otherwise_are_measured_again(
    predicted: float, measured: float, kept: bool, tmp_path: Path
):
    """In both directions, unless it is little beside the step."""
    nothing, step = Figure(0.0, 0.0), Figure(1.0, 1.0)
    stage = StageFigures(0, 0, {"F": Figure(0.1, 0.1)}, nothing, Figure(predicted, measured), nothing)
    rank = RankFigures(0, nothing, nothing, nothing)
    link = LinkFigures(0, 1, nothing)
    comparison = Comparison((stage,), (rank,), (link,), (), step, nothing, steps=5, typical=2)
    folder_of(tmp_path).mkdir()
    (folder_of(tmp_path) / "0.json").write_text("{}")
    forget_stale_times(comparison, cache=tmp_path, device=None)
    assert any(folder_of(tmp_path).iterdir()) == kept
