"""What the command line promises: plans for devices that are not here, and one clear text for every mistake."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import lightning_pipe
from lightning_pipe.capture import Request, capture_step, flatten
from lightning_pipe.cli import main
from lightning_pipe.cli.command_line import COMMANDS
from lightning_pipe.cli.options import PlanOptions, meanings, read_options
from lightning_pipe.cli.problem import overhead_sentence, problem_of
from lightning_pipe.config import conf_dir
from lightning_pipe.core.cluster_file import find_cluster, preset_names
from lightning_pipe.core.plan import Plan, StagePlan
from lightning_pipe.core.serial import load_yaml
from lightning_pipe.errors import ConfigError
from lightning_pipe.planner.comparison.alternatives import alternatives
from lightning_pipe.planner.evaluation.evaluate import Judged, judge
from lightning_pipe.planner.problem import Problem, nominal_cluster
from lightning_pipe.planner.registry import PLANNER_NAMES, propose
from lightning_pipe.profiler.timing.operators import Operators
from lightning_pipe.profiles.published import load_published
from lightning_pipe.schedule import SCHEDULES
from lightning_pipe.schedule.weights import POLICIES
from lightning_pipe.units import format_bytes, format_seconds

PROFILE = "".join(
    f"node{k} -- Linear_{k} -- forward_compute_time={k}, backward_compute_time={2 * k}, activation_size={k << 16}, "
    f"parameter_size={k << 20}\n"
    for k in range(1, 6)
) + "".join(f"\tnode{k} -- node{k + 1}\n" for k in range(1, 5))

MODULE = """
import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

BUILT_ON = []


class Net(pl.LightningModule):
    def __init__(self, width=8):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(width, width) for _ in range(4)])
        BUILT_ON.append(self.layers[0].weight.device.type)

    def training_step(self, batch, batch_idx):
        loss = (self.layers(batch) + torch.arange(batch.shape[1], device=self.device)).square().mean()
        self.log("loss", loss)
        return loss


class Loaded(Net):
    def train_dataloader(self):
        return DataLoader(torch.randn(32, 8), batch_size=4)


class Exemplified(Net):
    def __init__(self):
        super().__init__()
        self.example_input_array = torch.randn(6, 8)


class Late(Net):
    def configure_model(self):
        self.layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(5)])


class NeedsValues(Loaded):
    def __init__(self):
        super().__init__()
        self.rates = torch.linspace(0, 1, 4).tolist()


class Deep(Net):
    def __init__(self, depth=1):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(depth)])


class Frozen(Net):
    def training_step(self, batch, batch_idx):
        self.count = getattr(self, "count", 0) + 1
        return self.layers(batch).mean() * self.count


class Told(Net):
    tokens_per_sample = 7


class Wide(Net):
    def __init__(self):
        super().__init__(width=1024)

    def training_step(self, batch, batch_idx):
        return self.layers(batch).square().mean()


def wide_batch():
    return torch.zeros(4, 1024)


def make():
    return Net(width=4)


def batch(width=8):
    return torch.zeros(10, width)


def raises():
    raise RuntimeError("no [such] data")
"""

SMALL = """
hosts:
- name: small
  devices: [{kind: tiny, count: 2, memory: 3 MiB}]
  inside: {latency: 1 us, bandwidth: 10 GB/s}
"""


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """Work in a directory with a profile, a cluster and a module of a name of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "chain-pbs-4.txt").write_text(PROFILE)
    (tmp_path / "small.yaml").write_text(SMALL)
    (tmp_path / "nets.py").write_text(MODULE)
    monkeypatch.delitem(sys.modules, "nets", raising=False)
    return tmp_path


@pytest.fixture
def run(here, capsys):
    """Return a function that runs a command, which must succeed, and returns what it prints."""

    def running(*words: str) -> str:
        status = main(words)
        told = capsys.readouterr()
        assert status == 0, told.err
        return told.out

    return running


@pytest.fixture
def refused(here, capsys):
    """Return a function that runs a command, which must be refused, and returns the only text."""

    def running(*words: str) -> str:
        status = main(words)
        told = capsys.readouterr()
        assert (status, told.out) == (2, "")
        assert told.err.startswith(f"lightning-pipe {words[0]}: ") and told.err.count("\n") == 1
        return told.err

    return running


CHAIN = ("profile=chain-pbs-4.txt", "samples=16")
ON_TWO = (*CHAIN, "ranks=2", "planner=uniform")


