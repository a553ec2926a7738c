"""Table of captured steps, by all that their graphs depend on from the start; those not used for longest go first."""

from __future__ import annotations

from typing import Any

from lightning_pipe.capture.steps.batch import outline
from lightning_pipe.capture.torch_private import unguarded
from lightning_pipe.lightning_names import pl
from lightning_pipe.strategy.plans.batch_cuts import BatchCuts
from lightning_pipe.strategy.steps.step_calls import StepRequest
from lightning_pipe.strategy.steps.step_runtime import RankStep

_MOST_CAPTURES = 64


class KnownSteps:
    """Look captured steps up.

    Args:
        module: the user's module.
        cuts: which batches are cut.
        batch_dim: dimension of the samples in them.

    Attributes:
        steps: by what they are kept under.
    """

    def __init__(self, module: pl.LightningModule, *, cuts: BatchCuts, batch_dim: int) -> None:
        self._modules = tuple(module.modules())
        self._cuts, self._batch_dim = cuts, batch_dim
        self.steps: dict[tuple[Any, ...], list[RankStep]] = {}

    def steps_like(self, call: StepRequest) -> list[RankStep]:
        """Return the steps that were captured for calls like this, which are now those used last."""
        key = self.key(call)
        steps = self.steps.pop(key, [])
        self.steps[key] = steps
        return steps

    def answering(self, call: StepRequest, answers: tuple[bool, ...]) -> RankStep | None:
        """Return the step of calls like this in which the first questions have these answers; None if unknown."""
        steps = self.steps.get((*self.key(call), *answers))
        return None if steps is None else steps[0]

    def relatives(self, call: StepRequest) -> list[RankStep]:
        """List the captured steps that differ from a call in the shapes of its batch only; the youngest last."""
        method, texts, _, *others = self.key(call)
        keys = [key for key in self.steps if (key[0], key[1], [*key[3:]]) == (method, texts, others)]
        return [step for key in keys for step in self.steps[key]]

    def put(self, call: StepRequest, step: RankStep, *, answers: tuple[bool, ...] = ()) -> None:
        """Have this step alone for calls like this, in which the first questions have these answers."""
        key = (*self.key(call), *answers)
        self.steps[key] = [step]

    def add(self, call: StepRequest, step: RankStep) -> None:
        """Have this step for calls like this too."""
        steps = self.steps.setdefault(self.key(call), [])
        steps[:] = [*steps[1 - _MOST_CAPTURES :], step]
        if len(self.steps) > _MOST_CAPTURES:
            del self.steps[next(iter(self.steps))]

    def forget(self, method: str) -> None:
        """Forget the steps of a method."""
        self.steps = {key: steps for key, steps in self.steps.items() if key[0] != method}

    def key(self, call: StepRequest) -> tuple[Any, ...]:
        """Return what a captured step is kept under: everything that its graph depends on from the start."""
        dim = self._batch_dim
        leaves = tuple((*leaf.shape[:dim], *leaf.shape[dim + 1 :], leaf.dtype) for leaf in call.structure.leaves)
        shapes = leaves if self._cuts.can_cut(call.structure) else call.structure.leaves
        modes = tuple([module.training for module in self._modules])
        with unguarded():  # stand-ins would be asked one by one
            frozen = tuple([p.requires_grad for m in self._modules for p in m._parameters.values() if p is not None])
        form = call.structure.form  # which says as much of the structure as an outline
        described = outline(call.structure.template) if form is None else form[0]
        return (call.method, described, shapes, call.arguments[1:], modes, frozen)
