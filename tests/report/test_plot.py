"""Pictures show as much of every colour as the timeline has of its kind, and leave pyplot alone."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from lightning_pipe.core.program import Compute, Evict, Fetch
from lightning_pipe.core.timeline import Event, Timeline
from lightning_pipe.errors import ConfigError
from lightning_pipe.report import Curves, plot_memory, plot_timeline
from lightning_pipe.report.plot import COLOURS, MEASURED, PREDICTED
from report.runs import Shaped, run_of

RUN = run_of(((0,), (1,)), Shaped(1.0, 1.5, 0.5, latency=0.1, step=0.7))
FILL = "#A2D5F2"


def pixels(path: Path) -> Counter[str]:
    """Count the pixels of a picture by colour."""
    image = (imread(path)[:, :, :3] * 255).round().astype(int)
    colours, counts = np.unique(image @ (2**16, 2**8, 1), return_counts=True)
    return Counter({f"#{colour:06X}": int(count) for colour, count in zip(colours, counts, strict=True)})


def test_areas_are_seconds(tmp_path):
    plot_timeline(RUN, tmp_path / "run.png")
    found = pixels(tmp_path / "run.png")
    areas = [found[COLOURS[kind]] for kind in "FIW"]
    assert areas[1] / areas[0] == pytest.approx(1.5, rel=0.05)
    assert areas[2] / areas[0] == pytest.approx(0.5, rel=0.05)
    assert found[COLOURS["B"]] == 0


def test_copies_to_the_host_and_back_are_drawn(tmp_path):
    plot_timeline(run_of(((0,), (1,)), Shaped(swap=0.7), offloads=(0,)), tmp_path / "swaps.png")
    plot_timeline(run_of(((0,), (1,)), Shaped()), tmp_path / "none.png")
    found, none = pixels(tmp_path / "swaps.png"), pixels(tmp_path / "none.png")
    assert (
        found[Evict.effects.colour] == pytest.approx(found[Fetch.effects.colour], rel=0.3)
        and found[Evict.effects.colour] > 100
    )
    assert none[Evict.effects.colour] == none[Fetch.effects.colour] == 0


def test_predicted_and_measured_are_drawn_on_one_scale(tmp_path):
    predicted = Timeline((Event(0, Compute(0, "F", 0), 0.0, 1.0),))
    measured = Timeline((Event(0, Compute(0, "B", 0), 70.0, 73.0),))
    plot_timeline(measured, tmp_path / "both.png", predicted=predicted, title="both")
    found = pixels(tmp_path / "both.png")
    assert found[COLOURS["B"]] / found[COLOURS["F"]] == pytest.approx(3.0, rel=0.1)


def test_later_stages_of_a_rank_are_paler(tmp_path):
    pale = "#A2D6F3"  # F, mixed with white
    for name, stages in (("one", ((0,), (1,))), ("two", ((0,), (1,), (0,)))):
        plot_timeline(run_of(stages, Shaped()), tmp_path / f"{name}.png")
    assert pixels(tmp_path / "one.png")[pale] == 0
    found = pixels(tmp_path / "two.png")
    assert found[pale] / found[COLOURS["F"]] == pytest.approx(0.5, rel=0.05), "one of three stages"


def test_memory_is_an_area_and_a_limit_in_reach_a_line(tmp_path):
    low, high = {0: [(0.0, 2 * 2**20), (1.0, 0)]}, {0: [(0.0, 3 * 2**20), (1.0, 0)]}

    def drawn(curves: Curves, **options: object) -> Counter[str]:
        plot_memory(curves, tmp_path / "memory.png", **options)
        return pixels(tmp_path / "memory.png")

    limit = {0: 4 * 2**20}
    areas = [drawn(curves, limits=limit)[FILL] for curves in (low, high)]
    assert areas[1] / areas[0] == pytest.approx(1.5, rel=0.05)
    both = drawn(high, predicted=low, limits={0: 2**40}, title="kept for the backward")
    assert both[MEASURED] and both[PREDICTED]
    assert drawn(high, limits=limit)["#333333"] > drawn(high, limits={0: 2**40})["#333333"] + 1000


def test_a_timeline_without_computes_can_be_drawn(tmp_path):
    plot_timeline(Timeline(()), tmp_path / "nothing.png")
    assert pixels(tmp_path / "nothing.png")["#FFFFFF"]


def test_pyplot_is_not_touched(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    plot_timeline(RUN, tmp_path / "run.png")
    plot_memory({0: [(0.0, 1), (1.0, 2)]}, tmp_path / "memory.png")


def test_without_matplotlib_the_way_out_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'lightning-pipe\[plots\]'"):
        plot_timeline(RUN, tmp_path / "run.png")
