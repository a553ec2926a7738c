"""Laws of the structure of a batch."""

from __future__ import annotations

import pytest

from lightning_pipe.capture.steps.batch import LeafSlot, with_rows


@pytest.mark.parametrize(
    ("rows", "names"), [(range(2), ["a", "b"]), (range(1, 3), ["b", "c"]), (range(5), ["a", "b", "c", "a", "b"])]
)
def test_lists_with_an_item_per_sample_have_those_of_some_samples(rows: range, names: list[str]) -> None:
    """A trial with more samples than the batch that it is made of ended in an IndexError."""
    template = {"x": LeafSlot(0), "names": ["a", "b", "c"], "classes": ("cat", "dog")}
    assert with_rows(template, 3, rows) == {**template, "names": names}
