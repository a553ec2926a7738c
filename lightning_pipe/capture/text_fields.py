"""String fields of a batch, such as names and paths: detecting whether a step reads them.

A captured graph holds for the texts that it was captured with only if the step looked at them. So they are replaced,
while the step is captured, by texts that remember whether somebody looked. One that leaves the step as it is becomes
that of the batch (`record.BatchText`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection

from lightning_pipe.capture.output.late_texts import said_text
from lightning_pipe.capture.steps.batch import LeafSlot


class StringReads:
    """Remember whether any of the texts that were marked by this reader was looked at."""

    def __init__(self) -> None:
        self.has_read = False

    def marked(self, template: Any) -> Any:
        """Return a batch's template with marked texts."""
        count = itertools.count()
        return _map_texts(template, lambda text: MarkedText(text, self, next(count)))


class MarkedText(str):
    """A text that tells its reader when somebody looks at it, and knows which of the batch it is."""

    __slots__ = ("_index", "_reader")

    def __new__(cls, text: str, reader: StringReads, index: int) -> MarkedText:
        """Mark a text.

        Args:
            text: the text.
            reader: who is told.
            index: number of the text in the batch.
        """
        marked = super().__new__(cls, text)
        object.__setattr__(marked, "_reader", reader)
        object.__setattr__(marked, "_index", index)
        return marked

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_"):
            object.__getattribute__(self, "_reader").has_read = True
        return super().__getattribute__(name)

    def __reduce__(self) -> Any:
        return str, (str.__str__(self),)


def _telling(name: str) -> Any:
    original = getattr(str, name)

    def method(self: MarkedText, *arguments: Any) -> Any:
        object.__getattribute__(self, "_reader").has_read = True
        return original(self, *arguments)

    method.__name__ = name
    return method


def _saying(form: Any) -> Any:
    """Return what a text gives where it is only output: a mark that stands for the text of the batch at hand."""
    look = _telling(f"__{form.__name__}__")

    def method(self: MarkedText, *arguments: str) -> Any:
        late = said_text(self, form, *arguments)
        return look(self, *arguments) if late is None else late

    return method


for _form in (str, repr, format):
    setattr(MarkedText, f"__{_form.__name__}__", _saying(_form))
_LOOKS = "eq ne lt le gt ge hash len iter getitem contains add mul rmul mod"
for _name in _LOOKS.split():
    setattr(MarkedText, f"__{_name}__", _telling(f"__{_name}__"))


def index_of(text: MarkedText) -> int:
    """Return which of the texts of the batch this is, without looking at it."""
    index: int = object.__getattribute__(text, "_index")
    return index


def texts(template: Any) -> tuple[str, ...]:
    """List the texts of a template."""
    found: list[str] = []
    _map_texts(template, found.append)
    return tuple(found)


def _map_texts(template: Any, function: Callable[[str], Any]) -> Any:
    return apply_to_collection(
        template, (str, LeafSlot), lambda leaf: function(leaf) if isinstance(leaf, str) else leaf
    )
