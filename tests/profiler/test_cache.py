"""Measured times are kept, found again, and never in the way of a training."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import pytest
import torch

from lightning_pipe.profiler.cache import Timing, cache_file, digest, load_timings, store_timings
from lightning_pipe.report.comparison import Comparison, Figure, StageFigures
from lightning_pipe.strategy.plans import stale_times
from lightning_pipe.strategy.plans.stale_times import forget_stale_times

CPU = torch.device("cpu")
ONE = {digest("aten.mm"): Timing(1.5e-3, 0.1, 2048.0)}
OTHER = {digest("aten.add"): Timing(2e-6, 0.3)}


def test_what_was_stored_is_loaded_exactly(tmp_path: Path):
    store_timings(tmp_path / "new" / "folder", CPU, ONE)
    assert load_timings(tmp_path / "new" / "folder", CPU) == ONE


def test_times_are_added_to_those_that_are_kept(tmp_path: Path):
    store_timings(tmp_path, CPU, ONE)
    store_timings(tmp_path, CPU, OTHER)
    assert load_timings(tmp_path, CPU) == {**ONE, **OTHER}


def test_calls_that_could_not_be_timed_or_watched_are_not_kept(tmp_path: Path):
    store_timings(
        tmp_path,
        CPU,
        {**ONE, digest("aten.odd"): Timing(math.nan, 0.0), digest("aten.blind"): Timing(1.0, 0.0, math.nan)},
    )
    assert load_timings(tmp_path, CPU) == ONE


def test_there_is_nothing_before_anything_was_stored(tmp_path: Path, caplog):
    assert load_timings(tmp_path, CPU) == {} and not caplog.records


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"device": {}, "timings": {}}', '{"timings": 3}'])
def test_an_unreadable_file_is_said_once_and_written_again(tmp_path: Path, caplog, content: str):
    path = cache_file(tmp_path, CPU)
    path.parent.mkdir()
    path.write_text(content)
    with caplog.at_level(logging.WARNING):
        assert load_timings(tmp_path, CPU) == {}
        store_timings(tmp_path, CPU, ONE)
    assert [str(path) in record.getMessage() for record in caplog.records] == [True]
    assert load_timings(tmp_path, CPU) == ONE


def test_a_folder_that_cannot_be_written_is_said_and_stops_nothing(tmp_path: Path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        store_timings(tmp_path / "file" / "folder", CPU, ONE)
    assert len(caplog.records) == 1 and "cannot be written" in caplog.text


def test_no_part_of_a_file_is_left_behind(tmp_path: Path):
    store_timings(tmp_path, CPU, ONE)
    assert [*cache_file(tmp_path, CPU).parent.iterdir()] == [cache_file(tmp_path, CPU)]


def test_times_of_other_conditions_are_not_found(tmp_path: Path, monkeypatch):
    store_timings(tmp_path, CPU, ONE)
    monkeypatch.setattr(torch, "__version__", "99.0")
    assert load_timings(tmp_path, CPU) == {}


def test_a_file_says_what_it_holds_for(tmp_path: Path):
    store_timings(tmp_path, CPU, ONE)
    said = json.loads(cache_file(tmp_path, CPU).read_text().partition("\n")[2])["device"]
    assert {"device", "torch", "format"} <= set(said)


def test_times_of_another_host_are_not_found(tmp_path: Path, monkeypatch):
    store_timings(tmp_path, CPU, ONE)
    monkeypatch.setattr("platform.node", lambda: "elsewhere")
    assert load_timings(tmp_path, CPU) == {}


def test_a_file_does_not_grow_without_end_and_keeps_what_is_new(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("lightning_pipe.profiler.cache._MOST_TIMES", 3)
    for number in range(5):
        store_timings(tmp_path, CPU, {digest(f"aten.op{number}"): Timing(float(number), 0.0)})
        assert digest(f"aten.op{number}") in load_timings(tmp_path, CPU)
    assert len(load_timings(tmp_path, CPU)) == 3


@pytest.mark.parametrize(("measured", "kept"), [(1.0, True), (2.0, True), (0.8, True), (0.7, False)])
def test_times_that_computes_show_to_be_too_long_are_measured_again(
    tmp_path: Path, measured: float, kept: bool, monkeypatch
):
    """Those of ranks that share cores take longer together: that says nothing of the times."""
    nothing = Figure(0.0, 0.0)
    stage = StageFigures(0, 0, {"F": Figure(1.0, measured)}, nothing, nothing, nothing)
    comparison = Comparison((stage,), (), (), (), Figure(1.0, measured), nothing, steps=5, typical=2)
    store_timings(tmp_path, CPU, ONE)
    said: list[str] = []
    monkeypatch.setattr(stale_times, "rank_zero_info", said.append)
    forget_stale_times(comparison, cache=tmp_path, device=CPU)
    assert bool(load_timings(tmp_path, CPU)) == kept
    assert [f"Computes took {measured:.0%}" in text for text in said] == [True] * (not kept)
    forget_stale_times(comparison, cache=None, device=CPU)
