"""What docs/schedules.md says of schedules is what they do: its lower part is generated, and up to date."""

from __future__ import annotations

import pytest

from benchmarks.schedule_docs import MARKER, PAGE, WHEN, page
from lightning_pipe.schedule import SCHEDULES


def test_the_page_is_what_would_be_generated():
    text = PAGE.read_text(encoding="utf-8")
    assert text == page(text), "run `python -m benchmarks.schedule_docs`"


def test_every_schedule_says_when_it_is_used():
    assert not SCHEDULES.keys() - WHEN.keys()


def test_prose_above_the_marker_stays(monkeypatch):
    monkeypatch.setattr("benchmarks.schedule_docs.SCHEDULES", {"gpipe": SCHEDULES["gpipe"]})
    text = page(f"written by hand\n{MARKER}old")
    assert text.startswith(f"written by hand\n{MARKER}\n## All schedules") and "old" not in text
    assert "\n## gpipe\n" in text and "1f1b" not in text


def test_a_page_without_the_marker_is_refused():
    with pytest.raises(ValueError, match="has no line"):
        page("no marker")
