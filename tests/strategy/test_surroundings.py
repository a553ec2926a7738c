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
from lightning_pipe.profiler.network import link_probe
from lightning_pipe.profiler.processor_time import ProcessorTime
from lightning_pipe.strategy.plans import surroundings
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


def costs(cache: str, environment: dict[str, str], changed: float) -> Found | None:
    """Return what a validation has measured or found, as if nothing else took the processor.

    A link has changed if its messages take `changed` times as long or short: on a busy machine they take longer.
    """
    seen = Costs()
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(ProcessorTime, "is_short", return_value=False),
        mock.patch.object(link_probe, "_CHANGED", changed),
    ):
        trainer = make_trainer(DappleStrategy(cache=cache, layout="1-1"), callbacks=[seen])
        trainer.validate(make_module(NAME), make_loader(NAME), verbose=False)
    return seen.found


def start(cache: Path, *, changed: float = 1e9, **environment: str) -> Found:
    first, second = World(2).run(costs, str(cache), environment, changed)
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


@pytest.mark.parametrize("factor", [1.0, 50.0, 0.02])
def test_links_that_have_changed_are_measured_again(factor: float, tmp_path: Path):
    """In both directions; a few messages tell."""
    measured = without_memory(start(tmp_path))
    (file,) = folder_of(tmp_path).iterdir()
    known = cache_files.read(file, json.loads, version=surroundings._FORMAT)
    for pair in known["surroundings"]["links"]["links"]:
        pair["link"]["bytes_per_s"] *= factor
        pair["link"]["latency_s"] /= factor
    cache_files.write(file, json.dumps(known).encode(), version=surroundings._FORMAT)
    again = without_memory(start(tmp_path, changed=1e9 if factor == 1.0 else 2.0))
    assert (again == measured) == (factor == 1.0)
    written = cache_files.read(file, json.loads, version=surroundings._FORMAT)
    assert (written["time_s"] == known["time_s"]) == (factor == 1.0)
