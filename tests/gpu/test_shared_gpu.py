"""Laws that CUDA alone can break: precisions, scaled gradients, copies beside computes, compiled stages.

Run by `make test-gpu`, which also runs the fits of the other tests on ranks that share the first GPU. Ranks send each
other tensors over gloo; nothing here runs NCCL.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.models import GPT
from lightning_pipe import DappleStrategy
from lightning_pipe.capture import Request, capture_step, flatten
from lightning_pipe.core.serial import save_yaml
from lightning_pipe.errors import CaptureError
from lightning_pipe.planner.problem import Constraints, counted_problem
from lightning_pipe.strategy.start import on_device
from parity.policies import mixed, plan_of
from ranks.world import World
from strategy.fits import ON, Case, Losses, assert_same, dapple, fit, fit_as_pipeline, make_trainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(ON != "cuda", reason="LIGHTNING_PIPE_TESTS_ON is not cuda")]

RANKS, LENGTH, WIDTH = 2, 128, 512
PRECISIONS = {"32-true": 1e-4, "16-mixed": 2e-2, "bf16-mixed": 4e-2, "bf16-true": 1e-1, "16-true": 1e-1}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("layout", "capture"), [("1-1", "joint"), ("2", "joint"), ("1-1", "replay")])
def test_a_pipeline_trains_as_one_device_does_in_every_precision(precision: str, layout: str, capture: str) -> None:
    options = {"layout": layout, "microbatches": 2, "capture": capture}
    case = Case("gpt_tied", options, {"precision": precision}, epochs=1, dtype=torch.float32)
    expected = fit(case)
    for found in World(RANKS).run(fit_as_pipeline, case):
        assert_same(found, expected, rtol=PRECISIONS[precision])


def scaled(strategy: Any) -> tuple[list[float], float, dict[str, torch.Tensor]]:
    """Fit with a scale that is too large at first; return losses, the scale at the end, and parameters."""
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40, growth_interval=3)
    module, losses = text_model(), Losses()
    plugins = [MixedPrecision("16-mixed", "cuda", scaler)]
    trainer = make_trainer(strategy, max_epochs=4, plugins=plugins, callbacks=[losses], gradient_clip_val=0.5)
    trainer.fit(module, text())
    return losses.losses, scaler.get_scale(), {n: p.detach().cpu() for n, p in module.named_parameters()}


def scaled_as_pipeline(layout: str) -> tuple[list[float], float, dict[str, torch.Tensor]]:
    return scaled(dapple(layout=layout, microbatches=2))


@pytest.mark.parametrize("layout", ["1-1", "2"])
def test_steps_with_gradients_that_overflow_are_left_out_on_all_ranks(layout: str) -> None:
    losses, scale, parameters = scaled("auto")
    assert scale < 2.0**40
    for own, reached, found in World(RANKS).run(scaled_as_pipeline, layout):
        assert reached == scale
        assert own == pytest.approx(losses, rel=2e-2)
        for name, parameter in found.items():
            torch.testing.assert_close(parameter, parameters[name], rtol=2e-2, atol=2e-3)


def text_model(depth: int = 4) -> GPT:
    torch.manual_seed(0)
    return GPT(vocabulary=500, context=LENGTH, width=WIDTH, depth=depth)


def text(batches: int = 3, samples: int = 16) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(500, (batches * samples, LENGTH + 1), generator=generator)
    return DataLoader(TensorDataset(tokens), batch_size=samples)


def trained(strategy: Any, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    module, losses = text_model(), Losses()
    make_trainer(strategy, max_epochs=2, callbacks=[losses], **options).fit(module, text())
    return losses.losses, {name: p.detach().cpu() for name, p in module.named_parameters()}


def trained_as_pipeline(options: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    return trained(DappleStrategy(**options))


def assert_close(found: Any, expected: Any, *, rtol: float, atol: float = 1e-6) -> None:
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(expected[0]), rtol=rtol, atol=atol)
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    "options",
    [{}, {"planner": "uniform", "layout": "1-1"}, {"capture": "replay"}, {"layout": "1-1", "schedule": "zb_h1"}],
    ids=str,
)
def test_default_options_train_as_one_device_does(options: dict[str, Any]) -> None:
    expected = trained("auto")
    for found in World(RANKS).run(trained_as_pipeline, options, deadline_s=200):
        assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.fixture
def away(tmp_path: Path) -> Path:
    """Return a plan whose stages offload most of what they save, and recompute some."""
    module, (tensors, structure) = text_model(), flatten(next(iter(text())))
    graph = capture_step(Request(module, "training_step", structure, samples=2, device=torch.device("cuda", 0))).graph
    problem = counted_problem(graph, ranks=RANKS, samples=len(tensors[0]))
    hosts = tuple(replace(host, swap=host.inside) for host in problem.cluster.hosts)
    constraints = Constraints(8, (1, 1), "gpipe", None)
    problem = replace(problem, constraints=constraints, cluster=replace(problem.cluster, hosts=hosts))
    plan = mixed(plan_of(problem), problem, recompute=0.2, offload=0.9, seed="gpu")
    assert all(stage.offload and stage.recompute for stage in plan.stages)
    save_yaml(replace(plan, graph=""), tmp_path / "plan.yaml")
    return tmp_path / "plan.yaml"


def test_what_is_offloaded_beside_computes_comes_back_as_it_was(away: Path) -> None:
    """Copies of megabytes run on streams of their own while the next micro-batches are computed."""
    kept = World(RANKS).run(
        trained_as_pipeline,
        {"layout": "1-1", "schedule": "gpipe", "microbatches": 8, "costs": "counted", "planner": "uniform"},
        deadline_s=200,
    )
    found = World(RANKS).run(trained_as_pipeline, {"plan": str(away), "costs": "counted"}, deadline_s=200)
    for one, other in zip(found, kept, strict=True):
        assert_close(one, other, rtol=0, atol=0)


def traced_on_the_host(precision: str) -> Any:
    """Fit by replay, where the GPU has no room for the whole module while units are looked for."""
    run_on = on_device._run_on

    def short(device: torch.device, *arguments: Any) -> Any:
        if device.type == "cuda":
            raise CaptureError("the step fails") from torch.OutOfMemoryError("CUDA out of memory")
        return run_on(device, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_device, "_run_on", short)
        return trained(dapple(layout="1-1", microbatches=2, capture="replay"), precision=precision)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_units_are_found_on_the_host_where_the_gpu_has_no_room(precision: str) -> None:
    expected = trained("auto", precision=precision)
    for found in World(RANKS).run(traced_on_the_host, precision):
        assert_close(found, expected, rtol=5e-2, atol=5e-3)


def test_compiled_stages_train_as_one_device_does() -> None:
    expected = trained("auto")
    options = {"layout": "1-1", "microbatches": 2, "compile": True, "costs": "counted", "planner": "uniform"}
    for found in World(RANKS).run(trained_as_pipeline, options, deadline_s=230):
        assert_close(found, expected, rtol=1e-2, atol=1e-3)


def peaks(limit: str | None) -> tuple[float, float, list[float]]:
    """Return the predicted and the measured peak of this rank in bytes, and the losses."""
    own = {} if limit is None else {"memory_limit": limit}
    strategy = DappleStrategy(
        layout="1-1", microbatches=4, planner="uniform", cache="off", replan=False, timeline_steps=3, **own
    )
    losses, _ = trained(strategy)
    found = strategy.comparison
    memory = [] if found is None else [(m.total.predicted, m.total.measured) for m in found.memory]
    return memory, losses


def test_peaks_are_as_predicted() -> None:
    (memory, _), *_ = World(RANKS).run(peaks, None, deadline_s=200)
    assert len(memory) == RANKS
    for predicted, measured in memory:
        assert predicted == pytest.approx(measured, rel=0.2)


SCRIPT = """\
import sys
import lightning.pytorch as pl, torch
sys.path[:0] = {paths!r}
from gpu.test_shared_gpu import text, text_model
from strategy.fits import Losses

if __name__ == "__main__":
    losses = Losses()
    trainer = pl.Trainer(strategy={strategy!r}, accelerator="gpu", devices=1, max_epochs=1, logger=False,
                         enable_checkpointing=False, enable_progress_bar=False, callbacks=[losses])
    trainer.fit(text_model(), text())
    print("losses", losses.losses)
"""


def script(strategy: str, folder: Path) -> list[float]:
    (folder / "train.py").write_text(SCRIPT.format(paths=[str(Path(__file__).parents[1]), "."], strategy=strategy))
    run = subprocess.run([sys.executable, folder / "train.py"], capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-6000:]
    (line,) = [line for line in run.stdout.splitlines() if line.startswith("losses")]
    return eval(line.removeprefix("losses "))


def test_one_line_trains_on_one_gpu(tmp_path: Path) -> None:
    assert script("dapple", tmp_path) == pytest.approx(script("auto", tmp_path), rel=1e-3)
