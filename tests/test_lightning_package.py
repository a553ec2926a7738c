"""A Trainer of `lightning` and one of `pytorch_lightning` get the strategy that is theirs, by name and by instance."""

from __future__ import annotations

import inspect
import os
import pydoc
import subprocess
import sys
import types
import typing
from dataclasses import fields
from pathlib import Path

import pytest
from lightning.pytorch.strategies import Strategy

import lightning_pipe
from lightning_pipe.config import DappleConfig
from lightning_pipe.errors import ConfigError, UnsupportedError
from lightning_pipe.registration import refuse_fabric

ROOT = Path(lightning_pipe.__file__).parent.parent
STUB = """
import abc
class Strategy(abc.ABC): pass
class Registry(dict):
    def register(self, name, strategy, description): self[name] = strategy
StrategyRegistry = STRATEGY_REGISTRY = Registry()
"""
SAY = "from lightning_pipe.lightning_package import package_in_use; print(package_in_use())"


@pytest.fixture
def python(tmp_path):
    """Run files in a new process where both packages are stand-ins, and return what `main.py` prints."""

    def run(**files: str) -> str:
        for package in ("lightning/pytorch", "lightning/fabric", "pytorch_lightning", "lightning_fabric"):
            for folder in (package.split("/")[0], package, f"{package}/strategies"):
                (tmp_path / folder).mkdir(exist_ok=True)
                (tmp_path / folder / "__init__.py").touch()
            (tmp_path / package / "strategies/__init__.py").write_text(STUB)
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(text)
        code = f"import sys, runpy; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; runpy.run_path('main.py', "
        found = subprocess.run(
            [sys.executable, "-c", f"{code}run_name='__main__')"],
            cwd=tmp_path, capture_output=True, text=True, check=False,
        )  # fmt: skip
        return found.stdout + found.stderr

    return run


@pytest.mark.parametrize(
    ("main", "package"),
    [
        (f"import lightning.pytorch\n{SAY}", "lightning"),
        (f"import lightning_pipe, pytorch_lightning\n{SAY}", "pytorch_lightning"),
        (f"import lightning.pytorch, pytorch_lightning\n{SAY}", "lightning"),
        (SAY, "lightning"),
    ],
)
def test_asked_before_a_trainer_the_imported_package_decides(python, main, package):
    assert python(main=main) == f"{package}\n"


ORDERS = {
    "made before any import of Lightning": "s = lightning_pipe.DappleStrategy(); import lightning.pytorch, {package}",
    "a subclass": "import lightning.pytorch, pytorch_lightning\nclass O(lightning_pipe.DappleStrategy): ...\ns = O()",
}


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_the_trainer_that_takes_a_strategy_decides_which_package_it_is_for(package):
    """Each way in a child of one process: whichever Trainer asks gets a strategy that is one of its own."""
    code = f"""
import os, sys, lightning_pipe
def check(name, order):
    exec(order.format(package={package!r}), scope := {{"lightning_pipe": lightning_pipe}})
    import {package} as pl, pickle
    from {package}.strategies import ParallelStrategy
    isinstance(scope["s"], ParallelStrategy)  # whose answer Python keeps
    trainer = pl.Trainer(strategy=scope["s"], accelerator="cpu", devices=2, logger=False)
    kind = type(trainer.strategy)
    print(name, kind.__name__, isinstance(trainer.strategy, ParallelStrategy), ParallelStrategy in kind.__mro__)
    print(pickle.loads(pickle.dumps(lightning_pipe.DappleStrategy(microbatches=3))).config.microbatches)
    other = __import__("pytorch_lightning" if {package!r} != "pytorch_lightning" else "lightning.pytorch")
    try:
        other = getattr(other, "pytorch", other)
        other.Trainer(strategy=lightning_pipe.DappleStrategy(), accelerator="cpu", devices=2, logger=False)
    except ValueError as error:
        print(str(error)[:62])
for name, order in {ORDERS!r}.items():
    if (pid := os.fork()) == 0:
        check(name, order)
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(pid, 0)
"""
    found = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    of = package.partition(".")[0]
    other = "lightning" if of == "pytorch_lightning" else "pytorch_lightning"
    lines = found.stdout.splitlines()
    kinds = [f"{name} {'O' if 'subclass' in name else 'DappleStrategy'} True True" for name in ORDERS]
    refused = f"found a Trainer or module of the package {other!r} in a process that uses"[:62]
    assert lines == [line for kind in kinds for line in (kind, "3", refused)], found.stderr


