"""Whoever reaches a listener of a job without its token ends his own connection, and nothing else."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from lightning_pipe.runtime.callers import Callers, hello
from lightning_pipe.runtime.guard.client import GuardClient
from lightning_pipe.runtime.guard.failure import OUTSIDE
from lightning_pipe.runtime.guard.watch import Patience
from lightning_pipe.strategy.ranks import network_card
from ranks.strangers import listening, names_of, processes_of, strangers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="listeners are found in /proc")
ROOT = Path(__file__).parents[2]
COUNT = 1000
SCRIPT = """
import sys
import lightning.pytorch as pl
import torch
from lightning_pipe import DappleStrategy

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 1))
    def training_step(self, batch, batch_idx):
        return (self.layers(batch) - 1).square().mean()
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)

class Wait(pl.Callback):
    def on_train_batch_start(self, trainer, module, batch, number):
        if number == 2 and trainer.is_global_zero and trainer.world_size > 1:
            print("TRAINS", flush=True)
            sys.stdin.readline()

if __name__ == "__main__":
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    torch.set_default_dtype(torch.float64)
    data = [torch.randn(8, 6, generator=torch.Generator().manual_seed(k)) for k in range(6)]
    for ranks in (1, 2):
        strategy = "auto" if ranks == 1 else DappleStrategy(
            layout="1-1", microbatches=4, planner="uniform", costs="counted", cache="off", deadline_s=60, check=False
        )
        trainer = pl.Trainer(
            accelerator="cpu", devices=ranks, strategy=strategy, max_epochs=1, callbacks=[Wait()], **quiet
        )
        module = Net()
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=None))
        print("SAID", float(sum(p.detach().square().sum() for p in module.parameters())), flush=True)
"""


@pytest.fixture
def guards() -> Iterator[list[GuardClient]]:
    clients = [GuardClient(), GuardClient()]
    for rank, client in enumerate(clients):
        client.begin(rank, Patience(deadline_s=60).limits)
    yield clients
    for client in clients:
        client.end()
        client.close()


def test_strangers_neither_keep_a_guard_from_the_hub_nor_end_it(guards: list[GuardClient]) -> None:
    """One line from anybody who could reach its port ended the guard of rank 0, and with it the job."""
    hub = guards[0].host(["127.0.0.1"])
    (address, port), *others = hub["places"]
    assert not others and listening(guards[0]._process.pid) == [("127.0.0.1", port)]
    connect = partial(socket.create_connection, (address, port), timeout=1)
    with strangers(connect, COUNT) as reached:
        assert reached > COUNT // 2
        start = time.monotonic()
        guards[1].join(hub)
        with strangers(connect, COUNT, seed=1):
            guards[1].page.write(OUTSIDE, 3, b"the loading of a batch")
            while str(guards[0].where([1]).get(1)) != str(guards[1].page.state):
                assert time.monotonic() - start < 30, "rank 1 is not heard of"
    assert [client.failure for client in guards] == [None, None]


def test_who_says_nothing_is_turned_away_and_so_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    callers, call = Callers([listener], {1: b"t" * 32}.get), partial(socket.create_connection, listener.getsockname())
    silent = [call() for _ in range(300)]
    while len(callers._waiting) < 256:
        assert callers.known() == []
    for _ in range(100):
        assert callers.known() == [] and len(callers._waiting) == 256, "no more than so many wait"
    rank = call()
    rank.sendall(hello(b"t" * 32, 1))
    while not (found := callers.known()):
        pass
    assert [caller.rank for caller in found] == [1]
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 60)
    assert callers.known() == [] and not callers._waiting
    callers.close()
    for one in (*silent, rank, *(caller.connection for caller in found)):
        one.close()


def test_a_fit_on_one_host_listens_at_the_loopback_and_goes_on_among_strangers(tmp_path: Path) -> None:
    (tmp_path / "fit.py").write_text(SCRIPT)
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    job = subprocess.Popen([sys.executable, "fit.py"], cwd=tmp_path, env=environment, start_new_session=True, **pipes)
    assert job.stdin is not None and job.stdout is not None
    begun = []
    while "TRAINS" not in (line := job.stdout.readline()):
        begun.append(line)
        assert line, "".join(begun)
    found = {(pid, *place) for pid in processes_of(job.pid) for place in listening(pid)}
    of_guards = [p for p, words in processes_of(job.pid).items() if "runtime.guard.process" in words]
    names = {name for pid in processes_of(job.pid) for name in names_of(pid)}
    assert {address for _, address, _ in found} == {"127.0.0.1"}, found  # also torch's own: its store, and gloo's
    ports = [port for pid, _, port in found if pid in of_guards]
    assert len(of_guards) == 2 and len(ports) == 1 and names
    with strangers(partial(socket.create_connection, ("127.0.0.1", ports[0]), timeout=1), COUNT):
        for name in names:
            with strangers(partial(_to_name, name), COUNT // 10):
                pass
        job.stdin.write("\n")
        job.stdin.flush()
        rest, _ = job.communicate(timeout=120)
    assert job.returncode == 0, rest
    plain, *others = [float(x) for x in re.findall(r"SAID (\S+)", "".join(begun) + rest)]
    assert len(others) >= 2 and others == pytest.approx([plain] * len(others), rel=1e-12)


def _to_name(name: str) -> socket.socket:
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stranger.settimeout(1)
    stranger.connect(f"\0{name}")
    return stranger


@pytest.mark.parametrize(
    ("hosts", "main", "expected"),
    [
        (1, "10.9.8.7", ["127.0.0.1"]),
        (2, "localhost", ["127.0.0.1"]),
        (2, "10.1.1.1", ["10.1.1.1"]),
        (2, "10.9.8.7", ["10.1.1.1", "10.2.2.2"]),
    ],
)
def test_rank_0_listens_where_other_ranks_are_told_to_come(
    hosts: int, main: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", main)
    monkeypatch.setattr(network_card, "is_here", "10.1.1.1".__eq__)
    monkeypatch.setattr(network_card, "_addresses_of_cards", lambda: iter(["10.1.1.1", "10.2.2.2"]))
    assert network_card.own_addresses(hosts) == expected
