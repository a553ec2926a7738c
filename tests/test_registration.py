"""The name "dapple" is known as soon as package and Lightning are both imported, and no import costs or fails for it.

Most tests run in a process of their own with a stand-in for Lightning, which imports in no time.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest

import lightning_pipe

ROOT = Path(lightning_pipe.__file__).parent.parent
HEAVY = "[name for name in ('torch', 'lightning') if name in sys.modules]"
REGISTRY = """
class StrategyRegistry(dict):
    def register(self, name, strategy, description):
        self[name] = strategy
StrategyRegistry = StrategyRegistry()
"""


@pytest.fixture
def python(tmp_path):
    """Run code in a new process where `lightning` is a stand-in with this module of strategies."""

    def run(code: str, *, strategies: str = REGISTRY) -> str:
        for package in ("lightning", "lightning/pytorch", "lightning/pytorch/strategies"):
            (tmp_path / package).mkdir(exist_ok=True)
            (tmp_path / package / "__init__.py").write_text("")
        (tmp_path / "lightning/pytorch/strategies/__init__.py").write_text(strategies)
        found = subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]\n{code}"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert found.returncode == 0, found.stderr
        return found.stdout + found.stderr

    return run


def test_importing_the_package_imports_neither_torch_nor_lightning(python):
    assert python(f"import lightning_pipe\nprint({HEAVY})") == "[]\n"


def test_importing_the_hydra_plugin_imports_neither_torch_nor_lightning(python):
    code = (
        f"from hydra.core.plugins import Plugins\nPlugins.instance()\nprint('lightning_pipe' in sys.modules, {HEAVY})"
    )
    assert python(code) == "True []\n"


@pytest.mark.parametrize(
    "imports",
    [
        "import lightning_pipe, lightning.pytorch.strategies",
        "import lightning.pytorch.strategies, lightning_pipe",
        "from hydra.core.plugins import Plugins; Plugins.instance(); import lightning.pytorch.strategies",
        "import lightning_pipe, importlib; importlib.reload(lightning_pipe); import lightning.pytorch.strategies",
    ],
)
def test_the_order_of_imports_does_not_matter(python, imports):
    code = f"{imports}\nprint(list(sys.modules['lightning.pytorch.strategies'].StrategyRegistry))"
    assert python(code) == "['dapple']\n"


def test_a_registry_that_refuses_does_not_break_the_import_of_lightning(python):
    said = python("import lightning_pipe, lightning.pytorch.strategies as s\nprint(s.ready)", strategies="ready = True")
    assert "True" in said
    assert "Pass `strategy=lightning_pipe.DappleStrategy()` instead" in said


def test_an_import_of_lightning_that_fails_may_be_tried_again(python):
    code = """
import lightning_pipe, pathlib
try:
    import lightning.pytorch.strategies
except ZeroDivisionError:
    pathlib.Path(sys.path[0], "lightning/pytorch/strategies/__init__.py").write_text(registry)
import lightning.pytorch.strategies
print(list(lightning.pytorch.strategies.StrategyRegistry))
"""
    said = python(f"sys.dont_write_bytecode = True\nregistry = {REGISTRY!r}\n{code}", strategies="1 / 0")
    assert said == "['dapple']\n"


def test_lightning_knows_the_strategy():
    assert "dapple" in pl.strategies.StrategyRegistry.available_strategies()


def test_the_name_makes_the_public_class():
    trainer = pl.Trainer(strategy="dapple", accelerator="cpu", devices=2, logger=False)
    assert type(trainer.strategy) is lightning_pipe.DappleStrategy