def asked(name: str, samples: int) -> Problem:
    graph, profile = load_published("chain-pbs-4.txt")
    return Problem(graph, profile, find_cluster(name, presets=conf_dir() / "cluster"), samples)


# --- plans


def test_the_plan_that_is_written_is_the_one_that_is_shown_and_explained(run):
    told = run("plan", *CHAIN, "cluster=rtx4090_4", "planner=uniform", "layout=1-2-1", "microbatches=4", "runtime=0")
    plan = load_yaml(Plan, "plan.yaml")
    assert [stage.ranks for stage in plan.stages] == [(0,), (1, 2), (3,)] and plan.microbatches == 4
    judged = judge(plan, asked("rtx4090_4", 16))
    assert f"step {format_seconds(judged.step_s)}, {16 / judged.step_s:.4g} samples/s" in told
    assert "16 samples in 4 micro-batches" in told, "samples are those of the step, not of the profile"
    assert all(format_bytes(peak) in told for peak in judged.peak_bytes) and "23 GiB" in told
    assert all(row in told for row in ("this plan", "one device", "data parallel (DDP)"))


def test_the_models_own_operations_per_second_are_said_where_they_are_known(run):
    asked_for = ("model=nets:Net", "batch=nets:batch", "planner=uniform", "runtime=0")
    told = run("plan", *asked_for, "cluster=a100_8", "samples=32")
    step = re.search(r"step ([\d.]+) us, .* samples/s, ([\d.e-]+) TFLOP/s per device", told)
    nets = sys.modules["nets"]
    graph = capture_step(Request(nets.Net(), "training_step", flatten(nets.batch())[1], samples=10)).graph
    flops = sum(node.flops + node.backward_flops for node in graph.nodes) * 32 / 10
    assert step is not None
    assert float(step[2]) * 1e12 == pytest.approx(flops / (float(step[1]) * 1e-6) / 8, rel=0.01)
    utilised = re.search(r"TFLOP/s per device \(MFU (\d+)%\)", told)
    assert utilised is not None and int(utilised[1]) == round(float(step[2]) / 19.5 * 100), "float32 on an A100"
    assert "TFLOP/s" not in run("plan", *asked_for, "ranks=2", "samples=32"), "nominal devices have no rates"


def test_half_the_numbers_are_counted_at_their_own_rate_and_peak(run):
    asked_for = (
        "model=nets:Wide",
        "batch=nets:wide_batch",
        "runtime=0",
        "cluster=a100_8",
        "layout=8",
        "microbatches=1",
    )

    def found(precision: str) -> tuple[float, float, float]:
        told = run("plan", *asked_for, "planner=uniform", "samples=65536", f"precision={precision}")
        rate, share = re.search(r"([\d.e-]+) TFLOP/s per device \(MFU (\d+)%\)", told).groups()
        parameters = re.search(r"^ +0 .*? ([\d.]+) MiB", told, re.MULTILINE)[1]
        return float(rate), int(share) / 100, float(parameters)

    whole, half, mixed = found("32-true"), found("bf16-true"), found("bf16-mixed")
    assert half[0] > 5 * whole[0] and mixed[0] > 3 * whole[0]
    assert half[0] / 312 == pytest.approx(half[1], abs=0.006), "all operations that count have 16 bits"
    assert mixed[0] / 312 == pytest.approx(mixed[1], abs=0.006)
    assert half[2] == pytest.approx(whole[2] / 2, rel=0.01) and mixed[2] == whole[2]


def test_tokens_per_second_are_those_of_the_model_or_as_given(run):
    words = ("model=nets:Told", "batch=nets:batch", "ranks=2", "planner=uniform", "samples=32")
    seconds = re.compile(r"([\d.e+]+) samples/s, ([\d.,]+) tokens/s")
    for more, tokens in (((), 7), (("tokens=11",), 11)):
        samples_s, tokens_s = (float(n.replace(",", "")) for n in seconds.search(run("plan", *words, *more)).groups())
        assert tokens_s / samples_s == pytest.approx(tokens, rel=1e-3)
    assert "tokens/s" not in run("plan", *ON_TWO)
    assert seconds.search(run("plan", *ON_TWO, "tokens=5"))


