"""What a newcomer reads and types is true: every block of the documents runs or is checked, every preset composes."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import hydra
import pytest
import torch
import yaml
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

import lightning_pipe
from benchmarks import demo
from benchmarks.schedule_docs import own_schedules
from benchmarks.site import DRAWN
from lightning_pipe.cli.command_line import COMMANDS, CONSOLIDATE, command_parser
from lightning_pipe.cli.options import StepOptions, read_options
from lightning_pipe.config import DappleConfig, conf_dir, read_config
from lightning_pipe.core.cluster_file import cluster_from_text, preset_names
from lightning_pipe.core.effects import OWN_WORK
from lightning_pipe.core.plan import Plan
from lightning_pipe.core.program import Bucket, Edge, Layout, Traffic
from lightning_pipe.core.serial import from_yaml
from lightning_pipe.entry.environment_options import with_environment
from lightning_pipe.planner.comparison.alternatives import alternatives
from lightning_pipe.report import draw
from lightning_pipe.schedule import order_of
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.verification.verify import verify
from lightning_pipe.simulator import UnitPrices, simulate
from lightning_pipe.units import parse_bytes
from slow import slow_but

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted(path for path in (ROOT / "examples").rglob("*.py"))
PRESETS = sorted(path.stem for path in (conf_dir() / "strategy").glob("*.yaml"))
TRAINER = "{_target_: lightning.pytorch.Trainer, strategy: auto, accelerator: cpu, devices: 1, logger: false}"
APPLICATION = """
import hydra


@hydra.main(version_base=None, config_path="conf", config_name="train")
def main(config):
    trainer = hydra.utils.instantiate(config.trainer)
    print(type(trainer.strategy).__name__, trainer.world_size)


if __name__ == "__main__":
    main()
