"""Options come from the environment where code leaves them open, and programs run with the strategy registered."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import lightning_pipe
from lightning_pipe.config import DappleConfig
from lightning_pipe.entry.environment_options import with_environment
from lightning_pipe.entry.run_program import main
from lightning_pipe.errors import ConfigError

ROOT = Path(lightning_pipe.__file__).parent.parent


def read(text: str = "", path: str = "", **options) -> DappleConfig:
    return with_environment(DappleConfig(**options), {"LIGHTNING_PIPE": text, "LIGHTNING_PIPE_CONFIG": path})[0]


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("", {}),
        ("  ", {}),
        ("layout=1-1 microbatches=4", {"layout": "1-1", "microbatches": 4}),
        ("layout=2 warmup=3 seed=0", {"layout": "2", "warmup": "3", "seed": 0}),
        ("check=false recheck=TRUE deadline_s=60", {"check": False, "recheck": True, "deadline_s": 60.0}),
        ("memory_limit='V100: 15GiB, T4: 14GiB'", {"memory_limit": "V100: 15GiB, T4: 14GiB"}),
        ("cache=off\nshard_optimizer=off", {"cache": "off", "shard_optimizer": "off"}),
        ("schedule=Interleaved1F1B trace='a b.json'", {"schedule": "interleaved", "trace": "a b.json"}),
    ],
)
def test_a_text_sets_options_of_all_types(text, options):
    assert read(text) == DappleConfig(**options)


def test_a_file_sets_options_as_yaml_has_them(tmp_path):
    path = tmp_path / "pipe.yaml"
    path.write_text("layout: [2, 1]\ncache: off\nshard_optimizer: on\nmemory_limit: {V100: 15GiB}\nplanner: uniform\n")
    assert read(path=str(path)) == DappleConfig(
        layout="2-1", cache="off", shard_optimizer="on", memory_limit="V100: 15GiB", planner="uniform"
    )


def test_code_comes_before_the_variable_and_the_variable_before_the_file(tmp_path):
    path = tmp_path / "pipe.yaml"
    path.write_text("microbatches: 2\nlayout: 2-2\nseed: 5\n")
    environment = {"LIGHTNING_PIPE": "layout=1-1 microbatches=4", "LIGHTNING_PIPE_CONFIG": str(path)}
    config, told = with_environment(DappleConfig(microbatches=8), environment)
    assert config == DappleConfig(microbatches=8, layout="1-1", seed=5)
    assert told == (
        f"Options from the environment: layout=1-1 (LIGHTNING_PIPE), seed=5 (LIGHTNING_PIPE_CONFIG={path}); "
        "set elsewhere already: layout, microbatches."
    )
    config = DappleConfig(microbatches=8)
    assert with_environment(config, {"PATH": "/bin"}) == (config, "")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("microbatchs=4", "LIGHTNING_PIPE: found the unknown option.*did you mean 'microbatches'"),
        ("n_microbatches=4", "LIGHTNING_PIPE: found the unknown option.*set microbatches"),
        ("microbatches=four", r"found microbatches='four' .*integer.*microbatches=four \(LIGHTNING_PIPE\)"),
        ("check=perhaps", "found check='perhaps' .*true or false"),
        ("schedule=1f2b", "did you mean '1f1b'"),
        ("layout 1-1", "found 'layout' in LIGHTNING_PIPE=.*expected name=value"),
        ("layout=1-1 layout=2", "found layout twice"),
        ("trace='a", "No closing quotation"),
        ("plan=plan.yaml layout=1-1", r"found plan='plan.yaml' and layout.*\(LIGHTNING_PIPE\)"),
    ],
)
def test_mistakes_are_refused_like_those_of_options(text, words):
    with pytest.raises(ConfigError, match=words):
        read(text)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "pipe.yaml', which cannot be read .*No such file"),
        ("layot: 1-1", "pipe.yaml: found the unknown option 'layot'; 'layot': did you mean 'layout'"),
        ("- layout", "found a list in LIGHTNING_PIPE_CONFIG"),
        ("layout: 1-1\nlayout: 2", "cannot be read .*duplicate key"),
        ("microbatches: four", r"found microbatches='four'.*LIGHTNING_PIPE_CONFIG=.*pipe.yaml"),
    ],
)
def test_mistakes_of_a_file_name_the_file(content, words, tmp_path):
    path = tmp_path / "pipe.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        read(path=str(path))


PROGRAM = """
import sys
import beside
if __name__ == "__main__":
    found = [type(finder).__name__ for finder in sys.meta_path]
    print(sys.argv[1:], sys.argv[0].endswith(NAME), "_RegistryFinder" in found, "torch" in sys.modules)
    sys.exit(3)
"""


@pytest.mark.parametrize("words", [("train.py",), ("-m", "train"), ("tool",), ("sub/tool",)])
def test_a_program_runs_as_by_itself_with_the_strategy_registered(words, tmp_path):
    for folder in (tmp_path, tmp_path / "sub"):
        folder.mkdir(exist_ok=True)
        (folder / "beside.py").touch()
        (folder / "train.py").write_text(PROGRAM.replace("NAME", "'train.py'"))
        (folder / "tool").write_text(f"#!{sys.executable}\n" + PROGRAM.replace("NAME", "'tool'"))
        (folder / "tool").chmod(0o755)
    environment = {"PATH": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "lightning_pipe", "run", *words, "--epochs", "3"]
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (3, "['--epochs', '3'] True True False\n"), found.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "found nothing"),
        (("-m",), "found nothing"),
        (("--epochs",), "found --epochs"),
        (("trian.py",), "found neither a file nor a command named 'trian.py'"),
        ((sys.executable,), "is no Python program"),
    ],
)
def test_what_is_no_program_is_refused(words, said, capsys):
    assert main(words) == 2
    assert said in (error := capsys.readouterr().err) and "expected `run train.py ...`" in error