def test_nothing_but_what_was_asked_for_is_written_and_the_directory_stays(run, here):
    before = {path.name for path in here.iterdir()}
    run("plan", *ON_TWO, "out=null")
    assert {path.name for path in here.iterdir()} == before and Path.cwd() == here
    run("plan", *ON_TWO, "out=two.yaml", "trace=two.json")
    assert {path.name for path in here.iterdir()} - before == {"two.yaml", "two.json"}


def test_pictures_of_time_and_memory_are_drawn(run, here):
    pytest.importorskip("matplotlib")
    assert "Drew two.png and two_memory.png" in run("plan", *ON_TWO, "draw=two.png")
    assert (here / "two.png").stat().st_size and (here / "two_memory.png").stat().st_size


def test_pictures_without_matplotlib_are_refused_with_the_way_to_install_it(here, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["plan", *ON_TWO, "draw=two.png"]) == 2
    assert "lightning-pipe[plots]" in capsys.readouterr().err


def test_faster_devices_compute_in_so_much_less_time(run):
    def busy(*words: str) -> str:
        return re.findall(r"^ +0 +nominal +0 +(\S+ \S+)", run("plan", *ON_TWO, "microbatches=2", *words), re.MULTILINE)[
            0
        ]

    once, tenfold = busy("runtime=0"), busy("speed=10", "runtime=0")
    assert float(once.split()[0]) == pytest.approx(10 * float(tenfold.split()[0]), rel=0.01)


# --- simulate, explain, compare


def test_simulating_a_plan_says_of_it_what_planning_said(run):
    tables = run("plan", *ON_TWO).split("\n\n")[:4]  # two, each with a headline
    assert run("simulate", *CHAIN, "ranks=2", "plan=plan.yaml").split("\n\n")[:4] == tables


def test_a_given_plan_that_exceeds_memory_is_shown_with_how_much_is_missing(run):
    run("plan", *ON_TWO)
    told = run("simulate", *CHAIN, "cluster=small.yaml", "plan=plan.yaml")
    assert "Predicted: the plan does not fit; the fullest rank needs" in told and "3 MiB     no" in told


@pytest.mark.parametrize(("limit", "is_full"), [(1.02, True), (1.0, True), (1.1, False)])
def test_a_plan_that_leaves_no_room_is_said_to_be_full(limit, is_full, run):
    run("plan", *ON_TWO, "microbatches=2", "layout=1-1")
    problem = replace(asked("rtx4090_4", 16), cluster=nominal_cluster(2))
    peak = max(judge(load_yaml(Plan, "plan.yaml"), problem).peak_bytes)
    told = run("simulate", *CHAIN, "ranks=2", "plan=plan.yaml", f"memory_limit={int(peak * limit)}B")
    assert ("is full to" in told) == is_full and "does not fit" not in told


def test_a_plan_of_a_profile_is_not_said_to_be_one_for_a_module(run):
    assert "no module does" in run("plan", *ON_TWO)
    assert "DappleStrategy(plan='plan.yaml')" in run("plan", "model=nets:Loaded", "ranks=2", "planner=uniform")


def test_no_plan_within_memory_is_an_error_that_says_what_would_help(refused, here):
    told = refused("plan", *CHAIN, "cluster=small.yaml")
    assert "No plan fits into memory" in told and "What would help" in told
    assert not (here / "plan.yaml").exists()


def test_a_given_plan_is_explained_against_what_auto_would_do(run):
    run("plan", *ON_TWO, "microbatches=1")
    told = run("explain", *CHAIN, "ranks=2", "plan=plan.yaml")
    assert "one device" in told and "data parallel (DDP)" in told and "the best other plan (" in told


def test_a_report_is_one_page_with_the_figures_of_the_plan(run, refused, here):
    run("plan", *ON_TWO)
    told = run("report", *CHAIN, "ranks=2", "plan=plan.yaml", "out=page.html")
    page = (here / "page.html").read_text()
    seconds = re.search(r": predicted ([\d.]+ m?s) per step", told)
    assert seconds is not None and f"<b>{seconds[1]}</b>" in page
    assert "this plan" in page and "</html>" in page
    assert "cannot write the report" in refused("report", *ON_TWO, "out=no/such/folder/page.html")


def test_explaining_without_a_plan_plans_and_writes_nothing(run, here):
    assert "this plan" in run("explain", *ON_TWO)
    assert not (here / "plan.yaml").exists()


