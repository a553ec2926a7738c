"""DAPPLE planner against the plans of DAPPLE's Table 4.

    python -m benchmarks.planners dapple
    python -m benchmarks.planners dapple --only vgg-19,bert-48 --with auto

After Fan et al., DAPPLE (PPoPP 2021), Table 4: 16 V100 of 16 GB as 2 x 8 (A) and 16 x 1 (B 25 Gbit/s, C 10 Gbit/s), the
authors' profiles, micro-batches of the profiled size per replica. What the table compares:

    published    the paper's plan: replicas of the stages, or DP, or straight; layers of the stages
    same kinds   our best among the kinds of plans that the table has: data parallel, two stages, straight
    free         our best of any number of stages
    L, sim       seconds of a batch by eq. 1 to 3, and by the event simulation (of DP: the formula)
    step         seconds that the simulator says of the program of the plan: samples are whole, memory counted exactly,
                 and sums of gradients do not overlap with backward

As the authors count it: messages of 0.8 (0.32) GB/s and sums of 3.0 (1.2) GB/s across servers, every pair of replicas
with a flow of its own; peak bytes of activations per sample; no inputs that most layers read (masks, positions) among
what crosses a cut. Bandwidths: conf/cluster/dapple_{a,b,c}.yaml. A kind matches if two stages have the published
replicas but for one.
"""

from __future__ import annotations

import argparse
import itertools
import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from lightning_pipe.core.cluster import NO_LINK, Cluster, PairLink
from lightning_pipe.core.cluster_file import load_cluster
from lightning_pipe.core.graph import Graph
from lightning_pipe.core.profile import Profile
from lightning_pipe.planner.candidates.candidate import Candidate
from lightning_pipe.planner.estimates.recurrence import Estimator
from lightning_pipe.planner.estimates.stage_costs import StageCostTable
from lightning_pipe.planner.evaluation.evaluate import Judge
from lightning_pipe.planner.memory.settle import fitted
from lightning_pipe.planner.problem import Constraints, Problem
from lightning_pipe.planner.registry import propose
from lightning_pipe.planner.systems.dapple.dapple_planner import Ranked, ranked
from lightning_pipe.profiles.published import load_published

ROOT = Path(__file__).parents[2]
PROFILES = ROOT.parent / "shared" / "profiles" / "dapple_alibabapai"
CONFIGURATIONS = ("a", "b", "c")
_SGD, _ADAM = 0.0, 2.0  # bytes of optimizer state per byte of parameters


@dataclass(frozen=True)
class Model:
    """A row of Table 4.

    Attributes:
        name: of the model.
        file: its profile.
        batch: samples of a batch.
        slice: samples of a micro-batch per replica: those of the profile.
        saved_bytes: peak bytes of activations per sample, as the authors' planner takes them.
        optimizer: bytes of optimizer state per byte of parameters.
        published: plan for each configuration: "DP", "straight", or replicas, with layers of the stages.
    """

    name: str
    file: str
    batch: int
    slice: int
    saved_bytes: float
    optimizer: float
    published: tuple[str, str, str]


_BERT_LARGE = 1736689664.0  # BERT-48 has twice its layers
_XLNET_24 = 3942774528.0
_AMOEBA_6 = 250845152.0  # the authors take it three times for 36 cells
_GNMT_32 = 1614725120.0 / 64  # GNMT-16 has half its layers

MODELS = (
    Model("vgg-19", "vgg-19-pbs-32.txt", 2048, 32, 70e6, _SGD, ("DP", "DP", "15:1 (13|6)")),
    Model("gnmt-16", "gnmt-16-pbs-64.txt", 1024, 64, _GNMT_32 / 2, _ADAM, ("8:8 (9|7)", "8:8 (9|7)", "straight")),
    Model("bert-48", "bert-48-pbs-2.txt", 64, 2, _BERT_LARGE * 2, _ADAM, ("8:8 (23|25)", "straight", "straight")),
    Model("xlnet-36", "xlnet-36-pbs-1.txt", 128, 1, _XLNET_24 * 1.5, _ADAM, ("8:8 (18|18)", "8:8 (18|18)", "straight")),
    Model(
        "amoebanet-36",
        "amoeba-36-pbs-1.txt",
        128,
        1,
        _AMOEBA_6 * 3,
        _ADAM,
        ("8:8 (24|12)", "11:5 (27|9)", "11:5 (27|9)"),
    ),
)


PLENTY = 1 << 50  # bytes of memory


def problem(model: Model, configuration: str) -> Problem:
    """Return one entry of the table."""
    graph, profile = read_profile(model)
    return Problem(
        graph, profile, cluster(configuration), model.batch, constraints=Constraints(least_samples=model.slice)
    )


def read_profile(model: Model) -> tuple[Graph, Profile]:
    """Return graph and profile of a model; inputs that most layers read are made where they are read."""
    text = without_shared_inputs((PROFILES / model.file).read_text())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / model.file
        path.write_text(text)
        return load_published(path, saved_bytes_per_sample=model.saved_bytes, optimizer_state=model.optimizer)


