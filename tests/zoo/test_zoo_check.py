"""The check before training finds every module of the zoo right, by both routes, and leaves it as it was."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from lightning_pipe.capture import Capture, Request, flatten
from lightning_pipe.capture.replayed.replay import Replay
from lightning_pipe.strategy.checks.check import differences
from slow import slow_but
from zoo.test_zoo_pipelines import JOINT, REFUSED, of_zoo
from zoo.test_zoo_replay import OTHERWISE, replayed

REPLAYED = [name for name in (*REFUSED, *JOINT) if name not in OTHERWISE]
IN_THE_SUITE = {*REFUSED, *JOINT[::3]}  # one graph holds the others: they need no replay


def assert_right(captured: Capture | Replay, request: Request, batch: Any, samples: int) -> None:
    """Compare on the first samples of a batch."""
    module, tensors = request.module, flatten(batch)[0]
    first = [t[:samples] if request.samples is not None and t.ndim else t for t in tensors]
    before = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    found = differences(captured, request, first, samples=samples, seed=5)
    assert all(difference.relative <= difference.allowed for difference in found), found
    assert_equal([*module.state_dict().values(), torch.get_rng_state()], [*before[0].values(), before[1]])
    assert all(parameter.grad is None for parameter in module.parameters())


def assert_equal(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("name", JOINT)
def test_the_graph_of_a_module_of_the_zoo_agrees_with_its_step(name):
    found = of_zoo(name)
    assert_right(found.capture, found.request, found.batch, found.sizes[0])
    assert found.capture.testimony(found.request) == "", "a witness finds a step that does the same"


@pytest.mark.parametrize("name", slow_but(IN_THE_SUITE, REPLAYED))
def test_the_replay_of_a_module_of_the_zoo_agrees_with_its_step(name):
    found = replayed(name)
    assert_right(Replay(found.request, found.trace), found.request, found.batch, found.sizes[0])
