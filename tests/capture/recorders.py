"""A stand-in for CUDA graphs: it runs functions again, on the memory that they were recorded with."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


class Again:
    """Records by running functions again; what they have made is overwritten by the next launch."""

    def __init__(self, fails: bool = False) -> None:
        self.device, self.fails = torch.device("cpu"), fails
        self.recorded = self.launched = 0
        self._shown: list[torch.Tensor] = []

    def try_out(self, function: Callable[[], T]) -> T:
        return function()

    def record(self, function: Callable[[], list[torch.Tensor]]) -> Callable[[], list[torch.Tensor]]:
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        self.recorded += 1

        def launch() -> list[torch.Tensor]:
            self.launched += 1
            for tensor in self._shown:
                tensor.fill_(77)
            self._shown = [made.clone() for made in function()]
            return self._shown

        return launch
