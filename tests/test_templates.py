"""Projects made from the usual templates train as a pipeline by a word on their command line: Hydra, LightningCLI."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_pipe

ROOT = Path(lightning_pipe.__file__).parent.parent
QUIET = {"logger": "false", "enable_checkpointing": "false", "enable_progress_bar": "false", "max_epochs": "1"}
PROJECT = """
import torch
import lightning.pytorch as pl
from torch.utils.data import DataLoader, TensorDataset

class Net(pl.LightningModule):
    def __init__(self, width: int = 8, norm: bool = False):
        super().__init__()
        torch.manual_seed(0)
        layers = [torch.nn.Linear(4, width), torch.nn.BatchNorm1d(width) if norm else torch.nn.Tanh()]
        self.net = torch.nn.Sequential(*layers, torch.nn.Linear(width, 3))

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Data(pl.LightningDataModule):
    def train_dataloader(self):
        random = torch.Generator().manual_seed(1)
        x, y = torch.randn(24, 4, generator=random), torch.randint(3, (24,), generator=random)
        return DataLoader(TensorDataset(x, y), 8)

def report(trainer):
    loss = float(trainer.callback_metrics["loss"])
    rank, strategy = f"rank {trainer.global_rank} of {trainer.world_size}", type(trainer.strategy).__name__
    print(f"SAID {rank} {strategy} {loss:.5f}\\n", end="")
"""
TRAIN = """
import hydra
import lightning as L
from project import Data, Net, report

@hydra.main(version_base="1.3", config_path="configs", config_name="train.yaml")
def main(cfg):
    L.seed_everything(cfg.seed)
    trainer = hydra.utils.instantiate(cfg.trainer)
    trainer.fit(Net(cfg.width, cfg.norm), datamodule=Data())
    report(trainer)

if __name__ == "__main__":
    main()
"""
DEFAULT = "\n".join(f"{name}: {value}" for name, value in QUIET.items())
CLI = """
import lightning_pipe
from lightning.pytorch.cli import LightningCLI
from project import Data, Net, report

if __name__ == "__main__":
    report(LightningCLI(Net, Data, seed_everything_default=1, save_config_kwargs={"overwrite": True}).trainer)
