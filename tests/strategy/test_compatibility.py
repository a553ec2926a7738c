"""Every feature of docs/compatibility.md equals one device, or is refused with the text that stands there."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_pipe.errors import PipeError
from ranks.world import Raised, World
from slow import slow_but
from strategy.compat_project import loader, state_of
from strategy.compatibility import PAGE, ROWS, page, row_of
from strategy.fits import dapple, make_trainer

NAMES = [row.name for rows in ROWS.values() for row in rows]
EVERY_TIME = {"max_epochs=2", "BasePredictionWriter(write_interval='epoch')", "several optimizers", "torchmetrics"}


def run(name: str, folder: str, is_pipeline: bool) -> dict[str, Any]:
    """Use the feature in this process, and return what it leaves."""
    row = row_of(name)
    Path(folder).mkdir(exist_ok=True)
    torch.manual_seed(5)
    strategy = dapple(layout="1-1", microbatches=2) if is_pipeline else "auto"
    trainer = make_trainer(strategy, **{"max_epochs": 2, "default_root_dir": folder, **row.options(folder)})
    module = row.module()
    return state_of(trainer, module, row.run(trainer, module, folder))


def as_pipeline(name: str, folder: str) -> dict[str, Any]:
    return run(name, folder, True)


@pytest.mark.parametrize("name", slow_but(EVERY_TIME, NAMES))
def test_a_feature_equals_one_device_or_is_refused(name: str, tmp_path: Path) -> None:
    row = row_of(name)
    if row.needs and importlib.util.find_spec(row.needs) is None:
        pytest.skip(f"needs {row.needs}")
    results = World(2).results(as_pipeline, name, str(tmp_path / "pipeline"))
    if row.refused:
        for result in results:
            assert isinstance(result, Raised) and row.refused in result.text, result
            assert issubclass(getattr(__import__("lightning_pipe.errors").errors, result.kind), PipeError)
        return
    expected = run(name, str(tmp_path / "plain"), False)
    for result in results:
        assert not isinstance(result, Raised), getattr(result, "traceback", "")
        torch.testing.assert_close(result.value, expected, rtol=row.tolerance, atol=row.tolerance)


def test_the_page_says_what_is_tested() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m strategy.compatibility, in tests, writes it"
    assert len(NAMES) == len(set(NAMES)) > 80


def warned() -> list[str]:
    trainer = make_trainer(dapple(layout="1-1"), max_epochs=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(row_of("max_epochs=2").module(), loader(), loader())
    return [str(warning.message) for warning in caught]


def test_nobody_is_told_to_synchronise_what_is_logged() -> None:
    assert not [text for texts in World(2).run(warned) for text in texts if "sync_dist" in text]
