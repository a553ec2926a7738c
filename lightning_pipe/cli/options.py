"""Options of the command line: schema, defaults, and what is refused.

Options are Hydra overrides, `key=value`, in Hydra's grammar. A command takes exactly the fields of its class below, all
of which have defaults; what they mean stands beside them, and is what `--help` shows. Options that the strategy has too
are checked by `lightning_pipe.config`, so both refuse the same with the same words.

Only Hydra's grammar is used, with OmegaConf's types: no application of Hydra is started, so nothing makes directories,
writes logs or changes the working directory, and `cluster=` is no configuration group.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, make_dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, Protocol, TypeVar, get_args, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_pipe.config import DappleConfig, read_config
from lightning_pipe.core.serial import Dataclass
from lightning_pipe.errors import ConfigError
from lightning_pipe.foreign_names import OLD_NAMES, OldName, expected_names, set_twice
from lightning_pipe.planner.problem import Constraints, MemoryPolicy
from lightning_pipe.planner.registry import PLANNER_NAMES
from lightning_pipe.profiles.published import ADAM_STATE
from lightning_pipe.schedule.weights import POLICIES

log = logging.getLogger(__name__)


def option(default: Any, meaning: str) -> Any:
    """Return a field of a command's options, with the meaning that `--help` shows."""
    return field(default=default, metadata={"meaning": meaning})


@dataclass(frozen=True)
class StepOptions:
    """Which step is planned for which devices."""

    model: str | None = option(
        None,
        "package.module:name of a LightningModule, or of a function that returns one; or gpt-13b and the like",
    )
    model_args: dict[str, Any] = field(
        default_factory=dict,
        metadata={"meaning": "arguments of the model: model_args={width: 64}, or +model_args.width=64"},
    )
    batch: str | None = option(None, "package.module:name of a function that returns a batch; else the model's own")
    precision: str = option(
        "32-true", "numeric precision, as in Trainer(precision=…): 32-true, 16-true, bf16-true, bf16-mixed"
    )
    batch_dim: int = option(0, "batch dimension of the batch's tensors")
    costs: str = option("counted", "cost of a model's operations: counted, or measured on this machine")
    compile: bool = option(False, "whether stages will run compiled; costs are then measured on compiled stages")
    cache: str | None = option(
        None, "directory for measured times; off stores none, null is the user's cache directory"
    )
    profile: str | None = option(None, "instead of a model: file of a published layer profile")
    profile_samples: int | None = option(None, "samples per batch of this profile, if its name does not say it")
    profile_layers: int | None = option(None, "number of layers of the model, for a Galvatron profile")
    saved_bytes_per_sample: float | None = option(
        None, "activation bytes per sample of a layer, if the profile does not say it"
    )
    optimizer_state: float = option(ADAM_STATE, "bytes of optimizer state per byte of parameters; 2 is Adam")
    cluster: str | None = option(None, "devices: preset (see docs/clusters.md) or cluster file")
    ranks: int | None = option(None, "instead of a cluster: number of equal nominal devices")
    memory_limit: str | None = option(
        None, "most memory of a device: 16GiB, or 'memory_limit=\"V100: 15GiB, T4: 14GiB\"'"
    )
    speed: float = option(1.0, "speed of the devices relative to the costs, multiplied by the cluster's speeds")
    runtime: float = option(
        1.0, "runtime overhead, as a multiple of the cluster's, else of what was measured on CPUs; 0 = none"
    )
    tokens: int | None = option(None, "tokens per sample, for tokens/s; default: the model's tokens_per_sample")
    samples: int | None = option(
        None, "samples per optimizer step, over all ranks; default: those of the batch or profile"
    )
    unlike_strategy: ClassVar[frozenset[str]] = frozenset()  # names that mean something else there

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name, None)
            if value is not None and value < least:
                raise ConfigError(f"found {name}={value}; expected at least {least}")
        if self.speed <= 0:
            raise ConfigError(f"found speed={self.speed:g}; expected more than 0; 1 is as fast as what was profiled")
        if self.precision not in PRECISIONS:
            raise ConfigError(f"found precision={self.precision!r}; {expected_names(self.precision, PRECISIONS)}")
        self._check_sources()
        _ = self.config  # which checks them

    def _check_sources(self) -> None:
        """Refuse none or two of what there must be one of, and options that the other one leaves without effect."""
        _check_one(self, "model", "profile", "model=package.module:Name, or profile=file of a published profile")
        _check_one(self, "cluster", "ranks", "cluster=preset or file, or ranks=n for n equal nominal devices")
        defaults = {f.name: _default(f) for f in fields(StepOptions)}
        source, others = ("model", _OF_PROFILES) if self.model is not None else ("profile", _OF_MODELS)
        if idle := [name for name in others if getattr(self, name) != defaults[name]]:
            raise ConfigError(f"found {source}= and {', '.join(idle)}, which it leaves without effect. Remove these.")
        if self.compile and self.costs == "counted":
            raise ConfigError(
                "found compile=true with counted costs, which it leaves without effect; set costs=measured"
            )

    @property
    def config(self) -> DappleConfig:
        """Return the options that the strategy has too, checked as it checks them."""
        known = DappleConfig.__dataclass_fields__.keys() - self.unlike_strategy
        shared = {f.name: getattr(self, f.name) for f in fields(self) if f.name in known}
        return read_config({name: value for name, value in shared.items() if value is not None})

    @property
    def constraints(self) -> Constraints:
        """Return what a plan must keep to."""
        return Constraints(versions=self.config.versions)


