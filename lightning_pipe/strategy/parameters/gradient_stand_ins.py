"""Stand-ins for gradients that other ranks have, for hooks that change or measure the gradients of all parameters.

A hook loops over all parameters on every rank. What it computes from the gradient of one parameter is right where the
gradient is, and of no concern elsewhere: there it is a stand-in again. An error is raised as soon as such a value would
be written into something real, or read into Python.

    p.grad.mul_(0.5), p.grad = p.grad.clamp(-1, 1)      done where the gradient is
    p.grad.norm(), grad_norm(self, 2)                   known everywhere (`Clipper.post_norms`), until it is changed
    total += p.grad.abs().sum()                         an error with the way out
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection

from lightning_pipe.capture.steps.hazards import user_line
from lightning_pipe.strategy.parameters.stand_ins import Absence, Guarded, StandIn, unguarded

_NORMS = frozenset({"norm", "linalg_vector_norm", "vector_norm"})
_EUCLIDEAN = (2, 2.0, "fro", None)
_DRAWS = frozenset(
    "rand_like randn_like randint_like normal normal_ uniform_ random_ bernoulli bernoulli_ exponential_ geometric_ "
    "cauchy_ log_normal_ dropout dropout_ alpha_dropout alpha_dropout_ feature_dropout feature_alpha_dropout "
    "dropout1d dropout2d dropout3d native_dropout poisson multinomial rrelu rrelu_".split()
)
_SCALED = {"mul_": 1, "div_": -1, "_foreach_mul_": 1, "_foreach_div_": -1}


class GradientStandIn(Guarded, torch.Tensor):
    """A gradient that other ranks have, or something computed from it.

    Attributes:
        known_norm: its 2-norm, where that was told; None if not, or if it has been changed since.
    """

    _way_out = (
        "`gradient_clip_val` and `trainer.strategy.grad_norm()` concern the gradients of all ranks; each gradient may "
        "be changed by itself (see docs/hooks.md)"
    )
    known_norm: torch.Tensor | None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute stand-ins from stand-ins; refuse to write them into something real."""
        kwargs, name = kwargs or {}, func.__name__
        guarded = _first(args, kwargs)
        if name == "__get__" and getattr(func.__self__, "__name__", "") == "data":
            return args[0]
        if name in _NORMS and isinstance(args[0], cls) and args[0].known_norm is not None and _is_total(args, kwargs):
            return args[0].known_norm.clone()
        if guarded is None or name in ("__get__", "__set__", "equal") or func in _FORMS:
            return super().__torch_function__(func, types, args, kwargs)
        changes = name.endswith("_") and not name.endswith("__")
        written = [args[0]] if changes or name == "__setitem__" else []
        if _has_real((written, kwargs.get("out"))):
            guarded.absence.refuse(name, guarded._way_out)
        forms = _as_drawn if name in _DRAWS else _as_forms
        with unguarded():
            try:
                result = func(*forms(args), **forms(kwargs))
            except Exception:  # torch has no values to read
                guarded.absence.refuse(name, guarded._way_out)
        if changes:
            _note_change(name, *args)
            return args[0]
        if not _has_real(result):
            guarded.absence.refuse(name, guarded._way_out)
        source = replace(guarded.absence, line=user_line(2))
        return apply_to_collection(result, torch.Tensor, lambda form: gradient_like(source, form))


def gradient_like(of: Absence, form: torch.Tensor, norm: torch.Tensor | None = None) -> GradientStandIn:
    """Return a stand-in for something computed from the gradient of an absent parameter.

    Args:
        of: the absence of the parameter.
        form: a tensor of its shape and type.
        norm: its 2-norm, if that is known.
    """
    with unguarded():
        form = form.detach().to("meta")
        found = form.as_subclass(GradientStandIn)
    name = of.name if of.name.startswith("the gradient") else f"the gradient of {of.name}"
    found.absence = Absence(name, of.ranks, of.rank, of.device, form, line=of.line)
    found.known_norm = norm
    return found


def show_gradient(parameter: StandIn, norm: torch.Tensor | None = None) -> None:
    """Let hooks see that other ranks have a gradient of this parameter, and its norm."""
    parameter.gradient = gradient_like(parameter.absence, parameter.absence.form, norm)


def _note_change(name: str, changed: Any, factor: Any = None, *_: Any) -> None:
    """Keep the norms of what is scaled, and forget those of what is changed otherwise."""
    power = _SCALED.get(name, 0)
    is_number = isinstance(factor, (int, float)) or (
        isinstance(factor, torch.Tensor) and not factor.ndim and not factor.is_meta
    )
    for one in changed if isinstance(changed, (list, tuple)) else [changed]:
        if one.known_norm is not None:
            one.known_norm = one.known_norm * abs(factor) ** power if power and is_number else None


def _is_total(args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call asks for the 2-norm of all elements."""
    order = args[1] if len(args) > 1 else kwargs.get("p", kwargs.get("ord", 2))
    return order in _EUCLIDEAN and len(args) < 3 and all(kwargs.get(k) in (None, False) for k in ("dim", "keepdim"))


def _as_forms(value: Any) -> Any:
    """Return arguments with meta tensors in the place of all tensors but numbers."""

    def form(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.absence.form if isinstance(tensor, Guarded) else tensor.to("meta") if tensor.ndim else tensor

    return apply_to_collection(value, torch.Tensor, form)


def _as_drawn(value: Any) -> Any:
    """Return arguments with zeros in the place of stand-ins, so that as much is drawn as where the gradient is."""

    def zeros(tensor: torch.Tensor) -> torch.Tensor:
        return (
            torch.zeros_like(tensor.absence.form, device=tensor.absence.device)
            if isinstance(tensor, Guarded)
            else tensor
        )

    return apply_to_collection(value, torch.Tensor, zeros)


def _has_real(value: Any) -> bool:
    found: list[torch.Tensor] = []
    apply_to_collection(value, torch.Tensor, lambda t: None if isinstance(t, Guarded) else found.append(t))
    return bool(found)


def _first(args: Any, kwargs: Any) -> Guarded | None:
    found: list[Guarded] = []
    apply_to_collection((args, kwargs), GradientStandIn, found.append)
    return found[0] if found else None


_FORMS = frozenset(
    {
        torch.Tensor.dim,
        torch.Tensor.size,
        torch.Tensor.stride,
        torch.Tensor.numel,
        torch.numel,
        torch.Tensor.nelement,
        torch.Tensor.element_size,
        torch.Tensor.__len__,
        torch.Tensor.is_contiguous,
        torch.Tensor.is_floating_point,
        torch.is_floating_point,
        torch.Tensor.is_complex,
        torch.is_complex,
        torch.Tensor.__repr__,
        torch.Tensor.__format__,
    }
)
