"""The routes by which a step becomes stages, as the strategy sees them: one protocol for `Capture` and `Replay`.

What differs between a graph and a replayed step is an attribute here, so that who runs steps asks no object for its
class:

    Capture     one graph of forward and backward: what the Python of the step did is fixed, and the plan decides what
                is saved for the backward
    Replay      the Python of the step is played in every stage of every batch: what it says is known afterwards
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from lightning_pipe.capture.capture import Capture
from lightning_pipe.capture.graphs.joint_graph import JointGraph
from lightning_pipe.capture.graphs.request import Request
from lightning_pipe.capture.python.places import Place
from lightning_pipe.capture.recording.units import Head, OutputRules
from lightning_pipe.capture.slicing.results import LateValue
from lightning_pipe.capture.steps.call_recording import StepRecording
from lightning_pipe.capture.steps.record import StepRecord
from lightning_pipe.capture.steps.stage_program import FIRST_KEY, NOT_HELD, RandomKey, Split
from lightning_pipe.capture.tracked.number_expressions import Situation
from lightning_pipe.core.graph import Graph
from lightning_pipe.core.policy import ActivationPolicy
from lightning_pipe.core.profile import Profile


class Plays(Protocol):
    """What the plays of a batch say: the Python of a step, run by stages for every micro-batch."""

    @property
    def speakers(self) -> tuple[int, ...]:
        """Return the stages whose plays say something."""
        ...

    @property
    def proportional(self) -> frozenset[tuple[str, ...]]:
        """Return the places of the numbers that the step returns or logs, and that are in proportion to the samples."""
        ...

    @property
    def output(self) -> OutputRules:
        """Return what is known of what the step outputs."""
        ...

    @property
    def mixing(self) -> tuple[str, ...]:
        """Return the paths of the sub-modules that mix samples: they return something else for parts of a batch."""
        ...

    @property
    def rows(self) -> Mapping[tuple[str, ...], int]:
        """Return the dimension along which what the step returns or logs has rows of samples, by place."""
        ...

    @property
    def head(self) -> Head:
        """Return what is run once per batch: "holds", "speaks" or ""."""
        ...

    @property
    def kept(self) -> str:
        """Name the state that the step keeps for its next call, where stages hand it on; "" if there is none."""
        ...

    @property
    def sets_first(self) -> frozenset[str]:
        """Return the names of the parameters that the first call of the step alone writes to, if that is known."""
        ...

    def unlike_law(self, plays: Sequence[tuple[int, StepRecording]]) -> str:
        """Return "" if plays with so many samples make their losses as was proven, else what they do."""
        ...

    def cut(self, sizes: tuple[int, ...]) -> None:
        """Take the samples of the micro-batches that come next."""
        ...

    def said(self) -> list[tuple[int, int, int, StepRecording]]:
        """Return (micro-batch, first sample, samples, words) of every play of the batch that says something."""
        ...

    def turn(self, turned: Mapping[str, bool]) -> None:
        """Have `requires_grad` as the step has left it where it came to its end, and hooks as one play has."""
        ...

    def late_changes(self) -> Mapping[str, int]:
        """Return, by name, how many plays of the batch have changed state that the traced run has not."""
        ...

    def leave_whole(self, reason: str) -> None:
        """Do not cut batches from now on; on all ranks."""
        ...


class Route(Protocol):
    """A step that can be cut into stages."""

    @property
    def graph(self) -> Graph:
        """Return what planners see."""
        ...

    @property
    def record(self) -> StepRecord:
        """Return what is known of the step's words before it runs."""
        ...

    @property
    def timing(self) -> Capture | Profile:
        """Return the seconds of the nodes, if a run has found them; else the graph whose operations are to be timed."""
        ...

    @property
    def general(self) -> JointGraph | None:
        """Return a traced graph that holds for other lengths of the batch too; None if there is none."""
        ...

    @property
    def plays(self) -> Plays | None:
        """Return what the plays of a batch say; None if nothing is played, and `record` says all.

        What the Python of a step did is fixed then: nothing that it read may change, batches may run ahead, and what
        is saved for the backward can be brought to the host until then.
        """
        ...

    @property
    def name(self) -> str:
        """Return the name of the route, as the option `capture` has it."""
        ...

    @property
    def identity(self) -> str:
        """Return a hash of all that the step is known to do, equal in every process; "" if that is not known."""
        ...

    @property
    def is_exact(self) -> bool:
        """Return whether micro-batches make the loss and the gradients of the batch, but for batch statistics."""
        ...

    @property
    def is_sliceable(self) -> bool:
        """Return whether replicas of a stage may share the samples of a micro-batch."""
        ...

    @property
    def whole(self) -> str:
        """Return why batches must not be cut, "" if they may be."""
        ...

    @property
    def writes(self) -> frozenset[str]:
        """Return the names of the parameters that every micro-batch writes to; those of buffers may be among them."""
        ...

    @property
    def late_values(self) -> tuple[LateValue, ...]:
        """Return how results are made which are not combined from those of micro-batches, but of other results."""
        ...

    @property
    def may_draw(self) -> bool:
        """Return whether the step may draw random numbers of torch."""
        ...

    @property
    def draws(self) -> tuple[str, ...]:
        """Name what the step draws at random, dropout aside, each with the user's line."""
        ...

    def buffers_by_parts(self) -> tuple[str, ...]:
        """Name the buffers that every micro-batch changes for its samples, but for batch statistics."""
        ...

    def told(self) -> str:
        """Return in a line by which route the step was captured, and why."""
        ...

    @property
    def by_parts(self) -> tuple[str, ...]:
        """Return the lines of results that are means over micro-batches."""
        ...

    def begin(self, arguments: tuple[int, ...], template: Any) -> list[float]:
        """Take what a batch brings besides tensors; return the tracked numbers that the stages read.

        Args:
            arguments: positional arguments of the step after the batch.
            template: the batch without its tensors.
        """
        ...

    def numbers(self, situation: Situation) -> list[float]:
        """Return the tracked numbers that the stages read, now or as they are foreseen for a later batch."""
        ...

    @property
    def number_names(self) -> list[str]:
        """Return where each of these numbers comes from, as the user would write it."""
        ...

    def changed(self, situation: Situation) -> str:
        """Return "" if what the step's Python read is as it was, else what has changed."""
        ...

    def varying(self) -> tuple[Place, ...]:
        """List the places of numbers that the step read and that have become other numbers."""
        ...

    def testimony(self, request: Request) -> str:
        """Return "" if the step's Python does now what it did when it was captured, else what."""
        ...

    def for_lengths(self, request: Request) -> Route | None:
        """Return the step for other lengths of its batch, if what was captured holds for them."""
        ...

    def misfit(self, samples: int) -> str:
        """Return "" if slices of this many samples can be run, else why not."""
        ...

    def misfit_of_results(self, samples: int) -> str:
        """Return "" if results of a batch of this many samples are made as far as was found, else why not."""
        ...

    def left_whole(self, reason: str) -> Route:
        """Return the same step for batches that are not cut, for a reason (" since ...")."""
        ...

    def with_totals(
        self,
        leaves: Sequence[Any],
        *,
        cut: Sequence[bool],
        sizes: Sequence[int],
        buffers: Mapping[str, torch.Tensor],
        key: RandomKey = FIRST_KEY,
    ) -> tuple[tuple[Any, ...], tuple[bool, ...]]:
        """Return the leaves of a whole batch as stages read them, and which are cut."""
        ...

    def split(
        self,
        cuts: tuple[int, ...],
        *,
        policies: Sequence[ActivationPolicy] = (),
        exact_ties: bool = False,
        held: Mapping[str, Set[int]] = NOT_HELD,
        reads_twice: bool = False,
    ) -> Split:
        """Cut the step before the nodes at these positions; `()` is one stage."""
        ...

    def matched_draws(self, request: Request, key: RandomKey) -> AbstractContextManager[Callable[[], str]]:
        """Let a plain run of the step draw the random numbers that the captured one draws, inside.

        Yields:
            A function that says afterwards why the numbers were not the same; "" if they were.
        """
        ...
