"""Refusals of what cannot work in a pipeline, before anything starts, with the reason and the way out."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import re
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_pipe.capture import Route
from lightning_pipe.capture.steps.batch import is_dense
from lightning_pipe.capture.torch_private import has_backward_hooks_on_all, is_compiled, looks_for_overflow
from lightning_pipe.config import DappleConfig
from lightning_pipe.core.program import Layout
from lightning_pipe.errors import CaptureError, UnsupportedError
from lightning_pipe.lightning_names import (
    MixedPrecision,
    Precision,
    callbacks_of,
    is_overridden,
    is_param_in_hook_signature,
    pl,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_pipe.lightning_package import name_in_use
from lightning_pipe.strategy import lightning_private as private
from lightning_pipe.strategy.parameters.inner_optimizers import is_torchs
from lightning_pipe.strategy.parameters.meta_modules import without_origin

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_BEFORE_ZEROING = "on_before_zero_grad"
_GRADIENT_HOOKS = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")

# callback (some are newer than the oldest Lightning that we support) -> what it does; the way out
_CALLBACKS = {
    "BatchSizeFinder": (
        "doubles the batch until a device runs out of memory, which ends all ranks of a pipeline",
        "Set batch_size; `lightning-pipe max-batch` finds the largest that fits, without devices.",
    ),
    "ModelPruning": (
        "compares the weights of the whole module, of which no rank of a pipeline has all",
        "Prune the module after training.",
    ),
}


def refuse(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Check trainer and module before anything is built.

    Raises:
        UnsupportedError: naming what cannot work, why, and the way out.
    """
    name = type(module).__name__
    if not module.automatic_optimization:
        raise UnsupportedError(
            f"{name} uses manual optimization (automatic_optimization = False{_line_of(module)}). A pipeline runs "
            "forward and backward of many micro-batches in one program, which manual_backward cannot be part of. With "
            "one optimizer, return the loss from training_step instead; with several, as in a GAN, use strategy='ddp'."
        )
    _refuse_synchronised_norms(trainer, module)
    _refuse_hooks(module)
    for callback in callbacks_of(trainer):
        _refuse_callback(callback)


def _line_of(module: pl.LightningModule) -> str:
    """Return where a class of the module sets automatic_optimization, "" if that is not to be found."""
    for kind in type(module).__mro__:
        with contextlib.suppress(OSError, TypeError):
            lines, first = inspect.getsourcelines(kind)
            for number, line in enumerate(lines, start=first):
                if re.search(r"\bautomatic_optimization\s*=[^=]", line):
                    return f", set at {inspect.getsourcefile(kind)}:{number}"
    return ""


def refuse_parts(module: pl.LightningModule) -> None:
    """Check the sub-modules and parameters of the module once it is complete.

    Raises:
        UnsupportedError: naming a parameter without values, a sub-module of TorchScript, or a sparse tensor.
    """
    for path, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule):
            raise UnsupportedError(
                f"{path} of {type(module).__name__} is TorchScript ({child.original_name}), which cannot be cut into "
                "stages: its parameters cannot be exchanged. Use the module that it was made of; "
                "compile=True of the strategy compiles it."
            )
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        if not is_dense(tensor):
            raise UnsupportedError(
                f"{name} of {type(module).__name__} has the layout {tensor.layout}, and ranks exchange plain tensors "
                "only. Register its indices and values instead, and make it of them in the step: "
                "torch.sparse_coo_tensor(self.indices, self.values, size)."
            )
    for name in (name for name, p in module.named_parameters() if is_lazy(p)):
        raise UnsupportedError(
            f"{name} of {type(module).__name__} is lazy: its first input gives it a shape and values, and ranks divide "
            "parameters before that. Run the module once before trainer.fit, on a batch or on zeros of its shape: "
            "`with torch.no_grad(): module(batch)`; or give the number of inputs, as nn.Linear does."
        )
    for name in without_origin(module):
        raise UnsupportedError(
            f"{name} of {type(module).__name__} has no values (it is on the meta device), and nothing says "
            "which. Build it in configure_model or inside `with trainer.init_module(empty_init=True)`; or call "
            "save_hyperparameters() in its __init__, so that it can be built again; or give all values by weights= or "
            "ckpt_path=."
        )


def say_compiled(module: pl.LightningModule) -> None:
    """Say once which modules run without the compilation that the user has asked for."""
    if compiled := [path or type(module).__name__ for path, child in module.named_modules() if is_compiled(child)]:
        rank_zero_info(
            f"{', '.join(compiled)}: torch.compile is left out, since the whole step is captured as graphs anyway; "
            "compile=True of the strategy compiles those. Names in checkpoints stay as they are."
        )


