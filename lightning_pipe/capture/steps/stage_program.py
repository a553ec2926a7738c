"""Stage program: one stage as pure functions. The result of `split`, the input of `runtime.stage`.

A stage program holds up to three pure functions over named values (names are those of the joint graph's nodes):

    F(parameters, buffers, batch leaves, received values)      -> outputs
    I(saved values, received gradients, tangents)              -> gradients to send, values kept for W
    W(saved and kept values)                                   -> parameter gradients

The last stage may have a head besides, which runs once per batch: HEAD(values of all micro-batches) -> values for I, W

They run under `no_grad`; which values to save is simply the inputs of I and W that F has or produced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import fx

from lightning_pipe.core.program import Pass, Traffic


@dataclass(frozen=True)
class RandomKey:
    """Key of the random numbers of one compute: every random node adds its own number to it.

    Layout, schedule and recompute do not enter, so they do not change the numbers drawn. Beside it stands the number of
    samples of the batch, which no random number depends on; 0 for the number that the graph was captured with.
    """

    seed: int
    step: int
    microbatch: int
    first_sample: int = 0
    batch_samples: int = 0

    @property
    def of_batch(self) -> RandomKey:
        """Return the key of what is drawn once for all samples of the batch."""
        return replace(self, microbatch=-1, first_sample=0)


FIRST_KEY = RandomKey(0, 0, 0)
NOT_HELD: Mapping[str, Set[int]] = {}  # no parameter has copies in other stages than those that use it
Combine = Literal["mean", "sum", "cat", "same", "max", "min", "last"]


def memory_order(strides: Sequence[int]) -> tuple[int, ...]:
    """Return the dimensions from the slowest to the fastest by their strides; () if that is their own order.

    Dimensions of an expanded tensor that lie nowhere (stride 0) are the slowest: kernels rely on the fastest one.
    """
    order = tuple(sorted(range(len(strides)), key=lambda dim: -strides[dim] or -math.inf))
    return () if order == tuple(range(len(strides))) else order


@dataclass(frozen=True)
class Value:
    """What is known of a value that crosses stages or leaves the graph.

    Attributes:
        name: node name in the joint graph.
        dtype: element type; None for a Python integer.
        size: shape as a function of the number of samples.
        batch_dim: dimension along which samples lie, outermost within it; None if the value has no samples.
        rows: rows of `batch_dim` that belong to one sample (a flattened `[batch * time]` dimension has `time`).
        size_in_batch: shape as a function of the number of samples and of those of the batch, where it depends on
            these, too; None where it does not.
        order: dimensions from the slowest to the fastest in memory, as the step leaves them; () is row-major.
            Kept on the way to another rank, because kernels round differently for other strides.
        outer: how often all samples follow each other in `batch_dim`, as in `cat([z1, z2])`.
        combine: how the values of slices make the value of the batch: `cat` along `batch_dim`; `mean` weighted by
            samples; `sum`, `max`, `min`; `same` where it does not depend on the samples.
        sizes_travel: whether only its maker knows its shape, which goes before it in a message; `size` then says how
            many dimensions it has.
    """

    name: str
    dtype: torch.dtype | None
    size: Callable[[int], tuple[int, ...]]
    batch_dim: int | None
    rows: int = 1
    combine: Combine = "same"
    order: tuple[int, ...] = ()
    size_in_batch: Callable[[int, int], tuple[int, ...]] | None = None
    outer: int = 1
    sizes_travel: bool = False

    def shape(self, samples: int, batch_samples: int = 0) -> tuple[int, ...]:
        """Return the shape for so many samples of a batch of so many; 0 for as many as the step was captured with."""
        if self.size_in_batch is None:
            return self.size(samples)
        return self.size_in_batch(samples, batch_samples)


Give = Callable[..., None]  # give(canonical name of a parameter, *terms of its gradient)


@dataclass(frozen=True)
class Streamed:
    """A half that gives each gradient of a parameter away as soon as it is made, so that it need not keep them.

    Attributes:
        gradients: canonical name -> names of the terms of its gradient, all of which the half makes; in the order in
            which they are given.
        outputs: names of what it returns, which is all the rest.
        run: `run(samples, key, give, *inputs) -> outputs`.
    """

    gradients: Mapping[str, tuple[str, ...]]
    outputs: tuple[str, ...]
    run: Callable[..., tuple[torch.Tensor | int, ...]]

    def collected(self, outputs: tuple[str, ...]) -> Callable[..., tuple[torch.Tensor | int, ...]]:
        """Return a function that returns gradients among its outputs."""

        def run(samples: int, key: RandomKey | None, *inputs: torch.Tensor | int) -> tuple[torch.Tensor | int, ...]:
            found: dict[str, torch.Tensor | int] = {}

            def give(name: str, *terms: torch.Tensor) -> None:
                found.update(zip(self.gradients[name], terms, strict=True))

            found.update(zip(self.outputs, self.run(samples, key, give, *inputs), strict=True))
            return tuple(found[name] for name in outputs)

        return run


@dataclass(frozen=True)
class Code:
    """The operations of a half.

    Attributes:
        module: what runs; its inputs are `samples`, `key`, `give` where the half is streamed, and those of the half.
        form: the value of a node at a number of samples, with specs in the place of its tensors.
        batch_samples: samples of the batch for which values have this form; 0 if they do not depend on these.
    """

    module: fx.GraphModule
    form: Callable[[fx.Node, int], Any]
    batch_samples: int = 0

    def holds_for(self, key: RandomKey | None) -> bool:
        """Return whether values have this form in a batch."""
        return key is None or key.batch_samples in (0, self.batch_samples) or not self.batch_samples


@dataclass(frozen=True)
class Half:
    """One pure function of a stage.

    Attributes:
        inputs: names of the values it takes, in order.
        outputs: names of the values it returns, in order.
        run: `run(samples, key, *inputs) -> outputs`; `samples` is the number of samples of its slice.
        along: the inputs that are put together where W of several micro-batches is one, with the dimension (others are
            the same for every micro-batch); None if this half cannot be one for several micro-batches.
        streamed: the same function for who takes gradients as they come; None if it makes none that can be given away.
        code: its operations; None if they differ between numbers of samples, or are not known.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    run: Callable[..., tuple[torch.Tensor | int | None, ...]]
    along: Mapping[str, int] | None = None
    streamed: Streamed | None = None
    code: Code | None = None