def without_shared_inputs(text: str) -> str:
    """Leave of every layer without backward that over half of the layers read the first reader only."""
    lines = text.splitlines()
    layers = {line.split(" -- ")[0].strip(): line for line in lines if "forward_compute_time" in line}
    edges = [line.split(" -- ")[0].strip() for line in lines if " -- " in line and "forward_compute_time" not in line]
    still = {name for name, line in layers.items() if re.search(r"backward_compute_time=0(\.0*)?,", line)}
    shared = {name for name, readers in Counter(edges).items() if name in still and readers > len(layers) / 2}
    kept, seen = [], set()
    for line in lines:
        source = line.split(" -- ")[0].strip()
        is_edge = " -- " in line and "forward_compute_time" not in line
        if is_edge and source in shared and source in seen:
            continue
        seen.update({source} if is_edge else ())
        kept.append(line)
    return "\n".join(kept) + "\n"


def cluster(configuration: str) -> Cluster:
    """Return a configuration, each pair of devices with a flow of its own."""
    found = load_cluster(ROOT / "conf" / "cluster" / f"dapple_{configuration}.yaml")
    ranks = range(found.ranks)
    links = tuple(
        PairLink(sender, receiver, found.link(sender, receiver))
        for sender in ranks
        for receiver in ranks
        if found.host_of(sender) != found.host_of(receiver)
    )
    return replace(found, hosts=tuple(replace(host, network=NO_LINK) for host in found.hosts), links=links)


def kind(replicas: Sequence[int]) -> str:
    """Return how the table names a plan."""
    if len(replicas) == 1:
        return "DP"
    return "straight" if max(replicas) == 1 else ":".join(map(str, replicas))


def same_kind(entry: Problem) -> tuple[Problem, Ranked]:
    """Return the best plan of the kinds that the table has, and what it was planned for.

    As the authors do: samples divided evenly, and memory checked for data parallel training only.
    """
    devices = entry.cluster.ranks
    roomy = replace(entry, cluster=with_memory(entry.cluster, PLENTY))
    parallel = [(entry, one) for one in ranked(entry) if len(one.outline.ranks) == 1 and one.excess <= 0]
    pipelines = [(roomy, one) for one in ranked(roomy) if len(one.outline.ranks) in (2, devices)]
    return min((*parallel, *pipelines), key=lambda found: found[1].ideal_s)


def with_memory(cluster: Cluster, memory: int) -> Cluster:
    """Return a cluster whose devices have so much memory."""
    hosts = (
        replace(host, devices=tuple(replace(device, memory_bytes=memory) for device in host.devices))
        for host in cluster.hosts
    )
    return replace(cluster, hosts=tuple(hosts))


def matches(published: str, found: Ranked) -> bool:
    """Return whether a plan is of the published kind, two stages with the published replicas but for one."""
    wanted, ours = published.split()[0], kind([len(group) for group in found.outline.ranks])
    if ":" not in wanted or ours.count(":") != 1:
        return wanted == ours
    return abs(int(wanted.split(":")[0]) - int(ours.split(":")[0])) <= 1


def ratio(entry: Problem, outline: Candidate) -> float:
    """Return the ACR: mean seconds of a link over mean seconds of a stage, forward and backward."""
    if not outline.cuts:
        return 0.0
    row = Estimator(StageCostTable(entry, outline.cuts)).row(outline.cuts, outline.ranks, outline.microbatches)
    return sum(row.links()) / len(row.links()) / (sum(row.loads()) / len(row.loads()))


def described(entry: Problem, found: Ranked) -> str:
    """Return replicas, nodes per stage where these are few, and micro-batches."""
    outline = found.outline
    replicas = [len(group) for group in outline.ranks]
    ends = (0, *outline.cuts, len(entry.graph.nodes))
    sizes = "|".join(str(b - a) for a, b in itertools.pairwise(ends))
    split = f" ({sizes})" if 1 < len(replicas) <= 4 else ""
    return f"{kind(replicas)}{split} M={outline.microbatches}"


def step_s(entry: Problem, found: Ranked) -> float:
    """Return the simulated seconds of a plan, settled within memory."""
    return fitted(entry, found.outline, judge=Judge(entry)).step_s


def main(arguments: Sequence[str] = ()) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planners dapple")
    parser.add_argument("--only", default=",".join(model.name for model in MODELS), help="models, by comma")
    parser.add_argument("--with", default="", dest="others", help="other planners, by comma, by simulated seconds")
    chosen = parser.parse_args(arguments)
    others = [name for name in chosen.others.split(",") if name]
    columns = ("model", "on", "published", "same kinds", "ACR", "L", "sim", "step", "match", "free", "L", "sim", "step")
    table = Table(*columns, *(f"{name}: step" for name in others), box=box.SIMPLE)
    matched, tried = 0, 0
    for model in MODELS:
        if model.name not in chosen.only.split(","):
            continue
        for configuration, published in zip(CONFIGURATIONS, model.published, strict=True):
            entry = problem(model, configuration)
            found = ranked(entry)
            (asked, likely), best = same_kind(entry), found[0]
            matched, tried = matched + matches(published, likely), tried + 1
            table.add_row(
                model.name,
                configuration.upper(),
                published,
                described(entry, likely),
                f"{ratio(entry, likely.outline):.2f}",
                *(f"{seconds:.3f}" for seconds in (likely.latency_s, likely.ideal_s, step_s(asked, likely))),
                "yes" if matches(published, likely) else "no",
                described(entry, best),
                *(f"{seconds:.3f}" for seconds in (best.latency_s, best.seconds, step_s(entry, best))),
                *(f"{propose(entry, name)[0].step_s:.3f}" for name in others),
            )
    Console(width=190).print(table)
    print(f"plans of the published kind: {matched} of {tried}")


if __name__ == "__main__":
    main()