def readers_of_gradients(trainer: pl.Trainer, module: pl.LightningModule) -> list[str]:
    """Return which hooks of the user look at gradients, and say once what they see."""
    hooks = [name for name in _GRADIENT_HOOKS if is_overridden(name, module, pl.LightningModule)]
    callbacks = callbacks_of(trainer)
    hooks += [f"{type(c).__name__}.{n}" for c in callbacks for n in _GRADIENT_HOOKS[:-1] if _is_by_user(c, n)]
    zeroing = [type(c).__name__ for c in callbacks if _is_by_user(c, _BEFORE_ZEROING)]
    if is_overridden(_BEFORE_ZEROING, module, pl.LightningModule) or zeroing:
        rank_zero_warn(
            f"{_BEFORE_ZEROING} is called before the forward of a batch and not after it, because a program is forward "
            "and backward in one. What it writes to weights, this batch sees already."
        )
    if hooks and trainer.world_size > 1:
        rank_zero_warn(
            f"{', '.join(hooks)} will see the gradients of this rank's stages; of the others the 2-norm is known, and "
            "what is done to one by itself is done where it is. trainer.strategy.grad_norm() is the norm of all."
        )
    return hooks


def hooks_of_users(trainer: pl.Trainer, module: pl.LightningModule) -> list[str]:
    """Return the hooks that are code of the user, of the module and of callbacks."""
    kind = pl.LightningModule
    names = [name for name in dir(kind) if name.startswith("on_") and callable(getattr(kind, name))]
    own = [name for name in (*names, "optimizer_step", "lr_scheduler_step") if is_overridden(name, module, kind)]
    of_callbacks = [name for name in dir(pl.Callback) if name.startswith("on_") or name == "state_dict"]
    callbacks = callbacks_of(trainer)
    return own + [f"{type(c).__qualname__}.{n}" for c in callbacks for n in of_callbacks if _is_by_user(c, n)]


def _is_by_user(callback: pl.Callback, hook: str) -> bool:
    """Return whether a callback's hook is the user's code (a `LambdaCallback` keeps it as an attribute)."""
    kind = type(callback)
    is_lightnings = kind.__module__.startswith(name_in_use("pytorch") + ".")
    own = not is_lightnings and getattr(kind, hook) is not getattr(pl.Callback, hook)
    return own or hook in vars(callback)


@contextlib.contextmanager
def refusing_several_optimizers(module: pl.LightningModule) -> Iterator[None]:
    """Refuse several optimizers, inside: Lightning would recommend manual optimization, which cannot work either.

    Raises:
        UnsupportedError: with the way out.
    """
    try:
        yield
    except RuntimeError as error:
        if "multiple optimizers" not in str(error):
            raise
        raise UnsupportedError(
            f"{type(module).__name__}.configure_optimizers returned several optimizers; expected one. If they differ "
            "in options only, make them parameter groups of one. If they take turns, as in a GAN, use strategy='ddp': "
            "manual optimization, which Lightning would ask for, cannot be a pipeline."
        ) from error


def refuse_optimizers(optimizers: list[torch.optim.Optimizer], plugin: Precision) -> None:
    """Check what `configure_optimizers` returned.

    Raises:
        UnsupportedError: naming what cannot work, why, and the way out.
    """
    is_scaled = isinstance(plugin, MixedPrecision) and plugin.scaler is not None
    for optimizer in optimizers:
        try:
            optimizer.register_step_post_hook(lambda *_: None).remove()
        except (AttributeError, TypeError) as error:  # it has none, or one of its own making
            raise UnsupportedError(
                f"{type(optimizer).__name__}.__init__ does not call that of torch.optim.Optimizer, so nobody can "
                "follow its steps. Call super().__init__(parameters, defaults) there."
            ) from error
        if is_scaled and looks_for_overflow(optimizer):
            raise UnsupportedError(
                f"{type(optimizer).__name__}(fused=True) looks itself whether gradients are finite, with "
                "precision='16-mixed', and sees those of one rank only. Set fused=False, or precision='bf16-mixed'."
            )
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
        raise UnsupportedError(
            "LBFGS evaluates the step several times and multiplies gradients of all parameters, which are on several "
            "ranks. Use an optimizer that treats every parameter by itself, such as SGD or AdamW."
        )


