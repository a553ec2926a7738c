"""Laws of published profiles: they add up to what the files say, and are cut and judged like captured models."""

from __future__ import annotations

import json
import random
import re
from collections import defaultdict
from pathlib import Path

import pytest

from lightning_pipe.core.cluster import NO_LINK, Cluster, Device, Host, Link
from lightning_pipe.core.graph import Graph
from lightning_pipe.core.plan import Plan, StagePlan
from lightning_pipe.core.profile import Profile
from lightning_pipe.core.program import Compute, Edge, Layout
from lightning_pipe.cost.prices import Pricer
from lightning_pipe.cost.stage import stage_works, traffic
from lightning_pipe.errors import ProfileError
from lightning_pipe.planner.evaluation.evaluate import judge
from lightning_pipe.planner.problem import Problem
from lightning_pipe.profiles.published import load_published

PROFILES = Path(__file__).parents[3] / "shared" / "profiles"
PUBLISHED = sorted(
    path
    for folder, pattern in [("dapple*", "*.txt"), ("pipedream*", "*/*.txt"), ("piper*", "*.json")]
    for path in PROFILES.glob(f"{folder}/{pattern}")
    if "LICENSE" not in path.name
)
needs_profiles = pytest.mark.skipif(not PUBLISHED, reason=f"no published profiles in {PROFILES}")
DEVICE = Device("V100", 16 << 30)
TWO = Cluster((Host("host", (DEVICE, DEVICE), Link(5e-6, 1e10), NO_LINK),))


def line(name: str, description: str, forward: float, backward: float, outputs: object, parameters: float = 0) -> str:
    return (
        f"{name} -- {description} -- forward_compute_time={forward}, backward_compute_time={backward}, "
        f"activation_size={outputs}, parameter_size={parameters}\n"
    )


def edges(*pairs: tuple[int, int]) -> str:
    return "".join(f"\tnode{maker} -- node{reader}\n" for maker, reader in pairs)


CHAIN = (
    "".join(line(f"node{k}", f"Layer_{k}", k, 2 * k, 100 * k, 10 * k) for k in range(1, 6))
    + "\tnode1 -- node2\n\tnode2 -- node3\n\tnode3 -- node4\n\tnode4 -- node5\n"
)

SKIPS = (
    line("node1", "Input", 7, 0, 64)
    + line("node2", "Mask", 0, 0, 32)
    + line("node3", "Embed", 1, 0, 16, 40)
    + line("node4", "Layer", 1, 2, 24, 80)
    + line("node5", "Layer", 1, 2, 36, 80)
    + line("node6", "Add", 1, 2, 48)
    + edges((1, 2), (1, 3), (2, 4), (2, 5), (3, 4), (3, 5), (3, 6), (4, 5), (5, 6))
)


def piper(*, recomputed: float = 4.0, edge: tuple[int, int] = (1, 2), **changes: object) -> str:
    """Return a chain of three layers with their stash; `changes` are those of the first layer's plain variant."""

    def variants(k: int) -> list[dict[str, object]]:
        plain = {"id": "vanilla", "timePerSample": 3.0, "parameterSize": 8.0 * k, "memoryUsageA": 1000.0 * k}
        return [plain | (changes if k == 0 else {}), plain | {"id": "activation recomp", "timePerSample": recomputed}]

    nodes = [{"id": k, "name": "Layer", "TMPCs": {"1": variants(k), "2": []}} for k in range(3)]
    pairs = [(0, 1), edge]
    costs = [{"sourceId": a, "destId": b, "communicationCost": 64.0} for a, b in pairs]
    return json.dumps({"nodes": nodes, "edges": costs})


@pytest.fixture
def load(tmp_path):
    """Return a function that loads a text as a file of a name."""

    def loading(text: str, name: str = "model.txt", **options: float) -> tuple[Graph, Profile]:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return load_published(path, **options)

    return loading