# those of the Trainer that the strategy runs, except 64
PrecisionName = Literal["32-true", "16-true", "bf16-true", "bf16-mixed"]
PRECISIONS: tuple[PrecisionName, ...] = get_args(PrecisionName)
_OF_MODELS = ("model_args", "batch", "precision", "batch_dim", "costs", "compile", "cache")
_OF_PROFILES = ("profile_samples", "profile_layers", "saved_bytes_per_sample")
_LEAST = {
    "ranks": 1,
    "samples": 1,
    "tokens": 1,
    "profile_samples": 1,
    "profile_layers": 1,
    "saved_bytes_per_sample": 0,
    "optimizer_state": 0,
    "runtime": 0,
    "least_samples": 1,
}


def _check_one(options: StepOptions, one: str, other: str, expected: str) -> None:
    given = [name for name in (one, other) if getattr(options, name) is not None]
    if len(given) != 1:
        found = f"both {one}= and {other}=" if given else f"neither {one}= nor {other}="
        raise ConfigError(f"found {found}; expected {expected}")


@dataclass(frozen=True)
class WishedOptions(StepOptions):
    """What a plan must keep to."""

    microbatches: int | None = option(None, "micro-batches per batch; null leaves it to the planner")
    layout: str | None = option(None, "ranks per stage, such as 2-1; null leaves it to the planner")
    schedule: str | None = option(None, "schedule, or a CSV file of one; null leaves it to the planner")
    stages_per_device: int | None = option(None, "stages per device; null leaves it to the planner")
    warmup: str | None = option(None, "warm-up of 1F1B: pa, pb, 1f1b*, a depth, or 'warmup=\"4,3,2,1\"'")
    post_validation: bool = option(False, "whether ranks start the next batch without waiting for each other")
    shard_optimizer: str = option(
        "auto", "shard the optimizer state over replicas: on, off, or auto (only if needed to fit)"
    )
    least_samples: int = option(1, "minimum samples per micro-batch and replica")
    activation_policies: tuple[str, ...] = option(
        (), "extra activation policies the planner may use: [recompute,offload]"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names("activation_policies", self.activation_policies, get_args(MemoryPolicy))

    @property
    def constraints(self) -> Constraints:
        """Return what a plan must keep to."""
        policies: frozenset[Any] = frozenset(self.activation_policies)
        return replace(self.config.constraints, least_samples=self.least_samples, memory_policies=policies)


class Drawn(Protocol):
    """Options of a command whose timeline can be drawn."""

    @property
    def draw(self) -> str | None:
        """Return the picture to write."""

    @property
    def trace(self) -> str | None:
        """Return the trace to write."""


_VERSIONS = "policy of weight versions: sync flushes the pipeline after every batch; see docs/weights.md"
_POLICIES = (
    "instead of planners: policies of weight versions, side by side with a pipeline that is flushed: all, or some of "
    + ", ".join(POLICIES)
)
_PLANNER = "planner: one of " + ", ".join(PLANNER_NAMES)
_DRAW = "PNG file for the timeline; FILE_memory.png beside it shows memory"
_TRACE = "file for the timeline; open it at https://ui.perfetto.dev"


@dataclass(frozen=True)
class PlanOptions(WishedOptions):
    """Make a plan, compare it with its alternatives, and write it to a file."""

    planner: str = option("auto", _PLANNER)
    versions: str = option("sync", _VERSIONS)
    out: str | None = option("plan.yaml", "file for the plan; null writes none")
    draw: str | None = option(None, _DRAW)
    trace: str | None = option(None, _TRACE)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_picture(self.draw)


@dataclass(frozen=True)
class CompareOptions(WishedOptions):
    """Run several planners and compare their plans."""

    planners: tuple[str, ...] = option(
        tuple(name for name in PLANNER_NAMES if name != "exhaustive"),
        "planners: some of " + ", ".join(PLANNER_NAMES),
    )
    versions: Any = field(default=None, metadata={"meaning": _POLICIES})
    unlike_strategy: ClassVar[frozenset[str]] = frozenset(("versions",))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names("planners", self.planners, PLANNER_NAMES)
        if not self.planners:
            raise ConfigError(f"found planners=[]; expected some of {', '.join(PLANNER_NAMES)}")
        check_names("versions", self.policies, tuple(POLICIES))
        defaults = {f.name: f.default for f in fields(CompareOptions)}
        others = ("planners", "warmup", "post_validation", "schedule", "stages_per_device")
        changed = [name for name in others if getattr(self, name) != defaults[name]]
        if changed == ["planners"] and len(self.planners) == 1:
            changed = []
        if self.policies and changed:
            raise ConfigError(
                f"found versions={self.versions!r} and {', '.join(changed)}; policies are compared by the plans of one "
                "planner, in 1f1b. Remove these, or name one planner."
            )

    @property
    def policies(self) -> tuple[str, ...]:
        """Return the policies of weight versions that are compared."""
        match self.versions:
            case None:
                return ()
            case "all":
                return tuple(POLICIES)
            case str() as name:
                return (name,)
            case names:
                return tuple(map(str, names))

    @property
    def planner(self) -> str:
        """Return who plans where policies are compared."""
        return self.planners[0] if len(self.planners) == 1 else "auto"


@dataclass(frozen=True)
class SimulateOptions(StepOptions):
    """Predict time, bubble and memory of a given plan, rank by rank."""

    plan: str | None = option(None, "file of the plan")
    versions: str = option("sync", _VERSIONS)
    draw: str | None = option(None, _DRAW)
    trace: str | None = option(None, _TRACE)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_picture(self.draw)
        if self.plan is None:
            raise ConfigError("found no plan=; expected the file of a plan, such as `lightning-pipe plan` writes")


@dataclass(frozen=True)
class ExplainOptions(WishedOptions):
    """Explain how good a plan is (yours or a new one): against one device, DDP and other plans."""

    plan: str | None = option(None, "file of the plan; null lets the planner make one")
    planner: str = option("auto", _PLANNER)
    versions: str = option("sync", _VERSIONS)


@dataclass(frozen=True)
class ReportOptions(ExplainOptions):
    """Write one HTML page on a plan (yours or a new one): predicted timeline, memory and alternatives."""

    out: str = option("report.html", "file for the page")


Options = TypeVar("Options", bound=Dataclass)


def check_names(option: str, found: Sequence[str], known: Sequence[str]) -> None:
    """Refuse names that are not among the known ones.

    Raises:
        ConfigError: with the option, the name, and what it may have meant.
    """
    for name in found:
        if name not in known:
            raise ConfigError(f"found {name!r} in {option}; {expected_names(name, known, words='some of')}")


def _check_picture(path: str | None) -> None:
    if path is not None and not path.endswith(".png"):
        raise ConfigError(f"found draw={path!r}; expected the path of a PNG file, such as draw=timeline.png")


def read_options(kind: type[Options], overrides: Sequence[str]) -> Options:
    """Return the options of a command that these overrides make.

    Args:
        kind: the options of the command.
        overrides: in Hydra's grammar.

    Raises:
        ConfigError: if one is no `key=value`, its key is unknown, or a value has the wrong type or is out of range.
    """
    config = OmegaConf.structured(_schema(kind))
    for override in _with_present_names(overrides, kind):
        parsed = _parsed(override, kind)
        try:
            OmegaConf.update(config, parsed.key_or_group, parsed.value())
        except OmegaConfBaseException:
            raise ConfigError(f"found {override!r}; {_expected(kind, parsed.key_or_group)}") from None
    return _made(kind, config)


def options_of(kind: type[Options], values: Mapping[str, Any]) -> Options:
    """Return the options of a command with these values.

    Args:
        kind: the options of the command.
        values: by name; what is not given has its default.

    Raises:
        ConfigError: if a name is unknown, or a value has the wrong type or is out of range.
    """
    config, known = OmegaConf.structured(_schema(kind)), kind.__dataclass_fields__
    for name, value in values.items():
        if name not in known:
            raise unknown_option(name, known)
        try:
            OmegaConf.update(config, name, list(value) if isinstance(value, tuple) else value)
        except OmegaConfBaseException:
            raise ConfigError(f"found {name}={value!r}; {_expected(kind, name)}") from None
    return _made(kind, config)


def _made(kind: type[Options], config: Any) -> Options:
    """Return the options that a structured config holds."""
    try:
        found = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:  # of an interpolation
        raise ConfigError(_reason(error)) from None
    assert isinstance(found, dict)
    values: dict[str, Any] = {str(name): tuple(v) if isinstance(v, list) else v for name, v in found.items()}
    return kind(**values)


_OLD_NAMES = OLD_NAMES | {
    "reliefs": OldName("activation_policies", "0.3", "It allows plans that recompute or offload saved tensors.")
}


def _with_present_names(overrides: Sequence[str], kind: type[Dataclass]) -> Iterator[str]:
    """Yield overrides under the present names of their options; an old name is noted.

    Raises:
        ConfigError: if an option is set under both names.
    """
    names = [override.partition("=")[0].lstrip("+") for override in overrides]
    for name, override in zip(names, overrides, strict=True):
        old = _OLD_NAMES.get(name)
        if old is None or old.now not in kind.__dataclass_fields__:
            yield override
            continue
        if old.now in names:
            raise set_twice(name, old.now)
        log.warning(old.note(name))
        yield override.replace(name, old.now, 1)


def _parsed(override: str, kind: type[Dataclass]) -> Override:
    known = kind.__dataclass_fields__
    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException as error:
        raise ConfigError(
            f"found {override!r}; expected key=value ({_reason(error)}). A value with spaces, commas, '=' or brackets "
            f"is quoted twice: 'key=\"value\"'. Options: {', '.join(known)}"
        ) from None
    name = parsed.key_or_group.partition(".")[0]
    if name not in known:
        raise unknown_option(name, known)
    if parsed.type not in (OverrideType.CHANGE, OverrideType.ADD) or parsed.is_sweep_override():
        raise ConfigError(
            f"found {override!r}; expected one value: key=value. A list is {name}=[a,b], and a text with commas is "
            f"quoted twice: '{name}=\"a,b\"'"
        )
    return parsed


def unknown_option(name: str, known: Mapping[str, Any]) -> ConfigError:
    """Return the error that says which options there are."""
    return ConfigError(f"found the unknown option {name!r}; {expected_names(name, known)}")


_WORDS = {
    int: "a whole number, such as {0}=8",
    float: "a number, such as {0}=0.5",
    bool: "true or false",
    str: "a text",
}


def _expected(kind: type[Dataclass], key: str) -> str:
    """Return in words what an option takes."""
    of = get_type_hints(kind)[key.partition(".")[0]]
    words = next(
        (words for plain, words in _WORDS.items() if of in (plain, plain | None)), "a list {0}=[a,b], or pairs {{a: 1}}"
    )
    return f"expected {words.format(key)}"


def _reason(error: Exception) -> str:
    """Return the first line of what Hydra or OmegaConf found wrong."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _schema(kind: type[Dataclass]) -> type:
    """Return the structured config of a command: one of a frozen class could not be changed, and tuples are lists."""
    hints = get_type_hints(kind)
    kinds = {name: list[str] if of == tuple[str, ...] else of for name, of in hints.items()}
    return make_dataclass(
        kind.__name__, [(f.name, kinds[f.name], field(default_factory=partial(_default, f))) for f in fields(kind)]
    )


def _default(of: Field[Any]) -> Any:
    """Return the default of an option, as Hydra has it."""
    default = of.default if of.default_factory is MISSING else of.default_factory()
    return list(default) if isinstance(default, tuple) else default


def meanings(kind: type[Dataclass]) -> list[tuple[str, str, str]]:
    """List name, default as one would write it, and meaning of every option of a command."""
    return [(f.name, _written(_default(f)), str(f.metadata["meaning"])) for f in fields(kind)]


def _written(default: object) -> str:
    if isinstance(default, list):
        return f"[{','.join(default)}]"
    return "null" if default is None else f"{default:g}" if isinstance(default, float) else str(default)
