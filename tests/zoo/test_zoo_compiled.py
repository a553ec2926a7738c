"""Every module of the zoo with stages that are compiled: the numbers of the plain ones.

What a compiler is given is a graph of its own: the same bits come out where that is run as it is, and the same numbers
up to rounding where Inductor runs it.
"""

from __future__ import annotations

import copy
import logging
import random
import zlib
from typing import Any
from unittest import mock

import pytest
import torch

from capture.recorders import Again
from capture.sequential import run_stages
from lightning_pipe.capture import flatten
from lightning_pipe.capture.stages import compiling
from lightning_pipe.capture.stages.compiled_stages import CompiledStages
from lightning_pipe.capture.steps.stage_program import RandomKey
from slow import slow_but
from zoo.test_zoo_pipelines import JOINT, buffers_of, of_zoo

KEY = RandomKey(seed=1, step=0, microbatch=0)
CPU = torch.device("cpu")
QUICK = ("resnet_batchnorm",)
SLOW = slow_but(QUICK, JOINT)


def runs(name: str, *, times: int, **options: Any):
    """Return loss, gradients and buffers of plain stages, and of every run of the compiled ones."""
    found = of_zoo(name)
    module, capture = found.module, found.capture
    graph, dice = capture.graph, random.Random(zlib.crc32(name.encode()))
    places = [k for k in range(1, len(graph.nodes)) if k not in graph.uncuttable]
    samples = capture.joint.samples
    own = [t[:samples].clone() if t.ndim and len(found.sizes) > 1 else t.clone() for t in flatten(found.batch)[0]]
    plain = capture.split(tuple(sorted(dice.sample(places, min(2, len(places))))))
    stages = CompiledStages(plain, CPU, trials=True, **options)
    for program in plain.stages:
        for kind in ("F", "I", "W"):
            stages.compile(program.stage, kind, samples)
    made = []
    for split in (plain, *[stages.split] * times):
        replica = copy.deepcopy(module)
        buffers = buffers_of(replica, capture)
        leaves, _ = capture.with_totals(own, cut=(False,) * len(own), sizes=(samples,), buffers=buffers)
        before = torch.get_rng_state()
        results, gradients = run_stages(split, replica, leaves, key=KEY, weight=1.0, buffers=buffers)
        assert torch.equal(torch.get_rng_state(), before)
        made.append((results[capture.record.loss], gradients, dict(replica.named_buffers())))
    return made


@pytest.mark.parametrize("name", SLOW)
def test_what_a_compiler_is_given_has_the_same_bits(name, caplog):
    """The second run, after the trial of every function, is that of the graphs."""
    with mock.patch.object(compiling, "inductor", lambda module, forms, device: module.forward):
        plain, _, second = runs(name, times=2)
    assert not [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    torch.testing.assert_close(plain, second, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", SLOW)
def test_what_is_recorded_has_the_same_bits(name, caplog):
    """Every run has parameters of its own, so that functions are recorded anew."""
    recorder = Again()
    plain, *recorded = runs(name, times=3, kernels=False, recorder=recorder)
    assert recorder.launched > recorder.recorded > 0
    assert not [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    for found in recorded:
        torch.testing.assert_close(plain, found, rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", JOINT)
def test_a_compiled_module_of_the_zoo_has_the_same_numbers(name, caplog):
    plain, _, second = runs(name, times=2)
    for record in caplog.records:
        assert record.levelno < logging.WARNING or "uncompiled" in record.message
    largest = max(float(gradient.abs().max()) for gradient in plain[1].values())
    rtol = 2 * torch.finfo(torch.bfloat16).eps if name == "autocast_inside" else 1e-3  # which computes in it
    torch.testing.assert_close(plain, second, rtol=rtol, atol=1e-4 * max(1.0, largest), equal_nan=True)
