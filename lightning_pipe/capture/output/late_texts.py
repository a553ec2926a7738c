"""Texts of values that a step prints, and that are known after the batch: a mark stands for each of them until then.

A mark is "nan" and characters that are not seen, which number the text. Output functions are given texts with marks;
`LateTexts.parts` takes these apart, and the texts are made when the values of the batch are there.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType
from typing import Any

from lightning_pipe.capture.output.output_conditions import Condition, condition_at, conditions_around
from lightning_pipe.capture.output.text_uses import use_of_text

UNKNOWN_TEXT = "nan\u2060"  # with a character that is not seen, so that texts with it are found
_END = "\u2060"
_BITS = str.maketrans("01", "\u200b\u200c")
_DIGITS = str.maketrans("\u200b\u200c", "01")
_MARK = re.compile(f"{UNKNOWN_TEXT}([\u200b\u200c]+){_END}")


@dataclass(frozen=True)
class LateText:
    """The text of a value: `form(value, *args)`.

    Attributes:
        value: a tensor, or what stands for a number.
        form: `format`, `str` or `repr`.
        args: the specification of a format.
    """

    value: Any
    form: Callable[..., str]
    args: tuple[str, ...]


class LateTexts:
    """The texts of one run of a step that are made after the batch, and the conditions of its output."""

    def __init__(self) -> None:
        self._texts: list[LateText] = []
        self._asked: list[tuple[Condition, Any]] = []

    def mark(self, value: Any, form: Callable[..., str], *args: str) -> str:
        """Return the mark that stands for the text of a value."""
        self._texts.append(LateText(value, form, args))
        return f"{UNKNOWN_TEXT}{format(len(self._texts) - 1, 'b').translate(_BITS)}{_END}"

    def parts(self, text: str) -> list[str | LateText]:
        """Return a text in pieces, with late texts in the places of marks."""
        pieces = _MARK.split(text)  # every second is the number of a mark
        late = [self._texts[int(digits.translate(_DIGITS), 2)] for digits in pieces[1::2]]
        every = [pieces[0], *(piece for pair in zip(late, pieces[2::2], strict=True) for piece in pair)]
        return [piece for piece in every if piece != ""]

    def assumed(self, condition: Condition, question: Any) -> bool:
        """Return the answer with which the output of a condition is reached, and remember what was asked."""
        again = any((one.frame, one.place) == (condition.frame, condition.place) for one, _ in self._asked)
        if again:  # in another turn of a loop
            self._asked = [
                (one, asked)
                for one, asked in self._asked
                if (one.frame, one.lines) != (condition.frame, condition.lines)
            ]
        self._asked.append((condition, question))
        return condition.answer

    def conditions(self, frame: FrameType | None) -> list[tuple[Any, bool]]:
        """Return what must have which answers for output that code of a frame makes."""
        return conditions_around(frame, self._asked)


_NONE = LateTexts()
_CURRENT: ContextVar[LateTexts] = ContextVar("late texts of the step that runs", default=_NONE)


def late_text(value: Any, form: Callable[..., str], *args: str) -> str:
    """Return the mark of a text in the run of a step around this."""
    texts = _CURRENT.get()
    return UNKNOWN_TEXT if texts is _NONE else texts.mark(value, form, *args)


def assumed_answer(frame: FrameType | None, question: Callable[[], Any]) -> bool | None:
    """Return the answer to a question by which the step outputs alone; None to any other.

    Args:
        frame: in which it is asked.
        question: returns a tensor, or what stands for a number or a truth value.
    """
    texts, condition = _CURRENT.get(), condition_at(frame)
    return None if texts is _NONE or condition is None else texts.assumed(condition, question())


def said_text(value: Any, form: Callable[..., str], *args: str) -> str | None:
    """Return the mark of a text that the step outputs, and does nothing else with; None for any other."""
    if _CURRENT.get() is _NONE or use_of_text(sys._getframe(1)) != "said":
        return None
    return late_text(value, form, *args)


@contextlib.contextmanager
def late_texts() -> Iterator[LateTexts]:
    """Give the late texts of the run of a step inside."""
    texts = LateTexts()
    token = _CURRENT.set(texts)
    try:
        yield texts
    finally:
        _CURRENT.reset(token)


def joined(*parts: str) -> str:
    """Return parts of a text in one."""
    return "".join(parts)