def totals_ms(graph: Graph, profile: Profile) -> tuple[float, float]:
    seconds = {"forward": 0.0, "backward": 0.0}
    for operation, (found,) in zip(graph.operations, profile.seconds, strict=True):
        seconds[operation.phase] += found
    return seconds["forward"] * 1e3, seconds["backward"] * 1e3


def saved_bytes(graph: Graph, profile: Profile, cuts: tuple[int, ...], samples: int) -> list[int]:
    pricer = Pricer(graph, profile=profile, cluster=TWO)
    prices = pricer.price(cuts, Layout(tuple((0,) for _ in range(len(cuts) + 1))))
    return [prices.saved_bytes(stage, samples) for stage in range(len(cuts) + 1)]


def by_direction(graph: Graph, cuts: tuple[int, ...]) -> tuple[Edge, ...]:
    """Return what crosses, gradients first."""
    return tuple(sorted(traffic(graph, cuts).edges, key=lambda edge: (edge.direction, edge.source, edge.target)))


# --- chains


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
def test_over_a_cut_of_a_chain_the_output_before_it_crosses_forward_and_its_gradient_backward(load, cut):
    graph, _ = load(CHAIN, "chain-pbs-4.txt")
    crossing = 100 * cut / 4
    assert traffic(graph, (cut,)).edges == (Edge("F", 0, 1, crossing), Edge("B", 1, 0, crossing))


def test_a_stage_of_a_chain_keeps_the_input_of_each_of_its_layers(load):
    graph, profile = load(CHAIN, "chain-pbs-4.txt")
    assert saved_bytes(graph, profile, (2, 3), samples=4) == [100, 200, 300 + 400], "the file has no bytes of the batch"
    assert saved_bytes(graph, profile, (2, 3), samples=8) == [200, 400, 600 + 800]


def test_the_whole_backward_is_input_half_where_a_gradient_leaves_the_stage_and_weight_half_in_the_first(load):
    first, second = stage_works(load(CHAIN)[0], (2,))
    assert (len(first.input_grad.operations), len(first.weight_grad.operations)) == (0, 2)
    assert (len(second.input_grad.operations), len(second.weight_grad.operations)) == (3, 0)


def test_seconds_are_proportional_to_samples_and_belong_to_their_stage(load):
    graph, profile = load(CHAIN, "chain-pbs-4.txt")
    assert (graph.samples, profile.samples, profile.source) == (4, (4,), "published")
    for samples, factor in [(1, 0.5), (2, 1.0), (8, 4.0)]:
        times = [profile.operation_s(o, samples) / factor for o in range(len(graph.operations))]
        assert times == pytest.approx([0.0005, 0.001, 0.0015, 0.002, 0.0025, 0.005, 0.004, 0.003, 0.002, 0.001])
    assert [operation.at for operation in graph.operations] == [0, 1, 2, 3, 4, 4, 3, 2, 1, 0]


def test_a_rank_holds_parameters_gradients_and_optimizer_state(load):
    for options, factor in [({}, 4.0), ({"optimizer_state": 0.0}, 2.0)]:
        graph, profile = load(CHAIN, **options)
        prices = Pricer(graph, profile=profile, cluster=TWO).price((2,), Layout(((0,), (1,))))
        assert [prices.state_bytes(rank) for rank in (0, 1)] == [30 * factor, 120 * factor]


# --- graphs with branches


def test_a_value_read_by_several_layers_of_a_stage_crosses_once_in_both_directions(load):
    graph, _ = load(SKIPS)
    assert [node.name for node in graph.nodes] == [f"node{k}" for k in range(1, 7)]
    assert traffic(graph, (3,)).edges == (Edge("F", 0, 1, 32 + 16), Edge("B", 1, 0, 16)), "node4 to node6 read node3"


