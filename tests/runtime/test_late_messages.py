"""Laws of gradients where a message is read as late as a device may read it, and its buffer holds NaN until then."""

from __future__ import annotations

import pytest

from lightning_pipe.runtime.transport.local import Hub
from parity.test_policies import (  # noqa: F401
    _fetched_late,
    test_where_some_micro_batches_are_offloaded,
    test_with_joined_w,
)
from runtime.late_transport import LateTransport
from runtime.test_executor_local import *  # noqa: F403


@pytest.fixture(autouse=True)
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hub, "endpoint", lambda hub, rank: LateTransport(hub, rank))
