"""Capture of a step on all ranks together: its request, the batch that rank 0 traces with, its answers and refusals."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch

from lightning_pipe.capture import Request, Route
from lightning_pipe.capture.graphs.lengths import Lengths
from lightning_pipe.capture.python.places import Place
from lightning_pipe.capture.recording.settled_state import settled_state
from lightning_pipe.capture.recording.unit_trace import trace_units
from lightning_pipe.capture.recording.units import UnitTrace
from lightning_pipe.capture.text_fields import StringReads
from lightning_pipe.config import DappleConfig
from lightning_pipe.lightning_names import pl
from lightning_pipe.strategy.parameters.weights import Weights
from lightning_pipe.strategy.ranks.connections import Connections
from lightning_pipe.strategy.start.on_device import run_on_device
from lightning_pipe.strategy.steps.capture_route import captured_by, replayed
from lightning_pipe.strategy.steps.captured import Captured
from lightning_pipe.strategy.steps.kept_state import SettledState
from lightning_pipe.strategy.steps.step_calls import TRAINING, StepRequest

log = logging.getLogger(__name__)

T = TypeVar("T")
Contexts = Mapping[str, Callable[[], AbstractContextManager[Any]]]


@dataclass(frozen=True)
class RankSetup:
    """What the steps of a fit have on one rank.

    Attributes:
        module: the user's module.
        config: options.
        links: to the other ranks.
        weights: where parameters live.
        contexts: step method -> context that the step runs in (autocast, no_grad).
        device: where this rank computes.
    """

    module: pl.LightningModule
    config: DappleConfig
    links: Connections
    weights: Weights
    contexts: Contexts
    device: torch.device


class StepCapture:
    """Capture the steps of a module.

    Args:
        setup: of this rank.

    Attributes:
        may_skip: whether a training step may return None, which the first one may not.
    """

    def __init__(self, setup: RankSetup) -> None:
        self._setup = setup
        self._varying: dict[Any, Place] = {}
        self.may_skip = False

    def note_varying(self, slots: tuple[Place, ...]) -> None:
        """Remember places of numbers that change from step to step: graphs read them from now on."""
        self._varying.update((slot.place, slot) for slot in slots)

    def capture(
        self,
        call: StepRequest,
        samples: int | None,
        *,
        symbolic: bool = True,
        lengths: Lengths = frozenset(),
        reason: str = "",
        uncut: str = "",
        answered: tuple[bool, ...] = (),
    ) -> Captured:
        """Capture a step; by replay if there is a reason.

        Args:
            call: a call of it.
            samples: number of samples to trace with; None for a batch that is not cut.
            symbolic: whether the number of samples is a symbol of the graph.
            lengths: sizes that are symbols, too.
            reason: why it is replayed; "" if it need not be.
            uncut: why its batches are not cut, in words after "since"; "" if they may be.
            answered: truth values of the first questions that the step asks, where they are known.

        Raises:
            CaptureError: if it cannot be captured.
        """
        reader = StringReads()
        request = Request(
            module=self._setup.module,
            method=call.method,
            structure=replace(call.structure, template=reader.marked(call.structure.template)),
            arguments=call.arguments,
            samples=samples,
            batch_dim=self._setup.config.batch_dim,
            device=self._setup.device,
            context=self._setup.contexts[call.method],
            symbolic=symbolic,
            lengths=lengths,
            varying=tuple(self._varying.values()),
            may_skip=self.may_skip,
            answered=answered,
            whole_batch=self._setup.config.whole_batch,
            uncut=uncut,
            kept=None if self._setup.config.cache_dir is None else self._setup.config.cache_dir / "graphs",
        )
        request = replace(request, answers=self._agreed_answers(call, request))
        with torch.inference_mode(False):
            traced = partial(self._traced, call)
            if reason:
                found: Route = replayed(request, traced, reason=reason)
            else:
                found = captured_by(
                    self._setup.config.capture,
                    request,
                    traced=traced,
                    refusals=self._refusals,
                    settled=partial(self._settled, call),
                )
        captured = Captured(found, replace(request, answers=None), reader, call.structure.template)
        if call.method != TRAINING:  # which the head of the plan tells
            log.info(captured.told())
        return captured

    def _agreed_answers(self, call: StepRequest, asked: Request) -> Callable[[], tuple[bool, ...]] | None:
        """Return what asks rank 0 for truth values, where the whole module is for that long."""
        answers = call.answers
        if answers is None:
            return None

        def agreed_answers() -> tuple[bool, ...]:
            weights = self._setup.weights
            with weights.whole(placed=weights.room().placed):
                return self._setup.links.control.agreed(
                    lambda: answers(asked), source=0, what="the answers that the step asks of its tensors"
                )

        return agreed_answers

    def _refusals(self, refuses: bool) -> tuple[int, int]:
        """Return how many ranks refuse to make a graph of a step, and how many there are."""
        control = self._setup.links.control
        told = control.sum(torch.tensor(float(refuses)), what="whether the step can be one graph")
        return int(told), control.ranks

    def _traced(self, call: StepRequest, request: Request) -> UnitTrace:
        """Find the units of a step by a real run on rank 0."""
        run = partial(trace_units, parts=self._setup.links.control.ranks)
        return self._run_on_first(run, call, request, what="the units of the step")

    def _settled(self, call: StepRequest, request: Request) -> SettledState:
        """Return what a first call of the step leaves for good."""
        settled = self._run_on_first(settled_state, call, request, what="what a first call of the step leaves")
        return SettledState(settled, self._setup.module, self._setup.device)

    def _run_on_first(
        self, run: Callable[[Request, Sequence[torch.Tensor]], T], call: StepRequest, request: Request, *, what: str
    ) -> T:
        """Return what real runs of a step give on rank 0, where the whole module is for that long."""
        control = self._setup.links.control
        mine = None if call.tensors is None else [tensor.cpu() for tensor in call.tensors]
        tensors = control.to_first(mine, source=call.holder, what="the batch that the step is traced with")

        def ran() -> T:
            assert tensors is not None, "rank 0 was sent the batch"
            return run_on_device(run, request, tensors)

        weights = self._setup.weights
        with weights.whole(placed=weights.room().placed):
            return control.agreed(ran, source=0, what=what)