def refuse_averages(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Check the callbacks that average weights once the module is complete.

    Raises:
        UnsupportedError: naming what cannot be averaged where it is, and the way out.
    """
    for callback in filter(private.keeps_average, callbacks_of(trainer)):
        name = type(callback).__name__
        norm = next((path for path, child in module.named_modules() if isinstance(child, _BATCH_NORMS)), None)
        if norm is not None and private.is_lightnings(callback, "StochasticWeightAveraging"):
            raise UnsupportedError(
                f"{name} takes the statistics of {norm} (BatchNorm) anew in one more epoch, without backward, which no "
                "program of a pipeline does. WeightAveraging() averages the statistics along with the weights."
            )
        if getattr(trainer.strategy, "config", DappleConfig()).save_distributed_checkpoint:
            raise UnsupportedError(
                f"{name} writes two sets of weights into a checkpoint, and save_distributed_checkpoint=True has place "
                "for one. Set it to False, or remove the callback."
            )


def refuse_post_validation(
    module: pl.LightningModule, plugin: Precision, optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """Check that an optimizer step can be taken back and taken again.

    Raises:
        UnsupportedError: naming what stands in the way.
    """
    if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
        raise UnsupportedError(
            "precision='16-mixed' asks all ranks before every optimizer step whether gradients are finite, so "
            "post_validation=True, which steps before ranks are asked, gains nothing. Set it to False, or "
            "precision='bf16-mixed'."
        )
    for optimizer in optimizers:
        if not is_torchs(optimizer):
            raise UnsupportedError(
                f"{type(optimizer).__name__} is no optimizer of torch.optim, so nobody knows all that a step of it "
                "changes, and with post_validation=True it may be taken back. Set post_validation=False."
            )
    for hook in ("configure_gradient_clipping", "optimizer_step"):
        if is_overridden(hook, module, pl.LightningModule):
            raise UnsupportedError(
                f"{type(module).__name__} overrides {hook}, but with post_validation=True an optimizer step may be "
                "taken back and taken again without this hook. Remove one of them."
            )


def check_written(capture: Route, module: pl.LightningModule, *, microbatches: int, layout: Layout) -> None:
    """Check the parameters that a training step writes to itself, which it does once per micro-batch.

    Raises:
        CaptureError: naming a parameter that is trained, or one that every part of the first batch would set anew.
    """
    if (
        (plays := capture.plays) is not None
        and plays.sets_first
        and (microbatches > 1 or any(len(ranks) > 1 for ranks in layout.stages))
    ):
        raise CaptureError(
            f"{type(module).__name__}.training_step sets {min(plays.sets_first)} in its first call, by "
            "the values of the first batch. Micro-batches and replicas would each set it by their own samples. Call "
            "the module once on a batch before trainer.fit, or set microbatches=1 with one rank per stage."
        )
    parameters = dict(module.named_parameters(remove_duplicate=False))
    names = capture.writes
    written = [name for name in parameters if name in names]
    if not written or microbatches == 1:
        return
    if trained := [name for name in written if parameters[name].requires_grad]:
        raise CaptureError(
            f"{type(module).__name__}.training_step writes to the parameter {trained[0]}, which it trains, and would "
            f"do so for each of {microbatches} micro-batches. Do it in on_train_batch_start or on_train_batch_end, or "
            "set microbatches=1."
        )
    rank_zero_warn(
        f"training_step writes to the parameter {written[0]}: once for each of {microbatches} micro-batches, not once "
        "per batch. Do it in on_train_batch_end."
    )


def _refuse_callback(callback: pl.Callback) -> None:
    for kind in type(callback).__mro__:
        if kind.__name__ in _CALLBACKS and kind.__module__.startswith(name_in_use("pytorch.callbacks")):
            why, way_out = _CALLBACKS[kind.__name__]
            raise UnsupportedError(f"The callback {type(callback).__name__} {why}. {way_out}")


def _refuse_synchronised_norms(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Refuse what templates switch on for all modules only where there is something to synchronise."""
    norms = [path for path, child in module.named_modules() if isinstance(child, _BATCH_NORMS)]
    if norms and getattr(trainer.strategy, "_layer_sync", None) is not None and trainer.world_size > 1:
        raise UnsupportedError(
            f"sync_batchnorm=True replaces {norms[0]} (BatchNorm) by a layer that talks to all ranks. Set "
            "sync_batchnorm=False; replicas that see batch statistics take whole micro-batches instead, and "
            "microbatches=1 normalises whole batches."
        )


def _refuse_hooks(module: pl.LightningModule) -> None:
    name = type(module).__name__
    if is_overridden("backward", module, pl.LightningModule):
        raise UnsupportedError(
            f"{name} overrides backward, which is never called: the backward of the pipeline is part of its program. "
            "Remove it; gradients can be changed in on_after_backward."
        )
    if has_backward_hooks_on_all():
        raise UnsupportedError(
            "There is a hook on the backward of all modules (register_module_full_backward_hook or its like), also of "
            "those whose sub-modules are on several ranks. Register it on the sub-modules that you want to see."
        )
    for step in _STEPS:
        if callable(own := getattr(module, step)) and is_param_in_hook_signature(own, "dataloader_iter", explicit=True):
            raise UnsupportedError(
                f"{name}.{step} takes `dataloader_iter`; a batch has to be known before it can be cut into "
                f"micro-batches. Write {step}(self, batch, batch_idx)."
            )