@dataclass(frozen=True)
class BatchHead:
    """What the last stage computes once per batch, when all of its forwards have run.

    `Split.values` says how the content of an input for the batch is made of those of micro-batches, and the parts of an
    output for micro-batches: rows are put together and cut, terms are added, what does not depend on samples is given
    whole. Parameters and buffers are read as they are, tangents are those of the whole batch. It makes no gradient of
    a parameter: W of a micro-batch does, from what the head has made, by its share.

    Attributes:
        half: reads what F of the stage made, received or loaded, and what it makes I and W read, or is a result.
        holds_backwards: whether I or W read what it makes; else it makes results only, and they do not wait.
    """

    half: Half
    holds_backwards: bool = True


@dataclass(frozen=True)
class StageProgram:
    """Everything the runtime needs to run one stage.

    Attributes:
        stage: its number.
        parameters: value name -> canonical name of the parameter (a tied parameter has one canonical name).
        buffers: value name -> name of the buffer.
        leaves: value name -> index of the batch leaf; only stages that load have any.
        tangents: value names of the loss tangents that I or W read; the runtime passes the weight of the slice.
        forward, input_grad, weight_grad: the functions; the last two are None in a forward-only stage, or where the
            stage has no backward.
        receives, sends: values per edge: (direction, other stage) -> names, in the order in which they travel.
        mutations: buffer name -> value name of its new content after F.
        once: buffers whose new content does not depend on the samples: every micro-batch reads what was there before
            the batch, and the new content is written once, at its end, as by one device.
        averaged: buffers whose new content is a mean over samples: written once, too, as the mean of the contents that
            micro-batches make of what was there before.
        written: names of the parameters that F writes to in place.
        gradients: value name -> canonical parameter name; several values may belong to one parameter: they are added.
        results: value names of the step's outputs (loss, logged values, metric arguments, guards) that F or the head
            produces; those of the head are the batch's.
        offloaded: names of values whose memory is on the host between F and the backward; those that the head reads
            stay.
        head: what the last stage computes once per batch.
    """

    stage: int
    parameters: Mapping[str, str]
    buffers: Mapping[str, str]
    leaves: Mapping[str, int]
    tangents: tuple[str, ...]
    forward: Half
    input_grad: Half | None
    weight_grad: Half | None
    receives: Mapping[tuple[Pass, int], tuple[str, ...]]
    sends: Mapping[tuple[Pass, int], tuple[str, ...]]
    mutations: Mapping[str, str]
    gradients: Mapping[str, str]
    results: tuple[str, ...]
    once: frozenset[str] = frozenset()
    averaged: frozenset[str] = frozenset()
    written: frozenset[str] = frozenset()
    offloaded: frozenset[str] = frozenset()
    head: BatchHead | None = None


@dataclass(frozen=True)
class Split:
    """A graph cut into stages.

    Attributes:
        stages: one program per stage.
        values: every value that crosses stages or is a result, by name.
        traffic: edges with bytes, gradient buckets, loading stages, stages whose weight halves can be joined.
        bucket_parameters: canonical parameter names of each bucket of `traffic.buckets`.
        owners: result value name -> stage that produces it.
        may_lack_gradients: whether a backward may make no gradient (None) of a parameter that it differentiates.
    """

    stages: tuple[StageProgram, ...]
    values: Mapping[str, Value]
    traffic: Traffic
    bucket_parameters: tuple[tuple[str, ...], ...]
    owners: Mapping[str, int]
    may_lack_gradients: bool = False
