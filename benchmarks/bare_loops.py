"""Peers in loops of their own: two stages, or two replicas, of a row of layers; no Lightning.

    torch 1F1B       torch.distributed.pipelining, two stages cut in the middle
    FSDP2            torch.distributed.fsdp.fully_shard, every layer apart
    DeepSpeed 1F1B   PipelineModule and its engine (`pip install deepspeed`)
    Megatron 1F1B    the schedule of megatron.core.pipeline_parallel over gloo (`pip install megatron-core`)

Stages of one process begin where the row's middle is; the loss is the mean over the batch; the optimizer is the case's.
Megatron-core is made for GPUs: where its schedule and its messages name the device "cuda", this module says "cpu".
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

CPU = torch.device("cpu")
RANKS = 2
NEEDS = {"DeepSpeed": "deepspeed", "Megatron": "megatron.core"}  # modules beyond those of this project, by peer

Make = Callable[[], nn.Sequential]
Optimizers = Callable[..., torch.optim.Optimizer]
Train = Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]  # a batch; its loss, on ranks that know it


def is_installed(peer: str) -> bool:
    """Return whether a peer can take part here."""
    try:
        return all(importlib.util.find_spec(module) for name, module in NEEDS.items() if peer.startswith(name))
    except ModuleNotFoundError:  # not even the package that has the module
        return False


def mean_loss(out: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return the loss of all cases."""
    return F.cross_entropy(out, wanted.flatten())


def _stage(row: nn.Sequential, rank: int) -> nn.Module:
    """Return the stage of a rank."""
    middle = len(row) // 2
    return row[:middle] if rank == 0 else row[middle:]


def torch_1f1b(make: Make, optimizers: Optimizers, microbatches: int) -> Train:
    """Return a step of torch's Schedule1F1B."""
    stage = PipelineStage(_stage(make(), dist.get_rank()), dist.get_rank(), RANKS, CPU)
    schedule = Schedule1F1B(stage, microbatches, loss_fn=mean_loss)
    optimizer = optimizers(stage.submod.parameters())

    def train(x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor | None:
        optimizer.zero_grad()
        parts: list[torch.Tensor] = []
        if dist.get_rank() == 0:
            schedule.step(x)
        else:
            schedule.step(target=wanted, losses=parts)
        optimizer.step()
        return torch.stack(parts).mean().detach() if parts else None

    return train


def fsdp2(make: Make, optimizers: Optimizers, _: int) -> Train:
    """Return a step of replicas whose parameters are sharded."""
    row, mesh = make(), init_device_mesh("cpu", (RANKS,))
    for layer in row:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(row, mesh=mesh)
    optimizer = optimizers(row.parameters())

    def train(x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        part = len(x) // RANKS
        here = slice(dist.get_rank() * part, (dist.get_rank() + 1) * part)
        optimizer.zero_grad()
        loss = mean_loss(row(x[here]), wanted[here])
        loss.backward()
        optimizer.step()
        known = loss.detach().clone()
        dist.all_reduce(known)
        return known / RANKS

    return train


def deepspeed_1f1b(make: Make, optimizers: Optimizers, microbatches: int) -> Train:
    """Return a step of DeepSpeed's pipeline engine."""
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(dist.get_rank()))
    import deepspeed
    from deepspeed.pipe import PipelineModule
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    deepspeed.init_distributed("gloo", verbose=False)
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        module = PipelineModule(list(make()), num_stages=RANKS, loss_fn=mean_loss, partition_method="uniform")
    engines: list[Any] = []  # one as soon as the size of a batch is known

    def train(x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        part = len(x) // microbatches
        if not engines:
            sizes = {"train_micro_batch_size_per_gpu": part, "gradient_accumulation_steps": microbatches}
            config = {"train_batch_size": len(x), **sizes, "steps_per_print": 10**9}
            optimizer = optimizers(module.parameters())
            engines.append(deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0])
        loss: torch.Tensor = engines[0].train_batch(data_iter=zip(x.split(part), wanted.split(part), strict=True))
        return loss.detach()

    return train


def megatron_1f1b(make: Make, optimizers: Optimizers, microbatches: int) -> Train:
    """Return a step of Megatron-core's schedule without interleaving."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.transformer import TransformerConfig

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=RANKS)
    config = TransformerConfig(
        num_layers=RANKS,
        hidden_size=1,  # what is known of shapes; they are adjusted to the real ones below
        num_attention_heads=1,
        pipeline_model_parallel_size=RANKS,
        pipeline_dtype=torch.float32,
        batch_p2p_comm=False,
        batch_p2p_sync=False,
    )
    stage = _MegatronStage(_stage(make(), dist.get_rank()), config)
    optimizer = optimizers(stage.parameters())
    is_last = dist.get_rank() == RANKS - 1
    shape: list[tuple[int, ...]] = []  # of what the first stage hands on, once a batch is known

    def forward(batches: Iterator[tuple[torch.Tensor, torch.Tensor]], model: _MegatronStage) -> tuple[Any, Any]:
        x, wanted = next(batches)
        out = model(x)

        def loss(result: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            found = mean_loss(result, wanted)
            return found, {"loss": found.detach().clone()}  # the schedule divides the loss in place

        return out, loss

    def train(x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor | None:
        part = len(x) // microbatches
        if not shape:
            with torch.no_grad():
                shape.append(tuple(_stage(make(), 0)(x[:part]).shape))
        optimizer.zero_grad()
        with _without_cuda(schedules):
            told = schedules.forward_backward_pipelining_without_interleaving(
                forward_step_func=forward,
                data_iterator=iter(zip(x.split(part), wanted.split(part), strict=True)),
                model=stage,
                num_microbatches=microbatches,
                seq_length=1,
                micro_batch_size=part,
                adjust_tensor_shapes_fn=lambda *_: ([shape[0]], [shape[0]]),
            )
        optimizer.step()
        return torch.stack([one["loss"] for one in told]).mean() if is_last else None

    return train


class _MegatronStage(nn.Module):
    """A stage that takes what Megatron's schedule has received for it in the place of the batch."""

    def __init__(self, stage: nn.Module, config: Any) -> None:
        super().__init__()
        self.stage, self.config = stage, config
        self.model_type = None
        self._received: torch.Tensor | None = None

    def set_input_tensor(self, received: list[torch.Tensor | None] | torch.Tensor | None) -> None:
        self._received = received[0] if isinstance(received, list) else received

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.stage(x if self._received is None else self._received)
        return out


@contextlib.contextmanager
def _without_cuda(schedules: Any) -> Iterator[None]:
    """Let Megatron's schedule make its tensors on the CPU."""

    def zeros(*size: Any, **options: Any) -> torch.Tensor:
        return torch.zeros(*size, **{**options, "device": CPU})

    on_cpu = SimpleNamespace(**{**vars(torch), "zeros": zeros})
    with mock.patch.object(schedules, "torch", on_cpu), mock.patch("torch.cuda.current_device", return_value=CPU):
        yield