def test_planners_are_compared_in_one_table_and_say_why_they_have_no_plan(run):
    told = run("compare", *CHAIN, "ranks=2", "layout=1-1", "planners=[auto,dapple,uniform]")
    auto, dapple, uniform = (
        re.search(rf"^  {name} .*", told, re.MULTILINE)[0] for name in ("auto", "dapple", "uniform")
    )
    assert "1.000" in auto and "1-1" in auto and "1-1" in uniform
    assert re.search(r"dapple( +-){7} +planner='dapple'", dapple), "it decides the layout itself"
    assert float(re.findall(r"\d\.\d{3}", uniform)[0]) >= 1, "auto is never slower"


def test_policies_of_weight_versions_are_compared_with_a_flush(run, here):
    """A row for each, with delays and versions by stage; plans are made with versions and name none."""
    told = run("compare", *CHAIN, "ranks=2", "layout=1-1", "microbatches=2", "versions=all")
    rows = {name: re.search(rf"^  {name} .*", told, re.MULTILINE)[0] for name in ("sync", *POLICIES)}
    assert all(any(f" {name} " in row for name in SCHEDULES) for row in rows.values())  # the best exact schedule
    assert "1.000" in rows["sync"] and re.search(r"1 1 +2 2", rows["2bw"]) and re.search(r"1 0 +2 1", rows["pipedream"])
    told = run("plan", *CHAIN, "ranks=2", "layout=1-1", "versions=2bw")
    for text in (told, run("explain", *CHAIN, "ranks=2", "plan=plan.yaml", "versions=2bw")):
        assert text.count("is not the training of one device: gradients are late by up to 1 update") == 1
        assert "data parallel" not in text
    assert "versions" not in (here / "plan.yaml").read_text()
    assert "is not the training" in run("simulate", *CHAIN, "ranks=2", "plan=plan.yaml", "versions=2bw")
    refused = run("compare", *CHAIN, "ranks=2", "layout=2", "versions=all")
    assert re.findall("No plan for ([^:]*):", refused) == [", ".join(POLICIES)], "once"
    options = [*CHAIN, "ranks=2", "versions=all", "warmup=pa"]
    with pytest.raises(ConfigError, match="versions='all' and warmup"):
        read_options(COMMANDS["compare"][0], options)


def test_the_old_name_of_activation_policies_is_read_and_noted_once(caplog):
    words = [*CHAIN, "ranks=2"]
    new = read_options(PlanOptions, [*words, "activation_policies=[recompute]"])
    assert not caplog.messages and new.constraints.memory_policies == {"recompute"}
    assert read_options(PlanOptions, [*words, "reliefs=[recompute]"]) == new
    assert len(caplog.messages) == 1 and "reliefs is called activation_policies now" in caplog.messages[0]


def test_by_default_all_planners_but_the_exhaustive_one_are_compared():
    options = read_options(COMMANDS["compare"][0], [*CHAIN, "ranks=2"])
    assert options.planners == tuple(name for name in PLANNER_NAMES if name != "exhaustive")


# --- published profiles


def test_published_profiles_need_neither_torch_nor_lightning(here):
    code = (
        "import sys\nfrom lightning_pipe.cli import main\n"
        f"status = main({['plan', *ON_TWO]!r})\n"
        "assert not {'torch', 'lightning'} & set(sys.modules), 'imported'\nsys.exit(status)"
    )
    package = str(Path(__file__).parent.parent)
    found = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": package}, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr


def test_samples_default_to_those_of_the_profile(run):
    assert "4 samples in" in run("plan", "profile=chain-pbs-4.txt", "ranks=2", "planner=uniform")
    assert "8 samples in" in run("plan", "profile=chain-pbs-4.txt", "profile_samples=8", "ranks=2", "planner=uniform")


# --- models


def test_a_model_is_planned_from_meta_parameters_and_its_plan_fits_the_real_graph(run):
    run("plan", "model=nets:Net", "batch=nets:batch", "ranks=2", "planner=uniform", "samples=32")
    nets = sys.modules["nets"]
    assert nets.BUILT_ON == ["meta"]
    plan = load_yaml(Plan, "plan.yaml")
    assert plan.graph == "", "kinds of devices and numbers of samples give graphs other fingerprints"
    capture = capture_step(Request(nets.Net(), "training_step", flatten(nets.batch())[1], samples=10))
    assert all(capture.graph.position(stage.at) >= 0 for stage in plan.stages)


