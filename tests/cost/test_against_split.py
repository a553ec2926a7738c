"""Costs and runtime see the same cut: what `cost.stage` says of a graph is what `capture.stages.split` makes of it."""

from __future__ import annotations

import random
import zlib

from lightning_pipe.cost.stage import Cutter


def cuts_of(name: str, graph) -> list[tuple[int, ...]]:
    """Draw cuts into one to eight stages, and add all into two where what a head makes may travel."""
    dice = random.Random(zlib.crc32(name.encode()))
    places = [k for k in range(1, len(graph.nodes)) if k not in graph.uncuttable]
    counts = [stages for stages in (1, 2, 3, 5, 8) if stages - 1 <= len(places)]
    drawn = [tuple(sorted(dice.sample(places, stages - 1))) for stages in counts]
    return drawn + [(place,) for place in places if graph.head]


def test_traffic_is_that_of_the_split(zoo):
    name, capture, _, _ = zoo
    cutter = Cutter(capture.graph)
    for cuts in cuts_of(name, capture.graph):
        assert cutter.traffic(cuts) == capture.split(cuts).traffic, cuts


def test_halves_make_what_those_of_the_split_return(zoo):
    name, capture, _, _ = zoo
    graph, cutter = capture.graph, Cutter(capture.graph)
    for cuts in cuts_of(name, graph):
        for program, work in zip(capture.split(cuts).stages, cutter.works(cuts), strict=True):
            halves = (program.forward, program.input_grad, program.weight_grad)
            for half, found in zip(halves, (work.forward, work.input_grad, work.weight_grad), strict=True):
                outputs = set(half.outputs) if half is not None else set()
                copies = {n for n in outputs if n.endswith("_before")}
                assert {graph.tensors[t].name for t in found.outputs} == outputs - copies, (cuts, program.stage)
            held = {*program.parameters.values(), *program.gradients.values()}
            assert set(work.parameters) == held, (cuts, program.stage)
            assert dict(program.gradients) == {graph.tensors[t].name: p for t, p in work.gradients}
