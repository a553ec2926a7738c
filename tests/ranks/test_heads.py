"""A head over gloo: gradients and results of the whole batch, and an end for everybody if a rank dies in it."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from lightning_pipe.errors import PipelineError
from lightning_pipe.runtime.exchanges.groups import connect
from lightning_pipe.runtime.exchanges.results import Results
from lightning_pipe.runtime.guard.watch import Unwatched
from lightning_pipe.runtime.transport.process_group import process_group_transport
from lightning_pipe.runtime.waiting import drive
from lightning_pipe.strategy.ranks.connections import begin_watch, meet_guards
from ranks.headed import HeadCase, executor_of, job_of, parameters_of, plain, program_of, split_of
from ranks.pipelines import CPU
from ranks.world import Died, Returned, World

CASES = {
    "contrast": HeadCase("contrast", ((0,), (1, 2)), (4, 3, 1)),
    "root": HeadCase("root", ((0,), (1,), (2,)), (3, 1)),
    "mean": HeadCase("mean", ((0,), (1, 2)), (4, 3, 2), "1f1b", weights=((1,), (1, 3))),
}


def gradients_and_result(case: HeadCase) -> tuple[dict[str, torch.Tensor | None], torch.Tensor]:
    parameters, program = parameters_of(case), program_of(case)
    transport = process_group_transport(CPU, deadline_s=20)
    connect(transport, [program])
    executor = executor_of(case, parameters, transport)
    outcome = executor.run(program, job_of(case))
    results = Results(split_of(case), case.layout, transport=transport, device=CPU)
    collected = drive(results.collect(program, outcome.results, ["told"]), wait=Unwatched().wait)
    transport.close()
    owned = {name for stage in executor.stages.values() for name in stage.program.gradients.values()}
    return {name: parameters[name].grad for name in owned}, collected.values["told"]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients_and_results_over_gloo_are_those_of_the_whole_batch(case: HeadCase) -> None:
    expected, expected_result = plain(case)
    for gradients, result in World(3).run(gradients_and_result, case):
        torch.testing.assert_close(result, expected_result, rtol=0, atol=1e-12)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-12, msg=name)


def die_at_the_head(case: HeadCase) -> tuple[str, float]:
    """Return what this rank says of the last rank's end, and the seconds that it took."""
    rank, program = dist.get_rank(), program_of(case)
    transport = process_group_transport(CPU)
    connect(transport, [program])
    executor = executor_of(case, parameters_of(case), transport)
    if rank == 2:
        executor.stages[1].run_head = lambda *inputs: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    watch = begin_watch(rank, dist.get_world_size(), deadline_s=60.0)
    meet_guards(watch, dist.group.WORLD.get_group_store(), start=time.monotonic())
    begin = time.monotonic()
    try:
        executor.run(program, job_of(case), watch=watch)
    except PipelineError as error:
        return str(error), time.monotonic() - begin
    finally:
        watch.close()
    return "all went well", time.monotonic() - begin


def test_every_rank_names_the_rank_that_was_killed_at_its_head() -> None:
    *others, killed = World(3).results(die_at_the_head, CASES["contrast"])
    assert isinstance(killed, Died) and killed.exitcode == -signal.SIGKILL
    for result in others:
        assert isinstance(result, Returned)
        text, seconds = result.value
        assert "Rank 2 died at HEAD of step 0: its process has ended without a word" in text
        assert seconds < 20.0
