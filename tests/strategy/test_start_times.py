"""The phases of a start add up to all of it, and gradients are compared as if they were compared at once."""

from __future__ import annotations

import logging
import sys
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch

from lightning_pipe.capture.eager_reference import EagerReference
from lightning_pipe.strategy import step_check
from lightning_pipe.strategy.checks import differences
from lightning_pipe.strategy.checks.differences import compared
from lightning_pipe.strategy.start import stopwatch
from lightning_pipe.strategy.start.stopwatch import Stopwatch
from models.parity import make_loader, make_module
from ranks.world import World
from strategy.fits import Losses, checked, make_trainer

PHASES = ("processes", "module", "values", "capture", "profile", "plan", "check", "stages", "placing", "first step")


def test_laps_leave_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = [10.0, 11.0, 14.0, 20.0, 20.5]
    monkeypatch.setattr(stopwatch.time, "perf_counter", iter(moments).__next__)
    watch = Stopwatch()
    for phase in ("a", "b", "a", "c"):
        watch.lap(phase)
    spans = [after - before for before, after in pairwise(moments)]
    assert watch.seconds == {"a": spans[0] + spans[2], "b": spans[1], "c": spans[3]}
    assert watch.total_s == pytest.approx(moments[-1] - moments[0])
    assert watch.stop() == "From the start to the end of the first step: 10.5 s (a 7 s, b 3 s, c 500 ms)."
    watch.lap("a")
    assert watch.stop() == "" and watch.seconds["a"] == spans[0] + spans[2]


def test_a_fit_says_once_how_long_its_phases_took(caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer(checked(), max_steps=2)
    with caplog.at_level(logging.INFO, logger="lightning_pipe"):
        trainer.fit(make_module("gpt_tied").train(), make_loader("gpt_tied"))
    (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("From the start")]
    seconds = trainer.strategy.start_seconds
    assert [phase for phase in seconds if phase in PHASES] == list(PHASES)
    assert all(phase in line for phase in seconds)


def gradients(*, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dense = {f"p{n}": torch.randn(n, 7, generator=generator) for n in (0, 1, 5, 40)}
    strided = torch.randn(6, 9, generator=generator).t()
    rows, values = torch.tensor([[1, 3, 1]]), torch.randn(3, 4, generator=generator)
    sparse = torch.sparse_coo_tensor(rows, values, (5, 4), check_invariants=True)
    return {**dense, "strided": strided, "complex": torch.randn(8, generator=generator) + 2j, "sparse": sparse}


@pytest.mark.parametrize("piece", [1, 7, 2**18])
def test_pieces_find_the_difference_that_the_whole_has(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(differences, "_PIECE", piece)
    plain, captured = gradients(seed=0), gradients(seed=0)
    plain["missing"] = torch.full((2, 2), 1e-3)
    captured["p40"][31, 3] += 50.0
    captured["p5"][2, 2] = plain["p5"][2, 2] = torch.nan  # the same everywhere
    reference = EagerReference(torch.tensor(2.0), plain, torch.float32, "")
    loss, worst = compared(reference, torch.tensor(2.5), captured)
    assert (loss.captured, loss.plain, loss.relative) == (2.5, 2.0, 0.25)
    own = float(plain["p40"].abs().max())
    assert worst.name == "p40" and worst.relative == pytest.approx(50.0 / own)
    assert (worst.captured, worst.plain) == (float(captured["p40"][31, 3]), float(plain["p40"][31, 3]))
    captured["strided"][0, 0] = torch.inf
    assert compared(reference, torch.tensor(2.5), captured)[1].relative == torch.inf


def fit_twice(folder: str) -> tuple[list[list[float]], list[list[str]], list[bool]]:
    """Fit without a cache, and twice with one, on all ranks of this world; a worker.

    Returns:
        The losses of each fit, the files of graphs and of checks, and whether each fit has compared its step.
    """
    found, has_checked = [], []
    for cache in ("off", folder, folder):
        pl.seed_everything(0, verbose=False)
        losses = Losses()
        strategy = checked(layout="1-1", microbatches=2, capture="joint", cache=cache)
        as_script = patch.object(sys.modules["__main__"], "__file__", __file__, create=True)
        with as_script, patch.object(step_check, "check_captured", wraps=step_check.check_captured) as check:
            make_trainer(strategy, max_steps=3, callbacks=[losses]).fit(
                make_module("gpt_tied").train(), make_loader("gpt_tied")
            )
        found.append(losses.losses)
        has_checked.append(check.called)
    kinds = ("graphs/*.graph", "checks/*")
    files = [sorted(path.name for path in Path(folder).glob(kind)) for kind in kinds]
    return found, files, has_checked


def test_a_start_that_finds_its_graph_trains_as_one_that_captures(tmp_path: Path) -> None:
    for (plain, first, second), files, has_checked in World(2).run(fit_twice, str(tmp_path)):
        assert plain == first == second
        assert len(plain) == 3
        assert [len(names) for names in files] == [1, 1], "both ranks, and both starts, have the same graph and check"
        assert has_checked == [True, True, False]
