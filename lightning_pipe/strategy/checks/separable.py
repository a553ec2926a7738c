"""Optimizers that couple parameters: found by trial steps before training, because no rank has all gradients.

An optimizer of the user's own may divide by the norm of all gradients, or choose one rate for all parameters. On a rank
of a pipeline it would do that with the gradients of this rank. So copies of it take a few steps with random gradients
of all parameters, and again with gradients of some of them only, as on a rank:

    the first half, the second, every second one    parameters may be coupled in groups
    none                                            a rank may train nothing

    1. parameters that step must come to the same weights
    2. with weights and state of the others, as a checkpoint gathers them, `state_dict()` must be the same
    3. further steps with all gradients must come to the same weights; else state cannot move to another rank

A first step alone may couple nothing, nor steps without a direction: a rate for all may be found from how far they have
come (Prodigy). Optimizers of torch treat every parameter by itself.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_pipe.errors import UnsupportedError
from lightning_pipe.strategy.checks.trial_steps import TrialSteps
from lightning_pipe.strategy.parameters.inner_optimizers import is_torchs, parameters_of
from lightning_pipe.strategy.parameters.stand_ins import WAY_OUT_OF_WEIGHTS

_ROUNDING = 1e-5
_STEPS, _MORE_STEPS = range(12), range(12, 15)  # AdaShift begins with the eleventh


def check_separable(optimizer: Optimizer, ranks: int, *, device: torch.device) -> bool:
    """Check that an optimizer steps each parameter by itself, and that its state can be put together.

    Args:
        optimizer: what is to train a pipeline.
        ranks: how many there are.
        device: where it will step.

    Returns:
        Whether the state of a parameter can move to another rank: all of it is in state tables.

    Raises:
        UnsupportedError: if a parameter's step depends on the gradients of others, or the state dict on the rank.
    """
    name = type(optimizer).__name__
    advice = f'layout="{ranks}" with shard_optimizer="off" trains data parallel, where every rank has all gradients.'
    trained = [place for place, p in enumerate(parameters_of(optimizer)) if p.requires_grad]
    if is_torchs(optimizer) or len(trained) < 2:
        return True
    try:
        together = TrialSteps(optimizer, trained, device=device)
        together.take(_STEPS)
        if not any(together.moved(place).any() for place in trained):
            raise RuntimeError(f"no parameter moves in {len(_STEPS)} steps")
        if not all(together.moved(place).isfinite().all() for place in trained):
            raise RuntimeError("weights become infinite, or no numbers")
    except Exception as error:  # of the user's own class, maybe
        raise UnsupportedError(
            f"{name} takes no trial step with random gradients ({type(error).__name__}: {error}), so nobody knows "
            f"whether it treats every parameter by itself, as the ranks of a pipeline need. {advice}"
        ) from error
    _refuse_more_calls(together, advice)
    half = len(trained) // 2
    shares: tuple[list[int], ...] = (trained[:half], trained[half:], trained[::2], [])
    aparts = [TrialSteps(optimizer, places, device=device) for places in shares]
    for apart, places in zip(aparts, shares, strict=True):
        _check_apart(apart, together, places, advice)
    together.take(_MORE_STEPS)
    return all(_goes_on_like(apart, together) for apart in aparts)


def _refuse_more_calls(trial: TrialSteps, advice: str) -> None:
    if trial.calls > 1:
        raise UnsupportedError(
            f"{type(trial.optimizer).__name__} runs its closure {trial.calls} times in a step. In between it moves "
            "weights by gradients, and in a pipeline no rank has all of these. Use an optimizer that runs the closure "
            f"once. {advice}"
        )


def _check_apart(apart: TrialSteps, together: TrialSteps, places: Sequence[int], advice: str) -> None:
    """Take steps with some gradients only, and check them, and what they leave beside weights and state of others."""
    name = type(apart.optimizer).__name__
    try:
        apart.take(_STEPS)
    except Exception as error:
        lacking = "some parameters have no gradient" if places else "no parameter has a gradient"
        raise UnsupportedError(
            f"{name} fails where {lacking} ({_said(error)}), and in a pipeline no rank has all "
            f"gradients. Let it leave those alone whose gradient is None. {advice}"
        ) from error
    _refuse_more_calls(apart, advice)
    if not all(_is_close(apart.moved(place), together.moved(place)) for place in places):
        raise UnsupportedError(
            f"{name} steps a parameter differently if others have gradients too: it couples them, by a norm or a rate "
            "over all parameters. In a pipeline no rank has all gradients. Use an optimizer that treats every "
            f"parameter by itself; gradient_clip_val clips by the norm over all ranks. {advice}"
        )
    apart.join(together)
    if (path := _difference(_saved(apart), _saved(together))) is not None:
        raise UnsupportedError(
            f"{name}.state_dict(){path} differs if other parameters have gradients too, and it is in no "
            "optimizer.state[parameter]. In a pipeline every rank has another value, and a checkpoint would hold that "
            f"of rank 0. Keep what belongs to a parameter in optimizer.state[parameter]. {advice}"
        )


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(WAY_OUT_OF_WEIGHTS)[0].strip()}"


def _goes_on_like(apart: TrialSteps, together: TrialSteps) -> bool:
    """Return whether a trial with the state of all parameters goes on as one that has stepped all of them."""
    try:
        apart.take(_MORE_STEPS)
    except Exception:  # it lacks what the state tables do not have
        return False
    return all(_is_close(apart.moved(place), together.moved(place)) for place in together.trained)


def _saved(trial: TrialSteps) -> Any:
    """Return the state dict; an error, which one device meets too, as its text."""
    try:
        return trial.optimizer.state_dict()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _is_close(moved: torch.Tensor, expected: torch.Tensor) -> bool:
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    return torch.allclose(moved, expected, rtol=0, atol=_ROUNDING * scale, equal_nan=True)


def _difference(found: Any, expected: Any, path: str = "") -> str | None:
    """Return the first place in which two trees differ, as Python writes it; None if they are alike."""
    if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
        alike = found.shape == expected.shape and torch.allclose(found, expected, rtol=_ROUNDING, equal_nan=True)
        return None if alike else path
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        if found.keys() != expected.keys():
            return path
        places = [(f"{path}[{key!r}]", found[key], expected[key]) for key in expected]
    elif isinstance(expected, (list, tuple, deque)) and isinstance(found, (list, tuple, deque)):
        if len(found) != len(expected):
            return path
        places = [(f"{path}[{k}]", *pair) for k, pair in enumerate(zip(found, expected, strict=True))]
    elif isinstance(expected, float) and isinstance(found, float):
        is_close = math.isclose(found, expected, rel_tol=_ROUNDING) or (math.isnan(found) and math.isnan(expected))
        return None if is_close else path
    else:
        return None if type(found) is type(expected) and (not _is_plain(expected) or found == expected) else path
    return next((inner for where, one, other in places if (inner := _difference(one, other, where)) is not None), None)


def _is_plain(value: Any) -> bool:
    """Return whether equality says something of a value."""
    return value is None or isinstance(value, (bool, int, str, bytes, complex))