"""


def run(folder: Path, *words: str) -> tuple[str, str]:
    found = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, check=False)
    return found.stdout, found.stderr


def reports(output: str) -> list[str]:
    return sorted(re.findall("SAID (.*)", output))


@pytest.fixture
def hydra_project(tmp_path):
    """A project as lightning-hydra-template has it, reduced to what matters for the trainer."""
    (tmp_path / "configs/trainer").mkdir(parents=True)
    (tmp_path / "project.py").write_text(PROJECT)
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "configs/train.yaml").write_text(
        "defaults:\n- _self_\n- trainer: default\nseed: 1\nwidth: 8\nnorm: false"
    )
    (tmp_path / "configs/trainer/default.yaml").write_text(
        f"_target_: lightning.pytorch.trainer.Trainer\naccelerator: cpu\ndevices: 1\nmin_epochs: 1\n{DEFAULT}\n"
    )
    (tmp_path / "configs/trainer/ddp.yaml").write_text(
        "defaults:\n- default\nstrategy: ddp\ndevices: 2\nnum_nodes: 1\nsync_batchnorm: true\n"
    )
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["trainer=ddp", "trainer.strategy=dapple"],
        ["+trainer.strategy=dapple", "trainer.devices=2"],
        ["+strategy=dapple", "trainer=ddp", "trainer.strategy.microbatches=2"],
        ["+strategy@trainer.strategy=dapple", "trainer.devices=2"],
    ],
)
def test_every_way_to_name_the_strategy_trains_like_one_device(hydra_project, words):
    (alone,) = reports(run(hydra_project, "train.py")[0])
    output, errors = run(hydra_project, "train.py", *words)
    assert reports(output) == [f"rank {rank} of 2 DappleStrategy {alone.split()[-1]}" for rank in (0, 1)], errors


@pytest.mark.slow
def test_a_batch_norm_that_is_to_be_synchronised_is_refused_by_name(hydra_project):
    _, errors = run(hydra_project, "train.py", "trainer=ddp", "trainer.strategy=dapple", "norm=true")
    assert re.search(r"sync_batchnorm=True replaces net.1 \(BatchNorm\)", errors), errors


@pytest.mark.slow
def test_a_sweep_trains_every_job_on_all_ranks(hydra_project):
    output, errors = run(hydra_project, "train.py", "-m", "trainer=ddp", "trainer.strategy=dapple", "width=8,16")
    found = [line.rpartition(" ") for line in reports(output)]
    losses = {line[2] for line in found}
    assert len(found) == 4 and len(losses) == 2, (output, errors)
    assert {line[0] for line in found} == {f"rank {rank} of 2 DappleStrategy" for rank in (0, 1)}


@pytest.fixture
def cli_project(tmp_path):
    """A project with LightningCLI."""
    pytest.importorskip("jsonargparse", reason="LightningCLI needs jsonargparse[signatures]")
    (tmp_path / "project.py").write_text(PROJECT)
    (tmp_path / "main.py").write_text(CLI)
    return tmp_path


FIT = ["main.py", "fit", "--trainer.accelerator=cpu", "--trainer.devices=2"]
FIT += [f"--trainer.{name}={value}" for name, value in QUIET.items()]


@pytest.mark.slow
def test_the_options_are_those_of_a_class_of_the_command_line(cli_project):
    strategy = "strategy:\n    class_path: lightning_pipe.DappleStrategy\n    init_args: "
    (cli_project / "config.yaml").write_text(f"trainer:\n  {strategy}{{layout: 1-1, schedule: GPipe}}\n")
    output, errors = run(cli_project, *FIT, "--config=config.yaml", "--print_config")
    assert "class_path: lightning_pipe.DappleStrategy" in output and "      layout: 1-1\n" in output, errors
    assert "      deadline_s: 300.0\n" in output and "      schedule: GPipe\n" in output
    (cli_project / "config.yaml").write_text(f"trainer:\n  {strategy}{{layot: 1-1}}\n")
    assert "'layot' is not accepted" in run(cli_project, *FIT, "--config=config.yaml")[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["--trainer.strategy=dapple"],
        ["--trainer.strategy=lightning_pipe.DappleStrategy", "--trainer.strategy.layout=1-1"],
        ["--trainer.strategy=lightning_pipe.DappleStrategy", "--trainer.strategy.layout=[1,1]"],
    ],
)
def test_a_command_line_trains_like_one_device(cli_project, words):
    alone = [word.replace("devices=2", "devices=1") for word in FIT]
    (line,) = reports(run(cli_project, *alone)[0])
    output, errors = run(cli_project, *FIT, *words)
    assert reports(output) == [f"rank {rank} of 2 DappleStrategy {line.split()[-1]}" for rank in (0, 1)], errors


NOTEBOOK = """
import lightning_pipe
import lightning.pytorch as pl
import lightning.pytorch.trainer.connectors.accelerator_connector as connector
from project import Data, Net

connector._IS_INTERACTIVE = True  # what Lightning finds out in a notebook
options = {"accelerator": "cpu", "devices": 2, "max_epochs": 2, "logger": False, "enable_checkpointing": False,
           "enable_progress_bar": False, "enable_model_summary": False}
try:
    pl.Trainer(strategy="dapple", **options)
except lightning_pipe.errors.UnsupportedError as error:
    print("SAID", error)
strategy = lightning_pipe.DappleStrategy(start_method="fork", layout="1-1")
trainer = pl.Trainer(strategy=strategy, **options)
trainer.fit(Net(), datamodule=Data())
print("SAID", trainer.global_step, trainer.current_epoch, len(strategy.plan.stages), strategy.comparison.steps > 0)
trainer.save_checkpoint("last.ckpt")
import torch
print("SAID", torch.load("last.ckpt", weights_only=False)["global_step"])
"""


@pytest.mark.slow
def test_a_notebook_is_told_how_and_knows_afterwards_what_was_trained(tmp_path):
    (tmp_path / "project.py").write_text(PROJECT)
    (tmp_path / "notebook.py").write_text(NOTEBOOK)
    output, errors = run(tmp_path, "notebook.py")
    told, known, saved = re.findall("SAID (.*)", output) or [errors] * 3
    assert 'DappleStrategy(start_method="fork")' in told
    assert (known, saved) == ("6 2 2 True", "6"), errors