@pytest.mark.parametrize(
    ("words", "samples"),
    [
        (("model=nets:Net", "batch=nets:batch"), 10),
        (("model=nets:make", "batch=nets:narrow"), 10),
        (("model=nets:Net", "batch=nets:narrow", "model_args={width: 4}"), 10),
        (("model=nets:Net", "batch=nets:narrow", "+model_args.width=4"), 10),
        (("model=nets:Loaded",), 4),
        (("model=nets:Exemplified",), 6),
        (("model=nets:Late", "batch=nets:batch"), 10),
    ],
)
def test_models_and_batches_come_from_wherever_they_are(words, samples, run, here):
    (here / "nets.py").write_text(MODULE + "\n\ndef narrow():\n    return batch(4)\n")
    assert f"{samples} samples in" in run("explain", *words, "ranks=2", "planner=uniform")


def test_a_model_that_needs_values_is_built_with_real_parameters_which_is_said(here, capsys):
    assert main(["explain", "model=nets:NeedsValues", "ranks=2", "planner=uniform"]) == 0
    assert sys.modules["nets"].BUILT_ON == ["meta", "cpu"]
    assert "built with real parameters" in capsys.readouterr().err


@pytest.mark.parametrize("compiled", ["false", "true"])
def test_costs_can_be_measured_on_this_machine(run, compiled, monkeypatch):
    asked: list[bool] = []

    def measured(operators: Operators, known: Any, **_: Any) -> dict[str, Any]:
        asked.append(operators.compiled)
        return {}

    monkeypatch.setattr(Operators, "measure_compiled", measured)
    words = ("model=nets:Loaded", "ranks=2", "planner=uniform", "costs=measured", "cache=off", f"compile={compiled}")
    assert "Costs are measured" in run("explain", *words)
    assert asked == [compiled == "true"]


def test_the_runtime_is_part_of_plans_made_without_ranks_and_said(run):
    def step(*words: str) -> float:
        told = run("plan", *ON_TWO, "microbatches=2", "layout=1-1", "out=null", *words)
        assert ("measured with two gloo ranks" in told) == ("runtime=0" not in words)
        return float(re.search(r"step (?:time )?([\d.]+) ms", told)[1])

    assert step("runtime=0") < step() < step("runtime=4")


def test_plans_for_gpus_have_the_overheads_that_their_cluster_states(run, here):
    """Plans for A100s had what was measured with gloo on CPUs."""
    for name in preset_names(conf_dir() / "cluster"):
        cluster = find_cluster(name, presets=conf_dir() / "cluster")
        assert cluster.runtime is not None, name
    (here / "mixed.yaml").write_text(SMALL.replace("3 MiB}", "1 GiB, runtime: {compute: 3 us, message: 4 us}}"))
    for words, sentence in [
        (("cluster=a100_8",), "10 us per compute and 20 us per message, assumed for A100-80GB"),
        (("cluster=a100_8", "runtime=0.5"), "5 us per compute and 10 us per message, assumed"),
        (("cluster=small.yaml",), "190 us per compute and 640 us per message, measured with two gloo ranks on a CPU"),
        (("cluster=mixed.yaml",), "3 us per compute and 4 us per message, assumed for tiny"),
        (("cluster=a100_8", "runtime=0"), "left out"),
    ]:
        options = read_options(PlanOptions, [*CHAIN, *words])
        assert sentence in overhead_sentence(problem_of(options), options)


def test_counted_costs_on_devices_with_rates_need_no_speed(run):
    told = run("explain", "model=nets:Loaded", "cluster=a100_8", "planner=uniform", "samples=64", "microbatches=1")
    assert "Costs are counted (device: A100-80GB)" in told and "set speed=" not in told


def test_counted_costs_on_real_devices_ask_for_their_speed(run):
    words = ("explain", "model=nets:Loaded", "cluster=small.yaml", "planner=uniform")
    assert "set speed=" in run(*words)
    assert "set speed=" not in run(*words, "speed=20")


def test_state_of_the_optimizer_counts_as_memory(here):
    def peak(state: int) -> int:
        words = ["model=nets:Loaded", "ranks=1", f"optimizer_state={state}"]
        problem = problem_of(read_options(PlanOptions, words))
        return judge(Plan((StagePlan("", (0,)),), 1), problem).peak_bytes[0]

    parameters = 4 * (8 * 8 + 8) * torch.float32.itemsize
    assert peak(2) - peak(0) == 2 * parameters