def test_gradients_of_a_value_read_in_several_stages_are_summed_on_their_way(load):
    graph, _ = load(SKIPS)
    assert by_direction(graph, (3, 4, 5)) == (
        Edge("B", 1, 0, 16),  # of node3, all three terms
        Edge("B", 2, 1, 16 + 24),  # of node3, two terms; of node4
        Edge("B", 3, 2, 16 + 36),  # of node3, the term of node6; of node5
        Edge("F", 0, 1, 32 + 16),
        Edge("F", 0, 2, 32 + 16),
        Edge("F", 0, 3, 16),
        Edge("F", 1, 2, 24),
        Edge("F", 2, 3, 36),
    )


def test_nothing_before_the_first_parameter_has_a_gradient(load):
    graph, _ = load(SKIPS)
    assert {re.split(r"\.", tensor.name)[0] for tensor in graph.tensors if "output0.gradient" in tensor.name} == {
        "node3",
        "node4",
        "node5",
    }


def test_a_stage_of_a_graph_keeps_every_value_once_that_its_layers_have_read(load):
    graph, profile = load(SKIPS)
    assert saved_bytes(graph, profile, (), samples=1) == [64 + 32 + 16 + 24 + 36]
    assert saved_bytes(graph, profile, (4,), samples=1) == [64 + 32 + 16, 32 + 16 + 24 + 36]


def test_saved_bytes_are_spread_over_the_layers_like_their_outputs(load):
    graph, profile = load(SKIPS, saved_bytes_per_sample=172 + 124)
    assert saved_bytes(graph, profile, (), samples=10) == [2960]
    stashes = {t.name: t.bytes_per_sample for t in graph.tensors if t.name.endswith("stash")}
    assert stashes == {"node3.stash": 16, "node4.stash": 24, "node5.stash": 36, "node6.stash": 48}, "of 124 bytes"


def test_an_output_for_every_reader_goes_to_that_reader_only(load):
    text = line("node1", "Cell", 1, 1, "[10; 30]", 8) + line("node2", "Cell", 1, 1, "[5.0; 6.0; 7.0]")
    graph, _ = load(text + line("node3", "Cell", 1, 1, 9) + edges((1, 2), (1, 3), (2, 3)))
    assert by_direction(graph, (1, 2)) == (
        Edge("B", 1, 0, 10),
        Edge("B", 2, 0, 30),
        Edge("B", 2, 1, 18),
        Edge("F", 0, 1, 10),
        Edge("F", 0, 2, 30),
        Edge("F", 1, 2, 18),
    )


def test_layers_out_of_order_are_put_chain_after_chain_with_inputs_first(load):
    layers = {"1": "Input", "2": "a", "3": "b", "4": "left", "5": "right", "6": "Input", "7": "join"}
    text = "".join(line(f"node{k}", name, 1, 0 if name == "Input" else 1, 8) for k, name in reversed(layers.items()))
    graph, profile = load(text + edges((1, 2), (2, 4), (4, 7), (2, 3), (3, 5), (5, 7), (6, 7)))
    assert [node.name for node in graph.nodes] == ["node6", "node1", "node2", "node4", "node3", "node5", "node7"]
    assert totals_ms(graph, profile) == pytest.approx((5, 5)), "loading the batch is no work of a stage"


def test_names_are_unique_and_descriptions_name_places_where_they_can(load):
    text = line("1", "Conv(3, 4)", 1, 1, 8, 4) + line("x:2", "head", 1, 1, 8) + line("node1", "head", 1, 1, 8)
    graph, _ = load(text + line("last", "loss", 1, 1, 8) + "  1 -- x:2\n  x:2 -- node1\n  node1 -- last\n")
    assert [node.name for node in graph.nodes] == ["node1.0", "x_2", "node1.2", "last"]
    assert [node.module for node in graph.nodes] == ["", "", "", "loss"]
    assert graph.position("loss") == 3
    made = [operation.name for operation in graph.operations], [tensor.name for tensor in graph.tensors]
    assert all(len(set(found)) == len(found) for found in made)


