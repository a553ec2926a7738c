"""A module that was built on the meta device has no values, and nobody has seen how it would have got some.

With hyper-parameters (`save_hyperparameters`, as `load_from_checkpoint` needs them) it is built once more, without
values (`building`), and gives the first one what its constructor does. Without, its values must come from a checkpoint
or a file.
"""

from __future__ import annotations

import inspect
import logging

import torch
from torch import nn

from lightning_pipe.capture.torch_private import swap_contents, without_modes
from lightning_pipe.errors import UnsupportedError
from lightning_pipe.lightning_names import pl
from lightning_pipe.strategy.parameters.building import building
from lightning_pipe.strategy.parameters.pending import Pending, suspend
from lightning_pipe.strategy.start.tape import Tape

log = logging.getLogger(__name__)


def adopt(module: pl.LightningModule) -> None:
    """Let parameters of the meta device be such that have no values yet; buffers get theirs.

    Raises:
        UnsupportedError: if the module, built once more, is another one.
    """
    on_meta = {name: p for name, p in module.named_parameters() if p.is_meta}
    buffers = [name for name, buffer in module.named_buffers() if buffer.is_meta]
    if not on_meta and not buffers:
        return
    twin = _built_again(module)
    if twin is not None:
        _exchange(module, twin)
        log.info("%s was built on the meta device, and once more by its hyper-parameters.", type(module).__name__)
    elif not buffers:
        tape = Tape()
        for parameter in on_meta.values():
            tape.hold(parameter)
            suspend(parameter, tape)


def without_origin(module: nn.Module) -> list[str]:
    """Name the parameters and buffers that nothing will give values."""
    parameters = [name for name, one in module.named_parameters() if one.is_meta or _is_never_written(one)]
    return parameters + [name for name, buffer in module.named_buffers() if buffer.is_meta]


def _is_never_written(parameter: nn.Parameter) -> bool:
    if not isinstance(parameter, Pending) or parameter.absence.tape is None:
        return False
    return parameter.absence.tape.is_bare(parameter.absence.form)


def _built_again(module: pl.LightningModule) -> pl.LightningModule | None:
    """Build a module of the same hyper-parameters without values; None where they do not suffice."""
    options = dict(module.hparams)
    try:
        inspect.signature(type(module)).bind(**options)
    except TypeError:
        return None
    with building():
        return type(module)(**options)


def _exchange(module: pl.LightningModule, twin: pl.LightningModule) -> None:
    """Let a module have the tensors of its twin in the place of those of the meta device."""
    theirs = dict(twin.named_parameters(remove_duplicate=False))
    mine = dict(module.named_parameters(remove_duplicate=False))
    if {n: p.shape for n, p in mine.items()} != {n: p.shape for n, p in theirs.items()}:
        raise UnsupportedError(
            f"{type(module).__name__} has no values (it was built on the meta device), and built again by its "
            "hyper-parameters it has other parameters. Build it in configure_model, or inside "
            "`with trainer.init_module(empty_init=True)`."
        )
    done: set[int] = set()
    for name, parameter in mine.items():
        if parameter.is_meta and id(parameter) not in done:
            other, requires_grad = theirs[name], parameter.requires_grad
            with without_modes():
                swap_contents(parameter, other)
            vars(parameter).update(vars(other))
            parameter.__class__ = type(other)
            parameter.requires_grad_(requires_grad)
        done.add(id(parameter))
    for path, owner in module.named_modules():
        source = twin.get_submodule(path)
        for name, buffer in owner._buffers.items():
            if buffer is not None and buffer.is_meta:
                owner._buffers[name] = source._buffers[name]
        for name, value in vars(owner).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                setattr(owner, name, vars(source)[name])