def test_the_best_other_plan_is_another_idea(here):
    """It was the same plan, cut elsewhere."""
    problem = asked("rtx4090_4", 16)
    names = [node.name for node in problem.graph.nodes]

    def judged(*stages: tuple[int, tuple[int, ...]], microbatches: int = 4) -> Judged:
        made = tuple(StagePlan(names[first] if first else "", ranks) for first, ranks in stages)
        return judge(Plan(made, microbatches), problem)

    halves = (0, 1), (2, 3)
    best, elsewhere = (judged((0, halves[0]), (at, halves[1])) for at in (3, 2))
    other = judged((0, (0, 1, 2)), (2, (3,)))
    fewer = judged((0, halves[0]), (2, halves[1]), microbatches=2)
    found = {one.kind: one.name for one in alternatives(problem, best, [elsewhere, fewer, other])}
    assert found["runner-up"] == "1f1b, 3-1, 4 micro-batches" and found["variant"] == "2 micro-batches"


def test_a_larger_batch_is_named_with_what_its_simulation_gives(run):
    words = (*CHAIN, "cluster=rtx4090_4", "planner=uniform", "layout=1-1-1-1", "microbatches=4", "out=null")
    found = re.search(
        r"with samples=64 in 16 micro-batches the bubble shrinks to ([\d.]+)%, and training is (\d+)%\s+faster",
        run("plan", *words),
    )
    assert found is not None
    one, large = (
        propose(problem_of(read_options(PlanOptions, [*words, *more])), "uniform")[0]
        for more in ((), ("samples=64", "microbatches=16"))
    )
    assert float(found[1]) == pytest.approx(100 * large.bubble, abs=0.1)
    assert int(found[2]) == pytest.approx(100 * (4 * one.step_s / large.step_s - 1), abs=1)
    assert "faster per sample" not in run("plan", *words, "samples=400", "microbatches=100")


def test_tables_of_plans_are_at_most_100_columns_wide(run):
    told = run("plan", *CHAIN, "cluster=rtx4090_4", "layout=1-1-1-1", "microbatches=4", "planner=uniform", "out=null")
    assert max(map(len, told.splitlines())) <= 100


def test_a_report_names_layouts_by_modules(run, here):
    run("report", "model=nets:Loaded", "ranks=2", "layout=1-1", "planner=uniform", "samples=32", "out=page.html")
    text = (here / "page.html").read_text()
    (data,) = re.findall(r'type="application/json">(.*?)</script>', text)
    layouts = [one["layout"] for one in json.loads(data)["candidates"]]
    cuts = [cut for layout in layouts for cut in re.findall(r"cut before ([^,]+)", layout)]
    assert cuts and all(cut.startswith("layers") for cut in cuts)
    assert "<dd>nets.Loaded</dd>" in text and "288 (1.12 KiB)" in text


# --- capacity


def rows(told: str) -> dict[str, list[str]]:
    """Return the numbers of a table of policies."""
    found = {name: re.search(rf"^ *{name}  +(.*)$", told, re.MULTILINE) for name in ("keep all", "gpipe", "planned")}
    return {name: row.group(1).split() for name, row in found.items() if row is not None}


def test_the_largest_batch_of_each_policy_is_shown_with_its_step(run):
    words = (*CHAIN, "ranks=2", "microbatches=4", "planner=uniform", "memory_limit=192MiB")
    found = rows(run("max-batch", *words, "policies=[keep all,gpipe,planned]"))
    assert found.keys() == {"keep all", "gpipe", "planned"}
    sizes = {name: int(size) for name, (size, *_) in found.items()}
    assert 0 < sizes["gpipe"] < sizes["keep all"] <= sizes["planned"]
    assert all(int(batch) == 4 * sizes[name] for name, (_, batch, *_) in found.items())


def test_the_deepest_model_of_a_family_is_shown(run):
    words = ("model=nets:Deep", "batch=nets:batch", "ranks=2", "planner=uniform", "microbatches=2", "memory_limit=8kB")
    found = rows(run("max-batch", *words, "deepest=depth", "model_args={depth:2}", "policies=[keep all,gpipe]"))
    assert all(int(depth) > 2 and int(batch) == 10 for depth, batch, *_ in found.values())