def test_the_fingerprint_follows_content_and_options(load):
    found = [
        load(CHAIN),
        load(CHAIN, batch=2),
        load(CHAIN.replace("=5,", "=6,")),
        load(CHAIN, saved_bytes_per_sample=9999),
    ]
    assert len({graph.fingerprint for graph, _ in found}) == 4
    assert load(CHAIN) == found[0]
    assert all(profile.graph == graph.fingerprint for graph, profile in found)


# --- Piper


def test_forward_is_what_recomputation_adds_and_a_stage_keeps_what_its_layers_keep(load):
    graph, profile = load(piper(), "model.json", batch=2)
    assert [node.name for node in graph.nodes] == ["Layer.0", "Layer.1", "Layer.2"]
    assert totals_ms(graph, profile) == pytest.approx((3000, 6000))
    assert graph.parameter_bytes == {"Layer.1.parameters": 8, "Layer.2.parameters": 16}
    assert saved_bytes(graph, profile, (), samples=2) == [1000 + 2000 + 64], "and the output of the first"
    assert saved_bytes(graph, profile, (2,), samples=2) == [64 + 1000 - 64, 64 + 2000], (
        "what is given, not what is given away"
    )
    assert traffic(graph, (2,)).edges == (Edge("F", 0, 1, 32), Edge("B", 1, 0, 32))


# --- errors


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("hello\nworld", "line 1: found 'hello', no profile"),
        ('{"a": 1}', "no profile of layers"),
        ('{\n"a": ', "line 2: found no JSON"),
        (CHAIN.replace(", parameter_size=20", ""), "line 2: found layer 'node2' without parameter_size"),
        (CHAIN.replace("=4,", "=four,"), "line 2: found backward_compute_time='four'; expected a number of at least 0"),
        (CHAIN.replace("=200", "=[100; -1]"), "line 2: found activation_size= -1; expected a number of at least 0"),
        (CHAIN.replace("=200", "=nan"), "line 2: found activation_size=nan"),
        (CHAIN.replace("node2 -- Layer", "node1 -- Layer"), "line 2: found a second layer 'node1'"),
        (CHAIN + "\tnode5 -- node9\n", "line 10: found an edge of layer 'node9'"),
        (CHAIN + "\tnode5 to node1\n", "line 10: found 'node5 to node1'; expected an edge"),
        (CHAIN + "\tnode1 -- node2\n", "line 10: found the edge node1 -- node2 again"),
        (CHAIN + "\tnode5 -- node4\n", "found layers node4 -> node5 -> node4 that read each other"),
        (CHAIN + "rest\n", "line 10: found 'rest'; expected `id -- description"),
        (piper(edge=(1, 7)), "edges[1], destId: found the unknown node 7"),
        (piper(edge=(0, 1)), "edges[1]: found the edge 0 -> 1 again"),
        (piper(edge=(1, 0)), "found layers Layer.0 -> Layer.1 -> Layer.0 that"),
        (piper(recomputed=7.0), "timePerSample: found 7; expected from once to twice the 3 without recomputation"),
        (piper(parameterSize=-1), "nodes[0], TMPCs, 1[0], parameterSize: found -1; expected a number of at least 0"),
        (piper(timePerSample="3"), "nodes[0], TMPCs, 1[0], timePerSample: found '3'; expected a number"),
        (piper(id="other"), "nodes[0], TMPCs, 1: found variants other, activation recomp; expected 'vanilla' among"),
        (piper().replace("TMPCs", "variants"), "nodes[0]: found the keys id, name, variants; expected the key 'TMPCs'"),
        ('{"nodes": [], "edges": []}', "nodes: found no nodes; expected at least one"),
        ('{"nodes": 3, "edges": []}', "nodes: found 3; expected a list"),
    ],
)
def test_a_broken_file_is_one_error_that_says_where_what_and_what_was_expected(load, text, told):
    with pytest.raises(ProfileError) as caught:
        load(text)
    assert told in str(caught.value)
    assert "model.txt" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "options", "told"),
    [
        (CHAIN, {"batch": 0}, "found a profile of 0 samples"),
        (CHAIN, {"saved_bytes_per_sample": 999.0}, "saved_bytes_per_sample is 999, but"),
        (piper(), {"saved_bytes_per_sample": 999.0}, "for a file that says what layers keep"),
    ],
)
def test_options_that_do_not_fit_are_errors(load, text, options, told):
    with pytest.raises(ProfileError, match=told):
        load(text, **options)


