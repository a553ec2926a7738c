"""Section `env`: the card, its memory, and the versions, without which no other figure means anything."""

from __future__ import annotations

import os
import subprocess

import lightning
import torch

import lightning_pipe
from benchmarks.gpu_once.findings import Assignment


def env(assignment: Assignment) -> None:
    """Report card, memory, versions and the variables that change how CUDA loads and queues kernels."""
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    assignment.report(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, lightning {lightning.__version__}, "
        f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}, cores {os.cpu_count()}, "
        f"free {free_bytes >> 20} of {total_bytes >> 20} MiB"
    )
    assignment.report(
        f"lightning_pipe {lightning_pipe.__version__} {_revision()}, "
        f"CUDA_MODULE_LOADING {os.environ.get('CUDA_MODULE_LOADING', 'default')}, "
        f"CUDA_DEVICE_MAX_CONNECTIONS {os.environ.get('CUDA_DEVICE_MAX_CONNECTIONS', 'default')}"
    )


def _revision() -> str:
    """Return the commit of the checkout, or nothing where there is no git."""
    try:
        command = ["git", "rev-parse", "--short", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""
