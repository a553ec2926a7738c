"""What counted costs promise: compute and memory have rates of their own, by type of numbers and kind of device."""

from __future__ import annotations

from dataclasses import replace

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from cost.sketches import Sketch
from lightning_pipe.capture import Request, capture_step, flatten
from lightning_pipe.config import conf_dir
from lightning_pipe.core.cluster import Cluster, Device, Host, Link, Rates
from lightning_pipe.core.cluster_file import cluster_from_text, cluster_to_text, find_cluster, preset_names
from lightning_pipe.core.graph import Graph
from lightning_pipe.cost.counted import NOMINAL, counted, counted_on
from lightning_pipe.cost.utilization import seconds_at_peak
from lightning_pipe.errors import ClusterError

FAST = Rates(memory_bytes_per_s=1e12, flops_per_s=(("float32", 1e13), ("bfloat16", 1e14)), operation_s=0.0)
SLOW_MEMORY = replace(FAST, memory_bytes_per_s=1e11)
LINK = Link(1e-6, 1e10)


def graph(*, flops: int, touched: int, dtype: str = "float32") -> Graph:
    """Return one operation with so much to compute and to move, on the one sample that was captured."""
    sketch = Sketch(1, samples=1)
    made = sketch.forward("h", 0, sketch.batch(per_sample=0), size=(0, 0), flops=flops, touched_bytes=touched)
    sketch.results.append(made)
    found = sketch.graph()
    return replace(found, operations=tuple(replace(one, dtype=dtype) for one in found.operations))


def seconds(rates: Rates, **needs: int | str) -> float:
    return counted(graph(**needs), rates).seconds[0][0]


def test_compute_and_memory_have_rates_of_their_own():
    assert seconds(FAST, flops=10**10, touched=0) == pytest.approx(1e-3)
    assert seconds(SLOW_MEMORY, flops=10**10, touched=0) == pytest.approx(1e-3)
    assert seconds(FAST, flops=0, touched=10**9) == pytest.approx(1e-3)
    assert seconds(SLOW_MEMORY, flops=0, touched=10**9) == pytest.approx(1e-2)


def test_types_of_numbers_have_rates_of_their_own():
    assert seconds(FAST, flops=10**10, touched=0, dtype="bfloat16") == pytest.approx(1e-4)
    assert seconds(FAST, flops=10**10, touched=0, dtype="float64") == pytest.approx(1e-3), "that of the first"
    assert seconds(NOMINAL, flops=10**8, touched=0, dtype="bfloat16") == pytest.approx(1e-3 + NOMINAL.operation_s)


def test_seconds_at_the_peak_are_those_of_all_devices_together():
    """Devices share the samples as their peaks do: 1 and 3 TFLOP/s do in 1 s what 4 do."""
    one = graph(flops=4 * 10**12, touched=0, dtype="bfloat16")
    one = replace(one, nodes=(replace(one.nodes[0], flops=4 * 10**12, backward_flops=0),))
    slow, fast = {"bfloat16": 1e12}.get, {"bfloat16": 3e12}.get
    assert seconds_at_peak(one, 1, [slow, fast]) == pytest.approx(1.0)
    assert seconds_at_peak(one, 6, [slow, fast]) == pytest.approx(6.0)
    assert seconds_at_peak(one, 1, [slow, lambda dtype: 0.0]) == 0, "one peak is not known"
    assert seconds_at_peak(graph(flops=0, touched=1), 1, [slow, fast]) == 0, "nor are the operations"


def test_a_device_is_as_much_faster_as_it_runs_this_graph():
    first, second = Device("a", 1, rates=FAST), Device("b", 1, rates=SLOW_MEMORY)
    other = Device("c", 1, speed=0.25)
    cluster = Cluster((Host("h", (first, second, other), LINK, LINK),))
    for needs, expected in (({"flops": 10**10, "touched": 0}, 1.0), ({"flops": 0, "touched": 10**9}, 0.1)):
        profile, found = counted_on(graph(**needs), cluster)
        assert profile.device == "a"
        assert [found.device(rank).speed for rank in range(3)] == pytest.approx([1.0, expected, 0.25])


def test_without_rates_costs_are_those_of_the_nominal_device():
    cluster = Cluster((Host("h", (Device("c", 1, speed=0.25),), LINK, LINK),))
    asked = graph(flops=10**8, touched=10**6)
    assert counted_on(asked, cluster) == (counted(asked), cluster)


@pytest.mark.parametrize("name", preset_names(conf_dir() / "cluster"))
def test_every_preset_has_the_rates_of_its_devices(name: str):
    cluster = find_cluster(name, presets=conf_dir() / "cluster")
    for rank in range(cluster.ranks):
        rates = cluster.device(rank).rates
        assert rates is not None and rates.flops_of("float16") > rates.flops_of("float32") > 0
        for kind, share in (("float32", 0.8), ("float16", 0.6)):
            assert rates.flops_of(kind) / rates.peak_of(kind) == pytest.approx(share, rel=0.02), "as the files say"
    assert cluster_from_text(cluster_to_text(cluster)) == cluster


@pytest.mark.parametrize(
    ("rates", "says"),
    [
        ("{memory: 0 GB/s, tflops: {float32: 1}}", r"rates.memory: found '0 GB/s'; expected more than 0"),
        ("{memory: 1 GB/s, tflops: {}}", r"rates.tflops: found nothing; expected at least one"),
        ("{memory: 1 GB/s, tflops: {float32: -1}}", r"rates.tflops.float32: found -1.0; expected more than 0"),
        ("{memory: 1 GB/s, tflops: {float32: 1}, peak: {x: 0}}", r"rates.peak.x: found 0.0; expected more than 0"),
        ("{memory: 1 GB/s}", "tflops"),
    ],
)
def test_wrong_rates_are_refused_with_their_place(rates: str, says: str):
    text = f"hosts: [{{name: a, devices: [{{kind: x, memory: 1 GiB, rates: {rates}}}]}}]"
    with pytest.raises(ClusterError, match=says):
        cluster_from_text(text)


def test_a_captured_step_knows_the_types_of_its_numbers():
    module = _Narrow()
    _, structure = flatten([torch.ones(4, 8)])
    found = capture_step(Request(module, "training_step", structure, samples=2)).graph
    types = {one.dtype for one in found.operations if one.flops}
    assert types == {"float32", "bfloat16"}


class _Narrow(pl.LightningModule):
    """A layer in 16 bits, and one in 32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, dtype=torch.bfloat16), nn.Linear(8, 8)

    def training_step(self, batch, batch_idx):
        return self.second(self.first(batch[0].bfloat16()).float()).mean()