def test_a_file_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(ProfileError, match=r"cannot read .*nothing\.txt"):
        load_published(tmp_path / "nothing.txt")


# --- the published files


@needs_profiles
@pytest.mark.parametrize(
    ("name", "samples", "forward_ms", "backward_ms", "parameters"),
    [
        ("vgg-19-pbs-32", 32, 48.0, 96.2, 548),
        ("gnmt-16-pbs-64", 64, 90.3, 158.6, 1163),
        ("gnmt-32-pbs-64", 64, 163, 289, 1835),
        ("bert-24-pbs-6", 6, 193.7, 321.6, 1341),
        ("bert-48-pbs-2", 2, 129.2, 214.6, 2550),
        ("xlnet-24-pbs-1", 1, 82.1, 119.0, 1379),
        ("xlnet-36-pbs-1", 1, 122.9, 177.8, 2003),
        ("amoeba-36-pbs-1", 1, 48.7, 119.4, 3731),
        ("amoeba-18-pbs-8", 8, 207.7, 510.1, 1915),
        ("amoeba-6-pbs-8-simplified", 8, 60, 152, 703),
        ("vgg16/graph", 1, 234, 439, 553),
        ("resnet50/graph", 1, 182, 261, 102),
        ("resnet101/graph", 1, 197, 214, 178),
        ("gnmt_large/graph", 1, 183, 338, 1111),
    ],
)
def test_published_totals(name, samples, forward_ms, backward_ms, parameters):
    (path,) = PROFILES.glob(f"*/{name}.txt")
    graph, profile = load_published(path)
    rounding = 0.51 if forward_ms == int(forward_ms) else 0.051
    assert totals_ms(graph, profile) == pytest.approx((forward_ms, backward_ms), abs=rounding)
    assert sum(graph.parameter_bytes.values()) / 1e6 == pytest.approx(parameters, abs=0.6), "rounded"
    assert graph.samples == samples


@needs_profiles
def test_a_layer_of_pipers_bert_is_as_published_and_a_stage_keeps_what_its_layers_keep():
    graph, profile = load_published(PROFILES / "piper_msr_fiddle" / "bert32a100.json")
    layer = graph.position("ParallelTransformerLayer.3")
    (forward,), (backward,) = profile.seconds[layer], profile.seconds[-1 - layer]
    assert (forward + backward, forward) == pytest.approx((30.5e-3, 10.2e-3), abs=0.05e-3)
    assert graph.parameter_bytes["ParallelTransformerLayer.3.parameters"] == 176997120
    first, second = saved_bytes(graph, profile, (layer + 16,), samples=1)
    hidden, embedded, first_mask, mask = 16777216, 31457280, 16777216, 31457280
    assert first == 16 * 606478336 + 2 * 8192 + embedded + first_mask + mask - hidden, "16 layers and their inputs"
    assert second == 16 * 606478336 + 31457280 + hidden + mask, "16 layers, the pooler, and what is given"


@needs_profiles
def test_recomputing_a_layer_of_pipers_bert_runs_its_forward_again_and_keeps_its_inputs_only():
    graph, profile = load_published(PROFILES / "piper_msr_fiddle" / "bert32a100.json")
    middle = graph.position("ParallelTransformerLayer.3") + 16
    layers = [node.name for node in graph.nodes[middle : middle + 16]]
    stashes = tuple(f"{name}.stash" for name in layers)
    stages = StagePlan("", (0,)), StagePlan(layers[0], (1,))
    recomputing = StagePlan(layers[0], (1,), recompute=stashes)
    problem = Problem(graph, profile, TWO, samples=4)
    plain, recomputed = (judge(Plan((stages[0], last), microbatches=4), problem) for last in (stages[1], recomputing))
    forward_s = sum(profile.seconds[middle + k][0] for k in range(16))
    backward = Compute(1, "B", 0)
    added = recomputed.prices.compute_s(backward, 1, 1) - plain.prices.compute_s(backward, 1, 1)
    assert added == pytest.approx(forward_s)
    dropped = plain.prices.saved_bytes(1, 1) - recomputed.prices.saved_bytes(1, 1)
    assert dropped == sum(tensor.size(1) for tensor in graph.tensors if tensor.name in stashes)


