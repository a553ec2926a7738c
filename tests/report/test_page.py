"""A page says what the tables say, needs nothing but itself, and opens in a browser without an error."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import replace

import pytest
from matplotlib.image import imread
from rich.table import Table

from lightning_pipe.core.program import Layout
from lightning_pipe.core.timeline import Timeline
from lightning_pipe.report import compare, html_page, mean_bubble, plot_stacks, step_seconds
from lightning_pipe.report.identity import identity
from lightning_pipe.report.page import MOST_EVENTS, STACK, JudgedPlan, Page, Stack, thinned
from lightning_pipe.report.stack_plot import COLOURS as STACK_COLOURS
from lightning_pipe.units import format_bytes, format_seconds, format_share
from report.runs import Shaped, as_recorded, run_of

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
STAGES = ((0, 1), (2,))
PREDICTED = run_of(STAGES, Shaped(1.0, 1.3, 0.7, latency=0.4, reduction=0.5, step=0.5))
MEASURED = [as_recorded(run_of(STAGES, Shaped(f, 1.3, 0.7, latency=0.4, step=0.5))) for f in (1.5, 1.2, 1.9)]
KINDS = dict.fromkeys(STACK, (10 * 2**20, 20 * 2**20))
MEMORY = Stack("0-2", (0.0, 5.0), KINDS, 2**28, measured_saved=((7.0, 2**20), (9.0, 2**21)), measured_peak=2**27)
TABLE = Table("a heading & more", title="of <it>")
TABLE.add_row("a cell\nin two lines")
ABOUT = (("Module", "nets.Net"), ("Command", "train.py <x>"))
PAGE = Page(
    title="two <stages>",
    identity=ABOUT,
    costs="Costs are measured.",
    samples=24,
    rates=lambda step_s: {"tokens per second": f"{24 * 7 / (step_s or 1):.4g}"},
    tables=(("Plan", TABLE),),
    sentences=("It is fast. </script><b>",),
    predicted=PREDICTED,
    memory=(MEMORY,),
    candidates=(
        JudgedPlan("2-1", "1f1b", 4, 1.0, 0.1, 2**30, True),
        JudgedPlan("2-1", "gpipe", 4, 1.0, 0.1, 2**30, True),
        JudgedPlan("2-1", "1f1b", 8, 1.5, 0.05, 2**31, False),
    ),
    plan="stages: []",
    measured=MEASURED[0],
    comparison=compare(PREDICTED, MEASURED, layout=Layout(STAGES)),
)


def data_of(text: str) -> dict:
    (found,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    return json.loads(found)


def test_figures_are_those_of_the_comparison_and_of_the_drawn_step():
    comparison = PAGE.comparison
    assert comparison is not None
    text = html_page(replace(PAGE, measured=MEASURED[comparison.typical]))
    assert f"<b>{format_seconds(comparison.step.measured)}</b>" in text
    assert f"predicted {format_seconds(comparison.step.predicted)}" in text
    assert f"<b>{24 * 7 / comparison.step.measured:.4g}</b>" in text, "tokens per second, where they are known"
    assert f"<b>{format_share(comparison.bubble.measured)}</b>" in text
    drawn, predicted = data_of(text)["runs"]
    assert drawn["seconds"] == comparison.step.measured and format_seconds(drawn["seconds"]) in drawn["heading"]
    assert predicted["seconds"] == step_seconds(PREDICTED)
    assert f"bubble {format_share(mean_bubble(PREDICTED))} of" in predicted["heading"]
    assert f"predicted peak {format_bytes(MEMORY.peak)}" in data_of(text)["memory"][0]["heading"]


@pytest.mark.parametrize("page", [PAGE, replace(PAGE, measured=None, comparison=None)])
def test_every_figure_says_whether_it_is_measured_or_predicted(page):
    """A card of 78 % computing was predicted, the one beside it measured."""
    text = html_page(replace(page, sentences=("Predicted: 1.",)))
    cards = re.findall(r'<div class="card"><b>.*?</b><span>(.*?)</span><i>(.*?)</i>', text)
    assert cards and all(re.search("measured|predicted", name) for name, _ in cards)
    assert all(not note or re.match(r"predicted|rank \d|no limit", note) for _, note in cards)
    summary = re.search("<h2>Summary</h2><ul>(.*?)</ul>", text)
    assert summary is not None
    assert all(line.startswith(("Measured", "Predicted")) for line in re.findall("<li>(.*?)</li>", summary[1]))


def test_a_page_is_told_from_others_by_what_stands_at_its_head():
    text = html_page(PAGE)
    assert "<dt>Module</dt><dd>nets.Net</dd>" in text and "train.py &lt;x&gt;" in text
    found = dict(identity("nets.Net", parameters=1234, parameter_bytes=2**20, devices="2 x A100 on a, b"))
    assert found["Parameters"] == "1,234 (1 MiB)" and "A100" in found["Devices"]
    assert "torch 2" in found["Versions"] and "Python 3" in found["Versions"]
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC on .", found["Written"]) and found["Command"]


def test_tables_are_tables_of_html():
    text = html_page(PAGE)
    assert "<th class='text'>a heading &amp; more</th>" in text and "<caption>of &lt;it&gt;</caption>" in text
    assert "<td class='text'>a cell\nin two lines</td>" in text
    assert text.count("<pre>") == 1, "the plan as a file"


def test_bars_have_the_seconds_of_the_computes():
    measured, _ = data_of(html_page(PAGE))["runs"]
    for rank in MEASURED[0].ranks:
        computed = [bar[3] for bar in measured["bars"] if bar[0] == rank and bar[1] in "FIWB"]
        assert sum(computed) == pytest.approx(MEASURED[0].busy(rank))
    assert measured["messages"], "messages on their way are drawn"


def test_a_page_needs_nothing_but_itself():
    text = html_page(PAGE)
    assert not re.findall(r"(?:src|href)=[\"'](?!data:)", text)
    assert "import(" not in text and "fetch(" not in text and "@import" not in text
    assert "two &lt;stages&gt;" in text and html.escape(PAGE.sentences[0]) in text


def test_a_page_of_many_ranks_stays_small_and_says_what_it_leaves_out():
    stages = tuple((rank,) for rank in range(48))
    run = run_of(stages, Shaped(1.0, 1.3, 0.7), microbatches=96)
    text = html_page(replace(PAGE, predicted=run, measured=None, comparison=None))
    data = data_of(text)
    assert len(text) < 2_000_000
    assert len(data["ranks"]) + data["left_out"] == 48 and data["left_out"] > 0
    assert len(run.events) > MOST_EVENTS


def test_thinned_curves_keep_their_peak():
    times, (series,) = thinned(range(10_000), [[k % 977 for k in range(10_000)]], most=100)
    assert len(times) <= 100 and max(series) == 976


def test_nothing_recorded_and_nothing_predicted_make_a_page_too():
    text = html_page(replace(PAGE, predicted=None, measured=MEASURED[0], comparison=None, memory=(), candidates=()))
    assert f"<b>{format_seconds(step_seconds(MEASURED[0]))}</b>" in text
    assert data_of(html_page(replace(PAGE, predicted=Timeline(()), measured=None, comparison=None)))["runs"]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
@pytest.mark.parametrize("page", [PAGE, replace(PAGE, measured=None, comparison=None, memory=(), candidates=())])
def test_a_browser_draws_the_page_without_an_error(page, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(html_page(page), encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=3000"]
    command = [str(BROWSER), *options, f"--user-data-dir={tmp_path / 'browser'}", "--dump-dom", path.as_uri()]
    found = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert ":CONSOLE" not in found.stderr, found.stderr
    assert "<canvas" in found.stdout and ("<svg" in found.stdout) == bool(page.memory)
    rows = re.findall(r'<tr><th class="text">(this plan|selected)</th><td>(.*?)</td>', found.stdout)
    assert [name for name, _ in rows] == (["this plan", "selected"] if len(page.candidates) > 1 else [])
    assert len({step for _, step in rows}) == len(rows), "another plan is selected, so that the table is seen to change"


def test_memory_is_drawn_by_kind(tmp_path):
    plot_stacks([MEMORY, replace(MEMORY, ranks="3", measured_saved=(), limit=None)], tmp_path / "memory.png")
    image = (imread(tmp_path / "memory.png")[:, :, :3] * 255).round().astype(int)
    areas = [int((image == [int(colour[k : k + 2], 16) for k in (1, 3, 5)]).all(-1).sum()) for colour in STACK_COLOURS]
    assert min(areas) > 1000 and max(areas) < 1.6 * min(areas), "kinds of equal bytes have about equal areas"
