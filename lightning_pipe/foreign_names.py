"""Names other than ours: misspelt ones, those of other systems, and those that our options had before.

Schedules of `torch.distributed.pipelining` are accepted under torch's names where ours is the same schedule. Options of
DDP, FSDP, DeepSpeed, Megatron-LM and torch are not: they are refused with what to set instead. Names that options of
ours had before are accepted for a while, with a note.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import SequenceMatcher
from itertools import takewhile
from typing import Any, NamedTuple

from lightning_pipe.errors import ConfigError

_SCHEDULES_OF_TORCH = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "interleaved1f1b": "interleaved",
    "loopedbfs": "breadth_first",
    "zbvzerobubble": "zb_v",
    "dualpipev": "dualpipe_v",
}

_LAYOUT = "set layout, the ranks of every stage, such as '1-1-1-1' for four stages"
_MICROBATCHES = "set microbatches, the micro-batches of a batch; the batch itself is that of your DataLoader"
_NO_TENSOR_PARALLELISM = "there is no tensor parallelism; layout='2' makes two replicas, layout='1-1' two stages"
_GRADIENTS = "remove it: gradients are reduced as soon as a stage has them, whichever parameters a step uses"
_SHARDING = "remove it: a rank keeps the parameters and optimizer state of its own stages only"
_TRAINER = "give it to the Trainer"

_INSTEAD = {
    # DDP
    "find_unused_parameters": _GRADIENTS,
    "static_graph": _GRADIENTS,
    "gradient_as_bucket_view": _GRADIENTS,
    "bucket_cap_mb": _GRADIENTS,
    "ddp_comm_hook": _GRADIENTS,
    "broadcast_buffers": "remove it: replicas of a stage have the buffers that one device has",
    "timeout": "set deadline_s, a number of seconds",
    "backend": "set process_group_backend",
    "sync_batchnorm": _TRAINER,
    # FSDP, DeepSpeed
    "sharding_strategy": _SHARDING,
    "auto_wrap_policy": _SHARDING,
    "stage": "for the ZeRO stage, " + _SHARDING + "; for pipeline stages, " + _LAYOUT,
    "zero_optimization": _SHARDING,
    "zero_stage": _SHARDING,
    "offload_optimizer": _SHARDING,
    "num_stages": _LAYOUT,
    "partition_method": "set planner, or the stages of a plan file",
    "gradient_accumulation_steps": "for micro-batches of one batch, " + _MICROBATCHES + "; for several batches per "
    "optimizer step, Trainer(accumulate_grad_batches=...)",
    "train_batch_size": _MICROBATCHES,
    "train_micro_batch_size_per_gpu": _MICROBATCHES,
    "mixed_precision": "set Trainer(precision=...)",
    # Megatron-LM, torch
    "pipeline_model_parallel_size": _LAYOUT,
    "pipeline_parallel_size": _LAYOUT,
    "pp_size": _LAYOUT,
    "stages": _LAYOUT,
    "tensor_model_parallel_size": _NO_TENSOR_PARALLELISM,
    "tensor_parallel_size": _NO_TENSOR_PARALLELISM,
    "data_parallel_size": _NO_TENSOR_PARALLELISM,
    "virtual_pipeline_model_parallel_size": "set stages_per_device",
    "num_layers_per_virtual_pipeline_stage": "set stages_per_device",
    "micro_batch_size": _MICROBATCHES,
    "num_microbatches": _MICROBATCHES,
    "n_microbatches": _MICROBATCHES,
    "global_batch_size": _MICROBATCHES,
    # the Trainer's
    "num_nodes": _TRAINER,
    "devices": _TRAINER,
    "precision": _TRAINER,
    "accumulate_grad_batches": _TRAINER,
}


class OldName(NamedTuple):
    """What an option is called now, until when the old name is accepted, and what it may be mistaken for."""

    now: str
    until: str
    remark: str

    def note(self, old: str) -> str:
        """Return what a user of the old name is told."""
        return (
            f"The option {old} is called {self.now} now; the old name is accepted until version {self.until}. "
            f"({self.remark})"
        )


OLD_NAMES = {
    "chunks": OldName("stages_per_device", "0.3", "What GPipe, torchgpipe and fairscale call chunks is microbatches."),
    "memory": OldName("measure_memory", "0.2", "What limits memory is memory_limit."),
}


def with_present_names(options: Mapping[str, Any], *, warn: Callable[[str], None]) -> dict[str, Any]:
    """Return options under their present names; an old name is noted, one without a value is left out.

    Raises:
        ConfigError: if an option is set under both names.
    """
    present = {name: value for name, value in options.items() if name not in OLD_NAMES}
    for old, value in options.items():
        if old not in OLD_NAMES or value is None:
            continue
        now = OLD_NAMES[old].now
        if present.get(now) not in (None, False):
            raise set_twice(old, now)
        warn(OLD_NAMES[old].note(old))
        present[now] = value
    return present


def set_twice(old: str, now: str) -> ConfigError:
    """Return the error of an option that is set under its old name and its present one."""
    return ConfigError(f"found {old} and {now}; {old} is the old name of {now}. Remove {old}.")


_CLOSE = 0.65  # of two names as difflib compares them: "stage" is not "trace" (0.6), "spq" is "spp" (0.67)


def closest(found: str, known: Iterable[str], *, close: float = _CLOSE) -> str | None:
    """Return the known name that a misspelt one seems to mean; None if none is like it.

    Of equally close names the one that begins alike for longest is meant: `gpt-13c` is `gpt-13b`, not `gpt-1b3`.

    Args:
        found: the name.
        known: the names that there are.
        close: least likeness, as of `difflib.get_close_matches`.
    """

    def likeness(name: str) -> tuple[float, int]:
        alike = takewhile(lambda pair: pair[0] == pair[1], zip(name, found, strict=False))
        return SequenceMatcher(None, name, found).ratio(), len(list(alike))

    meant = max(known, key=likeness, default=None)
    return meant if meant is not None and likeness(meant)[0] >= close else None


def expected_names(found: str, known: Iterable[str], *, words: str = "one of", close: float = _CLOSE) -> str:
    """Return `expected one of a, b`, after `did you mean 'a'?` if a name is misspelt; arguments as for `closest`."""
    names = list(known)
    meant = closest(found, names, close=close)
    return f"{f'did you mean {meant!r}? Expected' if meant else 'expected'} {words} {', '.join(names)}"


def schedule_name(found: str, known: Collection[str]) -> str:
    """Return our name of a schedule: in any case, or as torch calls it, with or without "Schedule" before it.

    What is neither is returned as it is found.
    """
    if found in known:
        return found
    folded = {name.casefold(): name for name in known}
    name = found.casefold()
    ours = _SCHEDULES_OF_TORCH.get(name.removeprefix("schedule"))
    return folded.get(name) or (ours if ours in known else None) or found


def instead_of(option: str) -> str | None:
    """Return what to do instead of setting an option of another system, None if it is of none."""
    return _INSTEAD.get(option)


def schedule_advice(found: str) -> str:
    """Return what to set for a schedule of torch that has no name of its own here, or nothing."""
    if found.casefold().removeprefix("schedule") == "interleavedzerobubble":
        return "torch's InterleavedZeroBubble is schedule='zb_h1' with stages_per_device=2 or more; "
    return ""
