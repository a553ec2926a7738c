"""Laws of clusters: what is saved is read back equal, every mistake is one clear error, every preset can be read."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from lightning_pipe.config import conf_dir
from lightning_pipe.core.cluster import NO_LINK, NO_SWAP, Cluster, Device, Host, Link, PairLink, Reduction, limited
from lightning_pipe.core.cluster_file import (
    check_ranks,
    cluster_from_text,
    cluster_to_text,
    find_cluster,
    load_cluster,
    preset_names,
    save_cluster,
)
from lightning_pipe.errors import ClusterError
from lightning_pipe.units import parse_seconds

PRESETS = conf_dir() / "cluster"
DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "clusters.md"
TEXT = """
hosts:
- name: server
  count: 2
  devices: [{kind: V100, count: 8, memory: 16 GiB, speed: 1.0}]
  inside: {latency: 5 us, bandwidth: 40 GB/s}
  network: {latency: 30 us, bandwidth: 25 Gbit/s}
  swap: {latency: 7 us, bandwidth: 12 GB/s}
links:
- {sender: 0, receiver: 8, latency: 40 us, bandwidth: 20 Gbit/s}
reductions:
- {ranks: [0, 1], latency: 20 us, bandwidth: 30 GB/s, small: {latency: 8 us, bandwidth: 9 GB/s}}
"""


def cluster_of(rng: random.Random) -> Cluster:
    """Return a cluster with uneven hosts and numbers that need all digits."""

    def link() -> Link:
        return Link(rng.random() * 10 ** -rng.randrange(2, 7), rng.random() * 10 ** rng.randrange(6, 12))

    def devices() -> tuple[Device, ...]:
        kinds = [Device(kind, rng.randrange(1, 2**40), rng.choice([1.0, rng.random()])) for kind in "AB"]
        return tuple(kind for kind in kinds for _ in range(rng.randrange(1, 4)))

    swaps = [NO_SWAP, link()]
    hosts = tuple(Host(f"host {h}", devices(), link(), link(), rng.choice(swaps)) for h in range(rng.randrange(2, 4)))
    ranks = range(sum(len(host.devices) for host in hosts))
    groups = {tuple(sorted(rng.sample(ranks, rng.randrange(2, len(ranks))))) for _ in range(3)}
    return Cluster(
        hosts,
        links=tuple(PairLink(*rng.sample(ranks, 2), link()) for _ in range(1)),
        reductions=tuple(
            Reduction(group, link().latency_s, link().bytes_per_s, rng.choice([None, link()]))
            for group in sorted(groups)
        ),
    )


@pytest.mark.parametrize("seed", range(20))
def test_what_is_saved_is_read_back_equal(seed: int, tmp_path: Path) -> None:
    cluster = cluster_of(random.Random(seed))
    save_cluster(cluster, tmp_path / "cluster.yaml")
    assert load_cluster(tmp_path / "cluster.yaml") == cluster


def test_a_file_says_what_it_means() -> None:
    cluster = cluster_from_text(TEXT)
    device = Device("V100", 16 * 2**30, 1.0)
    network, swap = Link(parse_seconds("30 us"), 25e9 / 8), Link(parse_seconds("7 us"), 12e9)
    assert cluster.hosts == tuple(
        Host(f"server-{i}", (device,) * 8, Link(parse_seconds("5 us"), 40e9), network, swap) for i in range(2)
    )
    assert cluster.ranks == 16
    assert cluster.link(0, 1) == Link(parse_seconds("5 us"), 40e9)
    assert cluster.link(8, 0) == network
    assert cluster.link(0, 8) == Link(parse_seconds("40 us"), 20e9 / 8)
    small = Link(parse_seconds("8 us"), 9e9)
    assert cluster.reductions == (Reduction((0, 1), parse_seconds("20 us"), 30e9, small),)


def test_what_nobody_needs_may_be_left_out() -> None:
    alone = cluster_from_text("hosts: [{name: a, devices: [{kind: cpu, memory: 1 GiB}]}]")
    assert alone.hosts[0].inside == alone.hosts[0].network == NO_LINK
    assert alone.hosts[0].swap == NO_SWAP
    assert "swap" not in cluster_to_text(alone)
    assert cluster_from_text(cluster_to_text(alone)) == alone


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("count: 2", "count: 0", "hosts[0].count: found 0; expected 1 to 4096"),
        ("count: 8", "count: 0", "hosts[0].devices[0].count: found 0; expected 1 to 4096"),
        ("[{kind: V100, count: 8, memory: 16 GiB, speed: 1.0}]", "[]", "hosts[0].devices: found no device; expected"),
        ("16 GiB", "0 B", "hosts[0].devices[0].memory: found '0 B'; expected more than 0"),
        ("16 GiB", "16", "hosts[0].devices[0].memory: found '16'; expected an amount of bytes such as '1.5 GiB'"),
        ("speed: 1.0", "speed: 0", "hosts[0].devices[0].speed: found 0.0; expected a number above 0"),
        ("speed: 1.0", "speed: .inf", "hosts[0].devices[0].speed: found inf; expected a number above 0"),
        ("40 GB/s", "0 GB/s", "hosts[0].inside.bandwidth: found '0 GB/s'; expected more than 0"),
        ("40 GB/s", "-1 GB/s", "hosts[0].inside.bandwidth: found '-1 GB/s'; expected a rate such as '10 Gbit/s'"),
        ("12 GB/s", "0 GB/s", "hosts[0].swap.bandwidth: found '0 GB/s'; expected more than 0"),
        ("latency: 7 us, ", "", "hosts[0].swap.latency: missing"),
        ("5 us", "-5 us", "hosts[0].inside.latency: found '-5 us'; expected a time such as '3.2 ms'"),
        ("latency: 5 us, ", "", "hosts[0].inside.latency: missing"),
        ("kind: V100", "knd: V100", "devices[0].knd: unknown key; did you mean 'kind'? Expected one of kind"),
        ("name: server", "name: 3", "hosts[0].name: expected a text, found 3"),
        ("  network: {latency: 30 us, bandwidth: 25 Gbit/s}\n", "", "hosts[0].network: found no link; expected one"),
        ("  inside: {latency: 5 us, bandwidth: 40 GB/s}\n", "", "hosts[0].inside: found no link; expected one"),
        ("receiver: 8", "receiver: 16", "links[0]: found rank 16; expected ranks from 0 to 15"),
        ("receiver: 8", "receiver: 0", "links[0]: found a link from rank 0 to itself; expected two different"),
        ("40 us, bandwidth: 20", "40 us, bandwidth: 0", "links[0].bandwidth: found '0 Gbit/s'; expected more than 0"),
        ("[0, 1]", "[0, 99]", "reductions[0].ranks: found rank 99; expected ranks from 0 to 15"),
        ("[0, 1]", "[1, 0]", "reductions[0].ranks: found [1, 0]; expected two or more different ranks in rising order"),
        ("[0, 1]", "[3]", "reductions[0].ranks: found [3]; expected two or more"),
        ("links:\n", "links:\n- {sender: 0, receiver: 8, latency: 1 us, bandwidth: 1 B/s}\n", "from 0 to 8 2 times"),
        ("reductions:\n", "reductions:\n- {ranks: [0, 1], latency: 1 us, bandwidth: 1 B/s}\n", "ranks [0, 1] 2 times"),
        ("hosts:", "hosts:\n- {name: server-1, devices: [{kind: a, memory: 1 B}], network: {latency: 0 s, "
         "bandwidth: 1 B/s}}", "hosts: found the name 'server-1' 2 times"),
        (TEXT, "hosts: []", "hosts: found no host; expected at least one"),
        (TEXT, "", "is empty; expected `hosts:`"),
        (TEXT, "# nothing yet\n\n", "is empty; expected `hosts:`"),
        (TEXT, "[1, 2]", "the top: expected a mapping"),
        (TEXT, "hosts: [", "is not YAML"),
    ],
)  # fmt: skip
def test_every_mistake_is_one_error_that_names_file_and_place(old: str, new: str, message: str) -> None:
    assert old in TEXT
    with pytest.raises(ClusterError) as caught:
        cluster_from_text(TEXT.replace(old, new, 1), source="my.yaml")
    assert str(caught.value).startswith("my.yaml")
    assert message in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "absent.yaml", tmp_path, tmp_path / "binary.yaml"):
        with pytest.raises(ClusterError, match=f"cannot read {path}"):
            load_cluster(path)


def test_a_cluster_is_found_by_its_name_or_its_path(tmp_path: Path) -> None:
    save_cluster(cluster_from_text(TEXT), tmp_path / "mine.yaml")
    assert find_cluster(str(tmp_path / "mine.yaml"), presets=PRESETS) == cluster_from_text(TEXT)
    assert find_cluster("dapple_a", presets=PRESETS) == load_cluster(PRESETS / "dapple_a.yaml")
    with pytest.raises(ClusterError, match=r"neither a preset nor a file named 'dapple_x'.*did you mean 'dapple_"):
        find_cluster("dapple_x", presets=PRESETS)


def test_a_cluster_has_as_many_devices_as_the_trainer_has_ranks() -> None:
    check_ranks(cluster_from_text(TEXT), 16, source="my.yaml")
    with pytest.raises(ClusterError, match=r"my.yaml has 16 devices on 2 hosts, but the trainer has 4 ranks"):
        check_ranks(cluster_from_text(TEXT), 4, source="my.yaml")


def test_a_reduction_stands_for_as_many_ranks_on_as_many_hosts_with_the_same_devices() -> None:
    inside, two, across = Reduction((0, 1), 1e-5, 3e10), Reduction((1, 2), 1e-5, 2e10), Reduction((7, 8), 1e-4, 1e9)
    plain = cluster_from_text(TEXT)
    cluster = Cluster(plain.hosts, reductions=(inside, two, across))
    assert cluster.reduction((0, 1)) == inside
    assert cluster.reduction((1, 2)) == two
    assert cluster.reduction((14, 15)) == inside
    assert cluster.reduction((0, 15)) == across
    assert cluster.reduction((0, 1, 2)) is None
    slower = Host("old", (Device("P100", 2**34),) * 8, plain.hosts[0].inside, plain.hosts[0].network)
    assert Cluster((plain.hosts[0], slower), reductions=(inside, across)).reduction((8, 9)) is None


@pytest.mark.parametrize("name", preset_names(PRESETS))
def test_presets_are_read_and_open_with_their_use_and_their_sources(name: str) -> None:
    assert find_cluster(name, presets=PRESETS).ranks > 1
    text = (PRESETS / f"{name}.yaml").read_text(encoding="utf-8")
    comment = "".join(line for line in text.splitlines() if line.startswith("#"))
    assert text.startswith(f'# DappleStrategy(cluster="{name}"), ')
    assert "Source" in comment and " %" in comment, "sources, and the share of the nominal bandwidth"


@pytest.mark.parametrize(
    ("name", "hosts", "message", "reduce"), [("a", 2, 0.8e9, 3e9), ("b", 16, 0.8e9, 3e9), ("c", 16, 0.32e9, 1.2e9)]
)
def test_the_configurations_of_dapple_have_the_bandwidths_of_its_authors(
    name: str, hosts: int, message: float, reduce: float
) -> None:
    """An all-reduce of w bytes among r devices takes 2 (r-1)/r w / bandwidth (analysis_dapple.py)."""
    cluster = find_cluster(f"dapple_{name}", presets=PRESETS)
    assert (cluster.ranks, len(cluster.hosts)) == (16, hosts)
    assert cluster.link(0, 15) == Link(0.0, message)
    for r in range(2, 17):
        found = cluster.reduction((0, *range(17 - r, 16)))
        assert found is not None
        assert 2 * (r - 1) / r * found.bytes_per_s == pytest.approx(reduce, rel=1e-5), r


def test_the_document_shows_a_cluster_and_all_presets() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    cluster = cluster_from_text(shown)
    assert cluster_from_text(cluster_to_text(cluster)) == cluster
    rows = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert sorted(rows) == list(preset_names(PRESETS))


def test_a_limit_lowers_the_memory_of_its_kind_and_never_raises_it():
    devices = (Device("Tesla V100", 16), Device("Tesla T4", 14), Device("Tesla T4", 5))
    cluster = Cluster((Host("a", devices, inside=NO_LINK, network=NO_LINK),))

    def found(limits):
        return [limited(cluster, limits).device(rank).memory_bytes for rank in range(3)]

    assert found({}) == [16, 14, 5]
    assert found({"": 10}) == [10, 10, 5]
    assert found({"t4": 7}) == [16, 7, 5]
    assert found({"V100": 99, "T4": 7}) == [16, 7, 5]
    with pytest.raises(ClusterError, match=r"H100.*Tesla V100; Tesla T4"):
        limited(cluster, {"H100": 7})
