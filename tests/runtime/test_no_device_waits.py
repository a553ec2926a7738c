"""Nothing waits for a device while a program runs.

Where a message may be under way on a stream of the device, whoever waits for the device, or calls what makes the driver
wait for it, may wait for a peer that waits for this rank. The programs run on a fake device, over the local transport.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_pipe
from lightning_pipe.capture import Capture
from lightning_pipe.capture.device_streams import finish_stream
from lightning_pipe.capture.stages.compiled_stages import CompiledStages
from lightning_pipe.capture.stages.cuda_recorder import CudaRecorder
from lightning_pipe.capture.steps.stage_program import Split, StageProgram
from lightning_pipe.core.milestones import Confirm, Publish, Rollback
from lightning_pipe.core.policy import ActivationPolicy
from lightning_pipe.core.program import Instruction, VerifiedProgram
from lightning_pipe.runtime.exchanges.results import Collected, Results
from lightning_pipe.runtime.executor import Executor
from lightning_pipe.runtime.guard.watch import Unwatched
from lightning_pipe.runtime.job import BatchInput
from lightning_pipe.runtime.milestones import at_once
from lightning_pipe.runtime.stage import State
from lightning_pipe.runtime.transport.local import Hub
from lightning_pipe.runtime.waiting import Wait, Walk, drive_together
from ranks.pipelines import Case, capture_of, job_of, module_of, plain_gradients, program_of, split_of
from runtime.fake_cuda import DEVICE, FakeCuda

HOST = torch.device("cpu")
OUT, BACK = {1, 3, 5}, {2, 4, 6}  # streams of three ranks that offload
EARLY = {
    "compute": {0},
    "compute and out": {0} | OUT,
    "out": OUT,
    "back": BACK,
    "copies": OUT | BACK,
    "none": set[int](),
}
CASES = {
    "1f1b": Case("Chain", ((0,), (1,), (2,)), sizes=(2, 2, 2, 1)),
    "zb_h1": Case("Skip", ((0,), (1,), (2,)), schedule="zb_h1"),
    "two stages on one rank": Case("Chain", ((0,), (1,), (0,))),
    "replicas": Case("Chain", ((0, 1), (2,)), ("second",)),
    "tied": Case("Tied", ((0,), (1,), (2,))),
    "batch norm": Case("Normed", ((0,), (1,), (2,)), sizes=(3, 2)),
}


class Rank:
    """A rank on the fake device, which notes what its host calls between the first instruction and the step.

    Args:
        beside: where ranks add the numbers of their results.

    Attributes:
        calls: these, of the last program.
    """

    def __init__(
        self, fake: FakeCuda, case: Case, split: Split, hub: Hub, beside: Hub, rank: int, *, loss: str | None
    ) -> None:
        self._fake, self._seen = fake, 0
        self.calls: list[str] = []
        self.has_begun = self.has_stepped = False
        self.module = module_of(case).to(DEVICE)
        state = State(dict(self.module.named_parameters()), dict(self.module.named_buffers()), DEVICE)
        transport = hub.endpoint(rank)
        self.names = [*split.owners]
        self.executor = Executor(split, case.layout, state=state, transport=transport, loss=loss, step=self._step)
        self.results = Results(
            split, case.layout, transport=transport, device=DEVICE, carrier=HOST, sums=beside.endpoint(rank)
        )

    def run(self, program: VerifiedProgram, job: BatchInput, *, record: bool) -> Walk[Collected]:
        """Run a program and collect its results, which are told in the middle."""
        self.calls, self.has_begun, self.has_stepped = [], False, False
        told: list[Walk[Collected]] = []

        def publish(pieces: Any) -> None:
            told.append(self.results.collect(program, pieces, self.names))

        walk = self.executor.walk(
            program,
            job,
            record=record,
            record_memory=record,
            watch=_Begun(self),
            milestones={Publish: at_once(publish), Confirm: lambda results: _holds(), Rollback: at_once(_nothing)},
        )
        yield from self._noted(walk)
        return (yield from told[0])

    def begin(self) -> None:
        """Note the first instruction of a program."""
        if not self.has_begun:
            self.has_begun, self._seen = True, len(self._fake.calls)

    def _step(self) -> None:
        self._note()
        self.has_stepped = True

    def _note(self) -> None:
        if self.has_begun and not self.has_stepped:
            self.calls += self._fake.calls[self._seen :]

    def _noted(self, walk: Walk[Any]) -> Walk[Any]:
        """Walk, and note what is called while this rank runs: others run in this thread, too."""
        while True:
            self._seen = len(self._fake.calls)
            try:
                pending = next(walk)
            except StopIteration as stop:
                return stop.value
            self._note()
            yield pending


class _Begun(Unwatched):
    """Tells a rank of the instructions of its program."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def at(self, instruction: Instruction, *, pending: bool = False) -> None:
        self._rank.begin()


def _nothing(pieces: Any) -> None:
    """Take no step back."""


