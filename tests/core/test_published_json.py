"""Laws of published profiles in JSON: dnn-partitioning, Sailor and Galvatron add up to what their files say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_pipe.core.cluster import NO_LINK, Cluster, Device, Host, Link
from lightning_pipe.core.plan import Plan, StagePlan
from lightning_pipe.core.program import Edge, Layout
from lightning_pipe.cost.prices import Pricer
from lightning_pipe.cost.stage import traffic
from lightning_pipe.errors import ProfileError
from lightning_pipe.planner.evaluation.evaluate import judge
from lightning_pipe.planner.problem import Problem
from lightning_pipe.profiles.published import load_published

SAILOR = Path(__file__).parents[3] / "shared" / "profiles" / "sailor_eth_easl"
needs_sailor = pytest.mark.skipif(not SAILOR.is_dir(), reason=f"no profiles of Sailor in {SAILOR}")
DEVICE = Device("V100", 1 << 50)
TWO = Cluster((Host("host", (DEVICE, DEVICE), Link(5e-6, 1e10), NO_LINK),))
MIB = 2**20


def node(k: int, color: int, *, backward: bool, size: float, latency: float = 1.0, **changes: object) -> dict:
    found = {"id": k, "name": f"node{k}", "supportedOnFpga": 1, "cpuLatency": 9.0, "fpgaLatency": latency}
    return found | {"isBackwardNode": int(backward), "colorClass": color, "size": size} | changes


def dnn(*, sink: float = 8.0 + 500, forward: dict | None = None, **content: object) -> str:
    """Return two layers, 1 -> 2, of 64 and 8 bytes of output and 100 and 500 of parameters, and their backward."""
    nodes = [
        node(1, 1, backward=False, size=164.0, latency=2.0, **(forward or {})),
        node(2, 2, backward=False, size=sink, latency=3.0),
        node(3, 1, backward=True, size=164.0, latency=4.0),
        node(4, 2, backward=True, size=sink, latency=5.0),
    ]
    edges = [
        {"sourceId": 1, "destId": 2, "cost": 1.0, "size": 64.0},
        {"sourceId": 3, "destId": 4, "cost": 1.0, "size": 8.0},
    ]
    return json.dumps({"maxFPGAs": 6, "maxCPUs": 1, "maxSizePerFPGA": 1.0, "nodes": nodes, "edges": edges} | content)


def sailor(folder: Path, *, times: dict | None = None, layers: int = 3, model: str = "Net") -> Path:
    """Write a chain of layers that take their number + 1 milliseconds per sample, and half a one besides."""

    def row(samples: int) -> dict[str, list[float]]:
        return {str(k): [1e-3 * ((k + 1) * samples + 0.5), 2e-3 * (k + 1) * samples, 0.3] for k in range(3)}

    path = folder / "profiles" / model / "A100" / "profile.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(times or {"4": {"1": row(4), "2": row(1)}, "2": {"1": row(2)}, "8": {"2": row(2)}}))
    sizes = {
        str(k): {"params_bytes": 100 * (k + 1), "act_output_bytes": 64 * (k + 1), "act_mem_bytes": 1000}
        for k in range(layers)
    }
    (folder / "llm_info.json").write_text(json.dumps({"Net": {"1": sizes, "2": {}}}))
    return path


def galvatron(folder: Path, **more: float) -> Path:
    """Write times of a layer and of the rest, 3 and 5 ms per sample, and their sizes."""
    times = {f"layertype_{kind}_bsz{b}_seq64": ms for kind, ms in (("0", 3.0), ("other", 5.0)) for b in (2, 4)}
    (path := folder / "computation_profiling_bf16_net.json").write_text(
        json.dumps({"layernum[2]_bsz2_seq64": 99.0, **times, **more})
    )
    other = {"64": {"model_states": {"1": 40.0, "2": 20.0}, "activation": {"1": 7.0}}}
    layer = {"64": {"parameter_size": 12.0, "tp_activation_per_bsz_dict": {"1": 9.0, "2": 4.5, "checkpoint": 2.0}}}
    sizes = {"layertype_0_sp": layer, "other_memory_pp_on_first_sp": other, "other_memory_pp_on_last_sp": other}
    (folder / "memory_profiling_bf16_net.json").write_text(json.dumps(sizes | {"other_memory_pp_off_sp": other}))
    return path


@pytest.fixture
def written(tmp_path):
    """Return a function that writes a text as a JSON file."""

    def writing(text: str) -> Path:
        path = tmp_path / "workload.json"
        path.write_text(text)
        return path

    return writing


def saved(graph, profile, cut: int) -> list[int]:
    prices = Pricer(graph, profile=profile, cluster=TWO).price((cut,), Layout(((0,), (1,))))
    return [prices.saved_bytes(stage, 1) for stage in range(2)]


# --- dnn-partitioning


def test_a_forward_and_a_backward_node_of_a_color_are_a_layer_with_its_parameters_and_output(written):
    graph, profile = load_published(written(dnn()), batch=2)
    assert [row[0] for row in profile.seconds] == pytest.approx([2e-3, 3e-3, 5e-3, 4e-3])
    assert graph.parameter_bytes == {"node1.parameters": 100, "node2.parameters": 500}, "a sink's output is known too"
    assert traffic(graph, (1,)).edges == (Edge("F", 0, 1, 32.0), Edge("B", 1, 0, 32.0))


def test_nodes_of_dnn_partitioning_may_have_no_name(written):
    text = json.loads(dnn())
    for found in text["nodes"]:
        del found["name"]
    assert [found.name for found in load_published(written(json.dumps(text)))[0].nodes] == ["node1", "node2"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (dnn(nodes=[node(1, 1, backward=False, size=1.0)], edges=[]), "no backward node, so a workload of inference"),
        (dnn(forward={"colorClass": 2}), "2 forward and 1 backward nodes of color class 2, so a graph of operators"),
        (dnn(forward={"supportedOnFpga": False}), "a node that no accelerator runs"),
        (dnn(sink=7.0 - 2), "5; expected at least the 8 bytes"),
        (dnn(edges=[{"sourceId": 1, "destId": 2, "cost": 1.0}]), "expected the key 'size'"),
        (dnn(edges=[{"sourceId": 1, "destId": 9, "cost": 1.0, "size": 1.0}]), "unknown node 9"),
        (dnn(forward={"fpgaLatency": -1}), "a number of at least 0"),
        (dnn(forward={"id": 2}), "an id twice"),
        (dnn(forward={"isBackwardNode": "no"}), "true or false"),
    ],
)
def test_what_is_no_layer_graph_of_training_is_refused(text, message, written):
    with pytest.raises(ProfileError, match=message):
        load_published(written(text))


# --- Sailor


def test_layers_of_sailor_have_the_times_of_one_device_for_every_size_of_micro_batches(tmp_path):
    graph, profile = load_published(sailor(tmp_path))
    assert (profile.samples, graph.samples) == ((2, 4), 4), "8 samples were measured on two devices only"
    for samples in (2, 3, 4, 8):
        forward = [profile.operation_s(k, samples) for k in range(3)]
        assert forward == pytest.approx([1e-3 * ((k + 1) * samples + 0.5) for k in range(3)])
        assert profile.operation_s(3, samples) == pytest.approx(6e-3 * samples)
    assert traffic(graph, (1,)).edges == (Edge("F", 0, 1, 64.0), Edge("B", 1, 0, 64.0))
    assert list(graph.parameter_bytes.values()) == [100, 200, 300]
    assert profile.optimizer.seconds_per_byte * 600 == pytest.approx(0.9)
    assert saved(graph, profile, 2) == [2000 - 128, 128 + 1000], "the last of a stage keeps what it gives elsewhere"


def test_what_is_no_whole_profile_of_sailor_is_refused(tmp_path):
    cases = [
        ({"layers": 2}, "found 3 layers; expected the 2 of"),
        ({"model": "Other"}, "no model 'Other'; expected the name of the folder above A100: Net"),
        ({"times": {"4": {"2": {"0": [1, 1, 1]}}}}, "no times of one device"),
        (
            {"times": {"4": {"1": {"first": [1, 1, 1]}}}},
            "found layers first; expected at least one, each with a number",
        ),
        ({"times": {"4": {"1": {}}}}, "found layers none"),
        ({"times": {"4": {"1": {"0": [1, 1, 1]}}, "2": {"1": {"1": [1, 1, 1]}}}}, "1 layers; expected the 1 of 4"),
        ({"times": {"4": {"1": {"0": [1, 1]}}}, "layers": 1}, "2 numbers; expected three"),
    ]
    for k, (changes, message) in enumerate(cases):
        with pytest.raises(ProfileError, match=message):
            load_published(sailor(tmp_path / str(k), **changes))
    path = sailor(tmp_path / "last")
    with pytest.raises(ProfileError, match=r"says how many samples .* Leave it out"):
        load_published(path, batch=2)
    (tmp_path / "last" / "llm_info.json").unlink()
    with pytest.raises(ProfileError, match=r"no llm_info\.json in .*A100 or above"):
        load_published(path)


@needs_sailor
def test_a_published_profile_of_sailor_is_judged_with_times_between_its_bounds():
    graph, profile = load_published(SAILOR / "profiles" / "OPT-350" / "A100-40" / "profile.json")
    assert (len(graph.nodes), profile.samples) == (26, (1, 2, 4, 8))
    plan = Plan((StagePlan("", (0,)), StagePlan("layer13", (1,))), microbatches=4)
    judged = judge(plan, Problem(graph, profile, TWO, samples=32))
    work_s = 4 * sum(row[-1] for row in profile.seconds)
    assert work_s / 2 <= judged.step_s <= work_s + 0.2, "optimizer and messages besides"


# --- Galvatron


def test_a_model_of_galvatron_is_a_chain_of_equal_layers_between_its_ends(tmp_path):
    graph, profile = load_published(galvatron(tmp_path), layers=3)
    assert [found.name for found in graph.nodes] == ["before", "layer0", "layer1", "layer2", "after"]
    assert profile.samples == (2, 4)
    for samples in (2, 3, 4):
        assert [profile.operation_s(k, samples) for k in range(5)] == pytest.approx(
            [0.0, *[3e-3 * samples] * 3, 5e-3 * samples]
        )
        assert profile.operation_s(5, samples) == pytest.approx(10e-3 * samples), "backward is twice forward"
    assert list(graph.parameter_bytes.values()) == [10 * MIB, *[12 * MIB] * 3, 10 * MIB]
    assert traffic(graph, (2,)).edges == (Edge("F", 0, 1, 2.0 * MIB), Edge("B", 1, 0, 2.0 * MIB))
    assert saved(graph, profile, 2) == [(7 + 9 - 2) * MIB, (2 + 9 + 9 + 7) * MIB]


@pytest.mark.parametrize(
    ("more", "layers", "message"),
    [
        ({}, None, "does not say how many the model has"),
        ({}, 0, "found 0 layers"),
        ({"layertype_1_bsz2_seq64": 1.0}, 3, "2 kinds of layers"),
        ({"layertype_0_bsz2_seq128": 1.0}, 3, "sequence lengths 128, 64"),
        ({"layertype_0_bsz6_seq64": 1.0}, 3, "the key 'layertype_other_bsz6_seq64'"),
    ],
)
def test_what_is_no_whole_profile_of_galvatron_is_refused(more, layers, message, tmp_path):
    with pytest.raises(ProfileError, match=message):
        load_published(galvatron(tmp_path, **more), layers=layers)


def test_a_profile_of_galvatron_without_its_sizes_and_layers_of_other_files_are_refused(tmp_path, written):
    path = galvatron(tmp_path)
    (tmp_path / "memory_profiling_bf16_net.json").unlink()
    with pytest.raises(ProfileError, match="no file of sizes beside it"):
        load_published(path, layers=3)
    with pytest.raises(ProfileError, match=r"layers=3 for a file that lists its layers"):
        load_published(written(dnn()), layers=3)
