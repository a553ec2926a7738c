"""Description of a replay: the step, what one stage plays of it, and what changes from batch to batch."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import nn

from lightning_pipe.capture.python.places import Path
from lightning_pipe.capture.recording.units import Head, UnitTrace
from lightning_pipe.capture.steps.batch import Structure
from lightning_pipe.capture.steps.call_recording import StepRecording
from lightning_pipe.capture.steps.module_tables import HookTables
from lightning_pipe.capture.steps.step_state import ModuleState
from lightning_pipe.capture.torchmetrics_objects import metrics_in
from lightning_pipe.errors import PipelineError
from lightning_pipe.lightning_names import pl

Tensors: TypeAlias = tuple[torch.Tensor, ...]
WHOLE_BATCH = -1  # in the place of the number of a micro-batch, for a head


@dataclass
class BatchContext:
    """What changes from batch to batch, the same for all stages of a rank.

    Attributes:
        arguments: positional arguments of the step after the batch.
        template: the batch without its tensors.
        sizes: samples of the micro-batches.
        state: Python state as it was before the batch; None before the first.
        metrics: torchmetrics objects of the module, by name; None before the first play of a batch.
        speakers: stages whose plays say something.
        knowing: the stage that knows what the step leaves in a place, by its path, where units of one stage write it.
        said: (micro-batch, first sample, samples, what the step said) of every such play; micro-batch -1 is the batch.
        written_by_glue: places of Python state that glue writes to, by path.
        trained: which parameters were to get gradients before the batch.
        hooks: of modules before the batch.
        left_hooks: of modules after the last play, if they were others.
        late: how many plays have changed a buffer or an attribute that the traced run has not.
    """

    arguments: tuple[int, ...]
    template: Any
    sizes: tuple[int, ...] = ()
    state: ModuleState | None = None
    metrics: Mapping[str, nn.Module] | None = None
    speakers: tuple[int, ...] = ()
    knowing: Mapping[Path, int] = field(default_factory=dict)
    said: list[tuple[int, int, int, StepRecording]] = field(default_factory=list)
    written_by_glue: frozenset[Path] = frozenset()
    trained: dict[str, bool] = field(default_factory=dict)
    hooks: HookTables | None = None
    left_hooks: HookTables | None = None
    late: Counter[str] = field(default_factory=Counter)

    def metrics_of(self, module: nn.Module) -> Mapping[str, nn.Module]:
        """Return the torchmetrics objects of the module, which a hook may have changed since the last batch."""
        if self.metrics is None:
            self.metrics = metrics_in(module)
        return self.metrics


@dataclass(frozen=True)
class StageSpec:
    """What one stage plays.

    Attributes:
        number: of the stage.
        begin, end: its units; there may be none.
        is_last: whether it runs the step to its end.
        given: units whose outputs it is given.
        leaves: tensors of the batch that it is given.
        sent: own units whose outputs others are given.
        parameters: canonical name -> names of the parameters that it has.
        absent: names of parameters that glue reads, and of buffers that it writes to, but this stage does not need.
        buffers: names of the buffers that it has.
        mutations: buffers that it changes.
        trained: canonical names of the parameters whose gradients it makes, in batches that use them.
        spare: canonical names of the parameters that no stage uses.
        receivers: (unit, stage that is given it) whose gradients come back.
        recomputed: own units that the plan has run again in the backward.
        stops: whether its plays end behind the last unit, as a head runs the rest.
        is_head: whether this is what runs once per batch.
        asked: units whose inputs are compared: own ones, or all that a head compares.
    """

    number: int
    begin: int
    end: int
    is_last: bool
    given: tuple[int, ...]
    leaves: tuple[int, ...]
    sent: tuple[int, ...]
    parameters: Mapping[str, tuple[str, ...]]
    absent: tuple[str, ...]
    buffers: tuple[str, ...]
    mutations: tuple[str, ...]
    trained: tuple[str, ...]
    spare: tuple[str, ...]
    receivers: tuple[tuple[int, int], ...]
    recomputed: frozenset[int]
    stops: bool = False
    is_head: bool = False
    asked: tuple[int, ...] = ()


@dataclass(frozen=True)
class PlayedStep:
    """The step that is played.

    Attributes:
        module: the user's module, on the rank that plays.
        method: name of the step.
        structure: the batch without its tensors.
        batch_dim: dimension of the samples in these; None if batches are not cut.
        context: entered around every play.
        trace: its units.
        device: where it runs.
        has_backward: whether gradients are made.
        sizes_travel: whether stages tell each other how large is what units return (`replay_values`).
    """

    module: pl.LightningModule
    method: str
    structure: Structure
    batch_dim: int | None
    context: Callable[[], contextlib.AbstractContextManager[Any]]
    trace: UnitTrace
    device: torch.device
    has_backward: bool
    sizes_travel: bool

    @property
    def head(self) -> Head:
        """Return what the head does; "" if there is none."""
        return self.trace.head

    @cached_property
    def modules(self) -> dict[str, nn.Module]:
        """Return the modules that are called as units, by path."""
        called = {unit.path for unit in self.trace.units}
        return {path: child for path, child in self.module.named_modules() if path in called}

    @cached_property
    def _paths(self) -> dict[int, str]:
        return {id(child): path for path, child in self.modules.items()}

    def number(self, module: nn.Module, called: int) -> int:
        """Return the number of the unit that a call of a module is: those before it are skipped in this batch.

        Raises:
            PipelineError: if that unit does not come any more.
        """
        path = self._paths[id(module)]
        for number in range(called, len(self.trace.units)):
            if self.trace.units[number].path == path:
                return number
        expected = self.trace.units[called].path if called < len(self.trace.units) else "the end of the step"
        raise PipelineError(
            f"{self.method} calls {path} where it called {expected} when it was traced. A step that calls its "
            "modules in another order from time to time cannot be a pipeline: let it call all of them every time, and "
            "multiply by zero what is not wanted."
        )
