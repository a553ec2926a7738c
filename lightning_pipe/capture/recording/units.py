"""Units of a step whose Python runs every time, and the values that flow between them.

A *unit* is a call of a sub-module; what the step does between units is *glue*. Ranks run the whole Python of the step,
but of the units only those that they own (replay). One run of the step on real tensors (`unit_trace`) finds out
what each unit's inputs are made of, through glue:

    source    a unit's output (`("unit", 3)`), a tensor of the batch (`("leaf", 0)`), a parameter that glue reads
              (`("parameter", "embed.weight")`), or state of the module that is no parameter
              (`("state", "running_mean")`)

Everything here is plain data, the same in every process, so that rank 0 can tell it to the others. Units are numbered
in the order of their calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from lightning_pipe.capture.python.places import Path
from lightning_pipe.capture.recording.unit_loss import Reductions

Source = tuple[Literal["unit", "leaf", "parameter", "state"], "int | str"]
Sources = frozenset[Source]
Head = Literal["", "holds", "speaks"]
MOST_SAID = 4096  # numbers of a sample that are put together for what a step says


@dataclass(frozen=True)
class UnitOutput:
    """One tensor that a unit returns.

    Attributes:
        dtype: its type.
        shape: its shape in the traced run.
        batch_dim: dimension of which every sample has `rows`; None if no dimension depends on the samples.
        rows: rows of `batch_dim` per sample.
        order: dimensions from the slowest to the fastest in memory; () is row-major.
        has_gradient: whether a gradient flows back to the unit through it.
        is_detached: whether none does although the unit made it differentiably: the step took its values only.
        is_overwritten: whether it (or memory that it shares) is changed in place after the unit has returned it.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    batch_dim: int | None
    rows: int
    order: tuple[int, ...]
    has_gradient: bool
    is_detached: bool
    is_overwritten: bool


@dataclass(frozen=True)
class Unit:
    """One call of a sub-module.

    Attributes:
        path: path of the sub-module.
        reads: sources of its inputs, through glue.
        template: what it returns, with `capture.steps.batch.LeafSlot` in the place of tensors.
        outputs: these tensors.
        parameters: canonical names of the parameters in the sub-module.
        mutations: names of the buffers that the call changes.
        buffers: names of the buffers in the sub-module.
        forward_s, backward_s: seconds in the traced run.
        flops: floating point operations of forward.
        saved_bytes: bytes that autograd keeps of it, parameters and its inputs left out.
        is_fixed: whether its outputs have shapes that depend on the number of samples only; others cannot travel.
        is_repeatable: whether it returns the same when it is called again in the backward, and changes nothing then.
        is_given_as_is: whether it is given tensors of the batch, or what units returned, and nothing else.
        blocks: how often all samples follow each other in its rows: `cat([first_view, second_view])` has two blocks.
    """

    path: str
    reads: Sources
    template: Any
    outputs: tuple[UnitOutput, ...]
    parameters: tuple[str, ...]
    mutations: tuple[str, ...]
    buffers: tuple[str, ...]
    forward_s: float
    backward_s: float
    flops: int
    saved_bytes: int
    is_fixed: bool
    is_repeatable: bool = False
    is_given_as_is: bool = False
    blocks: int = 1


@dataclass(frozen=True)
class Escape:
    """A value that glue reads into Python (`.item()`, NumPy), or whose shape depends on data.

    Whatever comes after it may depend on it, so every rank that goes on needs its sources. Random numbers in the form
    of a tensor of the batch are one too: fake tensors would not draw them, and those drawn next would be others.

    Attributes:
        before: number of the unit before which it happens; the number of all units if it happens behind the last.
        reads: what it is made of.
        line: the user's line.
    """

    before: int
    reads: Sources
    line: str


