"""Cache of measured timings, and the keys under which they stay valid.

One file for every host, kind of device and version of torch (`cache_files`):

    {"device": {...}, "timings": {"digest of a signature": [seconds, spread, scratch bytes], ...}}

It may be deleted at any time; times that are missing are measured again. It holds some ten thousand times at most; then
others give way. Of two processes that write at the same time, one may lose what it added.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_pipe import cache_files
from lightning_pipe.freed_memory import is_freed_memory_kept
from lightning_pipe.profiler.devices import device_kind

_FORMAT = 3  # raised when what is measured, or how it is written, changes
_MOST_TIMES = 50_000  # of a file: about 4 MiB


@dataclass(frozen=True)
class Timing:
    """What one call takes.

    Attributes:
        seconds: what it typically takes (`profiler.timing.sample_region`); not a number if it could not be run.
        spread: (upper quartile - lower quartile) / median of the repetitions.
        scratch_bytes: what it holds for itself while it runs (`workspace`); not a number if that is not known.
    """

    seconds: float
    spread: float
    scratch_bytes: float = 0.0


Timings = Mapping[str, Timing]  # by digest


def digest(name: str) -> str:
    """Return the key under which a time is kept."""
    return hashlib.blake2b(name.encode(), digest_size=10).hexdigest()


def conditions(device: torch.device) -> dict[str, str | int | bool]:
    """Return what times depend on besides the call."""
    found: dict[str, str | int | bool] = {
        "format": _FORMAT,
        "host": platform.node(),
        "device": device_kind(device),
        "torch": str(torch.__version__),
        "keeps_freed_memory": is_freed_memory_kept(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if device.type != "cuda":
        mkldnn: Any = torch.backends.mkldnn
        return found | {"mkldnn": mkldnn.enabled, "float32_matmul": mkldnn.matmul.fp32_precision}
    cudnn: Any = torch.backends.cudnn
    return found | {
        "cuda": str(torch.version.cuda),
        "cudnn": cudnn.enabled,
        "cudnn_benchmark": cudnn.benchmark,
        "float32_convolution": cudnn.conv.fp32_precision,
        "float32_matmul": torch.backends.cuda.matmul.fp32_precision,
    }


def cache_file(directory: Path, device: torch.device) -> Path:
    """Return the file of a device."""
    return directory / "times" / f"{device.type}-{digest(json.dumps(conditions(device), sort_keys=True))}.json"


def folder_under_load(directory: Path) -> Path:
    """Return where lies what was measured while other work took a part of the processor: it holds as long as that."""
    return directory / "under_load"


def load_timings(directory: Path, device: torch.device) -> dict[str, Timing]:
    """Return the known times of a device by digest; none where there is no file, or one that cannot be used."""
    return cache_files.read(cache_file(directory, device), _parsed, version=_FORMAT) or {}


def _parsed(content: bytes) -> dict[str, Timing]:
    return {name: Timing(*map(float, row)) for name, row in json.loads(content)["timings"].items()}


def store_timings(directory: Path, device: torch.device, timings: Timings) -> None:
    """Add times to those that are kept; calls of which something could not be measured are left out."""
    known = load_timings(directory, device)
    whole = {name: timing for name, timing in timings.items() if not math.isnan(timing.seconds + timing.scratch_bytes)}
    older = {name: timing for name, timing in known.items() if name not in whole}
    both = [*list(older.items())[: max(0, _MOST_TIMES - len(whole))], *whole.items()]
    rows = {name: dataclasses.astuple(timing) for name, timing in sorted(both)}
    content = json.dumps({"device": conditions(device), "timings": rows}, indent=0)
    cache_files.write(cache_file(directory, device), content.encode(), version=_FORMAT)


def forget_timings(directory: Path, device: torch.device) -> bool:
    """Delete the times of a device, which are measured again when they are needed; return whether there were any."""
    are_forgotten = False
    for folder in (directory, folder_under_load(directory)):
        with contextlib.suppress(OSError):
            cache_file(folder, device).unlink()
            are_forgotten = True
    return are_forgotten
