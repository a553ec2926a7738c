"""An uncaught error prints the user's lines, on the rank that raised it; other ranks print one line.

Whatever raises it and whoever starts the ranks: the last screen of the terminal has the user's line and text.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from lightning_pipe.errors import ConfigError, StepError, UnsupportedError
from lightning_pipe.runtime.guard.watch import PeerFailure
from lightning_pipe.strategy.ranks.shown_errors import raised_on, show_errors, tell_launcher
from models.parity import make_loader, make_module
from strategy.fits import dapple, make_trainer

SCREEN = 25  # lines of a terminal
SCRIPT = """
import os, signal, sys
import lightning.pytorch as pl
import torch
from lightning_pipe import DappleStrategy

CASE, RANK = sys.argv[1], int(sys.argv[2])

def fail(where, batch_idx=3):
    rank = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", 0)))
    if where == CASE and batch_idx == 3 and RANK in (rank, -1):
        raise ValueError("boom")

class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        fail("backward")
        return gradient

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(2)))
    def training_step(self, batch, batch_idx):
        fail("step", batch_idx)
        return Backward.apply(self.net(batch)).square().mean()
    def validation_step(self, batch, batch_idx):
        fail("validation")
        self.log("loss", self.net(batch).mean())
    def on_train_batch_end(self, outputs, batch, batch_idx):
        fail("hook", batch_idx)
        if CASE == "interrupted" and batch_idx == 3 and self.trainer.global_rank == RANK:
            os.kill(os.getpid(), signal.SIGINT)
    def configure_optimizers(self):
        fail("optimizers")
        kind = torch.optim.LBFGS if CASE == "refused" else torch.optim.SGD
        return kind(self.parameters(), lr=0.1)

def collate(rows, batches=iter(range(100))):
    fail("collate", next(batches))
    return torch.stack(rows)

strategy = DappleStrategy(layout="1-1", microbatches=2, costs="counted", check=False, cache="off")
trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, logger=False,
                     num_sanity_val_steps=0, enable_checkpointing=False, enable_model_summary=False)
