"""Two hosts train together, however their ranks are named, and also where a host's name leads to itself.

Hosts are network namespaces; needs root and iproute2.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_pipe
from benchmarks.two_hosts import CARD, MAIN_ADDRESS, NoNamespacesError, two_hosts
from lightning_pipe.strategy.ranks import network_card
from test_templates import PROJECT

ROOT = Path(lightning_pipe.__file__).parent.parent
SCRIPT = """
import lightning_pipe
import lightning.pytorch as pl
from project import Data, Net, report

strategy = lightning_pipe.DappleStrategy(layout="1-1", costs="counted", deadline_s=90)
options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=1, num_nodes=2, max_epochs=1, **options)
trainer.fit(Net(), datamodule=Data())
report(trainer)
"""
SBATCH_OPTIONS = frozenset(  # of `sbatch --help` (Slurm 24.05), those that a training job may need
    "account array chdir comment constraint cpus-per-gpu cpus-per-task distribution error exclude exclusive export "
    "gpus gpus-per-node gpus-per-task gres job-name mail-type mail-user mem mem-per-cpu mem-per-gpu nodelist nodes "
    "ntasks ntasks-per-gpu ntasks-per-node open-mode output partition qos requeue reservation signal time".split()
)


def command(launcher: str, host: int) -> tuple[list[str], dict[str, str]]:
    """Return the command and the variables with which a rank is started on a host."""
    match launcher:
        case "torchrun":
            words = [f"--node-rank={host}", f"--master-addr={MAIN_ADDRESS}", "--master-port=29500", "train.py"]
            return ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", *words], {}
        case "slurm":
            tasks = {"NTASKS": "2", "NTASKS_PER_NODE": "1", "PROCID": str(host), "LOCALID": "0", "NODEID": str(host)}
            job = {"JOB_ID": "1", "JOB_NAME": "train", "NODELIST": MAIN_ADDRESS, "NNODES": "2", **tasks}
            main = {"MASTER_ADDR": MAIN_ADDRESS, "MASTER_PORT": "29500"}
            return ["train.py"], {**{f"SLURM_{name}": value for name, value in job.items()}, **main}
        case _:
            return ["train.py"], {"MASTER_ADDR": MAIN_ADDRESS, "MASTER_PORT": "29500", "NODE_RANK": str(host)}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("launcher", ["by hand", "by hand, with GLOO_SOCKET_IFNAME", "torchrun", "slurm"])
def test_two_hosts_train_together(launcher: str, tmp_path: Path) -> None:
    (tmp_path / "project.py").write_text(PROJECT)
    (tmp_path / "train.py").write_text(SCRIPT)
    try:
        with two_hosts(1e9) as hosts:
            started = []
            for number, name in enumerate(hosts.names):
                words, variables = command(launcher, number)
                card = {"GLOO_SOCKET_IFNAME": CARD} if "IFNAME" in launcher else {}
                environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables, **card}
                inside = ["ip", "netns", "exec", name, sys.executable, *words]
                pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
                started.append(subprocess.Popen(inside, cwd=tmp_path, env=environment, **pipes))
            outputs = [process.communicate(timeout=380)[0] for process in started]
    except NoNamespacesError as error:
        pytest.skip(str(error))
    said = [re.findall("SAID rank (.*) DappleStrategy (.*)", output) for output in outputs]
    assert [[who for who, _ in one] for one in said] == [["0 of 2"], ["1 of 2"]], outputs
    assert said[0][0][1] == said[1][0][1]


def test_a_card_is_chosen_only_where_the_name_of_a_host_leads_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(network_card.socket, "gethostname", lambda: "localhost")
    assert network_card.choose_card("127.0.0.1", hosts=2) == os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert network_card.choose_card("127.0.0.1", hosts=2) is None  # it is named now
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(network_card.socket, "gethostbyname", lambda name: "10.1.2.3")
    assert network_card.choose_card("127.0.0.1", hosts=2) is None
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_the_sbatch_file_of_the_page_has_options_of_sbatch_and_a_task_for_each_rank() -> None:
    page = (ROOT / "docs" / "two_hosts.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"^```\w*\n(#!/bin/bash\n.*?)^```", page, re.MULTILINE | re.DOTALL)
    parsed = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert parsed.returncode == 0 and not parsed.stderr, parsed.stderr
    lines = script.splitlines()[1:]
    head = list(itertools.takewhile(lambda line: line.startswith("#"), lines))  # sbatch reads no option after a command
    assert [line for line in lines if "#SBATCH" in line] == [line for line in head if line.startswith("#SBATCH ")]
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", script, re.MULTILINE))
    assert len(options) == script.count("#SBATCH"), "an option is not written as --name=value, or stands there twice"
    assert options.keys() <= SBATCH_OPTIONS, options.keys() - SBATCH_OPTIONS
    assert re.fullmatch(r"(\d+-)?\d+(:\d\d){0,2}", options["time"])
    command = next(line for line in lines if line.startswith("srun "))
    nodes, devices = (re.findall(rf"\b{name}[= ](\d+)", command) for name in ("num_nodes", "devices"))
    assert nodes == [options["nodes"]]
    assert devices == [options["ntasks-per-node"]] == [options["gpus-per-node"]]
