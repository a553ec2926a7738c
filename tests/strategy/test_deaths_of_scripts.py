"""Scripts end, and say why, where worlds of tests cannot show it: workers of loaders, ranks that a script forks."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from lightning_pipe import DappleStrategy

DEADLINE_S = 400.0  # of the whole script, on a busy machine

SCRIPT = """
import os, signal, sys, threading
import lightning.pytorch as pl
import torch
from lightning_pipe import DappleStrategy

WIDTH = 1024 if "computed" in sys.argv else 4

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if "worker" in sys.argv and index == 40:
            threading.Event().wait()
        return torch.ones(WIDTH)

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2)))
    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if "killed" in sys.argv and batch_idx == 1 and self.trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while "callback" in sys.argv and batch_idx == 1 and self.trainer.global_rank == 1:
            pass
        if "raised" in sys.argv and batch_idx == 1 and self.trainer.global_rank == 1:
            raise ZeroDivisionError("the user's mistake")
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

if "computed" in sys.argv:
    Net().training_step(torch.ones(64, WIDTH), 0).backward()
strategy = DappleStrategy(layout="1-1", microbatches=2, costs="counted", deadline_s=30.0, start_method="fork")
trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, logger=False,
                     enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Net(), torch.utils.data.DataLoader(Rows(), 8, num_workers=int("worker" in sys.argv)))
print("went on")
"""

STARTED = """
import sys
import lightning.pytorch as pl
import torch
from lightning_pipe import DappleStrategy

class Counting(torch.utils.data.DataLoader):
    at = 0
    def __iter__(self):
        for self.at, batch in enumerate(super().__iter__()):
            yield batch
    def state_dict(self):
        return {"at": self.at}
    def load_state_dict(self, state):
        pass

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(2)))
    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def trained(**options):
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
                         enable_progress_bar=False, enable_model_summary=False, **options)
    net, data = Net(), torch.arange(32.0).reshape(8, 4)
    trainer.fit(net, Counting(data, 4))
    return torch.cat([p.detach().flatten() for p in net.parameters()]), trainer

if __name__ == "__main__":
    options = dict(layout="1-1", microbatches=2, costs="counted", deadline_s=60.0, start_method=sys.argv[1])
    found, trainer = trained(devices=2, strategy=DappleStrategy(**options))
    expected, alone = trained(devices=1)
    torch.testing.assert_close(found, expected)
    assert trainer.global_step == alone.global_step and trainer.strategy.plan is not None
    print("went on")
"""


def output_of(folder: Path, what: str, script: str = SCRIPT) -> str:
    """Run a script with a (mis)behaviour; return what it printed, once every process of it has ended."""
    (folder / "script.py").write_text(script)
    mark = uuid.uuid4().hex
    command = [sys.executable, "script.py", what]
    environment = {**os.environ, "MARK_OF_TEST": mark, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "2"}
    with (folder / "output").open("wb") as output:
        script = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output)
    try:
        script.wait(DEADLINE_S)
        for pid in processes_with(mark):  # readable once they have ended; a guard has a last word to say
            wait_for(pid)
    finally:
        for pid in processes_with(mark):
            os.kill(pid, signal.SIGKILL)
        script.wait()
    output = (folder / "output").read_text()
    assert (script.returncode == 0) == ("went on" in output), output
    return output


def processes_with(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"MARK_OF_TEST={mark}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:  # it has ended
            continue
    return found


def wait_for(pid: int) -> None:
    import select

    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    assert select.select([process], [], [], DEADLINE_S)[0], f"process {pid} of the script is still there"
    os.close(process)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="processes are waited for by descriptors of Linux")
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("worker", ["rank 0 is outside a program, after the loading of a batch of step 4"]),
        ("callback", ["Rank 0 waits for ", "rank 1 is outside a program, after STEP of step 1"]),
        ("killed", ["Rank 1 died outside a program, after STEP of step 1"]),
        ("raised", ["Rank 1 failed outside a program, after STEP of step 1: ZeroDivisionError: the user's mistake"]),
    ],
)
def test_every_process_of_a_script_ends_and_its_terminal_names_the_rank(what: str, words: list[str], tmp_path: Path):
    output = output_of(tmp_path, what)
    assert "went on" not in output
    assert all(word in output for word in words), output
    assert "without a word" not in output or what == "killed", output


@pytest.mark.slow
def test_ranks_are_forked_from_a_notebook_that_has_computed(tmp_path: Path):
    """They waited for ever for threads of OpenMP that only the notebook's process has."""
    assert "went on" in output_of(tmp_path, "computed")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_a_script_trains_with_processes_of_every_start_method(method: str, tmp_path: Path):
    assert "went on" in output_of(tmp_path, method, STARTED)


def test_a_strategy_is_told_to_processes_that_are_spawned():
    strategy = DappleStrategy(layout="1-1", start_method="spawn")
    assert pickle.loads(pickle.dumps(strategy)).config == strategy.config