"""


def blocks(language: str) -> list:
    """List the code blocks of all documents in a language, as parameters of a test."""
    pattern = re.compile(rf"^```{language}\n(.*?)^```", re.MULTILINE | re.DOTALL)
    return [
        pytest.param(found.group(1), id=f"{document.name}-{number}")
        for document in DOCUMENTS
        for number, found in enumerate(pattern.finditer(document.read_text(encoding="utf-8")))
    ]


@pytest.fixture
def application(tmp_path):
    """Write a Hydra application that knows nothing of this package; return the directory of its configuration."""
    (tmp_path / "train.py").write_text(APPLICATION)
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "train.yaml").write_text(f"trainer: {TRAINER}\n")
    return tmp_path / "conf"


def composed(conf: Path, overrides: list[str]):
    with hydra.initialize_config_dir(str(conf), version_base=None):
        return hydra.compose("train", overrides=overrides)


def first_command(path: Path) -> list[str]:
    """Return the overrides of the command that a preset opens with."""
    line = path.read_text(encoding="utf-8").splitlines()[1]  # after the line for Hydra
    assert line.startswith("# python train.py "), f"{path} does not open with the command that uses it"
    return shlex.split(line)[3:]


def test_the_public_names_are_these():
    names = ["DappleStrategy", "PlannedStep", "__version__", "compare", "plan", "register_schedule"]
    assert lightning_pipe.__all__ == names
    assert dir(lightning_pipe) == lightning_pipe.__all__
    assert all(hasattr(lightning_pipe, name) for name in lightning_pipe.__all__)
    with pytest.raises(AttributeError, match="no attribute 'DaplStrategy'"):
        _ = lightning_pipe.DaplStrategy


@pytest.mark.parametrize("code", blocks("python"))
def test_python_blocks_run(code, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    if "transformers" in code:
        pytest.importorskip("transformers", reason="the models of libraries need the extra `libraries`")
    names = {"pl": importlib.import_module("lightning.pytorch")}
    known = dict(OWN_WORK)
    try:
        exec(compile(code, "document", "exec", dont_inherit=True), names)
    finally:
        for code in OWN_WORK.keys() - known:
            del OWN_WORK[code]


@pytest.mark.parametrize("code", blocks("yaml"))
def test_yaml_blocks_are_plans_clusters_or_options(code):
    if code.startswith("hosts:"):
        assert cluster_from_text(code, source="a page").ranks > 1
        return
    if "stages:" not in code:
        assert read_config(OmegaConf.create(code)) != DappleConfig()
        return
    plan = from_yaml(Plan, code)
    layout = plan.layout
    order = order_of(plan.schedule, layout=layout, microbatches=plan.microbatches, options=plan.options)
    assert len(order) == layout.ranks


@pytest.mark.parametrize("code", blocks("bash"))
def test_commands_exist(code, application):
    for line in filter(None, (line.split("#")[0].strip() for line in code.splitlines())):
        program, *words = shlex.split(line)
        if "=" in program:  # variables before a command
            with_environment(DappleConfig(), dict([program.split("=", 1)]))
            program, *words = words
        if program == "make":
            assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), line
        elif program == "pip":
            assert words == ["install", "."] and (ROOT / "pyproject.toml").is_file(), line
        elif program == "lightning-pipe" and words[0] == CONSOLIDATE:
            assert command_parser().parse_args(words).out, line
        elif program == "lightning-pipe":
            options = read_options(COMMANDS[words[0]][0], words[1:])
            if isinstance(options, StepOptions):
                assert options.cluster in preset_names(conf_dir() / "cluster"), line
        elif words[0] == "-m":
            module = ROOT / words[1].replace(".", "/")
            assert module.with_suffix(".py").is_file() or (module / "__main__.py").is_file(), line
        elif words[0] == "train.py":
            composed(application, words[1:])
        else:
            assert (ROOT / words[0]).is_file(), line


def test_the_picture_is_what_the_simulator_draws():
    edges = [e for s in range(3) for e in (Edge("F", s, s + 1, 1.0), Edge("B", s + 1, s, 1.0))]
    traffic = Traffic(tuple(edges), tuple(Bucket((s,), 1) for s in range(4)))
    layout = Layout(((0,), (1,), (2,), (3,)))
    order = order_of("1f1b", layout=layout, microbatches=6)
    program = verify(lower(order, layout=layout, sizes=(4,) * 6, traffic=traffic))
    drawn = draw(simulate(program, UnitPrices()))
    page = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    assert re.sub(r"^", "stage ", drawn, flags=re.MULTILINE) in page


def test_the_table_of_options_is_complete():
    readme, page = (path.read_text(encoding="utf-8") for path in (DOCUMENTS[0], ROOT / "docs" / "options.md"))
    few, rows = (re.findall(r"^\| `(\w+)` \| (.*?) \|", text, re.MULTILINE) for text in (readme, page))
    assert len(few) == 8 and set(few) < set(rows)
    told = {name: default.strip("`") for name, default in rows}
    assert list(told) == list(DappleConfig.__dataclass_fields__)
    for name, default in told.items():
        value = getattr(DappleConfig(), name)
        assert value is None or yaml.safe_load(default) == value, name


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    drawn = {f"pictures/{name}" for name in DRAWN} | {f"schedule/{name}.md" for name in own_schedules()}
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text(encoding="utf-8")):
        assert target in drawn or (document.parent / target).is_file(), target


def test_the_architecture_page_has_every_package_and_no_file_that_is_gone():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    package = ROOT / "lightning_pipe"
    folders = {path.parent.relative_to(package).as_posix() for path in package.rglob("__init__.py")} - {"."}
    rows = set(re.findall(r"^\| `([\w/]+)` \|", text, re.MULTILINE))
    assert rows - {"config"} == {folder for folder in folders if not folder.startswith("planner/systems/")}
    files = set(re.findall(r"[\w/]+/\w+\.py", text.replace("/NAME.py", "")))
    assert files and [name for name in files if not ((package / name).exists() or (ROOT / name).exists())] == []


def test_every_page_and_every_schedule_has_its_place_in_the_site():
    """The navigation is complete, and names nothing that neither is there nor is written by the build."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = re.findall(r": ([\w/-]+\.md)$", text, re.MULTILINE)
    schedules = [f"schedule/{name}.md" for name in own_schedules()]
    assert sorted(pages) == sorted([*(path.name for path in (ROOT / "docs").glob("*.md")), *schedules])


@pytest.mark.parametrize("name", ["replicas.png", "memory.png"])
def test_pictures_of_the_site_can_be_drawn(name, tmp_path):
    DRAWN[name](tmp_path / name)
    assert (tmp_path / name).stat().st_size > 10_000


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_compose_by_their_own_command_and_can_be_built(preset, application):
    overrides = first_command(conf_dir() / "strategy" / f"{preset}.yaml")
    strategy = composed(application, overrides).trainer.strategy
    assert strategy._target_ == "lightning_pipe.DappleStrategy"
    given = {name: value for name, value in OmegaConf.to_container(strategy).items() if name != "_target_"}
    assert hydra.utils.instantiate(strategy).config == read_config(given)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_compose_wherever_an_application_has_its_trainer(preset, application):
    config = composed(application, [f"+strategy@own.group={preset}", "own.group.microbatches=6"])
    assert config.own.group.microbatches == 6


def test_lists_are_what_they_are_in_python(application):
    overrides = ["+strategy=dapple", "trainer.strategy.layout=[2,1]", "trainer.strategy.warmup=[2,1]"]
    config = hydra.utils.instantiate(composed(application, overrides).trainer.strategy).config
    assert (config.layout, config.warmup) == ("2-1", "2,1")


