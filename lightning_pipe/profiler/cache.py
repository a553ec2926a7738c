"""Cache of measured timings, and the keys under which they stay valid.

One JSON file for every host, kind of device and version of torch, in a directory that the caller names:

    {"device": {...}, "timings": {"digest of a signature": [seconds, spread, scratch bytes], ...}}

It may be deleted at any time; times that are missing are measured again. It holds some ten thousand times at most; then
others give way. Files are replaced as a whole, so that readers never see half of one; of two processes that write at
the same time, one may lose what it added. A file that cannot be read, or a directory that cannot be written, is said
once and does not stop anything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import os
import platform
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_pipe.freed_memory import is_freed_memory_kept
from lightning_pipe.profiler.devices import device_kind

log = logging.getLogger(__name__)

_FORMAT = 2  # raised when what is measured changes
_MOST_FILES = 64  # of a folder
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
    return directory / f"{device.type}-{digest(json.dumps(conditions(device), sort_keys=True))}.json"


def load_timings(directory: Path, device: torch.device) -> dict[str, Timing]:
    """Return the known times of a device by digest; none where there is no file, or one that cannot be read."""
    path = cache_file(directory, device)
    try:
        return _read(path, device)
    except FileNotFoundError:
        return {}
    except _UNREADABLE as error:
        log.warning("%s with measured times cannot be read (%r); the file will be rebuilt.", path, error)
        return {}


_UNREADABLE = (OSError, ValueError, TypeError, KeyError, AttributeError)


def _read(path: Path, device: torch.device) -> dict[str, Timing]:
    content = json.loads(path.read_text(encoding="utf-8"))
    if content["device"] != conditions(device):
        raise ValueError(f"it is of {content['device']}")
    return {name: Timing(*map(float, row)) for name, row in content["timings"].items()}


def store_timings(directory: Path, device: torch.device, timings: Timings) -> None:
    """Add times to those that are kept; calls of which something could not be measured are left out."""
    path = cache_file(directory, device)
    known: dict[str, Timing] = {}
    with contextlib.suppress(*_UNREADABLE):  # `load_timings` has said so
        known = _read(path, device)
    whole = {name: timing for name, timing in timings.items() if not math.isnan(timing.seconds + timing.scratch_bytes)}
    older = {name: timing for name, timing in known.items() if name not in whole}
    both = [*list(older.items())[: max(0, _MOST_TIMES - len(whole))], *whole.items()]
    rows = {name: dataclasses.astuple(timing) for name, timing in sorted(both)}
    content = json.dumps({"device": conditions(device), "timings": rows}, indent=0)
    try:
        write_whole(path, content)
    except OSError as error:
        log.warning("Measured times cannot be kept in %s (%s); they will be measured again next time.", path, error)


def forget_timings(directory: Path, device: torch.device) -> bool:
    """Delete the times of a device, which are measured again when they are needed; return whether there were any."""
    try:
        cache_file(directory, device).unlink()
    except OSError:
        return False
    return True


def write_among(path: Path, content: str) -> None:
    """Write a file as a whole, and delete the oldest of its kind in its folder where they are many.

    Raises:
        OSError: if it cannot be written.
    """
    write_whole(path, content)
    kind = sorted(path.parent.glob(f"*{path.suffix}"), key=lambda file: file.stat().st_mtime)
    for old in kind[:-_MOST_FILES]:
        old.unlink(missing_ok=True)


def write_whole(path: Path, content: str) -> None:
    """Write a file as a whole or not at all.

    Raises:
        OSError: if it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(content)
        os.replace(name, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
