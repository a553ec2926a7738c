"""What a waiting rank hears of its peers, with peers that exist only in the store."""

import json
import threading
from collections.abc import Iterator
from dataclasses import asdict

import pytest
import torch.distributed as dist

from lightning_pipe.core.program import Compute, Message, Recv, Reduce, Samples
from lightning_pipe.errors import PipelineError
from lightning_pipe.runtime.store_watch import Beat, Failure, StoreWatch
from lightning_pipe.runtime.waiting import Done, Wait
from lightning_pipe.runtime.watch import Patience, PeerFailure

QUICK = Patience(deadline_s=0.8, stale_s=0.3, grace_s=30, beat_s=0.25, parting_s=0.3)
RECEIVE = Recv(Message("F", 0, 1, 2, Samples(0, 4)), 1)


class Never:
    """A handle of something that never comes."""

    def wait(self, timeout_s: float) -> bool:
        return threading.Event().wait(timeout_s)

    def landed(self) -> bool:
        return False


class Broken(Never):
    """A handle whose connection is lost."""

    def wait(self, timeout_s: float) -> bool:
        raise RuntimeError("Connection closed by peer")


@pytest.fixture
def store() -> dist.HashStore:
    return dist.HashStore()


@pytest.fixture
def watch(store: dist.HashStore) -> Iterator[StoreWatch]:
    watch = StoreWatch(store, rank=0, ranks=2, peers=[0, 1], patience=QUICK)
    yield watch
    watch.close()


def beat(store: dist.HashStore, **changes: object) -> None:
    known = asdict(Beat(count=1, inside=True, step=7, at=str(Compute(0, "F", 2))))
    store.set("beat/1", json.dumps({**known, **changes}))


def test_what_is_there_is_not_waited_for(watch: StoreWatch) -> None:
    with watch.program(0):
        watch.at(Reduce(0))
        watch.wait(Wait(Done(), RECEIVE))


def test_a_silent_peer_outside_a_program_is_not_taken_for_dead_and_the_deadline_names_it(
    store: dist.HashStore, watch: StoreWatch
) -> None:
    beat(store, inside=False)
    expected = (
        r"Rank 0 waits for stage 0, micro-batch 2, direction F from rank 1 .* 0\.8 s; rank 1 is outside a program"
    )
    with pytest.raises(PipelineError, match=expected), watch.program(7):
        watch.wait(Wait(Never(), RECEIVE))


def test_a_silent_peer_inside_a_program_is_named_with_its_last_instruction(
    store: dist.HashStore, watch: StoreWatch
) -> None:
    beat(store)
    with pytest.raises(PeerFailure, match=r"Rank 1 failed at 0F2 of step 7: no sign of life"), watch.program(7):
        watch.wait(Wait(Never(), RECEIVE))


def test_a_lost_connection_names_the_peer_and_its_last_instruction(store: dist.HashStore, watch: StoreWatch) -> None:
    beat(store)
    with pytest.raises(PeerFailure, match=r"Rank 1 failed at .*Connection closed"), watch.program(7):
        watch.wait(Wait(Broken(), RECEIVE))


def test_the_failure_of_another_rank_is_raised_instead_of_its_consequence(
    store: dist.HashStore, watch: StoreWatch
) -> None:
    store.set("failure", json.dumps(asdict(Failure(1, 7, "1F0", "ValueError: user", "train.py:3"))))
    expected = "Rank 1 failed at 1F0 of step 7: ValueError: user\ntrain.py:3"
    with pytest.raises(PeerFailure, match=expected), watch.program(7):
        watch.wait(Wait(Broken(), RECEIVE))
    with pytest.raises(PeerFailure, match=expected), watch.program(8):
        pass


def test_the_first_failure_wins(store: dist.HashStore, watch: StoreWatch) -> None:
    watch.at(Compute(0, "F", 1))
    with pytest.raises(KeyError), watch.program(3):
        raise KeyError("mine")
    first = json.loads(store.get("failure"))
    assert (first["rank"], first["step"], first["at"], first["cause"]) == (0, 3, "0F1", "KeyError: 'mine'")
    assert "test_store_watch.py" in first["lines"]
    later = StoreWatch(store, rank=1, ranks=2, peers=[0], patience=QUICK)
    with pytest.raises((KeyError, PeerFailure)), later.program(3):
        raise KeyError("theirs")
    assert json.loads(store.get("failure")) == first
    later.close()


class GoneStore:
    """The store of a rendezvous whose host has died."""

    def __getattr__(self, name: str) -> object:
        raise RuntimeError("Broken pipe")


def test_a_lost_store_ends_the_wait() -> None:
    watch = StoreWatch(GoneStore(), rank=0, ranks=2, peers=[1], patience=QUICK)
    with pytest.raises(PeerFailure, match=r"store of the rendezvous is gone.*Broken pipe"), watch.program(0):
        watch.wait(Wait(Never(), RECEIVE))
    watch.close()
