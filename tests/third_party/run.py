"""Train a project's module for 20 steps on one device and on two ranks, and print the largest relative difference.

python -m third_party.run NAME    (in tests) forks the three processes after one import of the project.
"""

from __future__ import annotations

import logging
import os
import random
import socket
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from third_party.modules import PROJECTS

STEPS = 20


def _package_of(module: Any) -> str:
    return next(
        kind.__module__.partition(".")[0] for kind in type(module).__mro__ if kind.__name__ == "LightningModule"
    )


def train(name: str, *, pipeline: bool, microbatches: int) -> dict[str, torch.Tensor]:
    """Return weights and logged values after some steps."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    random.seed(0)  # a forked process has a random state of its own
    np.random.seed(0)
    torch.set_default_dtype(torch.float64)
    module, data = PROJECTS[name]()
    options: dict[str, Any] = {
        "accelerator": "cpu", "devices": 2 if pipeline else 1, "max_steps": STEPS, "logger": False,
        "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
        "limit_val_batches": 0,
    }  # fmt: skip
    if pipeline:
        from lightning_pipe.lightning_package import choose

        choose(_package_of(module))
        from lightning_pipe import DappleStrategy

        options["strategy"] = DappleStrategy(layout="1-1", microbatches=microbatches, costs="counted", deadline_s=60)
    package = _package_of(module)
    pl = __import__(package) if package != "lightning" else __import__("lightning.pytorch").pytorch
    logging.getLogger(pl.__name__).setLevel(logging.ERROR)
    trainer = pl.Trainer(**options)
    module.train()
    before = {key: value.detach().clone() for key, value in module.named_parameters()}
    trainer.fit(module, data)
    weights = {key: value.detach().clone() for key, value in module.named_parameters()}
    assert trainer.global_step == STEPS, trainer.global_step
    moved = [key for key, value in weights.items() if not torch.equal(value, before[key])]
    assert len(moved) > len(weights) / 2, f"{len(moved)} of {len(weights)} parameters have moved"
    return {**weights, **{f"metric {key}": value for key, value in trainer.callback_metrics.items()}}


def _child(name: str, path: Path, rank: int | None, port: int, microbatches: int) -> None:
    if rank is not None:
        os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        os.environ.update(WORLD_SIZE="2", GLOO_SOCKET_IFNAME="lo")
    try:
        torch.save(train(name, pipeline=rank is not None, microbatches=microbatches), path)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def difference(name: str, microbatches: int = 2) -> float:
    """Return the largest difference of a weight or logged value, relative to the largest value of its tensor."""
    torch.set_num_threads(1)
    PROJECTS[name]()  # imports everything
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        paths = {rank: Path(folder, f"{rank}.pt") for rank in (None, 0, 1)}
        children = []
        for rank, path in paths.items():
            if (pid := os.fork()) == 0:
                _child(name, path, rank, port, microbatches)
            children.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
        assert codes == [0, 0, 0], f"{name}: processes ended with {codes}"
        alone, *ranks = (torch.load(path, weights_only=True) for path in paths.values())
    for found in ranks:
        assert found.keys() == alone.keys(), found.keys() ^ alone.keys()
    return max(
        float((found[key].double() - value.double()).abs().max() / value.double().abs().max().clamp(min=1e-3))
        for found in ranks
        for key, value in alone.items()
        if value.numel()
    )


if __name__ == "__main__":
    sys.stdout.write(f"{sys.argv[1]} {difference(sys.argv[1], *map(int, sys.argv[2:])):.2e}\n")
