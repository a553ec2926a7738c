"""Run the stages of a split one after the other, without programs: the plainest executor there is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import lightning.pytorch as pl
import torch

from lightning_pipe.capture.steps.stage_program import RandomKey, Split, StageProgram

Values = dict[str, torch.Tensor]


def run_stages(
    split: Split,
    module: pl.LightningModule,
    leaves: Sequence[torch.Tensor],
    *,
    key: RandomKey,
    weight: float,
    buffers: Mapping[str, torch.Tensor] | None = None,
) -> tuple[Values, Values]:
    """Return (results by value name, gradients by parameter name) of one micro-batch; mutates buffers as F does.

    The buffers are those of the module unless they are given.
    """
    state = dict(module.named_parameters(remove_duplicate=False))
    state |= dict(module.named_buffers()) if buffers is None else buffers
    samples = leaves[0].shape[0]
    boxes: list[Values] = [{} for _ in split.stages]
    results: Values = {}
    gradients: Values = {}
    with torch.no_grad():
        for program, box in zip(split.stages, boxes, strict=True):
            box |= {name: leaves[index] for name, index in program.leaves.items()}
            box |= {name: state[own] for name, own in {**program.parameters, **program.buffers}.items()}
            box |= {name: torch.tensor(weight) for name in program.tangents}
            _compute(program.forward, box, samples, key)
            for own, name in program.mutations.items():
                state[own].copy_(box[name])
            _deliver(program, "F", boxes)
            results |= {name: box[name] for name in program.results}
        for program, box in zip(reversed(split.stages), reversed(boxes), strict=True):
            for half in (program.input_grad, program.weight_grad):
                if half is not None:
                    _compute(half, box, samples, key)
                _deliver(program, "B", boxes)
            for name, parameter in program.gradients.items():
                gradients[parameter] = box[name] + gradients[parameter] if parameter in gradients else box[name]
    return results, gradients


def _compute(half, box: Values, samples: int, key: RandomKey) -> None:
    outputs = half.run(samples, key, *(box[name] for name in half.inputs))
    box.update(zip(half.outputs, outputs, strict=True))


def _deliver(program: StageProgram, direction: str, boxes: list[Values]) -> None:
    for (towards, target), names in program.sends.items():
        if towards == direction:
            boxes[target].update({name: boxes[program.stage][name] for name in names if name in boxes[program.stage]})
