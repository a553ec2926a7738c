"""No optimizer steps once a rank has heard of a failure, whatever its sums read as."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_pipe.runtime.guard.failure import Failure
from lightning_pipe.runtime.guard.guarded_watch import GuardedWatch
from lightning_pipe.runtime.guard.watch import Patience, PeerFailure
from lightning_pipe.runtime.transport.local import Hub, LocalTransport
from lightning_pipe.runtime.transport.protocol import Group
from lightning_pipe.runtime.waiting import Done, Handle
from lightning_pipe.strategy.parameters.weights import Weights
from lightning_pipe.strategy.ranks.connections import Connections
from lightning_pipe.strategy.ranks.control_plane import ControlPlane
from lightning_pipe.strategy.steps.runner import Runner
from ranks.pipelines import CPU, Case, capture_of, executor_of, job_of, module_of, program_of, split_of
from runtime.guards import Aborted, Told

CASE = Case("Chain", ((0, 1),), cuts=())  # two replicas, of which the second fails


class Sums(LocalTransport):
    """A transport with a handle of the test's for every sum."""

    def __init__(self, make: Callable[[], Handle]) -> None:
        super().__init__(Hub(), 0)
        self.make = make

    def all_reduce(self, tensor: torch.Tensor, *, group: Group) -> Handle:
        return self.make()


class Trained:
    """The first of two replicas, and how often its optimizer has stepped."""

    def __init__(self, guard: Told, handle: Callable[[], Handle]) -> None:
        module = module_of(CASE)
        capture = capture_of(CASE, module)
        split = split_of(CASE, capture)
        self.parameters, self.steps = list(module.parameters()), 0
        self.program = program_of(CASE, split)
        self.watch = GuardedWatch(guard, rank=0, ranks=2, patience=Patience(parting_s=0.1))  # type: ignore[arg-type]
        self.transport = Sums(handle)
        self.executor = executor_of(CASE, module, capture, split, self.transport, self.step)

    def step(self) -> None:
        self.steps += 1

    def run(self, *, leave_sums: bool = False) -> None:
        self.executor.run(self.program, job_of(CASE), watch=self.watch, leave_sums=leave_sums)


def test_no_optimizer_steps_with_sums_that_end_after_a_failure_was_heard() -> None:
    guard = Told()
    trained = Trained(guard, lambda: Aborted(guard))
    with pytest.raises(PeerFailure, match="Rank 1 failed at 1F0 of step 7"):
        trained.run()
    assert trained.steps == 0


def test_no_optimizer_steps_if_the_device_comes_to_an_aborted_sum_that_its_stream_waits_for() -> None:
    guard = Told()
    trained = Trained(guard, Done)
    trained.transport.reached = lambda: Aborted(guard)  # type: ignore[method-assign]
    with pytest.raises(PeerFailure, match="Rank 1 failed at 1F0 of step 7"):
        trained.run()
    assert trained.steps == 0


def test_no_optimizer_steps_if_a_failure_is_heard_behind_the_last_sum() -> None:
    guard = Told()
    trained = Trained(guard, Done)
    stage = trained.executor.stages[0]
    finish = stage.finish

    def hear() -> None:
        finish()
        guard.failure = Failure(1, "at 1F0 of step 7", "ValueError: user")

    stage.finish = hear  # type: ignore[method-assign]
    with pytest.raises(PeerFailure, match="Rank 1 failed at 1F0 of step 7"):
        trained.run()
    assert trained.steps == 0


@pytest.mark.parametrize("on_device", [False, True])
def test_no_parameters_step_with_sums_that_were_left_and_end_after_a_failure_was_heard(on_device: bool) -> None:
    guard = Told()
    left: Handle = Done() if on_device else Aborted(guard)
    handles: list[Handle] = [Done(), left]
    trained = Trained(guard, lambda: handles.pop(0))
    trained.executor._gradients._piece_bytes = 1
    handles += [left] * len(trained.parameters)
    trained.run(leave_sums=True)
    if on_device:  # whose stream waits for the sums, but not the host
        trained.transport.reached = lambda: Aborted(guard)  # type: ignore[method-assign]
    control = ControlPlane(None, rank=0, ranks=1, wait=trained.watch.wait)
    links: Any = Connections(trained.transport, control, trained.watch)
    runner = Runner(links, weights=Weights(module_of(CASE), control), later=None, batch_dim=0, device=CPU)
    leaving: Any = trained
    runner._leaving = leaving
    with pytest.raises(PeerFailure, match="Rank 1 failed at 1F0 of step 7"):
        runner.land(trained.step, among=trained.parameters)
    assert trained.steps == 1, "that of the executor, with the first sum"
