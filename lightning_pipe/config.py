"""Configuration of the strategy: what a user can set, with which defaults, and what is refused.

`DappleConfig` is schema and defaults of the strategy, of its Hydra presets (`conf/strategy`) and of its keyword
arguments. Below this file nobody sees a `DictConfig`.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, make_dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args

from omegaconf import DictConfig, OmegaConf

from lightning_pipe.cache_files import usable
from lightning_pipe.errors import ConfigError
from lightning_pipe.foreign_names import (
    OLD_NAMES,
    closest,
    expected_names,
    instead_of,
    schedule_advice,
    schedule_name,
    with_present_names,
)
from lightning_pipe.planner.problem import EXECUTED, Constraints, Sharding
from lightning_pipe.planner.registry import FOLLOW_LAYOUTS, PlannerName
from lightning_pipe.schedule.formats.text import format_order
from lightning_pipe.schedule.formats.torch_csv import load_csv
from lightning_pipe.schedule.orders.one_f_one_b import WARMUPS, Warmup
from lightning_pipe.schedule.registry import SCHEDULES, ScheduleName
from lightning_pipe.schedule.weights import POLICIES, VersionOptions, WeightPolicy
from lightning_pipe.units import format_bytes, parse_bytes

CostSource = Literal["measured", "counted"]
CaptureMode = Literal["auto", "joint", "replay"]
WholeBatch = Literal["auto", "exact", "by_microbatch"]
StartMethod = Literal["popen", "spawn", "fork", "forkserver"]
WeightVersions = Literal[
    "sync",
    "stale",
    "pipedream",
    "pipedream_vertical",
    "2bw",
    "spectrain",
    "xpipe",
    "pipemare",
    "pb",
    "pb_lwpv",
    "pb_lwpd",
    "pb_sc",
    "pb_lwpv_sc",
    "timeprest",
]
RestoredRanks = Literal["auto", "all", "first", "none"]


@dataclass(frozen=True)
class DappleConfig:
    """Options of `Trainer(strategy="dapple")`; all have defaults.

    Attributes:
        plan: plan file (YAML) to use instead of planning; None lets the planner make one.
        planner: "auto" runs all planners and takes the plan that the simulator finds best; or the name of one planner.
        layout: ranks per stage, e.g. "2-1" for two replicas of stage 0 and one rank for stage 1 (per device, if
            schedule or stages_per_device give it several); None lets the planner choose ("uniform" takes one rank per
            stage).
        schedule: order of the forward and backward passes: a name (see docs/schedules.md), or a CSV file as
            torch.distributed.pipelining writes it; None lets the planner choose.
        stages_per_device: stages per device, for schedules that run several; None lets the planner choose.
        warmup: warm-up depth of 1F1B: "pa", "pb", "1f1b*", a depth, or one depth per stage such as "4,3,2,1"; None lets
            the planner choose.
        microbatches: micro-batches per batch; None lets the planner choose.
        costs: how plans are evaluated: "measured" times every operation and link once, "counted" counts operations and
            bytes and assumes equal devices.
        cluster: file or preset (`conf/cluster`) that describes devices and links; None measures them.
        cache: directory for measured times, captured graphs and passed checks; None takes the user's cache directory,
            "off" stores nothing.
        capture: "joint" captures the step as one graph, "replay" runs its Python on every rank, "auto" takes the first
            of them that works.
        whole_batch: "auto" has the gradients of the whole batch for any loss, but for an operation in the middle of a
            model that needs all samples, which takes those of a micro-batch; "exact" has them there, too;
            "by_microbatch" takes losses of micro-batches as gradient accumulation does, where gradients need all
            samples.
        check: compare the captured step with `training_step` itself on the first micro-batch, before training.
        recheck: repeat the check at every start, even if this step has passed it before.
        witness: periodically re-run the captured step's Python on empty tensors, to detect changes.
        post_validation: begin the next batch before the other ranks have ended this one, and check later whether the
            optimizer step was right (clipping by norm): zero-bubble schedules then have no bubble.
        compile: compile the functions of the stages with Inductor for the sizes of the first batches. A function that
            cannot be compiled, or gives other results than rounding explains, runs uncompiled.
        cuda_graphs: run each stage, compiled or not, as a CUDA graph.
        batch_dim: dimension of the batch's tensors along which samples lie.
        seed: seed of the random numbers inside the step; None takes torch's own seed.
        exact_ties: add gradients of a parameter that several stages use (tied embeddings) after every micro-batch, in
            the order of one device, instead of once per step: bit-equal results, but more traffic.
        deadline_s: longest wait for another rank, in seconds, before the run stops.
        report: HTML page (`.html`) of plan, timelines, memory and alternatives, or a directory for the page and for
            plan, profile, cluster, trace and pictures; None writes none.
        memory_limit: memory limit per rank, such as "16GiB", or by kind of device, such as "V100: 15GiB, T4: 14GiB" (or
            a mapping); None allows all free memory of the device. Plans stay within it, and CUDA's allocator enforces
            it.
        keep_freed_memory: ranks on CPUs reuse freed memory in the next step, as devices do (with glibc, and without a
            limit): faster, but other processes cannot use that memory meanwhile.
        shard_optimizer: shard the optimizer state over ranks with the same parameters (ZeRO, stage 1): "on", "off", or
            "auto": only if no plan fits otherwise.
        measure_memory: measure the memory of one recorded step, which makes that step slow on a CPU; other devices, and
            reports, always measure it.
        trace: file for the recorded timeline (Perfetto JSON); None writes none.
        timeline_steps: number of optimizer steps recorded at the start and compared with the prediction.
        watch_every: record one optimizer step in so many, and give the Trainer's loggers a row of its figures
            (`pipe/...`,
            see docs/monitoring.md); 0 gives them neither rows nor the plan.
        replan: if the prediction was wrong, plan again with measured times and switch to a better plan.
        start_method: how the processes of one host start: "popen" runs the script again, the others are those of
            multiprocessing.
        versions: which weights micro-batches read: "sync": those after the last batch; others run forwards of the
            next batch ahead, so that the pipeline is never flushed (docs/weights.md).
        versions_options: options of that policy, such as "anneal: 1000, warmup_epochs: 2" (or a mapping); None takes
            the defaults.
        weights: initial weights (file or directory) instead of the module's initialisers; each rank loads only its own
            part.
        save_distributed_checkpoint: write sharded checkpoints: a directory to which every rank writes its part.
        async_checkpoint: write sharded checkpoints in the background, from a copy in the host's memory.
        restore: which ranks get the full module back after a fit: "all", the "first", "none", or "auto": all, if each
            has the memory.
        verbose: show the log on rank 0: how the step is captured and why, and the time of each phase.
    """

    plan: str | None = None
    planner: PlannerName = "auto"
    layout: str | None = None
    schedule: ScheduleName | str | None = None
    stages_per_device: int | None = None
    warmup: Warmup | str | None = None
    microbatches: int | None = None
    costs: CostSource = "measured"
    cluster: str | None = None
    cache: str | None = None
    capture: CaptureMode = "auto"
    whole_batch: WholeBatch = "auto"
    check: bool = True
    recheck: bool = False
    witness: bool = True
    post_validation: bool = False
    compile: bool = False
    cuda_graphs: bool = False
    batch_dim: int = 0
    seed: int | None = None
    exact_ties: bool = False
    deadline_s: float = 300.0
    report: str | None = None
    memory_limit: str | None = None
    keep_freed_memory: bool = True
    shard_optimizer: Sharding = "auto"
    measure_memory: bool = False
    trace: str | None = None
    timeline_steps: int = 5
    watch_every: int = 50
    replan: bool = True
    start_method: StartMethod = "popen"
    weights: str | None = None
    versions: WeightVersions = "sync"
    versions_options: str | None = None
    save_distributed_checkpoint: bool = False
    async_checkpoint: bool = False
    restore: RestoredRanks = "auto"
    verbose: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            rule = _RULES[field.name]
            if not (value is None and field.default is None) and not rule.holds(value):
                raise ConfigError(f"found {field.name}={value!r} ({type(value).__name__}); {rule.expected(value)}")
        self._check_together()

    def _check_together(self) -> None:
        """Refuse options that another option would leave without effect."""
        defaults = {field.name: field.default for field in fields(self)}
        planned = [name for name in _DECIDED_BY_PLAN if getattr(self, name) != defaults[name]]
        if self.plan is not None and planned:
            raise ConfigError(
                f"found plan={self.plan!r} and {', '.join(planned)}; expected one or the other, as the plan decides "
                "these. Remove them, or change them in the plan file."
            )
        if self.schedule not in (None, "1f1b") and self.warmup is not None:
            raise ConfigError(
                f"found warmup={self.warmup!r} with schedule={self.schedule!r}; only '1f1b' has a warm-up. Remove it."
            )
        if self.warmup is not None and (depths := self.warmup.count(",") + 1) > 1:
            stages = None if self.replicas is None else len(self.replicas) * (self.stages_per_device or 1)
            if depths != stages:
                has = "no layout" if stages is None else f"a layout of {stages} stages"
                raise ConfigError(
                    f"found warmup={self.warmup!r}, a depth for each of {depths} stages, with {has}; expected as many "
                    f"depths as stages, such as layout={'-'.join('1' * depths)!r}, or one depth for all stages."
                )
        if self.schedule is not None and _is_file(self.schedule):
            decided = [name for name in ("layout", "stages_per_device") if getattr(self, name) is not None]
            if decided:
                raise ConfigError(
                    f"found schedule={self.schedule!r} and {', '.join(decided)}; the file decides these. Remove them."
                )
        if self.post_validation and self.shard_optimizer == "on":
            raise ConfigError(
                "found shard_optimizer='on' with post_validation=True, under which a rank may have to undo its own "
                "optimizer step, but not those of others. Remove one of them."
            )
        if self.versions != "sync":
            self._check_versions()
        _ = self.version_options  # read once, to refuse what cannot be
        if self.restore == "none" and self.start_method != "popen":
            raise ConfigError(
                f"found restore='none' with start_method={self.start_method!r}, whose processes end with the fit, and "
                "what they hold with them. Set restore='first'."
            )
        if self.async_checkpoint and not self.save_distributed_checkpoint:
            raise ConfigError(
                "found async_checkpoint=True without save_distributed_checkpoint=True; only directories are written "
                "behind the training. Set both, or give the trainer plugins=[AsyncCheckpointIO()] for plain files."
            )
        if self.memory_limit is not None:
            _limits(self.memory_limit)
        if self.layout is not None and self.planner not in FOLLOW_LAYOUTS:
            raise ConfigError(
                f"found layout={self.layout!r} with planner={self.planner!r}, which decides the layout itself; "
                f"expected one of the planners {', '.join(FOLLOW_LAYOUTS)}, or no layout."
            )

    def _check_versions(self) -> None:
        """Refuse options that rounds, whose forwards run ahead of their batch, do not have."""
        others = {"post_validation": self.post_validation, "warmup": self.warmup, "cuda_graphs": self.cuda_graphs}
        others["schedule"] = self.schedule not in (None, "1f1b")
        others["stages_per_device"] = self.stages_per_device not in (None, 1)
        others["shard_optimizer"] = self.shard_optimizer == "on" and POLICIES[self.versions].is_corrected
        if idle := [f"{name}={getattr(self, name)!r}" for name, is_set in others.items() if is_set]:
            raise ConfigError(
                f"found versions={self.versions!r} and {', '.join(idle)}; forwards of the next batch run ahead with "
                "schedule='1f1b', one stage per rank and no CUDA graphs, which nobody has run so on a GPU. Remove one "
                "of them."
            )

    @property
    def version_options(self) -> VersionOptions:
        """Return the options of the policy of weight versions.

        Raises:
            ConfigError: if one is unknown, out of range, or has no effect on the policy.
        """
        options = _version_options(self.versions_options or "")
        policy, defaults = POLICIES.get(self.versions), VersionOptions()
        effective = {
            "warmup_epochs": policy is not None,
            "anneal": policy is not None and policy.rate == "annealed",
            "decay": policy is not None and policy.correction == "discrepancy",
        }
        for name, has_effect in effective.items():
            if not has_effect and getattr(options, name) != getattr(defaults, name):
                raise ConfigError(
                    f"found versions_options={self.versions_options!r} with versions={self.versions!r}, in which "
                    f"{name} changes nothing. Remove it, or set versions='pipemare'."
                )
        return options

    @property
    def weight_policy(self) -> WeightPolicy | None:
        """Return the policy of weight versions with its options; None for pipelines that are flushed."""
        policy = POLICIES.get(self.versions)
        return None if policy is None else self.version_options.of(policy)

    @property
    def replicas(self) -> tuple[int, ...] | None:
        """Return the ranks per stage that `layout` asks for, None if it asks for nothing."""
        return None if self.layout is None else tuple(int(count) for count in self.layout.split("-"))

    @property
    def constraints(self) -> Constraints:
        """Return what a plan must keep to; a file of a schedule is read for it.

        Raises:
            ConfigError: if this file cannot be read.
            ProgramError: if what it says is no schedule.
        """
        if self.schedule is not None and _is_file(self.schedule):
            order = format_order(load_csv(self.schedule))
            return Constraints(self.microbatches, order=order, memory_policies=EXECUTED, shard_optimizer=self._sharding)
        is_ahead = self.versions != "sync"
        schedule = "1f1b" if self.warmup is not None or is_ahead else self.schedule
        policies = EXECUTED - {"offload"} if is_ahead else EXECUTED
        if is_ahead and POLICIES[self.versions].reads_twice:  # which would compute other activations again
            policies -= {"recompute"}
        constraints = Constraints(self.microbatches, self.replicas, schedule, self.warmup, memory_policies=policies)
        return replace(
            constraints,
            stages_per_device=self.stages_per_device,
            shard_optimizer=self._sharding,
            versions=self.versions,
        )

    @property
    def _sharding(self) -> Sharding:
        """Return whether plans share optimizer state: not where a step may be undone, or is corrected afterwards."""
        policy = self.weight_policy
        if self.post_validation or (policy is not None and policy.is_corrected):
            return "off"
        return self.shard_optimizer

    @property
    def memory_limits(self) -> Mapping[str, int]:
        """Return the most bytes that a rank may take by kind of device, "" for every kind; {} leaves it open."""
        return {} if self.memory_limit is None else _limits(self.memory_limit)

    @property
    def keeps_freed_memory(self) -> bool:
        """Return whether ranks on CPUs keep what they free: a limit is for all that a process has."""
        return self.keep_freed_memory and self.memory_limit is None

    @property
    def cache_dir(self) -> Path | None:
        """Return where measured times and captured graphs are kept; None if nowhere, or if others can write there."""
        if self.cache is not None:
            return None if self.cache == "off" else usable(Path(self.cache))
        home = os.environ.get("XDG_CACHE_HOME")
        return usable((Path(home) if home else Path.home() / ".cache") / "lightning_pipe")


_DECIDED_BY_PLAN = ("planner", "layout", "schedule", "stages_per_device", "warmup", "microbatches", "shard_optimizer")


LIMITS = "an amount such as '16GiB', or one by kind of device such as 'V100: 15GiB, T4: 14GiB'"


_LEAST_MEMORY = 1000  # bytes: a number below is one of larger units, which were left out


def _is_file(schedule: str) -> bool:
    return schedule.endswith(".csv")


def _limits(text: str) -> dict[str, int]:
    """Return the bytes by kind of device that a memory limit says, "" for every kind.

    Raises:
        ConfigError: if it cannot be read, is zero, or names a kind twice.
    """
    found: dict[str, int] = {}
    for part in text.split(","):
        kind, colon, amount = part.rpartition(":")
        kind = kind.strip()
        if (colon and not kind) or kind in found or (not kind and len(found) + text.count(",")):
            raise ConfigError(f"found memory_limit={text!r}; expected {LIMITS}")
        try:
            found[kind] = parse_bytes(amount)
        except ConfigError:
            raise ConfigError(f"found memory_limit={text!r}; expected {LIMITS}") from None
        if found[kind] < _LEAST_MEMORY:
            meant = f" (did you mean '{amount.strip().rstrip('bB').strip()}GiB'?)" if found[kind] else ""
            raise ConfigError(
                f"found memory_limit={text!r}, {format_bytes(found[kind])} for a rank{meant}; expected at least "
                f"{format_bytes(_LEAST_MEMORY)}, {LIMITS}"
            )
    return found


VERSION_OPTIONS = "options such as 'anneal: 1000, warmup_epochs: 2', of " + ", ".join(
    field.name for field in fields(VersionOptions)
)


def _version_options(text: str) -> VersionOptions:
    """Return the options that a text of names and numbers says.

    Raises:
        ConfigError: if a name is unknown or given twice, or a number is out of range.
    """
    given: dict[str, float] = {}
    kinds: dict[str, type[int] | type[float]] = {"warmup_epochs": int, "anneal": int, "decay": float}
    for part in text.split(",") if text else ():
        name, _, number = (word.strip() for word in part.partition(":"))
        try:
            value = kinds[name](number)
        except (KeyError, ValueError):
            value = -1
        if name in given or not value >= 0 or (name == "decay" and value >= 1):
            raise ConfigError(
                f"found {part.strip()!r} in versions_options={text!r}; expected {VERSION_OPTIONS}, each once: integers "
                "of at least 0, and a decay from 0 to less than 1"
            )
        given[name] = value
    return VersionOptions(**given)  # type: ignore[arg-type]  # of the types of its defaults


class _Rule(NamedTuple):
    """What a field may be: one of some names or, where there are none, what kind, range and pattern allow.

    Where there are names and a pattern, one of both.
    """

    kind: type
    words: str
    one_of: Collection[str] = ()
    least: float | None = None
    pattern: str = ""

    def holds(self, value: object) -> bool:
        if isinstance(value, bool) is not (self.kind is bool) or not isinstance(value, self.kind):
            return False
        if self.one_of and (value in self.one_of or not self.pattern):
            return value in self.one_of
        if isinstance(value, str):
            return bool(value) and re.fullmatch(self.pattern or ".*", value) is not None
        return self.least is None or value >= self.least  # type: ignore[operator]

    def expected(self, value: object) -> str:
        if not self.one_of:
            return f"expected {self.words}"
        return schedule_advice(str(value)) + expected_names(str(value), self.one_of, words=self.words.strip())


def _choice(words: Any) -> _Rule:
    return _Rule(str, "one of ", one_of=get_args(words))


_RULES = {
    "plan": _Rule(str, "the path of a plan file"),
    "planner": _choice(PlannerName),
    "layout": _Rule(str, "ranks per stage joined by '-', such as '2-1'", pattern=r"[1-9]\d*(-[1-9]\d*)*"),
    "schedule": _Rule(str, "the path of a CSV file, or one of ", one_of=SCHEDULES, pattern=r".+\.csv"),
    "stages_per_device": _Rule(int, "an integer of at least 1", least=1),
    "warmup": _Rule(
        str, WARMUPS,
        pattern="|".join([*map(re.escape, get_args(Warmup)), r"[1-9]\d*(,[1-9]\d*)*"]),
    ),
    "microbatches": _Rule(int, "an integer of at least 1", least=1),
    "costs": _choice(CostSource),
    "cluster": _Rule(str, "the path of a cluster file or the name of a preset"),
    "cache": _Rule(str, "the path of a directory, or 'off'"),
    "capture": _choice(CaptureMode),
    "check": _Rule(bool, "true or false"),
    "recheck": _Rule(bool, "true or false"),
    "witness": _Rule(bool, "true or false"),
    "post_validation": _Rule(bool, "true or false"),
    "compile": _Rule(bool, "true or false"),
    "whole_batch": _choice(WholeBatch),
    "cuda_graphs": _Rule(bool, "true or false"),
    "batch_dim": _Rule(int, "an integer of at least 0", least=0),
    "seed": _Rule(int, "an integer of at least 0", least=0),
    "exact_ties": _Rule(bool, "true or false"),
    "keep_freed_memory": _Rule(bool, "true or false"),
    "deadline_s": _Rule(float, "a number of seconds of at least 1", least=1.0),
    "report": _Rule(str, "the path of an .html file, or of a directory, to write"),
    "memory_limit": _Rule(str, LIMITS),
    "shard_optimizer": _choice(Sharding),
    "measure_memory": _Rule(bool, "true or false"),
    "trace": _Rule(str, "the path of a file to write"),
    "timeline_steps": _Rule(int, "an integer of at least 1", least=1),
    "watch_every": _Rule(int, "an integer of at least 0", least=0),
    "replan": _Rule(bool, "true or false"),
    "start_method": _choice(StartMethod),
    "weights": _Rule(str, "the path of a file or directory of weights"),
    "versions": _choice(WeightVersions),
    "versions_options": _Rule(str, VERSION_OPTIONS),
    "save_distributed_checkpoint": _Rule(bool, "true or false"),
    "async_checkpoint": _Rule(bool, "true or false"),
    "restore": _choice(RestoredRanks),
    "verbose": _Rule(bool, "true or false"),
}  # fmt: skip


def kind_of(name: str) -> type:
    """Return the type of an option's value; that of a text for an option that does not exist."""
    return _RULES[name].kind if name in _RULES else str