# --- mistakes


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("modle=nets:Net",), "unknown option 'modle'; did you mean 'model'. Expected one of"),
        (("hydra.run.dir=x",), "unknown option 'hydra'"),
        (("samples",), r"found 'samples'; expected key=value"),
        (("--model", "gpt-125m"), "found --model; options have no dashes: write model=gpt-125m"),
        (("--batch-dim=1",), "found --batch-dim=1; options have no dashes: write batch_dim=1"),
        (("model=gpt-13c", "ranks=2"), "did you mean 'gpt-13b'"),
        ((*CHAIN, "ranks=2", "memory_limit=16"), "plan: found memory_limit='16'; expected [^;:]*such as [^;]*$"),
        (("samples=many",), "found 'samples=many'; expected a whole number, such as samples=8"),
        (("samples=0", *CHAIN[:1], "ranks=2"), "found samples=0; expected at least 1"),
        (("speed=0", *CHAIN, "ranks=2"), "found speed=0; expected more than 0"),
        (("warmup=2,1",), "a text with commas is quoted twice"),
        (("~samples",), "found '~samples'; expected one value"),
        (("activation_policies=[recomput]", *CHAIN, "ranks=2"), "did you mean 'recompute'"),
        (CHAIN, "neither cluster= nor ranks="),
        ((*CHAIN, "ranks=2", "cluster=rtx4090_4"), "both cluster= and ranks="),
        (("ranks=2",), "neither model= nor profile="),
        (("ranks=2", "model=nets:Net", "profile=x"), "both model= and profile="),
        (("ranks=2", "model=nets:Net", "profile_samples=2"), "model= and profile_samples, which it leaves without"),
        ((*CHAIN, "ranks=2", "costs=measured"), "profile= and costs, which it leaves without effect"),
        (("model=nets:Net", "ranks=2", "compile=true"), "compile=true with counted costs"),
        ((*CHAIN, "cluster=rtx4090"), "did you mean 'rtx4090_4'"),
        (("profile=none.txt", "ranks=2"), "cannot read none.txt"),
        ((*CHAIN, "ranks=2", "planner=dapel"), "did you mean 'dapple'"),
        ((*CHAIN, "ranks=2", "planner=uniform", "layout=1-2"), "asks for 3 ranks"),
        ((*CHAIN, "ranks=2", "draw=x.pdf"), "expected the path of a PNG file"),
        (("model=nots:Net", "ranks=2"), "import of nots.*ModuleNotFoundError"),
        (("model=nets", "ranks=2"), "expected package.module:name"),
        (("model=nets:Nit", "ranks=2"), "found nothing as 'Nit' in nets"),
        (("model=nets:BUILT_ON", "ranks=2"), "found list as 'BUILT_ON'"),
        (("model=nets:batch", "ranks=2"), "returned Tensor; expected a LightningModule"),
        (("model=nets:raises", "ranks=2"), r"raised RuntimeError: no \[such\] data \(.*nets.py:\d+\)"),
        (("model=nets:Net", "ranks=2"), "found no batch for nets:Net"),
        (("model=nets:Net", "batch=nets:raises", "ranks=2"), "nets:raises raised RuntimeError"),
        (("model=nets:Net", "ranks=2", "model_args={depth: 2}"), "raised TypeError.*depth"),
        (("model=nets:Frozen", "batch=nets:batch", "ranks=2"), r"self\.count.*nets.py"),
    ],
)
def test_mistakes_are_refused_with_one_text(words, text, refused):
    assert re.search(text, refused("plan", *words))


@pytest.mark.parametrize(
    ("command", "words", "text"),
    [
        ("compare", ("planners=[auto,spq]",), "'spq' in planners; did you mean 'spp'. Expected some of"),
        ("compare", ("planners=[]",), "expected some of auto"),
        ("compare", ("planner=auto",), "unknown option 'planner'"),
        ("simulate", (), "found no plan="),
        ("simulate", ("plan=none.yaml",), "none.yaml"),
        ("simulate", ("plan=plan.yaml", "microbatches=2"), "unknown option 'microbatches'"),
        ("explain", ("plan=plan.yaml", "microbatches=2"), "plan='plan.yaml' and microbatches"),
        ("explain", ("out=plan.yaml",), "unknown option 'out'"),
        ("max-batch", ("policies=[vpip]",), "did you mean 'vpipe'"),
        ("max-batch", ("swap=fast",), "found 'fast'"),
        ("max-batch", ("deepest=depth",), "deepest='depth' without model="),
        ("max-batch", (), "unlimited memory.*memory_limit"),
        ("max-batch", ("memory_limit=V100: 1GiB",), "memory limit for 'V100'.*nominal"),
    ],
)
def test_every_command_takes_its_own_options_only(command, words, text, refused):
    assert re.search(text, refused(command, *CHAIN, "ranks=2", *words))


