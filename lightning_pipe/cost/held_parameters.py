"""Which parameters the ranks of a layout hold, train and step, and which of them they share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property

from lightning_pipe.core.program import Bucket, Layout
from lightning_pipe.core.sharding import owners
from lightning_pipe.cost.stage import StageWork


class HeldParameters:
    """Parameters by rank, of one cut in one layout.

    Args:
        works: what every stage runs and holds.
        layout: ranks of each stage.
        sizes: bytes of every parameter of the graph, in the order of the module.
        sharded: whether holders of the same parameters share their optimizer state (`core.sharding`).
    """

    def __init__(self, works: Sequence[StageWork], layout: Layout, sizes: Mapping[str, int], *, sharded: bool) -> None:
        self._works, self._layout, self._sizes, self._sharded = works, layout, sizes, sharded
        self._by_rank: dict[int, tuple[list[int], dict[str, int]]] = {}

    def held(self, rank: int) -> list[int]:
        """Return the bytes of every parameter that a rank holds, each once."""
        return self._of(rank)[0]

    def trained(self, rank: int) -> Mapping[str, int]:
        """Return the bytes of those that some stage has a gradient of, by name."""
        return self._of(rank)[1]

    def stepped(self, rank: int) -> list[int]:
        """Return the bytes of the parameters whose optimizer state a rank keeps."""
        trained = self.trained(rank)
        return [size for name, size in trained.items() if not self._sharded or self._owners[name] == rank]

    def shared(self, rank: int) -> Mapping[tuple[int, ...], list[int]]:
        """Return the bytes of the trained parameters that a rank holds with others, by all that hold them."""
        found: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for name, size in self.trained(rank).items():
            if len(ranks := self._holders[name]) > 1:
                found[ranks].append(size)
        return found

    @property
    def shares_state(self) -> bool:
        """Return whether several ranks hold the same trained parameter, so that they could share optimizer state."""
        return any(len(self._holders[name]) > 1 for name in self._differentiated)

    def of_bucket(self, bucket: Bucket) -> dict[str, int]:
        """Return the bytes of the parameters of exactly a bucket's stages that some stage differentiates, by name."""
        held = [{*work.parameters} & self._differentiated for work in self._works]
        common = set.intersection(*(held[s] for s in bucket.stages))
        mine = common.difference(*(names for s, names in enumerate(held) if s not in bucket.stages))
        return {name: size for name, size in self._sizes.items() if name in mine}

    def _of(self, rank: int) -> tuple[list[int], dict[str, int]]:
        if rank not in self._by_rank:
            own = [work for work, ranks in zip(self._works, self._layout.stages, strict=True) if rank in ranks]
            names = dict.fromkeys(name for work in own for name in work.parameters)
            trained = {name: self._sizes[name] for name in names if name in self._differentiated}
            self._by_rank[rank] = [self._sizes[name] for name in names], trained
        return self._by_rank[rank]

    @cached_property
    def _differentiated(self) -> frozenset[str]:
        return frozenset(name for work in self._works for _, name in work.gradients)

    @cached_property
    def _holders(self) -> dict[str, tuple[int, ...]]:
        """Return the ranks that hold each parameter, in the order of the module."""
        found: dict[str, set[int]] = defaultdict(set)
        for work, ranks in zip(self._works, self._layout.stages, strict=True):
            for name in work.parameters:
                found[name].update(ranks)
        return {name: tuple(sorted(found[name])) for name in self._sizes if name in found}

    @cached_property
    def _owners(self) -> dict[str, int]:
        trained = {name: self._sizes[name] for name in self._holders if name in self._differentiated}
        return owners(trained, self._holders)
