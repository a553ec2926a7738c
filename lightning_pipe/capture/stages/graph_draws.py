"""Random numbers of a plain step that are those of its graph: every random operation draws from the key of its node."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lightning_pipe.capture.graphs.joint_graph import JointGraph
from lightning_pipe.capture.operators import draws, drops, is_random
from lightning_pipe.capture.steps.hazards import at
from lightning_pipe.capture.steps.keyed_random import keyed
from lightning_pipe.capture.steps.stage_program import RandomKey
from lightning_pipe.capture.torch_private import TorchDispatchMode, checkpoint_only, operator_name


def named_draws(joint: JointGraph) -> tuple[str, ...]:
    """Name the random operations of a graph, each with the user's line; dropout aside."""
    random = [node for node in joint.module.graph.nodes if is_random(node) and not drops(operator_name(node))]
    places = (at((node.meta.get("custom") or {}).get("line", "")) for node in random)
    return tuple(
        dict.fromkeys(f"{_plain_name(operator_name(n))}{place}" for n, place in zip(random, places, strict=True))
    )


@contextlib.contextmanager
def graph_draws(joint: JointGraph, key: RandomKey, device: torch.device) -> Iterator[Callable[[], str]]:
    """Let a plain run of a step draw what its graph draws on a device, inside.

    Yields:
        A function that says afterwards which random operation was not that of the graph; "" if all were.
    """
    dice = _GraphDice(joint, key, device)
    with checkpoint_only(lambda: False), dice:  # the graph keeps what a checkpoint would compute again
        yield dice.unmatched


class _GraphDice(TorchDispatchMode):
    """Seed the generator before every random operation of a plain step as the captured graph does.

    Dropout of the plain step on a host is a `bernoulli_` where the graph has the fused operator; it gets that one's
    mask.

    Args:
        joint: the graph.
        key: key of the random numbers.
        device: where the graph draws.
    """

    def __init__(self, joint: JointGraph, key: RandomKey, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        random = [node for node in joint.module.graph.nodes if is_random(node)]
        self._expected = [operator_name(node) for node in random]
        self._by_batch = ["of_batch" in node.meta for node in random]
        self._key, self._device = key, device
        self._drawn = 0
        self._reason = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, with the numbers of the graph's if it is random."""
        kwargs = kwargs or {}
        if not draws(func, args, kwargs):
            return func(*args, **kwargs)
        number, name = self._drawn, _plain_name(func.__name__.partition(".")[0])
        self._drawn += 1
        expected = _plain_name(self._expected[number]) if number < len(self._expected) else "nothing"
        is_dropout = (name, expected) == ("bernoulli", "native_dropout")
        if name != expected and not is_dropout:
            self._note(f"draw {number + 1} is {name} in the plain step and {expected} in the graph")
        elif kwargs.get("generator") is not None:
            self._note(f"draw {number + 1} ({name}) is from a generator of the step's own")
        by_batch = number < len(self._by_batch) and self._by_batch[number]
        draw = keyed(_fill_with_mask if is_dropout else func, number, self._device, by_batch=by_batch)
        return draw(self._key, *args, **kwargs)

    def unmatched(self) -> str:
        """Return "" if all random operations were those of the graph, else which is not."""
        if not self._reason and self._drawn != len(self._expected):
            self._note(f"it makes {self._drawn} draws in the plain step and {len(self._expected)} in the graph")
        return self._reason

    def _note(self, reason: str) -> None:
        self._reason = self._reason or reason


def _fill_with_mask(noise: torch.Tensor, keep: float = 0.5, **_: Any) -> torch.Tensor:
    """Fill with the mask of the fused dropout."""
    return noise.copy_(torch.native_dropout(torch.ones_like(noise), 1 - keep, True)[1])


def _plain_name(name: str) -> str:
    """Return the name of a random operator without what tells whether it draws into a tensor of the caller."""
    return name.removesuffix("_").removesuffix("_functional")