data = torch.utils.data.DataLoader(list(torch.ones(48, 4)), 8, collate_fn=collate, num_workers=int(sys.argv[3]))
trainer.fit(Net(), data, data if CASE == "validation" else None)
"""

TRACE = (
    "Rank 1 failed in F0: ValueError: boom\n"
    '  File "/env/site-packages/lightning/pytorch/trainer/trainer.py", line 1, in fit\n    self.run()\n'
    '  File "/home/me/train.py", line 2, in training_step\n    raise ValueError("boom")\nValueError: boom'
)


def of_user() -> None:
    raise ValueError("boom")


def of_torch() -> None:
    nn.functional.cross_entropy(torch.zeros(3, 2), torch.zeros(4, dtype=torch.long))


def through_libraries() -> None:
    hook = nn.Linear(1, 1)
    hook.register_forward_pre_hook(lambda *_: of_user())
    hook(torch.zeros(1))


def behind_another() -> None:
    try:
        through_libraries()
    except ValueError as error:
        raise RuntimeError("after it") from error


def refused() -> None:
    raise ConfigError("What was asked for is refused.")


def of_step() -> None:
    try:
        through_libraries()
    except ValueError as error:
        raise StepError("training_step raises ValueError: boom.") from error


def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, **env: str) -> str:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    show_errors(rank=0, ranks=2)
    show_errors(rank=1, ranks=2)  # as after the process group is joined
    sys.excepthook(type(error), error, error.__traceback__)
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("call", "said", "is_hidden"),
    [
        (of_user, "ValueError: boom", False),
        (of_torch, "Expected input batch_size (3) to match target batch_size (4).", False),
        (through_libraries, "ValueError: boom", True),
        (behind_another, "RuntimeError: after it", True),
        (refused, "What was asked for is refused.", False),
        (of_step, "StepError: training_step raises ValueError: boom.", True),
    ],
)
def test_the_raising_rank_shows_the_users_lines(monkeypatch, capsys, call, said, is_hidden) -> None:
    with pytest.raises(Exception) as raised:  # noqa: PT011 - of any kind
        call()
    text = shown(monkeypatch, capsys, raised.value)
    assert text.splitlines()[-2 if is_hidden else -1].endswith(said)
    assert f"in {call.__name__}" in text and "module.py" not in text
    assert ("frames of libraries are hidden" in text) == is_hidden


def test_all_frames_are_shown_where_wanted(monkeypatch, capsys) -> None:
    with pytest.raises(ValueError, match="boom") as raised:
        through_libraries()
    assert "module.py" in shown(monkeypatch, capsys, raised.value, LIGHTNING_PIPE_TRACEBACK="full")


@pytest.mark.parametrize("error", [PeerFailure(TRACE), raised_on(ValueError("boom"), 0)])
def test_other_ranks_say_in_a_line_who_has_failed(monkeypatch, capsys, error) -> None:
    text = shown(monkeypatch, capsys, error)
    assert text.startswith("[rank1] stopped. Rank") and "ValueError: boom" in text
    assert "Traceback" not in text and "site-packages" not in text
    assert ("train.py" in text) == isinstance(error, PeerFailure)


def test_a_refusal_that_all_ranks_raise_has_a_line_on_the_others(monkeypatch, capsys) -> None:
    text = shown(monkeypatch, capsys, UnsupportedError("LBFGS is refused."))
    assert text == "[rank1] stopped. UnsupportedError: LBFGS is refused.\n"


@pytest.mark.parametrize("root", [0, 1])
def test_torchs_launcher_shows_the_error_of_the_rank_that_raised_it_first(monkeypatch, tmp_path, root) -> None:
    with pytest.raises(ValueError, match="boom") as raised:
        of_user()
    failures = {}
    for rank in (root, 1 - root):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / str(rank)))
        tell_launcher(raised.value if rank == root else PeerFailure(TRACE), rank=rank, ranks=2)
        failures[rank] = ProcessFailure(rank, 1, 1, str(tmp_path / str(rank)))
    said = str(ChildFailedError("train.py", dict(sorted(failures.items()))))
    others, first = said.split("Root Cause")
    assert "in of_user" in first and f"rank      : {root}" in first
    assert "stopped. Rank 1 failed in F0: ValueError: boom (/home/me/train.py:2 in training_step)" in others


def test_the_error_of_a_step_that_is_captured_keeps_its_lines(monkeypatch) -> None:
    def failing(*_: object) -> torch.Tensor:
        raise ValueError("boom")

    module = make_module("parameter_groups")
    monkeypatch.setattr(type(module), "training_step", failing)
    with pytest.raises(StepError, match="training_step raises ValueError") as raised:
        make_trainer(dapple(capture="joint"), max_steps=1).fit(module, make_loader("parameter_groups"))
    assert isinstance(raised.value.__cause__, ValueError)


ALL = -1  # ranks
CASES = [
    ("step", 0, 0), ("step", 1, 0), ("step", ALL, 0), ("hook", 0, 0), ("hook", 1, 0), ("hook", ALL, 0),
    ("collate", 0, 0), ("collate", 0, 1), ("backward", ALL, 0), ("backward", 1, 0), ("optimizers", ALL, 0),
    ("validation", ALL, 0), ("refused", ALL, 0), ("interrupted", 0, 0),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("start", ["popen", "torchrun"])
@pytest.mark.parametrize(("case", "rank", "workers"), CASES)
def test_the_last_screen_has_the_users_line_and_text(
    tmp_path: Path, case: str, rank: int, workers: int, start: str
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if start == "torchrun" else []
    command = [sys.executable, *torchrun, "script.py", case, str(rank), str(workers)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=240, check=False,
    )  # fmt: skip
    assert ended.returncode
    screen = "\n".join(ended.stdout.splitlines()[-SCREEN:])
    if case == "interrupted":
        assert "KeyboardInterrupt" in ended.stdout
        assert not re.search(r'File "[^"]*(lightning_pipe/|script\.py)', ended.stdout), "torchrun's own frames alone"
        return
    line, text = (".fit(", "LBFGS") if case == "refused" else ('raise ValueError("boom")', "ValueError: boom")
    assert line in screen and text in screen, ended.stdout
    assert ended.stdout.partition("Failures:")[0].count(line) == 1, ended.stdout


def test_a_hook_of_the_program_stays(monkeypatch) -> None:
    def own(*_: object) -> None:
        pass

    monkeypatch.setattr(sys, "excepthook", own)
    show_errors(rank=0, ranks=2)
    assert sys.excepthook is own
