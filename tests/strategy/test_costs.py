"""Costs are measured before the first step and compared after it; wrong descriptions of a cluster are refused."""

from __future__ import annotations

import json
import math
import os
import re
import time
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist

from lightning_pipe import DappleStrategy
from lightning_pipe.core.cluster_file import load_cluster
from lightning_pipe.core.plan import Plan
from lightning_pipe.core.profile import Profile
from lightning_pipe.core.serial import load_json, load_yaml
from lightning_pipe.errors import ClusterError
from lightning_pipe.freed_memory import freed_memory_kept
from lightning_pipe.profiler.cache import Timing, folder_under_load, load_timings
from lightning_pipe.profiler.processor_time import ProcessorTime
from lightning_pipe.strategy.plans import stale_times
from lightning_pipe.units import format_seconds, format_share
from models.parity import make_loader, make_module
from ranks.world import World
from strategy.fits import dapple, make_trainer

NAME = "gpt_tied"


def measured(folder: str) -> dict[str, tuple[float, float]] | None:
    """Fit with measured costs and a report; return predicted and measured figures where there are any."""
    strategy = DappleStrategy(report=f"{folder}/report", cache=f"{folder}/cache", timeline_steps=4, layout="1-1")
    make_trainer(strategy, max_epochs=2).fit(make_module(NAME), make_loader(NAME))
    found = strategy.comparison
    if found is None:
        return None
    figures = {"step": found.step, "bubble": found.bubble, **{f"saved {m.rank}": m.saved for m in found.memory}}
    figures |= {f"{s.stage}{kind}": figure for s in found.stages for kind, figure in s.computes.items()}
    return {name: (figure.predicted, figure.measured) for name, figure in figures.items()}


@pytest.fixture(scope="module")
def reported(tmp_path_factory) -> tuple[Path, dict[str, tuple[float, float]]]:
    folder = tmp_path_factory.mktemp("measured")
    of_first, of_second = World(2).run(measured, str(folder))
    assert of_second is None
    return folder, of_first


def test_the_first_steps_are_predicted_and_measured(reported):
    _, figures = reported
    assert {"step", "bubble", "saved 0", "saved 1", "0F", "0W", "1F", "1I", "1W"} <= set(figures)
    for name, (predicted, found) in figures.items():
        assert math.isfinite(predicted) and math.isfinite(found) and min(predicted, found) >= 0, name
    assert min(figures["step"]) > 0


def test_saved_tensors_are_predicted_to_a_few_per_cent(reported):
    _, figures = reported
    for rank in (0, 1):
        predicted, found = figures[f"saved {rank}"]
        assert predicted == pytest.approx(found, rel=0.05), rank


def test_a_report_holds_what_other_runs_can_use(reported):
    folder, _ = reported
    report = folder / "report"
    plan = load_yaml(Plan, report / "plan.yaml")
    profile = load_json(Profile, report / "profile.json")
    cluster = load_cluster(report / "cluster.yaml")
    assert plan.graph == profile.graph and profile.source == "measured"
    assert cluster.ranks == 2 and cluster.link(0, 1).bytes_per_s > 0
    names = {
        event["args"]["name"]
        for event in json.loads((report / "timeline.json").read_text())["traceEvents"]
        if event["name"] == "process_name"
    }
    assert names == {f"rank {rank} {run}" for rank in (0, 1) for run in ("predicted", "measured")}
    said = (report / "report.txt").read_text()
    assert said.startswith("training_step: one graph of")
    assert "one device" in said and "DDP" in said
    for picture in ("timeline.png", "memory.png"):
        assert (report / picture).read_bytes().startswith(b"\x89PNG")


def test_the_page_of_a_run_has_the_figures_of_its_comparison(reported):
    folder, figures = reported
    page = (folder / "report" / "report.html").read_text()
    (data,) = re.findall(r'type="application/json">(.*?)</script>', page)
    drawn = {run["name"]: run["seconds"] for run in json.loads(data)["runs"]}
    assert (drawn["predicted"], drawn["measured"]) == pytest.approx(figures["step"])
    for seconds, bubble in zip(figures["step"], figures["bubble"], strict=True):
        assert format_seconds(seconds) in page and format_share(bubble) in page
    assert "measured peak" in page and len(page) < 2_000_000


def compared(options: dict[str, object]) -> bool:
    """Return whether a fit with measured costs compared its first steps."""
    strategy = DappleStrategy(**options)
    make_trainer(strategy, max_epochs=1).fit(make_module(NAME), make_loader(NAME))
    return strategy.comparison is not None


def test_a_step_that_sends_more_than_is_predicted_is_not_compared(reported):
    """With exact ties the gradients of the tied embedding travel for every micro-batch."""
    folder, _ = reported
    options = {"exact_ties": True, "layout": "1-1", "schedule": "1f1b", "cache": f"{folder}/cache", "microbatches": 2}
    assert World(2).run(compared, options) == [False, False]


def test_a_replayed_step_is_compared_too(reported):
    """What the last stage reads of the batch is sent to it, and was not predicted once."""
    folder, _ = reported
    options = {"capture": "replay", "layout": "1-1", "cache": f"{folder}/cache", "microbatches": 2}
    assert World(2).run(compared, options) == [True, False]


def test_one_device_is_measured_if_a_report_is_wanted(tmp_path: Path):
    assert compared({"report": str(tmp_path / "report"), "cache": "off"})
    assert (tmp_path / "report" / "report.txt").is_file()


