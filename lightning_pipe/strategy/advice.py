"""Keep back advice of Lightning's that is wrong for a pipeline: `sync_dist=True`.

Lightning recommends it wherever a value is logged per epoch and processes are distributed. Here every rank logs the
value of the whole batch already, so there is nothing to synchronise.
"""

from __future__ import annotations

import re
import warnings

_SYNC_DIST = r"It is recommended to use `self\.log\(.*sync_dist=True"


class WrongAdvice:
    """Filter of warnings that can be put in place and taken away; other filters stay as they are."""

    def ignore(self) -> None:
        """Keep the advice back from now on."""
        self.allow()
        warnings.filterwarnings("ignore", message=_SYNC_DIST)

    def allow(self) -> None:
        """Take the filter away again."""
        for entry in [entry for entry in warnings.filters if _pattern(entry[1]) == _SYNC_DIST]:
            warnings.filters.remove(entry)  # type: ignore[attr-defined]  # what is ignored is not remembered as shown


def _pattern(message: re.Pattern[str] | str | None) -> str | None:
    return message.pattern if isinstance(message, re.Pattern) else message
