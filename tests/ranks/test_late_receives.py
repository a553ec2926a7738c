"""Programs of ranks whose receives are launched late: the NCCL transport over gloo, whose host is never ahead."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from lightning_pipe.runtime.exchanges.groups import connect
from lightning_pipe.runtime.guard.watch import Unwatched
from lightning_pipe.runtime.transport.collectives import Collectives
from lightning_pipe.runtime.transport.device_works import ReceiveQueue
from lightning_pipe.runtime.transport.gloo import GlooTransport
from lightning_pipe.runtime.transport.nccl import NcclTransport
from lightning_pipe.runtime.transport.staged import StagedTransport
from lightning_pipe.schedule.verification.verify import verify
from lightning_pipe.strategy.ranks import connections
from lightning_pipe.strategy.steps.message_bounds import message_bounds
from ranks.pipelines import CPU, Case, capture_of, executor_of, job_of, module_of, plain_gradients, program_of, split_of
from ranks.test_process_group import CASES
from ranks.world import World
from strategy import fits

TIMEOUT_S = 60


class Moment:
    """What stands for an event of a device that has always come so far."""

    def record(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class Queue:
    """What stands for a stream of a device that runs what it is told at once."""

    def __init__(self, device: object = None) -> None: ...

    def wait_event(self, event: Moment) -> None: ...


@contextlib.contextmanager
def no_device() -> Iterator[None]:
    """Let the transport of a device run where there is none."""
    with pytest.MonkeyPatch.context() as patch:
        for name, fake in {
            "Event": Moment,
            "Stream": Queue,
            "stream": contextlib.nullcontext,
            "current_stream": lambda device=None: None,
            "mem_get_info": lambda device=None: (0, 0),
        }.items():
            patch.setattr(torch.cuda, name, fake)
        yield


def staged(device: torch.device, *, deadline_s: float = TIMEOUT_S) -> StagedTransport:
    """Return the transport of GPU ranks, with groups of gloo in the place of NCCL's: waiting on a stream is waiting."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    transport = NcclTransport(rank=rank, device=device, timeout_s=deadline_s)
    transport._collectives = Collectives("gloo", timeout_s=deadline_s, aborted=transport._aborted)
    return StagedTransport(transport, GlooTransport(rank=rank, ranks=ranks, timeout_s=deadline_s))


def gradients_of_two_runs(case: Case) -> list[dict[str, torch.Tensor | None]]:
    """Run a program over the host, then with late receives; return the gradients of each."""
    with no_device():
        return _gradients_of_two_runs(case)


def _gradients_of_two_runs(case: Case) -> list[dict[str, torch.Tensor | None]]:
    module = module_of(case)
    capture = capture_of(case, module)
    split = split_of(case, capture)
    program = verify(program_of(case, split), launches="late")
    transport = staged(CPU)
    connect(transport, [program])
    executor = executor_of(case, module, capture, split, transport)
    found = []
    for _ in range(2):
        module.zero_grad()
        most = message_bounds(program)[dist.get_rank()]
        executor.run(program, job_of(case), watch=Unwatched(), most_messages=most)  # type: ignore[arg-type]
        owned = {name for stage in executor.stages.values() for name in stage.program.gradients.values()}
        found.append({name: p.grad for name, p in module.named_parameters() if name in owned})
    transport.close()
    return found


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients_with_late_receives_equal_those_of_the_batch(case: Case) -> None:
    expected = plain_gradients(case, [(0, sum(case.sizes))])
    seen = set()
    for runs in World(case.layout.ranks).run(gradients_of_two_runs, case):
        for gradients in runs:
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-12, msg=name)
                seen.add(name)
    assert seen == set(expected)


@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1", "2bp"])
def test_so_it_is_under_schedules_with_other_orders(schedule: str) -> None:
    case = Case("Chain", ((0,), (1,), (2,)), sizes=(1,) * 6, schedule=schedule)
    test_gradients_with_late_receives_equal_those_of_the_batch(case)


def fit_with_late_receives(case: fits.Case) -> fits.Fitted:
    """Fit on all ranks of this world, as ranks with GPUs do."""
    with no_device(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(connections, "process_group_transport", staged)
        announced, announce = [], ReceiveQueue.announce
        patch.setattr(ReceiveQueue, "announce", lambda *args: announced.append(args) or announce(*args))
        fitted = fits.fit_as_pipeline(case)
        assert len(announced) > 100, "the probe, the rehearsal and all steps but the first come this way"
        return fitted


@pytest.mark.parametrize("layout", ["1-1", pytest.param("2", marks=pytest.mark.slow)])
def test_a_fit_that_measures_plans_clips_and_validates_is_that_of_ranks_whose_host_carries_messages(
    layout: str,
) -> None:
    """Probe, rehearsal, first runs over the host, late receives, and norms that are added up on the device."""
    options = {"layout": layout, "microbatches": 4 if layout == "1-1" else 1, "costs": "measured", "cache": "off"}
    case = fits.Case("parameter_groups", options, {"gradient_clip_val": 0.05}, epochs=2)
    both = zip(World(2).run(fit_with_late_receives, case), World(2).run(fits.fit_as_pipeline, case), strict=True)
    for late, plain in both:
        torch.testing.assert_close(late.losses, plain.losses, rtol=1e-9, atol=1e-12)
        for name, value in plain.parameters.items():
            torch.testing.assert_close(late.parameters[name], value, rtol=1e-9, atol=1e-12, msg=name)
