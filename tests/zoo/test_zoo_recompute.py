"""Every module of the zoo with everything recomputed that can be, or some of it: the numbers of keeping all."""

from __future__ import annotations

import copy
import random
import zlib

import pytest
import torch

from capture.sequential import run_stages
from lightning_pipe.capture import flatten
from lightning_pipe.capture.steps.stage_program import RandomKey
from lightning_pipe.cost.activations import StagePolicy, candidates
from lightning_pipe.cost.stage import Cutter
from lightning_pipe.planner.memory.policies import policy_of
from slow import slow_but
from zoo.test_zoo_pipelines import JOINT, buffers_of, of_zoo

KEY = RandomKey(seed=1, step=0, microbatch=0)
QUICK = ("resnet_batchnorm",)


@pytest.mark.parametrize("name", slow_but(QUICK, JOINT))
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_module_of_the_zoo_recomputes_without_a_difference(name, share):
    found = of_zoo(name)
    module, capture = found.module, found.capture
    graph, dice = capture.graph, random.Random(zlib.crc32(name.encode()))
    places = [k for k in range(1, len(graph.nodes)) if k not in graph.uncuttable]
    samples = capture.joint.samples
    own = [t[:samples].clone() if t.ndim and len(found.sizes) > 1 else t.clone() for t in flatten(found.batch)[0]]
    for stages in (1, 3):
        cuts = tuple(sorted(dice.sample(places, min(stages - 1, len(places)))))
        cutter = Cutter(graph)
        policies = []
        for work in cutter.works(cuts):
            can = [c.memory for c in candidates(graph, work) if c.is_remakeable]
            again = frozenset(dice.sample(can, round(share * len(can))))
            policies.append(policy_of(cutter.tables, work, StagePolicy(again, frozenset())))
        runs = []
        for chosen in ((), tuple(policies)):
            replica = copy.deepcopy(module)
            buffers = buffers_of(replica, capture)
            leaves, _ = capture.with_totals(own, cut=(False,) * len(own), sizes=(samples,), buffers=buffers)
            split = capture.split(cuts, policies=chosen)
            results, gradients = run_stages(split, replica, leaves, key=KEY, weight=1.0, buffers=buffers)
            runs.append((results[capture.record.loss], gradients, dict(replica.named_buffers())))
        torch.testing.assert_close(*runs, rtol=0, atol=0, equal_nan=True)
