"""A step is captured again for other texts only if it looks at them; objects in a batch are compared by content."""

from __future__ import annotations

import pickle
from typing import Any
from unittest import mock

import pytest
from torch.utils.data import DataLoader

from lightning_pipe.capture.steps.batch import contents, outline
from lightning_pipe.capture.text_fields import StringReads, texts
from lightning_pipe.strategy.steps.step_capture import StepCapture
from ranks.world import World
from strategy.small import LAYOUTS, Named, Small, assert_as_on_one_device, run

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


class Returns(Small):
    """Texts of the batch that leave the step as they are: returned, kept, and handed to another text."""

    data = staticmethod(lambda: DataLoader(Named(), 4))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.latest = batch["name"][1:]
        return {"loss": self.loss((batch["x"], batch["y"])), "names": batch["name"], "first": batch["name"][0]}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        found = (*outputs["names"], outputs["first"], *self.latest)
        self.noted.append((found, {type(text).__name__ for text in found}))


def fitted(name: str, options: dict[str, Any] | None) -> tuple[Any, ...]:
    """Fit it; a worker function."""
    return run(Returns, options)


def captures(options: dict[str, Any]) -> int:
    """Return how often it is captured; a worker function."""
    with mock.patch.object(StepCapture, "capture", autospec=True, side_effect=StepCapture.capture) as capture:
        run(Returns, options)
    return capture.call_count


@pytest.mark.parametrize("options", LAYOUTS[:2], ids=lambda options: "-".join(map(str, options.values())))
def test_texts_that_leave_the_step_are_those_of_the_batch(options: dict[str, Any]) -> None:
    """They were of a class of this package, which `yaml.safe_dump` and weights-only loading refuse."""
    assert_as_on_one_device(fitted, "", options)


def test_a_step_is_captured_once_for_all_texts_that_it_hands_on() -> None:
    """It was captured for every batch with other texts."""
    assert World(2).run(captures, LAYOUTS[0]) == [1, 1]