def test_a_plan_for_more_micro_batches_than_samples_is_refused(run, refused):
    run("plan", *ON_TWO, "microbatches=8")
    assert "has 4 samples, but 8 micro-batches" in refused(
        "simulate", "profile=chain-pbs-4.txt", "ranks=2", "plan=plan.yaml"
    )


def test_a_file_that_cannot_be_written_is_an_error(here, capsys):
    assert main(["plan", *ON_TWO, "out=nowhere/plan.yaml"]) == 2
    assert "cannot write the plan" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_help_lists_every_option_with_its_default(command, capsys):
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    told = capsys.readouterr().out
    assert left.value.code == 0
    for name, default, _ in meanings(COMMANDS[command][0]):
        assert re.search(rf"^  {name} +{re.escape(default[:12])}", told, re.MULTILINE), name


def test_defaults_are_written_as_one_would_set_them():
    for name, default, _ in meanings(COMMANDS["compare"][0]):
        assert isinstance(yaml.safe_load(default), (str, int, float, list, dict, type(None))), name


def test_python_plans_what_the_command_plans(run):
    """By name and as a module; a module that is given stays as it is."""
    words = ("model=nets:Net", "batch=nets:batch", "ranks=2", "planner=uniform", "samples=32", "microbatches=4")
    run("plan", *words)
    options = {"ranks": 2, "planner": "uniform", "samples": 32, "microbatches": 4}
    named = lightning_pipe.plan("nets:Net", batch="nets:batch", **options)
    nets = importlib.import_module("nets")
    module = nets.Net()
    before = {name: (value, value.clone()) for name, value in module.state_dict(keep_vars=True).items()}
    given = lightning_pipe.plan(module, batch=nets.batch(), **options)
    made = lightning_pipe.plan(nets.Net, batch=nets.batch(), **options)
    for planned in (named, given, made):
        planned.save("planned.yaml")
        assert load_yaml(Plan, "planned.yaml") == replace(load_yaml(Plan, "plan.yaml"), graph=planned.plan.graph)
        assert planned.fits and len(planned.memory) == 2 and planned.step_s == named.step_s
    for name, value in module.state_dict(keep_vars=True).items():
        assert value is before[name][0] and torch.equal(value, before[name][1])
    named.report("planned.html")
    assert "<html" in Path("planned.html").read_text() and "micro-batch" in str(named) and named.reasons


@pytest.mark.slow
def test_a_large_model_on_a_large_cluster_is_planned_within_a_minute_of_one_core(run):
    """From Python as by the command, and the same."""
    words = {"cluster": "a100_4x8_ethernet_100g", "samples": 64, "precision": "bf16-mixed"}
    began = time.process_time()
    planned = lightning_pipe.plan("gpt-13b", **words)
    assert time.process_time() - began < 60
    run("plan", "model=gpt-13b", *(f"{name}={value}" for name, value in words.items()))
    assert load_yaml(Plan, "plan.yaml") == replace(planned.plan, graph="")


def test_nothing_to_consolidate_is_said_without_importing_torch(here):
    code = (
        "import sys\nfrom lightning_pipe.cli import main\nassert main(['consolidate', 'nofile', 'x']) == 2\n"
        "assert not {'torch', 'lightning'} & set(sys.modules), 'imported'"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 0 and "found nothing at nofile" in found.stderr, found.stderr


def test_python_compares_planners_and_refuses_what_the_command_refuses(here):
    found = lightning_pipe.compare("nets:Loaded", ranks=2, planners=["uniform", "dapple"])
    assert [planned.plan.microbatches > 0 for planned in found.values()] == [True, True]
    for options, words in [
        ({"rank": 2}, "unknown option 'rank'; did you mean 'ranks'"),
        ({"ranks": "two"}, "found ranks='two'"),
        ({"ranks": 2, "planner": "dappel"}, "did you mean 'dapple'"),
        ({}, "neither cluster= nor ranks="),
    ]:
        with pytest.raises(ConfigError, match=words):
            lightning_pipe.plan("nets:Loaded", **options)
