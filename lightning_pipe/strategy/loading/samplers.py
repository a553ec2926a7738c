"""Samplers that divide the data among ranks are told that there is one: every batch of a pipeline is a whole batch.

A recipe for data parallelism makes `DistributedSampler(data, num_replicas=trainer.world_size, rank=...)` in its loader.
In a pipeline that would train on a part of the data. So such a sampler becomes that of one replica, with the order that
one device has for the same seed and epoch; one whose arithmetic is not known is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sized
from typing import Any

from lightning_pipe.errors import UnsupportedError
from lightning_pipe.lightning_names import rank_zero_warn

_WRAPPED = ("sampler", "batch_sampler")
_DEEPEST = 4


def gather_shards(loader: Any) -> None:
    """Let the samplers of a loader draw all samples.

    Raises:
        UnsupportedError: naming a sampler that divides the data in a way that is not known.
    """
    for sampler in _samplers(loader):
        if getattr(sampler, "num_replicas", 1) > 1:
            _gather(sampler)


def _samplers(owner: Any, depth: int = 0) -> Iterator[Any]:
    """Yield the samplers of a loader, and those inside of them."""
    for name in _WRAPPED:
        sampler = getattr(owner, name, None)
        if sampler is not None and depth < _DEEPEST:
            yield sampler
            yield from _samplers(sampler, depth + 1)


def _gather(sampler: Any) -> None:
    name, replicas, rank = type(sampler).__name__, sampler.num_replicas, getattr(sampler, "rank", None)
    data: Any = getattr(sampler, "dataset", getattr(sampler, "data_source", None))
    own = {key: getattr(sampler, key) for key in ("num_samples", "total_size") if hasattr(sampler, key)}
    expected = _sizes(len(data), replicas, rank) if isinstance(data, Sized) and isinstance(rank, int) else []
    if not own or not any(all(sizes[key] == size for key, size in own.items()) for sizes in expected):
        raise UnsupportedError(
            f"{name} divides the data among num_replicas={replicas} ranks, in a way that is not known here. In a "
            "pipeline every batch is the whole batch: make it with num_replicas=1 and rank=0, or leave the sampler out "
            "(shuffle=True)."
        )
    try:
        sampler.num_replicas, sampler.rank = 1, 0
        for key in own:
            setattr(sampler, key, len(data))
    except AttributeError as error:
        raise UnsupportedError(
            f"{name} divides the data among num_replicas={replicas} ranks, and cannot be told otherwise ({error}). In "
            "a pipeline every batch is the whole batch: make it with num_replicas=1 and rank=0."
        ) from error
    rank_zero_warn(
        f"{name} was made for num_replicas={replicas}. In a pipeline every batch is the whole batch, so it draws all "
        f"{len(data)} samples now, in the order of one device. Make it with num_replicas=1, or leave it out."
    )


def _sizes(samples: int, replicas: int, rank: int) -> list[dict[str, int]]:
    """List what a sampler may have computed: filled up, cut off, or shared without repeating."""
    filled, cut = math.ceil(samples / replicas), samples // replicas
    return [
        {"num_samples": filled, "total_size": filled * replicas},
        {"num_samples": cut, "total_size": cut * replicas},
        {"num_samples": len(range(rank, samples, replicas)), "total_size": samples},
    ]