def _holds() -> Generator[Wait, None, bool]:
    yield from ()
    return True


@cache
def captured(case: Case) -> tuple[Capture, Split]:
    """Return the step of a case, and its stages."""
    capture = capture_of(case, module_of(case))
    return capture, split_of(case, capture)


def assert_nothing_waits(
    case: Case,
    early: set[int],
    *,
    record: bool,
    split: Split | None = None,
    graphs: bool = False,
    programs: int = 2,
) -> None:
    """Run programs on the fake device, the last of which must wait for nothing and have the plain module's gradients.

    Args:
        case: the module and its layout.
        early: streams that run early.
        record: whether timelines are recorded.
        split: stages of the case; by default those that keep everything.
        graphs: whether what stages launch is recorded, in the first program that runs.
        programs: how many run: pinned memory is made in the first, whose messages go over the host.
    """
    capture, keeping = captured(case)
    split = split or keeping
    loss, is_exact = str(capture.record.loss), all(len(ranks) == 1 for ranks in case.layout.stages)
    expected = plain_gradients(case, () if is_exact else [(0, sum(case.sizes))])
    program = program_of(case, split, milestones=True)
    with FakeCuda(early) as fake:
        split = recorded_stages(split, case.sizes) if graphs else split
        hub, beside = Hub(), Hub()
        ranks = [Rank(fake, case, split, hub, beside, rank, loss=loss) for rank in range(case.layout.ranks)]
        job = replace(job_of(case), leaves=tuple(leaf.to(DEVICE) for leaf in job_of(case).leaves))
        for _ in range(programs):
            for rank in ranks:
                rank.module.zero_grad()
            collected = drive_together([rank.run(program, job, record=record) for rank in ranks])
        assert [rank.calls for rank in ranks] == [[]] * len(ranks)
        assert all(rank.has_stepped for rank in ranks)
        assert len({result.values[loss].item() for result in collected}) == 1
        for rank in ranks:
            for name in {name for stage in rank.executor.stages.values() for name in stage.program.gradients.values()}:
                gradient = rank.module.get_parameter(name).grad.cpu()
                torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-12, msg=name)


def recorded_stages(split: Split, sizes: Sequence[int]) -> Split:
    """Return stages whose launches are recorded when they first run."""
    stages = CompiledStages(split, DEVICE, trials=False, kernels=False, recorder=CudaRecorder(DEVICE))
    for stage in split.stages:
        for kind, size in product(("F", "I", "W"), {*sizes}):
            stages.compile(stage.stage, kind, size)
    return stages.split


@pytest.mark.parametrize("early", [{0}, set()], ids=["compute is early", "compute is late"])
@pytest.mark.parametrize("record", [False, True], ids=["unrecorded", "recorded"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_program_waits_for_no_device_between_its_first_instruction_and_its_step(
    case: Case, record: bool, early: set[int]
) -> None:
    assert_nothing_waits(case, early, record=record)


@pytest.mark.parametrize("early", [{0}, set()], ids=["compute is early", "compute is late"])
def test_nor_does_one_whose_launches_are_recorded_while_it_runs(early: set[int]) -> None:
    assert_nothing_waits(CASES["1f1b"], early, record=False, graphs=True)


@pytest.mark.parametrize("early", EARLY.values(), ids=EARLY)
def test_nor_does_one_that_offloads(early: set[int]) -> None:
    case = Case("Chain", ((0,), (1,), (2,)), sizes=(1,) * 6)
    capture, split = captured(case)
    policies = [ActivationPolicy(offloaded=read_later(stage)) for stage in split.stages]
    cuts = tuple(capture.graph.position(at) for at in case.cuts)
    assert_nothing_waits(case, early, record=True, split=capture.split(cuts, policies=policies))


def read_later(stage: StageProgram) -> tuple[str, ...]:
    """Name what F makes for the backward."""
    halves = [half for half in (stage.input_grad, stage.weight_grad) if half is not None]
    return tuple(name for name in stage.forward.outputs if any(name in half.inputs for half in halves))


MAY_WAIT = {"profiler/network/link_probe.py"}  # no program runs then


def test_the_package_waits_for_streams_and_not_for_devices() -> None:
    root = Path(lightning_pipe.__file__).parent
    waiting = [path for path in root.rglob("*.py") if re.search(r"\bcuda\.synchronize\(", path.read_text())]
    assert {path.relative_to(root).as_posix() for path in waiting} <= MAY_WAIT


def test_waiting_for_a_stream_leaves_the_others_alone() -> None:
    with FakeCuda(set()) as fake:
        side, content = torch.cuda.Stream(), torch.ones(3, device=DEVICE)
        with torch.cuda.stream(side):
            content.add_(1)
        finish_stream(DEVICE)
        assert [stream.queued - stream.done for stream in fake.streams] == [0, 1]
        finish_stream(HOST)
        assert fake.calls == ["Stream.synchronize"]