@pytest.mark.parametrize("package", [pytest.param("lightning.pytorch", marks=pytest.mark.slow), "pytorch_lightning"])
def test_both_registries_know_the_name_and_both_fabrics_refuse_it(python, package):
    fabric = {"lightning.pytorch": "lightning.fabric"}.get(package, "lightning_fabric")
    main = f"""
import {package}.strategies, lightning_pipe, {fabric}.strategies
print(list({package}.strategies.StrategyRegistry), {fabric}.strategies.STRATEGY_REGISTRY['dapple'].__name__)
strategy = {package}.strategies.StrategyRegistry['dapple'](microbatches=3)
print(strategy.config.microbatches, isinstance(strategy, {package}.strategies.Strategy))
"""
    assert python(main=main) == "['dapple'] refuse_fabric\n3 True\n"


def test_one_process_uses_one_package(python):
    main = """
from lightning_pipe.lightning_package import choose
choose("lightning")
choose("lightning")
choose("pytorch_lightning")
"""
    assert "found a Trainer or module of the package 'pytorch_lightning' in a process that uses" in python(main=main)


def test_fabric_is_refused_with_the_way_out():
    with pytest.raises(UnsupportedError, match=r"LightningModule and use Trainer\(strategy='dapple'\)"):
        refuse_fabric()


def alternatives(hint) -> set:
    """Return the types of which a union takes one."""
    return set(typing.get_args(hint)) if typing.get_origin(hint) in (typing.Union, types.UnionType) else {hint}


def test_the_strategy_shows_every_option_with_its_default():
    shown = inspect.signature(lightning_pipe.DappleStrategy).parameters
    for field in fields(DappleConfig):
        assert field.name in shown, f"add {field.name} to DappleStrategy.__init__"
        assert shown[field.name].default == field.default, field.name
    given = {"config", "accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"}
    assert {*shown} == {f.name for f in fields(DappleConfig)} | given | {"process_group_backend", "unknown"}
    hints = typing.get_type_hints(lightning_pipe.DappleStrategy.__init__)
    for name, hint in typing.get_type_hints(DappleConfig).items():
        assert alternatives(hint) <= alternatives(hints[name]), name


def test_help_shows_the_options_in_the_order_of_the_config():
    shown = [
        name for name in inspect.signature(lightning_pipe.DappleStrategy).parameters if name in vars(DappleConfig())
    ]
    assert shown == [field.name for field in fields(DappleConfig)]
    text = pydoc.plain(pydoc.render_doc(lightning_pipe.DappleStrategy))
    assert "microbatches: 'int | None' = None" in text and "deadline_s: 'float' = 300.0" in text


def test_a_command_line_can_give_every_option():
    """LightningCLI reads the signature by jsonargparse: `class_path: lightning_pipe.DappleStrategy` and `init_args`."""
    jsonargparse = pytest.importorskip("jsonargparse", reason="LightningCLI needs jsonargparse[signatures]")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Strategy, "strategy")

    def built(**options):
        given = {"class_path": "lightning_pipe.DappleStrategy", "init_args": options}
        instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # its name before 4.49
        return instantiate(parser.parse_object({"strategy": given})).strategy.config

    assert built() == DappleConfig()
    assert built(**vars(DappleConfig())) == DappleConfig()
    assert built(layout=[2, 1], deadline_s=60, memory_limit={"V100": "15GiB"}, microbatches=8) == DappleConfig(
        layout="2-1", deadline_s=60.0, memory_limit="V100: 15GiB", microbatches=8
    )
    for wrong in ({"layot": "2-1"}, {"microbatches": "many"}, {"check": "perhaps"}, {"capture": "jiont"}):
        with pytest.raises(jsonargparse.ArgumentError, match=next(iter(wrong))):
            built(**wrong)


def test_a_config_and_an_option_beside_it_are_refused_even_if_unknown():
    config = DappleConfig(microbatches=2)
    assert lightning_pipe.DappleStrategy(config).config is config
    for option, text in (({"microbatches": 3}, "either a config or its fields"), ({"nonsense": 3}, "unknown option")):
        with pytest.raises(ConfigError, match=text):
            lightning_pipe.DappleStrategy(config, **option)
