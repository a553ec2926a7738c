"""Mistakes that need no measuring are refused before any process is started: by the Trainer, or when a run begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_pipe import DappleStrategy
from lightning_pipe.errors import PipeError
from lightning_pipe.strategy.lightning_private import ScriptLauncher
from strategy.small import Small, loader

PLAN = "stages: [{at: '', ranks: [0]}, {at: b, ranks: [1]}, {at: c, ranks: [2]}]\nmicrobatches: 4\n"
ORDER = "0F0,0B0\n1F0,1B0\n2F0,2B0\n"

MISTAKES = {
    "a layout of three ranks": ({"layout": "1-1-1"}, "layout='1-1-1' asks for 3 ranks, the trainer has 2"),
    "a limit without a unit": ({"memory_limit": 16}, "16 B for a rank .did you mean '16GiB'"),
    "no plan file": ({"plan": "none.yaml"}, r"cannot read none\.yaml"),
    "a plan that is no plan": ({"plan": "file"}, "expected a mapping with the keys of Plan"),
    "a plan for three ranks": ({"plan": "plan.yaml"}, r"plan uses ranks \[0, 1, 2\], the trainer has ranks 0..1"),
    "no cluster": ({"cluster": "dapple_x"}, "a preset nor a file named 'dapple_x'.*did you mean 'dapple_"),
    "a cluster of eight devices": ({"cluster": "h100_8"}, "h100_8 has 8 devices .*the trainer has 2 ranks"),
    "no weights": ({"weights": "none.safetensors"}, "no file or directory weights='none.safetensors'"),
    "weights of no known kind": ({"weights": "file"}, "found weights='file'; expected a .safetensors file"),
    "a cache below a file": (
        {"cache": "file/cache"},
        "found cache='file/cache', but .*file is there, and it is no dir",
    ),
    "a report below a file": ({"report": "file/r.html"}, "found report='file/r.html', but nothing can be written"),
    "a trace below a file": ({"trace": "file/trace.json"}, "found trace='file/trace.json', but nothing can be written"),
    "an unknown schedule": ({"schedule": "1f2b"}, "found schedule='1f2b'.*did you mean '1f1b'"),
    "no file of a schedule": ({"schedule": "none.csv"}, "cannot read the schedule none.csv"),
    "a schedule for three ranks": ({"schedule": "order.csv"}, "passes for 3 ranks, the trainer has 2"),
    "a schedule that the layout does not suit": (
        {"schedule": "chimera", "layout": "2"},
        "two pipes in opposite directions need an even number of devices of one rank each",
    ),
    "more micro-batches than samples": ({"microbatches": 64}, "has 8 samples, but 64 micro-batches are wanted"),
    "weight versions of one stage": ({"versions": "2bw", "layout": "2"}, "the plan is data parallel training"),
    "a plan and a layout": ({"plan": "plan.yaml", "layout": "1-1"}, "found plan='plan.yaml' and layout"),
    "a notebook's start for weights that end": ({"restore": "none", "start_method": "fork"}, "Set restore='first'"),
}


@pytest.fixture
def fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that trains on two ranks up to the moment when processes are started."""
    monkeypatch.chdir(tmp_path)
    for name, text in {"file": "a file\n", "plan.yaml": PLAN, "order.csv": ORDER}.items():
        Path(name).write_text(text)
    started: list[str] = []
    monkeypatch.setattr(ScriptLauncher, "_call_children_scripts", lambda launcher: started.append("ranks"))

    def run(module: pl.LightningModule, strategy: str = "", **options: Any) -> None:
        try:
            trainer = pl.Trainer(
                accelerator="cpu", devices=2, strategy=strategy or DappleStrategy(**options), logger=False, max_steps=1,
                enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            )  # fmt: skip
            trainer.fit(module, loader(16, 8))
        finally:
            assert not started

    return run


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_before_a_process_is_started(fit, mistake: str) -> None:
    options, text = MISTAKES[mistake]
    with pytest.raises(PipeError, match=text):
        fit(Small(), **options)


def test_options_of_the_environment_reach_a_trainer_that_is_given_the_name(fit, monkeypatch) -> None:
    monkeypatch.setenv("LIGHTNING_PIPE", "microbatches=64")
    with pytest.raises(PipeError, match="has 8 samples, but 64 micro-batches are wanted"):
        fit(Small(), strategy="dapple")


def test_what_a_module_cannot_is_refused_before_a_process_is_started(fit) -> None:
    module = Small()
    module.automatic_optimization = False
    with pytest.raises(PipeError, match="uses manual optimization"):
        fit(module)
