"""Kept checks: what a check before training has found, for a later start that would compare the very same.

A check is a function of the step, of how batches are cut, of the values of the module and of the first batch, and of a
seed. A start that has all of these as an earlier one had would find what that one found. They are in two places:

    name of the file   a hash of the step's identity, its graph, numbers and sizes, of the seed, device and settings
    in the file        a hash of all values; time and size of every file of code that was loaded, as the plain step may
                       run code that no capture has seen

What was not compared, or compared with a warning, is not kept, so that a warning comes at every start.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import os
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_pipe import cache_files
from lightning_pipe.core.serial import from_dict, to_dict
from lightning_pipe.profiler.cache import conditions, digest
from lightning_pipe.strategy.plans.batch_cuts import BatchCuts
from lightning_pipe.strategy.steps.captured import Captured
from lightning_pipe.strategy.steps.step_calls import StepRequest

_FORMAT = 2  # raised when what is written changes


@dataclass(frozen=True)
class Verdict:
    """What a check has found that passed.

    Attributes:
        day: when.
    """

    day: str


@dataclass(frozen=True)
class _KnownCheck:
    """A file of a check: values and files of code as they were."""

    verdict: Verdict
    values: str
    files: Mapping[str, tuple[int, ...]]

    @classmethod
    def parsed(cls, content: bytes) -> _KnownCheck:
        return from_dict(cls, json.loads(content))


class KeptCheck:
    """One check, on the rank that makes it.

    Args:
        folder: where checks are kept; None keeps none.
        captured: the step; its module is whole.
        call: what was captured, with the tensors of the batch.
        cuts: how it is cut.
        seed: of the random numbers.
    """

    def __init__(
        self, folder: Path | None, captured: Captured, call: StepRequest, *, cuts: BatchCuts, seed: int
    ) -> None:
        self._folder, self._captured, self._call, self._cuts, self._seed = folder, captured, call, cuts, seed

    @functools.cached_property
    def _path(self) -> Path | None:
        """Return the file of this check; None if there can be none."""
        if self._folder is None:
            return None
        name = _name(self._captured, self._call, cuts=self._cuts, seed=self._seed)
        return self._folder / f"{name}.json" if name else None

    def look(self) -> Verdict | None:
        """Return what was found when everything was as it is; None if that is not known."""
        known = None if self._path is None else cache_files.read(self._path, _KnownCheck.parsed, version=_FORMAT)
        if known is None or any(_stamp(file) != stamp for file, stamp in known.files.items()):
            return None
        return known.verdict if known.values == self._values() else None

    def keep(self) -> None:
        """Keep a check that has passed."""
        if self._path is None or not (values := self._values()):
            return
        files = {file: stamp for file in _code_files() if (stamp := _stamp(file)) is not None}
        verdict = Verdict(time.strftime("%Y-%m-%d"))
        content = json.dumps(to_dict(_KnownCheck(verdict, values, files)))
        cache_files.write(self._path, content.encode(), version=_FORMAT)

    def _values(self) -> str:
        """Return a hash of the values of the module and the batch; "" if some of them have no plain form."""
        batch = ((str(number), tensor) for number, tensor in enumerate(self._call.tensors or ()))
        with contextlib.suppress(RuntimeError, TypeError):
            return _hash(itertools.chain(_state_of(self._captured.request.module), batch))
        return ""


def _name(captured: Captured, call: StepRequest, *, cuts: BatchCuts, seed: int) -> str:
    """Return a hash of what a check depends on besides values and code; "" if some of that is not known."""
    capture, request = captured.capture, captured.request
    if not capture.identity or call.tensors is None or "__file__" not in vars(sys.modules["__main__"]):
        return ""  # code without a file cannot be looked at
    samples = cuts.samples(call.structure)
    asked = {
        "step": [capture.identity, capture.graph.fingerprint, capture.whole],
        "numbers": capture.begin(request.arguments, request.structure.template),
        "cut": [samples, cuts.sizes(capture, samples), cuts.parts(capture, samples), str(cuts.planned.layout)],
        "seed": seed,
        "device": [str(request.device), conditions(request.device), torch.get_num_threads()],
    }
    return digest(json.dumps(asked, sort_keys=True))


def _state_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return itertools.chain(
        module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    )


def _hash(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    found = hashlib.blake2b(digest_size=20)
    for name, tensor in named:
        if type(tensor.data) is not torch.Tensor or tensor.is_meta or tensor.is_quantized:
            return ""
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}\n".encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _code_files() -> list[str]:
    """Return the files of the modules that are loaded, but for those of Python and torch, whose versions are known."""
    standard, torchs = sysconfig.get_path("stdlib"), str(Path(torch.__file__).parent)
    others = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    loaded: list[Any] = [getattr(module, "__dict__", {}).get("__file__") for module in list(sys.modules.values())]
    return [
        file
        for file in sorted({file for file in loaded if isinstance(file, str)})
        if not file.startswith(torchs) and (file.startswith(others) or not file.startswith(standard))
    ]


def _stamp(file: str) -> tuple[int, ...] | None:
    """Return time and size of a file; None if there is none."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size)