@pytest.mark.parametrize("override", ["microbatchs=4", "microbatches=four", "seed=[1]"])
def test_hydra_refuses_what_is_no_option(override, application):
    with pytest.raises(ConfigCompositionException, match="strategy"):
        composed(application, ["+strategy=dapple", f"trainer.strategy.{override}"])


@pytest.mark.parametrize(
    "override", slow_but(("trainer.strategy=dapple",), ("trainer.strategy=dapple", "+strategy=dapple"))
)
def test_an_unmodified_hydra_application_gets_the_strategy(override, application):
    command = [sys.executable, "train.py", override, "trainer.devices=2"]
    found = subprocess.run(command, cwd=application.parent, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert "DappleStrategy 2" in found.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_say_how_they_are_run(path):
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    assert f"python examples/{path.relative_to(ROOT / 'examples')}" in docstring
    assert path == EXAMPLES[0] or "For real size: " in docstring.replace("\n", " ")


def test_the_page_of_examples_names_the_command_of_each():
    """By which they run from the built wheel, see test_installed.py."""
    page = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    for path in EXAMPLES[1:]:
        name = f"python {path.relative_to(ROOT)}"
        command = next(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if name in line)
        assert f"\n{command}\n" in page, command


@pytest.mark.slow
def test_the_demo_shows_a_pipeline_that_fits_where_ddp_does_not_on_one_screen(tmp_path):
    command = [sys.executable, "-m", "benchmarks.demo", "--steps", "6", "--timed", "6"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = subprocess.run(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    lines = [line for line in found.stdout.splitlines() if not line.startswith("Waiting for rank")]  # a slow machine
    assert found.returncode == 0 and len(lines) <= 27, found.stdout  # 25 from the first line of the training on
    losses = re.search(r"^Loss after 6 steps .*one device: (\S+), pipeline: (\S+)$", found.stdout, re.MULTILINE)
    assert losses is not None and float(losses[1]) == pytest.approx(float(losses[2]), abs=1e-6)
    shares = re.findall(r"^(pipeline|best|Lightning's DDP).* (\d+)%$", found.stdout, re.MULTILINE)
    assert [name for name, share in shares if int(share) <= 102] == ["pipeline"], shares
    assert (tmp_path / "runs" / "demo" / "report.html").is_file()


def test_the_gpt_of_the_demo_fits_its_limit_as_a_pipeline_and_not_as_data_parallel_training():
    gpt = demo.example().GPT().double()
    batch = [torch.zeros(demo.BATCH, 65, dtype=torch.uint8)]
    planned = lightning_pipe.plan(gpt, batch=batch, ranks=demo.RANKS, memory_limit=demo.LIMIT, planner="dapple")
    assert planned.fits and len(planned.plan.stages) == demo.RANKS
    state_bytes = sum(4 * parameter.nbytes for parameter in gpt.parameters())  # with gradients and AdamW
    assert state_bytes > parse_bytes(demo.LIMIT), "micro-batches do not help"
    ways = {way.kind: way for way in alternatives(planned.problem, planned.judged, planned.others)}
    assert not ways["data parallel"].fits and min(ways["data parallel"].peak_bytes) > 2 * parse_bytes(demo.LIMIT)


def run_of_the_gpt_example(directory, *options):
    script = [sys.executable, str(ROOT / "examples" / "01_gpt_on_real_text.py"), "--steps", "3"]
    found = subprocess.run([*script, *options], cwd=directory, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("def read(self, ") == 1
    assert len(re.findall(r"after 3 steps of \d+ ms, nats per byte", found.stdout)) == 1
    if "dapple" in options:
        assert re.fullmatch(r"one device: \d\.\d+, pipeline: \d\.\d+", found.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_the_gpt_example_trains_on_one_device(tmp_path):
    run_of_the_gpt_example(tmp_path)


@pytest.mark.slow
def test_the_gpt_example_trains_as_a_pipeline(tmp_path):
    pipeline = ["--strategy", "dapple", "--devices", "2", "--timeline", "runs/new/timeline.json", "--batch-size", "8"]
    pipeline += ["--layout", "1-1"]
    found = run_of_the_gpt_example(tmp_path, *pipeline)
    events = json.loads((tmp_path / "runs" / "new" / "timeline.json").read_text())
    assert events, "the timeline is empty"
    lines = (found.stdout + found.stderr).splitlines()
    first = next(number for number, line in enumerate(lines) if "micro-batch" in line)
    told = lines[first : next(number for number, line in enumerate(lines) if line.startswith("Wrote the timeline"))]
    ours = [line for line in told if "Warning" not in line and "site-packages" not in line]
    besides_rows = [line for line in ours if not re.match(r" +(\d|measured)|Start: ", line)]
    assert len(besides_rows) <= 25, "\n".join(ours)  # a screen
    for noise in ("USDT:", "sync_dist", "-0.0%", "1 micro-batches"):
        assert not [line for line in lines if re.search(rf"(?<!\d){noise}", line)], noise
