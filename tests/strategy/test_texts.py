"""A step is captured again for other texts only if it looks at them; objects in a batch are compared by content."""

from __future__ import annotations

import pickle

import pytest

from lightning_pipe.capture.steps.batch import contents, outline
from lightning_pipe.strategy.steps.string_fields import StringReads, texts

BATCH = {"kind": "rows", "names": ["a.png", "b.png"], "n": 3}

LOOKS = {
    "compare": lambda batch: batch["kind"] == "rows",
    "compare from the left": lambda batch: "rows" == batch["kind"],  # noqa: SIM300
    "look up": lambda batch: {"rows": 1}.get(batch["kind"]),
    "print": lambda batch: f"{batch['kind']}",
    "convert": lambda batch: str(batch["names"][0]),
    "method": lambda batch: batch["names"][1].endswith("png"),
    "length": lambda batch: len(batch["kind"]),
    "search": lambda batch: "r" in batch["kind"],
    "join": lambda batch: batch["kind"] + "!",
}
PASSES = {
    "nothing": lambda batch: batch["n"] + 1,
    "count the list": lambda batch: len(batch["names"]),
    "hand on": lambda batch: [name for name in batch["names"]],  # noqa: C416
    "type": lambda batch: isinstance(batch["kind"], str),
}


@pytest.mark.parametrize("how", LOOKS)
def test_looking_at_a_text_is_noticed(how: str) -> None:
    reader = StringReads()
    marked = reader.marked(BATCH)
    assert not reader.has_read
    assert LOOKS[how](marked) == LOOKS[how](BATCH)
    assert reader.has_read


@pytest.mark.parametrize("how", PASSES)
def test_having_a_text_is_not_looking_at_it(how: str) -> None:
    reader = StringReads()
    PASSES[how](reader.marked(BATCH))
    assert not reader.has_read


def test_texts_are_told_apart_from_the_rest_of_a_batch() -> None:
    other = {"kind": "columns", "names": ["c.png", "d.png"], "n": 3}
    assert texts(BATCH) == ("rows", "a.png", "b.png")
    assert outline(BATCH) == outline({**other, "n": 4}) != outline({**other, "n": 4.0})
    assert contents(BATCH) == contents({**other, "n": 4}), "numbers are tracked"
    assert contents({"on": True}) != contents({"on": False}) and contents({"a": b"1"}) != contents({"a": b"2"})
    assert pickle.loads(pickle.dumps(StringReads().marked(BATCH))) == BATCH
