"""Modules of the zoo as a fixture."""

from __future__ import annotations

import pytest

from cost.captures import QUICK, zoo_capture


@pytest.fixture(params=QUICK)
def zoo(request):
    """Return (name, capture, module, batch) of a module of the zoo."""
    return request.param, *zoo_capture(request.param)