@needs_profiles
def test_pipers_files_give_the_times_of_the_pipedream_files_they_were_made_from():
    ours = dict(timed(PROFILES / "piper_msr_fiddle" / "gnmt.json"))
    theirs = dict(timed(PROFILES / "pipedream_msr_fiddle" / "gnmt_large" / "graph.txt"))
    shared = sorted(ours.keys() & theirs.keys())
    assert len(shared) == 2 * 78, "a forward and a backward of every node"
    assert [ours[name] for name in shared] == pytest.approx([theirs[name] for name in shared])


def timed(path: Path) -> list[tuple[str, float]]:
    graph, profile = load_published(path)
    return [(operation.name, found) for operation, (found,) in zip(graph.operations, profile.seconds, strict=True)]


@needs_profiles
@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_published_profile_is_judged_with_times_between_its_bounds(path):
    graph, profile = load_published(path)
    middle = len(graph.nodes) // 2
    plan = Plan((StagePlan("", (0,)), StagePlan(graph.nodes[middle].name, (1,))), microbatches=4)
    judged = judge(plan, Problem(graph, profile, TWO, samples=4 * graph.samples))
    work_s = 4 * sum(found for (found,) in profile.seconds)
    moved_s = sum(8 * edge.bytes_per_sample * graph.samples / 1e10 for edge in judged.program.traffic.edges) + 1e-3
    assert work_s / 2 <= judged.step_s <= work_s + moved_s
    assert judged.cuts == (middle,)


@needs_profiles
@pytest.mark.parametrize("name", ["bert-24-pbs-6", "gnmt-16-pbs-64", "resnet50/graph", "nasnetamobile/graph"])
def test_what_crosses_a_cut_of_a_published_profile_is_what_its_edges_carry(name):
    (path,) = PROFILES.glob(f"*/{name}.txt")
    graph, _ = load_published(path)
    text = path.read_text(encoding="utf-8")
    sizes = {
        found[1]: sum(map(float, found[2].strip("[]").split(";")))
        for found in re.finditer(r"^(node\d+) .*activation_size=([^,]*),", text, re.MULTILINE)
    }
    pairs = re.findall(r"^\s+(node\d+) -- (node\d+)", text, re.MULTILINE)
    position = {node.name: k for k, node in enumerate(graph.nodes)}
    assert all(position[maker] < position[reader] for maker, reader in pairs)
    cuts = tuple(sorted(random.Random(0).sample(range(3, len(graph.nodes)), 3)))
    stage = {node: sum(k >= cut for cut in cuts) for node, k in position.items()}
    crossing = {(maker, stage[reader]) for maker, reader in pairs if stage[maker] != stage[reader]}
    expected: dict[tuple[int, int], float] = defaultdict(float)
    for maker, target in crossing:
        expected[stage[maker], target] += sizes[maker] / graph.samples
    edges = traffic(graph, cuts).edges
    assert {(e.source, e.target): e.bytes_per_sample for e in edges if e.direction == "F"} == pytest.approx(expected)
    backward = sum(e.bytes_per_sample for e in edges if e.direction == "B")
    masks = {node for node in sizes if not any(t.name.startswith(f"{node}.output0.grad") for t in graph.tensors)}
    assert backward == pytest.approx(sum(sizes[m] / graph.samples for m, _ in crossing if m not in masks))
