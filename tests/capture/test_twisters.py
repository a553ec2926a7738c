"""States of the generators of Python and NumPy: equal exactly where what they say is, and put back whole."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from lightning_pipe.capture.python import twisters
from lightning_pipe.capture.steps.keyed_random import PythonRandomness


def asked() -> tuple[Any, bytes]:
    """Return what the generators themselves say."""
    return random.getstate(), pickle.dumps(np.random.get_state(legacy=False))


@pytest.fixture(params=["read", "asked"], autouse=True)
def generators(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Read generators, or ask them where they cannot be read; and leave them as they were."""
    python, numpy = random.getstate(), np.random.get_state(legacy=False)
    if request.param == "asked":
        monkeypatch.setattr(twisters, "_can_read", lambda: False)
    else:
        assert twisters._can_read(), "this Python and this NumPy are known"
    random.seed(0)
    np.random.seed(0)
    yield
    random.setstate(python)
    np.random.set_state(numpy)


DRAWS: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "a number": random.random,
    "a normal number": lambda: random.gauss(0, 1),
    "a number of NumPy": np.random.rand,
    "a normal number of NumPy": np.random.randn,
    "both of a pair": lambda: np.random.randn(2),
    "one of a binomial": lambda: np.random.binomial(10, 0.5),
    "as many as there are words": lambda: np.random.bytes(4 * 624),
    "no number": lambda: np.random.rand(0),
    "another seed": lambda: np.random.seed(1),
    "the same seed": lambda: random.seed(0),
    "what was there": lambda: np.random.set_state(np.random.get_state()),
    "another number drawn ahead": lambda: np.random.set_state((*np.random.get_state()[:3], 1, 0.5)),
}


@pytest.mark.parametrize("first", DRAWS)
@pytest.mark.parametrize("then", DRAWS)
def test_a_state_is_another_exactly_if_generators_say_so(first: str, then: str) -> None:
    DRAWS[first]()
    before, said = PythonRandomness.now(), asked()
    DRAWS[then]()
    assert (PythonRandomness.now() == before) == (asked() == said)


@pytest.mark.parametrize("first", DRAWS)
def test_a_state_that_was_sent_is_put_back_whole(first: str) -> None:
    DRAWS[first]()
    said, state = asked(), pickle.loads(pickle.dumps(PythonRandomness.now()))
    random.gauss(0, 1), np.random.randn(3)
    state.restore()
    assert asked() == said
    assert PythonRandomness.now() == state


def test_the_number_drawn_ahead_is_a_part_of_the_state() -> None:
    """Only it changes when the second number of a pair is drawn."""
    np.random.randn()
    before = PythonRandomness.now()
    np.random.randn()
    assert PythonRandomness.now() != before


def test_another_kind_of_generator_is_asked() -> None:
    """NumPy's generator may be replaced."""
    ours: Any = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(0))
    try:
        before = PythonRandomness.now()
        assert PythonRandomness.now() == before
        drawn = np.random.rand(3)
        assert PythonRandomness.now() != before
        before.restore()
        assert np.array_equal(np.random.rand(3), drawn)
    finally:
        np.random.set_bit_generator(ours)
