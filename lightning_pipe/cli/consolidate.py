"""The command `lightning-pipe consolidate`: a checkpoint becomes one plain file, or safetensors files."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator
from glob import escape
from pathlib import Path

from lightning_pipe.errors import ConfigError
from lightning_pipe.units import format_bytes, format_seconds, parse_bytes


def run_consolidate(found: Namespace) -> Iterator[str]:
    """Write the plain file, or the safetensors files, of a checkpoint, and yield how large they are.

    Args:
        found: the arguments of the command.

    Raises:
        CheckpointError, ConfigError: as `consolidate` and `write_safetensors` do.
    """
    directory = Path(found.directory)
    if not any(directory.parent.glob(f"{escape(directory.name)}*")):  # an interrupted save has another ending
        raise ConfigError(f"found nothing at {directory}; expected a checkpoint (a file for safetensors)")
    import torch

    from lightning_pipe.strategy.checkpoints.consolidate import consolidate  # which needs torch
    from lightning_pipe.strategy.checkpoints.safetensors_files import write_safetensors

    source, out, started = directory, Path(found.out), time.perf_counter()
    if found.format == "safetensors":
        dtype = getattr(torch, found.dtype) if found.dtype else None
        most = parse_bytes(found.max_shard_size)
        size = write_safetensors(source, out, prefix=found.prefix, dtype=dtype, shard_bytes=most)
    else:
        if given := [name for name in ("prefix", "dtype") if getattr(found, name)]:
            raise ConfigError(f"found --{given[0]} without --format safetensors; a plain file has all as it is.")
        size = consolidate(source, out, weights_only=not found.trusted)
    yield f"Wrote {out} ({format_bytes(size)}) in {format_seconds(time.perf_counter() - started)}."
