"""What can a user set, with which defaults, and what is refused?

`DappleConfig` is schema and defaults of the strategy, of its Hydra presets (`conf/strategy`) and of its keyword
arguments. Below this file nobody sees a `DictConfig`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, make_dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast, get_type_hints

from omegaconf import DictConfig, OmegaConf

from lightning_pipe.errors import ConfigError
from lightning_pipe.planner.problem import Wishes
from lightning_pipe.planner.registry import FOLLOW_LAYOUTS, PLANNER_NAMES
from lightning_pipe.schedule.one_f_one_b import WARMUPS
from lightning_pipe.schedule.options import hint
from lightning_pipe.schedule.registry import SCHEDULES
from lightning_pipe.schedule.text import format_order
from lightning_pipe.schedule.torch_csv import load_csv


@dataclass(frozen=True)
class DappleConfig:
    """Options of `Trainer(strategy="dapple")`; all have defaults.

    Attributes:
        plan: file of the plan to use (YAML); None lets the planner make one.
        planner: who makes the plan; "auto" asks all planners, and takes what the simulator finds best.
        layout: ranks per stage, e.g. "2-1" for two replicas of stage 0 and one of stage 1 (per device, where schedule
            or chunks give a device several stages); None lets the planner choose ("uniform" takes one rank per stage).
        schedule: order of the computes: a name (see docs/schedules.md), or a file that lists it (CSV, as
            torch.distributed.pipelining writes it); None lets the planner choose.
        chunks: stages per device, for schedules that run several; None lets the planner choose.
        warmup: warm-up depth of 1F1B: "pa", "pb", "1f1b*", a depth, or one depth per stage such as "4,3,2,1"; None lets
            the planner choose.
        microbatches: micro-batches per batch; None lets the planner choose.
        costs: what plans are judged by: "measured" times every operation and link once, "counted" counts operations
            and bytes and supposes equal devices.
        cluster: file or preset (`conf/cluster`) that says which devices and links there are; None measures them.
        cache: directory where measured times are kept; None takes the user's cache directory, "off" keeps nothing.
        capture: route by which the step becomes stages: "joint" as one graph, "replay" by running its Python on every
            rank, "auto" the first that can.
        check: whether the captured step is compared with the plain one before training, on the first micro-batch.
        witness: whether the Python of a captured step runs again now and then, on tensors that compute nothing, to see
            whether it still does what was captured.
        post_validation: whether a rank goes on to the next batch before the others have ended theirs, and looks later
            whether its optimizer step was right (clipping by norm): zero-bubble schedules then have no bubble.
        batch_dim: dimension of the batch's tensors along which samples lie.
        seed: seed of the random numbers inside the step; None takes torch's own seed.
        exact_ties: whether gradients of a parameter that several stages use (tied embeddings) are added for every
            micro-batch, in the order of one device, instead of once per step: bit-equal results for more traffic.
        deadline_s: seconds after which a wait for another rank is reported as an error.
        report: HTML page (`.html`) of plan, timelines, memory and alternatives, or a directory for it and for plan,
            profile, cluster, trace and pictures; None writes none.
        memory: whether the memory of one of the recorded steps is measured, which makes that step slow on a CPU; on
            other devices, and for a report, it always is.
        trace: file to write the recorded timeline to (Perfetto JSON); None writes none.
        timeline_steps: optimizer steps that are recorded at the beginning, to be compared with the prediction.
        start_method: how the processes of one host are started: "popen" runs the script again, the others are those
            of multiprocessing.
    """

    plan: str | None = None
    planner: str = "auto"
    layout: str | None = None
    schedule: str | None = None
    chunks: int | None = None
    warmup: str | None = None
    microbatches: int | None = None
    costs: str = "measured"
    cluster: str | None = None
    cache: str | None = None
    capture: str = "auto"
    check: bool = True
    witness: bool = True
    post_validation: bool = False
    batch_dim: int = 0
    seed: int | None = None
    exact_ties: bool = False
    deadline_s: float = 300.0
    report: str | None = None
    memory: bool = False
    trace: str | None = None
    timeline_steps: int = 5
    start_method: str = "popen"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            rule = _RULES[field.name]
            if not (value is None and field.default is None) and not rule.holds(value):
                raise ConfigError(
                    f"found {field.name}={value!r} ({type(value).__name__}); expected {rule.expected(value)}"
                )
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
        if self.schedule is not None and _is_file(self.schedule):
            decided = [name for name in ("layout", "chunks") if getattr(self, name) is not None]
            if decided:
                raise ConfigError(
                    f"found schedule={self.schedule!r} and {', '.join(decided)}; the file decides these. Remove them."
                )
        if self.layout is not None and self.planner not in FOLLOW_LAYOUTS:
            raise ConfigError(
                f"found layout={self.layout!r} with planner={self.planner!r}, which decides the layout itself; "
                f"expected one of the planners {', '.join(FOLLOW_LAYOUTS)}, or no layout."
            )

    @property
    def replicas(self) -> tuple[int, ...] | None:
        """Return the ranks per stage that `layout` asks for, None if it asks for nothing."""
        return None if self.layout is None else tuple(int(count) for count in self.layout.split("-"))

    @property
    def wishes(self) -> Wishes:
        """Return what a plan must keep to; a file of a schedule is read for it.

        Raises:
            ConfigError: if this file cannot be read.
            ProgramError: if what it says is no schedule.
        """
        if self.schedule is not None and _is_file(self.schedule):
            return Wishes(self.microbatches, order=format_order(load_csv(self.schedule)))
        schedule = "1f1b" if self.warmup is not None else self.schedule
        return Wishes(self.microbatches, self.replicas, schedule, self.warmup, chunks=self.chunks)

    @property
    def cache_dir(self) -> Path | None:
        """Return where measured times are kept, None if nowhere."""
        if self.cache is not None:
            return None if self.cache == "off" else Path(self.cache)
        home = os.environ.get("XDG_CACHE_HOME")
        return (Path(home) if home else Path.home() / ".cache") / "lightning_pipe"


_DECIDED_BY_PLAN = ("planner", "layout", "schedule", "chunks", "warmup", "microbatches")


def _is_file(schedule: str) -> bool:
    return schedule.endswith(".csv")


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
        return self.words + ", ".join(map(repr, self.one_of)) + hint(str(value), dict.fromkeys(self.one_of))


def _choice(names: Collection[str]) -> _Rule:
    return _Rule(str, "one of ", one_of=names)


_RULES = {
    "plan": _Rule(str, "the path of a plan file"),
    "planner": _choice(PLANNER_NAMES),
    "layout": _Rule(str, "ranks per stage joined by '-', such as '2-1'", pattern=r"[1-9]\d*(-[1-9]\d*)*"),
    "schedule": _Rule(str, "the path of a CSV file, or one of ", one_of=SCHEDULES, pattern=r".+\.csv"),
    "chunks": _Rule(int, "an integer of at least 1", least=1),
    "warmup": _Rule(
        str, WARMUPS,
        pattern=r"pa|pb|1f1b\*|[1-9]\d*(,[1-9]\d*)*",
    ),
    "microbatches": _Rule(int, "an integer of at least 1", least=1),
    "costs": _choice(("measured", "counted")),
    "cluster": _Rule(str, "the path of a cluster file or the name of a preset"),
    "cache": _Rule(str, "the path of a directory, or 'off'"),
    "capture": _choice(("auto", "joint", "replay")),
    "check": _Rule(bool, "true or false"),
    "witness": _Rule(bool, "true or false"),
    "post_validation": _Rule(bool, "true or false"),
    "batch_dim": _Rule(int, "an integer of at least 0", least=0),
    "seed": _Rule(int, "an integer of at least 0", least=0),
    "exact_ties": _Rule(bool, "true or false"),
    "deadline_s": _Rule(float, "a number of seconds of at least 1", least=1.0),
    "report": _Rule(str, "the path of an .html file, or of a directory, to write"),
    "memory": _Rule(bool, "true or false"),
    "trace": _Rule(str, "the path of a file to write"),
    "timeline_steps": _Rule(int, "an integer of at least 1", least=1),
    "start_method": _choice(("popen", "spawn", "fork", "forkserver")),
}  # fmt: skip


def read_config(options: Mapping[str, Any] | DictConfig) -> DappleConfig:
    """Return the configuration that these options make, with defaults filled in.

    Args:
        options: fields of `DappleConfig` by name; paths may be `os.PathLike`, numbers of seconds may be integers, and
            a layout or a warm-up of one number may be an integer.

    Raises:
        ConfigError: if a name is unknown, or a value has the wrong type or is out of range.
    """
    plain: dict[str, Any] = dict(_container(options) if isinstance(options, DictConfig) else options)
    for name in plain:
        if name not in _RULES:
            known = ", ".join(_RULES)
            raise ConfigError(f"found the unknown option {name!r}; expected one of {known}{hint(name, _RULES)}")
    return DappleConfig(**{name: _converted(name, value) for name, value in plain.items()})


def _container(options: DictConfig) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", OmegaConf.to_container(options, resolve=True))


def _converted(name: str, value: Any) -> Any:
    """Accept what YAML and Python naturally write for a field."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, int) and not isinstance(value, bool):
        kind = _RULES[name].kind
        return float(value) if kind is float else str(value) if name in ("layout", "warmup") else value
    return value


def hydra_schema() -> type:
    """Return the structured config of the presets: the fields of `DappleConfig` and the class that they make."""
    hints = get_type_hints(DappleConfig)
    target = ("_target_", str, "lightning_pipe.DappleStrategy")
    return make_dataclass(
        "DappleOptions", [target, *((f.name, hints[f.name], f.default) for f in fields(DappleConfig))]
    )


def conf_dir() -> Path:
    """Return the directory of the presets: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).parent
    return next(path for path in (package / "conf", package.parent / "conf") if path.is_dir())
