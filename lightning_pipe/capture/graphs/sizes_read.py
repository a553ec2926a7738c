"""Sizes that a step reads into Python: all that it does with them but print holds for one size."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from lightning_pipe.capture.output.late_texts import late_text
from lightning_pipe.capture.output.text_uses import use_of_text
from lightning_pipe.capture.steps.hazards import SizeDependentError, at, user_line


@contextlib.contextmanager
def sizes_in_texts() -> Iterator[None]:
    """Let the step say sizes; a step that does more with the text of one holds for that size."""

    def text(usual: Callable[..., str]) -> Callable[..., str]:
        def of(number: Any, *form: str) -> str:
            use = use_of_text(sys._getframe(1))
            if use == "used":
                raise SizeDependentError(
                    f"The step makes a text of a size, and does more than print it{at(user_line(2))}."
                )
            if use == "internal":
                return usual(number, *form)
            return late_text(number, format if form else repr, *form)

        return of

    with contextlib.ExitStack() as stack:
        for kind in (torch.SymInt, torch.SymFloat):
            for name in ("__repr__", "__format__"):
                stack.enter_context(mock.patch.object(kind, name, text(getattr(kind, name))))
        yield
