"""What docs/schedules.md says of schedules is what they do: its table is generated, and up to date."""

from __future__ import annotations

import pytest

from benchmarks.schedule_docs import CASE, MARKER, PAGE, WHEN, own_schedules, page, section
from lightning_pipe.cli.schedules import shown
from lightning_pipe.schedule import SCHEDULES, Schedule


def test_the_page_is_what_would_be_generated():
    text = PAGE.read_text(encoding="utf-8")
    assert text == page(text), "run `python -m benchmarks.schedule_docs`"


def test_every_schedule_says_when_it_is_used():
    assert WHEN.keys() == set(own_schedules())


def test_a_schedule_that_somebody_registered_is_not_on_the_page(monkeypatch):
    def of_my_own(layout, microbatches, options=None, /):
        return SCHEDULES["gpipe"].order(layout, microbatches)

    monkeypatch.setitem(SCHEDULES, "of_my_own", Schedule(of_my_own))
    assert "of_my_own" not in own_schedules()


def test_prose_above_the_marker_stays(monkeypatch):
    monkeypatch.setattr("benchmarks.schedule_docs.SCHEDULES", {"gpipe": SCHEDULES["gpipe"]})
    text = page(f"written by hand\n{MARKER}old")
    assert text.startswith(f"written by hand\n{MARKER}\n## All schedules") and "old" not in text
    assert "| [gpipe](schedule/gpipe.md) |" in text and "1f1b" not in text


def test_the_page_of_a_schedule_has_its_source_its_use_and_its_drawing():
    source, *_, use, figures, drawing = section("gpipe", shown("gpipe", CASE))
    assert source.startswith("GPipe: ") and use == f"**When.** {WHEN['gpipe']}" and "makespan 30" in figures
    assert drawing.startswith("```text\n0 | F0 F1 F2")


def test_a_page_without_the_marker_is_refused():
    with pytest.raises(ValueError, match="has no line"):
        page("no marker")
