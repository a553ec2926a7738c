"""An uncaught error prints the user's lines, on the rank that raised it; other ranks print one line."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from lightning_pipe.errors import UnsupportedError
from lightning_pipe.runtime.guard.watch import PeerFailure
from lightning_pipe.strategy.ranks.shown_errors import raised_on, show_errors

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
    raise UnsupportedError("What was asked for is refused.")


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


def test_a_hook_of_the_program_stays(monkeypatch) -> None:
    def own(*_: object) -> None:
        pass

    monkeypatch.setattr(sys, "excepthook", own)
    show_errors(rank=0, ranks=2)
    assert sys.excepthook is own
