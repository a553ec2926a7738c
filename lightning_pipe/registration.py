"""Registration of the strategy name "dapple" with Lightning.

Lightning looks names up in its `StrategyRegistry` while the trainer is built, and knows no entry points for strategies.
So the name is registered as soon as both this package and `lightning.pytorch.strategies` are imported, whichever comes
first; likewise with `pytorch_lightning.strategies`. Importing Lightning takes seconds, so it is never imported for
this: if it is absent, a finder waits for it.
Hydra imports our plug-in in every application of the environment; nothing here may make such an application fail.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from lightning_pipe import random_start
from lightning_pipe.errors import UnsupportedError
from lightning_pipe.lightning_package import FABRICS, TRAINERS

STRATEGY = "dapple"
_STRATEGY_MODULE = "lightning_pipe.entry.dapple_strategy"  # imported when it is first used
_REGISTRIES = tuple(f"{module}.strategies" for module in TRAINERS.values())
_FABRIC_REGISTRIES = tuple(f"{module}.strategies" for module in FABRICS.values())


def register_strategy() -> None:
    """Register the strategy with Lightning, now or as soon as Lightning is imported; a second call does nothing."""
    for name in (*_REGISTRIES, *_FABRIC_REGISTRIES):
        if hasattr(sys.modules.get(name), _registry_name(name)):
            _register(sys.modules[name])
    if not any(isinstance(finder, _RegistryFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RegistryFinder())


def _registry_name(module: str) -> str:
    return "STRATEGY_REGISTRY" if module in _FABRIC_REGISTRIES else "StrategyRegistry"


def _register(module: Any) -> None:
    random_start.begin()
    is_fabrics = module.__name__ in _FABRIC_REGISTRIES
    registry = getattr(module, _registry_name(module.__name__))
    if STRATEGY not in registry:
        make = refuse_fabric if is_fabrics else make_strategy
        registry.register(STRATEGY, make, description="A planned pipeline of stages (DAPPLE, 2021)")
    if not is_fabrics and _STRATEGY_MODULE in sys.modules:
        sys.modules[_STRATEGY_MODULE].accept_in(module)


def refuse_fabric(**options: Any) -> Any:
    """Refuse to run without a Trainer.

    Raises:
        UnsupportedError: with the reason and the way out.
    """
    raise UnsupportedError(
        "Fabric(strategy='dapple'): a pipeline is cut from the training_step of a LightningModule, and Fabric's loop "
        "has none. Write the step as a LightningModule and use Trainer(strategy='dapple')."
    )


def make_strategy(**options: Any) -> Any:
    """Build the strategy; only now are its parts imported.

    Args:
        options: fields of `lightning_pipe.config.DappleConfig`.

    Raises:
        ConfigError: if an option is wrong.
    """
    from lightning_pipe.entry.dapple_strategy import DappleStrategy

    return DappleStrategy(**options)


class _RegistryFinder:  # `importlib.abc` has a base for it, which takes 20 ms to import
    """Find Lightning's module of strategies as others do, and register when it has been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in (*_REGISTRIES, *_FABRIC_REGISTRIES):
            return None
        others = (f for f in sys.meta_path if f is not self and hasattr(f, "find_spec"))
        spec = next((spec for f in others if (spec := f.find_spec(fullname, path, target))), None)
        if spec is not None and spec.loader is not None:
            _register_after(spec.loader)
        return spec


def _register_after(loader: Any) -> None:
    """Let the loader register when it has executed the module (every module has a loader of its own)."""
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        try:
            _register(module)
        except Exception as error:  # an import of Lightning must not fail because of us
            warnings.warn(
                f"lightning_pipe could not register strategy {STRATEGY!r} with this Lightning ({error!r}). Pass "
                "`strategy=lightning_pipe.DappleStrategy()` instead of the name.",
                stacklevel=2,
            )

    loader.exec_module = exec_module