@dataclass(frozen=True)
class KeptChange:
    """What the step leaves different for its next call: an attribute, or a buffer or parameter changed by glue.

    Attributes:
        name: path of the attribute, buffer or parameter.
        before: number of the unit before which it has changed.
        reads: what its new value is made of.
        is_tensor: whether it is a tensor (or a collection of them), whose use is followed; of other values, and of
            parameters, it is not known who reads them.
        line: the user's line; "" if unknown.
    """

    name: str
    before: int
    reads: Sources
    is_tensor: bool
    line: str


@dataclass(frozen=True)
class WrittenPlace:
    """A place of Python state outside of units that the step changes.

    Attributes:
        name: for a reader.
        path: where it is.
        units: inside which it changes; their number stands for glue, which the last stage runs to the end.
    """

    name: str
    path: Path
    units: frozenset[int]


@dataclass(frozen=True)
class OutputRules:
    """What runs with different numbers of samples have told about the output of a step, by place.

    Attributes:
        same: places of texts and numbers that all runs had.
        proportional: places of numbers in proportion to the samples.
        rows: dimension of the samples in tensors.
    """

    same: frozenset[tuple[str, ...]] = frozenset()
    proportional: frozenset[tuple[str, ...]] = frozenset()
    rows: Mapping[tuple[str, ...], int] = field(default_factory=dict)


@dataclass(frozen=True)
class UnitTrace:
    """A step, seen as units.

    Attributes:
        units: the calls in their order.
        samples: samples of the traced run.
        tail: sources of the loss, and of all that is logged, given to metrics or returned; with tensors of the batch
            that the traced run does not read.
        escapes: in their order.
        changes: in their order.
        trained: canonical names of the parameters that got a gradient, and of those of units, which a batch may train.
        loss: type of the loss; None if the step has none.
        combine: how losses of micro-batches make that of the batch.
        is_random: whether torch's random numbers are drawn, by units or glue.
        is_random_in_python: whether Python's or NumPy's are.
        whole: why a batch must not be cut: what the step keeps for its next call, or for hooks, depends on the samples;
            "" if it may be.
        once: buffers whose new content was the same for all samples.
        keeping: units inside which the step changes Python state.
        written: Python state that it changes elsewhere.
        proportional: places of the numbers that it returns or logs, and that are in proportion to the samples.
        rows: dimension along which what it returns or logs has rows of samples, by place.
        writes: names of the parameters that the step writes to.
        sets_first: names of those, and of buffers, that its first call alone writes to, by the values of its batch.
        is_for_one_count: whether the step does not run with other numbers of samples, so that nothing tells what
            depends on them.
        law: how the loss is made, if losses of micro-batches are proven to make that of the batch; else None.
        head: whether what lies behind the last unit runs once per batch, on what units gave for all micro-batches:
            "holds", where backwards wait for its gradients; "speaks", where all that the step says is said by it; ""
            where micro-batches say it.
        mixing: paths of the units that mix samples: they return something else for parts of a batch than for all.
        draws: what it draws from torch's generators, dropout aside, each with the user's line.
        headless: why there is none for batches that are cut, in words after "since"; "" if there is.
        output: what is known of its output.
        outputting: units that output something.
    """

    units: tuple[Unit, ...]
    samples: int
    tail: Sources
    escapes: tuple[Escape, ...]
    changes: tuple[KeptChange, ...]
    trained: frozenset[str]
    loss: torch.dtype | None
    combine: Literal["mean", "sum"]
    is_random: bool
    is_random_in_python: bool
    whole: str = ""
    once: frozenset[str] = frozenset()
    keeping: frozenset[int] = frozenset()
    written: tuple[WrittenPlace, ...] = ()
    proportional: frozenset[tuple[str, ...]] = frozenset()
    rows: Mapping[tuple[str, ...], int] = field(default_factory=dict)
    writes: frozenset[str] = frozenset()
    sets_first: frozenset[str] = frozenset()
    is_for_one_count: bool = False
    law: Reductions | None = None
    head: Head = ""
    headless: str = ""
    mixing: tuple[str, ...] = ()
    output: OutputRules = field(default_factory=OutputRules)
    outputting: frozenset[int] = frozenset()
    draws: tuple[str, ...] = ()
