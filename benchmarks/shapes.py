"""Seconds to capture a step for another length of its batch: a GPT, traced for each, or once with symbols for lengths.

    python -m benchmarks.shapes
    python -m benchmarks.shapes --blocks 12 --lengths 64 128

Seconds are those of the processor, as others may use the machine too: of the capture, and of the split into two stages.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn

from lightning_pipe.capture import Request, capture_step, flatten
from lightning_pipe.capture.graphs.lengths import changed_sizes

_WIDTH, _HEADS, _WORDS, _SAMPLES = 64, 4, 100, 4


class Block(nn.Module):
    """Attention and feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.heads, self.out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.wide = nn.Sequential(nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the next layer's input."""
        parts = self.heads(self.before(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (_HEADS, -1)).transpose(1, 2) for part in parts)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.wide(self.between(x))


class GPT(pl.LightningModule):
    """A language model."""

    def __init__(self, blocks: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(_WORDS, _WIDTH), nn.Embedding(length, _WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _WORDS)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Return the loss of predicting every next word."""
        x, y = batch[:, :-1], batch[:, 1:]
        x = self.blocks(self.words(x) + self.places(torch.arange(x.shape[1])))
        loss = F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), y.flatten())
        self.log("loss", loss)
        return loss


def main() -> None:
    """Capture and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--lengths", type=int, nargs="+", default=[17, 33, 49, 65, 18, 34, 50, 66])
    options = parser.parse_args()
    torch.set_num_threads(1)
    module = GPT(options.blocks, max(options.lengths)).train()
    first = _request(module, options.lengths[0])
    general = None
    for length in options.lengths:
        request = _request(module, length)
        changed = changed_sizes(first.structure, request.structure, batch_dim=0)
        direct, capture = _timed(capture_step, request)
        how = "first"
        if general is None and changed:
            symbols, general = _timed(capture_step, replace(request, lengths=changed))
            how = f"with symbols {symbols:.2f} s"
        elif general is not None:
            again, found = _timed(general.for_lengths, request)
            how = f"from that {again:.2f} s" if found is not None else "from that: does not hold"
        split, _ = _timed(capture.split, (len(capture.graph.nodes) // 2,))
        count = len(capture.joint.module.graph.nodes)
        print(f"length {length}: {count} operations, traced {direct:.2f} s, {how}, split {split:.2f} s")


def _request(module: GPT, length: int) -> Request:
    structure = flatten(torch.zeros(_SAMPLES, length, dtype=torch.long))[1]
    return Request(module, "training_step", structure, samples=_SAMPLES)


def _timed(run: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Return seconds of the processor, and what was returned."""
    begin = time.process_time()
    found = run(*arguments)
    return time.process_time() - begin, found


if __name__ == "__main__":
    main()