def _warn(note: str) -> None:
    warnings.warn(note, FutureWarning, stacklevel=4)


def read_config(options: Mapping[str, Any] | DictConfig, *, warn: Callable[[str], None] = _warn) -> DappleConfig:
    """Return the configuration that these options make, with defaults filled in.

    Args:
        options: fields of `DappleConfig` by name; paths may be `os.PathLike`, numbers of seconds may be integers, a
            layout or a warm-up may be a list of integers, or one, and a schedule may have torch's name.
        warn: is called with a note for every option that is given under an old name.

    Raises:
        ConfigError: if a name is unknown, or a value has the wrong type or is out of range.
    """
    given = _container(options) if isinstance(options, DictConfig) else options
    if (limit := given.get("memory")) is not None and not isinstance(limit, bool):
        raise ConfigError(f"found memory={limit!r}; the option that limits the memory of a rank is memory_limit")
    plain = with_present_names(given, warn=warn)
    check_known(plain)
    return DappleConfig(**{name: _converted(name, value) for name, value in plain.items()})


def chosen_config(
    config: DappleConfig | None, options: Mapping[str, Any], *, warn: Callable[[str], None] = _warn
) -> DappleConfig:
    """Return a configuration that is given whole, or made of all its fields, as `read_config` does.

    Raises:
        ConfigError: if a field is given beside the whole, is unknown, or has a value that cannot be.
    """
    if config is None:
        return read_config(options, warn=warn)
    options = with_present_names(options, warn=warn)
    check_known(options)
    defaults = vars(DappleConfig())
    if given := [name for name, value in options.items() if value != defaults[name]]:
        raise ConfigError(f"found config= and {', '.join(given)}; expected either a config or its fields.")
    return config