class SourceOfCosts(pl.Callback):
    """Keep where the costs came from that the plan was made by, and the kind of the first device; on rank 0."""

    found: tuple[str, str] | None = None

    def on_predict_end(self, trainer: pl.Trainer, *_: object) -> None:
        planned = trainer.strategy._session._pipeline.proposal
        if planned is not None:
            self.found = planned.problem.profile.source, planned.problem.cluster.device(0).kind

    on_validation_end = on_predict_end


def costs_outside_fit(method: str, costs: str) -> tuple[str, str] | None:
    """Return the source of the costs, outside of a fit."""
    source = SourceOfCosts()
    trainer = make_trainer(DappleStrategy(costs=costs, cache="off", layout="1-1"), callbacks=[source])
    getattr(trainer, method)(make_module(NAME), make_loader(NAME))
    return source.found


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("method", ["validate", "predict"])
def test_outside_of_a_fit_costs_are_measured_as_in_it(method: str):
    """Plans of evaluation were made for equal nominal devices, whatever the devices were."""
    of_first, of_second = World(2).run(costs_outside_fit, method, "measured")
    assert of_second is None
    assert of_first[0] == "measured" and of_first[1] != "nominal"


def test_outside_of_a_fit_nothing_is_measured_either_if_costs_are_counted():
    assert World(2).run(costs_outside_fit, "predict", "counted") == [("counted", "nominal"), None]


def fit_with(options: dict[str, str]) -> str:
    """Return the error that a fit with these options ends with."""
    with pytest.raises(ClusterError) as error:
        make_trainer(dapple(**options), max_epochs=1).fit(make_module(NAME), make_loader(NAME))
    return str(error.value)


CLUSTER = """
hosts:
- name: a
  devices: [{kind: x, count: %s, memory: 1 GiB}]
  inside: {latency: 1 us, bandwidth: %s}
"""


@pytest.mark.parametrize(
    ("count", "bandwidth", "says"),
    [
        (3, "1 GB/s", "3 devices on 1 hosts, but the trainer has 2 ranks"),
        (2, "-1 GB/s", "-1 GB/s"),
    ],
)
def test_a_wrong_cluster_is_refused_on_every_rank(tmp_path: Path, count: int, bandwidth: str, says: str):
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER % (count, bandwidth))
    for said in World(2).run(fit_with, {"cluster": str(path)}):
        assert says in said and "cluster.yaml" in said, said


class Dawdling(pl.Callback):
    """Take long between a step and the next."""

    def on_train_batch_end(self, *_: object) -> None:
        spent = time.perf_counter() + DAWDLE_S
        while time.perf_counter() < spent:
            pass


DAWDLE_S = 0.05


def optimizer_s(folder: str) -> float | None:
    """Return the measured seconds of the optimizer's steps on rank 0."""
    strategy = DappleStrategy(cache=f"{folder}/cache", timeline_steps=3, layout="1-1")
    make_trainer(strategy, max_epochs=1, callbacks=[Dawdling()]).fit(make_module(NAME), make_loader(NAME))
    found = strategy.comparison
    return None if found is None else max(rank.optimizer.measured for rank in found.ranks)


def test_what_callbacks_do_is_not_the_optimizers_time(reported):
    folder, _ = reported
    assert World(2).run(optimizer_s, str(folder))[0] < DAWDLE_S


def measured_in(dtype: torch.dtype) -> list[str]:
    """Fit a module of this type with measured costs while it is the default; return the types of its parameters."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        module = make_module("frozen", dtype=dtype)
        strategy = DappleStrategy(cache="off", layout="1-1", microbatches=2)
        make_trainer(strategy, max_epochs=1, limit_train_batches=1).fit(module, make_loader("frozen", dtype=dtype))
        return sorted({str(parameter.dtype) for parameter in module.parameters()})
    finally:
        torch.set_default_dtype(before)


def test_costs_are_measured_under_any_default_type():
    assert World(2).run(measured_in, torch.float64) == [["torch.float64"]] * 2


def kept_times(folder: str, loads: tuple[bool, ...]) -> list[list[dict[str, Timing]]]:
    """Return the times that are kept, without and under load, after each of some fits on one cache."""
    cache = Path(folder)
    kept = []
    for is_busy in loads:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ProcessorTime, "is_short", lambda *_, busy=is_busy, **__: busy and dist.get_rank() == 1)
            patch.setattr(stale_times, "TOO_LONG", math.inf)  # a machine busy meanwhile would have them dropped again
            strategy = DappleStrategy(cache=str(cache), layout="1-1", microbatches=2)
            trainer = make_trainer(strategy, max_epochs=1, limit_train_batches=1)
            trainer.fit(make_module("frozen"), make_loader("frozen"))
        with freed_memory_kept(wanted=True):  # as while operations are timed
            kept.append([load_timings(part, torch.device("cpu")) for part in (cache, folder_under_load(cache))])
    return kept


def test_times_measured_under_load_serve_starts_under_load_and_no_others(tmp_path):
    (first, again, quiet), _ = World(2).run(kept_times, str(tmp_path), (True, True, False))
    assert first[1] and not first[0]
    assert again == first, "nothing was measured"
    assert quiet[1] == first[1] and quiet[0].keys() == first[1].keys()


def test_processor_time_is_short_by_more_than_ranks_take_from_each_other():
    cores, device = len(os.sched_getaffinity(0)), torch.device("cpu")
    full = ProcessorTime(time.perf_counter() - 100, time.thread_time() - 100)
    half = ProcessorTime(time.perf_counter() - 100, time.thread_time() - 50)
    assert not full.is_short(ranks=1, device=device) and half.is_short(ranks=1, device=device)
    assert not half.is_short(ranks=2 * cores, device=device)
    assert not half.is_short(ranks=1, device=torch.device("cuda"))
