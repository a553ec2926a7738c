"""What leaves for the host comes back as it was, and is gone in the meantime."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from lightning_pipe.capture.steps.stage_program import Half, RandomKey, StageProgram
from lightning_pipe.runtime.activations.away import send_away
from lightning_pipe.runtime.activations.cuda import PinnedHost
from lightning_pipe.runtime.activations.plain import FileHost
from lightning_pipe.runtime.activations.protocol import HostStore, StorageRange
from lightning_pipe.runtime.activations.trip import trip_s
from lightning_pipe.runtime.stage import Slice, Stage, State, slices_of
from runtime.fake_cuda import DEVICE, FakeCuda

FOREVER_S = 60.0


@pytest.fixture
def host():
    made = FileHost()
    yield made
    made.close()


def tensors() -> dict[str, torch.Tensor]:
    base = torch.arange(24, dtype=torch.float64).reshape(4, 6)
    return {
        "base": base,
        "view": base.t()[1:],
        "mask": torch.tensor([True, False, True]),
        "half": torch.full((3, 2), 1.5, dtype=torch.bfloat16),
        "none": torch.empty(0, 5),
        "number": torch.tensor(7),
    }


def test_tensors_come_back_with_their_forms_and_share_memory_as_before(host):
    wanted, away = tensors(), send_away(tensors(), host, slices={})
    away.parcel.fetch()
    assert away.parcel.returned.wait(FOREVER_S)
    found = away.tensors()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor) and found[name].stride() == tensor.stride(), name
    assert found["view"].untyped_storage().data_ptr() == found["base"].untyped_storage().data_ptr()


def test_of_a_loaded_batch_only_the_slice_leaves(host):
    batch = torch.arange(40.0).reshape(10, 4)
    part = batch[2:5]
    address = part.untyped_storage().data_ptr()
    away = send_away({"part": part}, host, slices={address: (part.data_ptr(), part.nbytes)})
    assert away.held() == {part.data_ptr(): part.nbytes}
    away.parcel.fetch()
    assert away.parcel.returned.wait(FOREVER_S)
    away.vacate()
    assert [*away.held().values()] == [part.nbytes]
    assert torch.equal(away.tensors()["part"], part)


def test_memory_is_gone_when_it_is_given_up_and_not_sooner(host):
    """So it is the program that decides what a rank holds, and nobody else holds it when the way out has ended."""
    content = torch.ones(1000)
    storage = content.untyped_storage()
    seen = weakref.ref(storage)
    away = send_away({"content": content}, host, slices={})
    del content, storage
    assert away.parcel.left.wait(FOREVER_S)
    assert [*away.held().values()] == [4000] and seen() is not None
    away.vacate()
    assert seen() is None and not away.held()


def test_memory_that_came_back_is_gone_with_the_tensors_although_the_parcel_is_there(host):
    """It stayed to the end of the step once, so that a run that offloads took more memory than one that keeps all."""
    away = send_away(tensors(), host, slices={})
    away.parcel.fetch()
    assert away.parcel.returned.wait(FOREVER_S)
    away.vacate()
    found = away.tensors()
    seen = [weakref.ref(tensor.untyped_storage()) for tensor in found.values()]
    found.clear()
    assert not any(one() for one in seen) and not away.held()
    assert len(away.parcel.spans()) == 2, "when it was copied is still known"


def test_places_in_the_file_are_used_again(host):
    for turn in range(5):
        away = send_away({"one": torch.full((100,), float(turn))}, host, slices={})
        away.parcel.fetch()
        assert away.parcel.returned.wait(FOREVER_S)
        assert away.tensors()["one"].unique().tolist() == [turn]
    assert host.place(400) == 0, "the only place of this size is free again"


def test_what_is_discarded_frees_its_place(host):
    away = send_away({"one": torch.ones(100)}, host, slices={})
    away.parcel.discard()
    host.close()  # when all is done
    away = send_away({"one": torch.zeros(100)}, host, slices={})
    away.parcel.fetch()
    assert away.parcel.returned.wait(FOREVER_S) and not away.tensors()["one"].any()


def test_a_copy_that_fails_is_an_error_where_it_is_waited_for(host, monkeypatch):
    def fail(content, place):
        raise OSError("no space left on device")

    monkeypatch.setattr(host, "write", fail)
    parcel = host.take([StorageRange(torch.ones(3).untyped_storage(), 0, 12)])
    parcel.fetch()
    with pytest.raises(RuntimeError, match="no space left"):
        parcel.returned.wait(FOREVER_S)


def test_a_trip_is_timed(host):
    assert trip_s(host, 1 << 16, device=torch.device("cpu")) > 0


ONE_SLICE = Slice(2, RandomKey(0, 0, 0), 1.0, 1.0)


def offloading_stage(device: torch.device, given: list[torch.Tensor]) -> Stage:
    """Return a stage that offloads a number of the host and a part of the batch; its backward adds them to `given`."""

    def forward(samples: int, key: RandomKey, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.tensor(7), x[:, 1:].t()

    def backward(samples: int, key: RandomKey, *saved: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given.extend(saved)
        return ()

    names = ("seed", "part")
    program = StageProgram(
        stage=0,
        parameters={},
        buffers={},
        leaves={"x": 0},
        tangents=(),
        forward=Half(("x",), names, forward),
        input_grad=Half(names, (), backward),
        weight_grad=None,
        receives={},
        sends={},
        mutations={},
        gradients={},
        results=(),
        offloaded=frozenset(names),
    )
    return Stage(program, {}, state=State({}, {}, device))


def given_back(stage_on: torch.device, batch: torch.Tensor, host: HostStore) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number and the part of the batch that a backward is given, which were offloaded after F."""
    given: list[torch.Tensor] = []
    stage = offloading_stage(stage_on, given)
    stage.begin(Counter(), training=True)
    leaf = batch[2:4]
    stage.load(0, {0: leaf})
    stage.compute("F", 0, ONE_SLICE)
    parcel = stage.evict(0, host, slices_of([leaf]))
    assert parcel.left.wait(FOREVER_S)
    stage.vacate(0)
    stage.fetch(0)
    assert parcel.returned.wait(FOREVER_S)
    stage.compute("I", 0, ONE_SLICE)
    seed, part = given
    return seed, part


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    with FakeCuda() as made:
        yield made


def test_what_was_on_the_host_stays_there_and_views_of_the_batch_come_back_as_they_were(fake: FakeCuda) -> None:
    """Seeds of attention came back on the device, where a kernel that reads them on the host finds no memory."""
    batch = torch.arange(40.0, device=DEVICE).reshape(10, 4)
    wanted = batch[2:4, 1:].t()
    seed, part = given_back(DEVICE, batch, PinnedHost(DEVICE))
    assert (seed.device, seed.dtype, seed.item()) == (torch.device("cpu"), torch.int64, 7)
    assert (part.device, part.dtype, part.stride()) == (DEVICE, wanted.dtype, wanted.stride())
    assert part.data_ptr() != wanted.data_ptr()
    assert part.tolist() == wanted.tolist()


def test_nothing_of_the_host_leaves_a_stage_of_another_device(host: FileHost) -> None:
    batch = torch.arange(40.0).reshape(10, 4)
    seed, part = given_back(torch.device("meta"), batch, host)
    assert (seed.device, seed.item()) == (torch.device("cpu"), 7)
    assert part.data_ptr() == batch[2:4, 1:].data_ptr()