def check_known(options: Collection[str]) -> None:
    """Refuse options that do not exist, all at once, and say what to set instead where that is known.

    Raises:
        ConfigError: naming every unknown option.
    """
    unknown = [name for name in options if name not in _RULES]
    if not unknown:
        return
    advice = [_advice(name) for name in unknown]
    advised = "; ".join(f"{name!r}: {text}" for name, text in zip(unknown, advice, strict=True) if text)
    names = f"option{'s' if len(unknown) > 1 else ''} {', '.join(map(repr, unknown))}"
    expected = "" if all(advice) else f"; expected some of {', '.join(_RULES)}"
    raise ConfigError(f"found the unknown {names}{'; ' if advised else ''}{advised}{expected}")


def _advice(name: str) -> str:
    if (advice := instead_of(name)) is not None:
        return advice
    meant = closest(name, _RULES)
    return f"did you mean {meant!r}?" if meant else ""


def _container(options: DictConfig) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", OmegaConf.to_container(options, resolve=True))


_SWITCHED = {"True": "on", "False": "off"}  # what YAML and Hydra make of these words
_CAN_BE_OFF = ("cache", "shard_optimizer")
_JOINED = {"layout": "-", "warmup": ","}  # what lists of numbers are written with


def _converted(name: str, value: Any) -> Any:
    """Accept what YAML and Python naturally write for a field."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if name == "schedule" and isinstance(value, str):
        return schedule_name(value, SCHEDULES)
    if name in _JOINED and isinstance(value, Sequence) and not isinstance(value, str):
        return _JOINED[name].join(map(str, value))
    if isinstance(value, int) and not isinstance(value, bool):
        kind = _RULES[name].kind
        if name == "memory_limit":
            return f"{value}B"
        return float(value) if kind is float else str(value) if name in ("layout", "warmup") else value
    if name in _CAN_BE_OFF and str(value) in _SWITCHED:
        return _SWITCHED[str(value)]
    if name == "versions_options" and isinstance(value, Mapping):
        return ", ".join(f"{option}: {number}" for option, number in value.items())
    if name == "memory_limit" and isinstance(value, Mapping):
        return ", ".join(f"{kind}: {_converted(name, amount)}" for kind, amount in value.items())
    return value


def hydra_schema() -> type:
    """Return the structured config of the presets: the fields of `DappleConfig` and the class that they make."""
    hints: dict[str, Any] = {name: rule.kind | None for name, rule in _RULES.items()}  # OmegaConf knows no Literal
    hints |= {f.name: _RULES[f.name].kind for f in fields(DappleConfig) if f.default is not None}
    target = ("_target_", str, "lightning_pipe.DappleStrategy")
    lists = dict.fromkeys(_JOINED, Any)
    hints |= {"memory_limit": Any, "versions_options": Any}  # mappings
    hints |= {**dict.fromkeys(_CAN_BE_OFF, Any), **lists}  # what YAML makes of on and off
    present = [(f.name, hints[f.name], f.default) for f in fields(DappleConfig)]
    old = [(name, hints[renamed.now] | None, None) for name, renamed in OLD_NAMES.items()]
    return make_dataclass("DappleOptions", [target, *present, *old])


def conf_dir() -> Path:
    """Return the directory of the presets: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).parent
    return next(path for path in (package / "conf", package.parent / "conf") if path.is_dir())
