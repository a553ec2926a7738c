"""Stand-ins for what other stages have: fake tensors of the right shapes, and what arrived, as leaves of autograd."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias
from unittest import mock

import torch
from torch import nn

from lightning_pipe.capture.output.late_texts import late_text
from lightning_pipe.capture.output.printed_tensors import Elsewhere
from lightning_pipe.capture.output.text_uses import use_of_text
from lightning_pipe.capture.replayed.replay_values import filled, leaf_size
from lightning_pipe.capture.replayed.stage_spec import PlayedStep, StageSpec
from lightning_pipe.capture.torch_private import FakeTensor, FakeTensorMode

_TEXTS: dict[str, Callable[..., str]] = {"__format__": format, "__repr__": repr}


@contextlib.contextmanager
def absent_values_printed() -> Iterator[None]:
    """Let a play print values that this stage does not have; the output of the batch comes from where they are."""

    def answering(name: str) -> Any:
        usual = getattr(FakeTensor, name)

        def answer(tensor: FakeTensor, *args: Any, **kwargs: Any) -> Any:
            if use_of_text(sys._getframe(1)) != "said":
                return usual(tensor, *args, **kwargs)
            return late_text(Elsewhere(), _TEXTS[name], *args) if name in _TEXTS else Elsewhere()

        return answer

    with contextlib.ExitStack() as stack:
        for name in (*_TEXTS, "item", "tolist", "numpy"):
            stack.enter_context(mock.patch.object(FakeTensor, name, answering(name)))
        yield


Shapes: TypeAlias = tuple[tuple[int, ...], ...]  # of the outputs of a unit
_MOST_FORMS = 4096  # fake tensors that are kept


class OtherStages:
    """Give a stage's plays what they need of other stages.

    Args:
        step: the step.
        part: what this stage plays.

    Attributes:
        parameters: fake tensors for the parameters and buffers of others that glue reads or writes to, by name.
    """

    def __init__(self, step: PlayedStep, part: StageSpec) -> None:
        self.step, self.part = step, part
        self._outputs: dict[tuple[int, Shapes], list[torch.Tensor]] = {}
        self._leaves: dict[tuple[int, int], torch.Tensor] = {}
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.parameters = self._parameters()

    def _parameters(self) -> dict[str, torch.Tensor]:
        module, device = self.step.module, self.step.device
        parameters = dict(module.named_parameters(remove_duplicate=False))
        forms = {**dict(module.named_buffers()), **parameters}
        with self._mode:
            fakes = {n: torch.empty(forms[n].shape, dtype=forms[n].dtype, device=device) for n in self.part.absent}
            return {n: nn.Parameter(fake, False) if n in parameters else fake for n, fake in fakes.items()}

    def leaf(self, i: int, samples: int) -> torch.Tensor:
        """Return a fake tensor in the place of one of the batch that this stage is not given."""
        if (i, samples) not in self._leaves:
            leaf = self.step.structure.leaves[i]
            size = leaf_size(leaf, samples, self.step.batch_dim)
            with self._mode:
                self._leaves[i, samples] = torch.empty(size, dtype=leaf.dtype, device=self.step.device)
        return self._leaves[i, samples]

    def outputs(self, k: int, shapes: Shapes) -> Any:
        """Return what a unit that nobody here needs returns: its template with fake tensors of these shapes.

        They require gradients where the unit's own do: the step may ask, as the reentrant form of a checkpoint does,
        which runs all that is inside without gradients where it is given none that does.
        """
        unit = self.step.trace.units[k]
        if (k, shapes) not in self._outputs:
            if len(self._outputs) >= _MOST_FORMS:
                self._outputs.clear()
            with self._mode:
                self._outputs[k, shapes] = [
                    torch.empty(shape, dtype=output.dtype, device=self.step.device)
                    for shape, output in zip(shapes, unit.outputs, strict=True)
                ]
        tensors = self.handed(k, self._outputs[k, shapes])
        return filled(
            unit.template, [t.clone() if o.is_overwritten else t for t, o in zip(tensors, unit.outputs, strict=True)]
        )

    def handed(self, k: int, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the outputs of a unit that another stage runs as the step gets them: leaves of autograd."""
        outputs = self.step.trace.units[k].outputs
        return [
            tensor.detach().requires_grad_((output.has_gradient or output.is_detached) and self.step.has_backward)
            for tensor, output in zip(tensors, outputs, strict=True)
        ]
