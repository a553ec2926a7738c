"""Options from the environment, for programs that build the Trainer themselves and know `strategy="dapple"` at most.

    LIGHTNING_PIPE="layout=1-1 microbatches=4"     options, separated by spaces; values are quoted as in a shell
    LIGHTNING_PIPE_CONFIG=pipeline.yaml            a file of options, `name: value`

What code sets to something else than its default comes first, then the variable, then the file.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_pipe.config import DappleConfig, check_known, kind_of, read_config
from lightning_pipe.errors import ConfigError

VARIABLE = "LIGHTNING_PIPE"
FILE_VARIABLE = "LIGHTNING_PIPE_CONFIG"


def with_environment(config: DappleConfig, environment: Mapping[str, str]) -> tuple[DappleConfig, str]:
    """Return the options of code with those of the environment where code leaves the default.

    Args:
        config: the options that code has set.
        environment: variables by name.

    Returns:
        The options, and a sentence that says which of them the environment has set; "" if none.

    Raises:
        ConfigError: if an option of the environment is unknown, has a value that cannot be, or excludes another.
    """
    text, path = environment.get(VARIABLE, "").strip(), environment.get(FILE_VARIABLE, "").strip()
    sources: dict[str, Mapping[str, Any]] = {}  # the first that has an option decides
    if text:
        sources[VARIABLE] = _checked(_of_text(text), VARIABLE)
    if path:
        sources[f"{FILE_VARIABLE}={path}"] = _checked(_of_file(path), path)
    if not sources:
        return config, ""
    defaults = vars(DappleConfig())
    options = {name: value for name, value in vars(config).items() if value != defaults[name]}
    used: dict[str, Mapping[str, Any]] = {}
    for source, found in sources.items():
        used[source] = {name: value for name, value in found.items() if name not in options}
        options |= used[source]
    told = ", ".join(f"{_written(more)} ({source})" for source, more in used.items() if more) or "none"
    passed_over = {name for source, found in sources.items() for name in found.keys() - used[source].keys()}
    if passed_over:
        told += f"; set elsewhere already: {', '.join(sorted(passed_over))}"
    try:
        return read_config(options), f"Options from the environment: {told}."
    except ConfigError as error:
        raise ConfigError(f"{error} Options from the environment: {told}.") from None


def _written(options: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in options.items())


def _checked(options: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """Return the options of one source, if all are known."""
    try:
        check_known(options)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    return options


def _of_text(text: str) -> dict[str, Any]:
    """Return the options of `name=value name=value`; values are numbers or truth values where their options are."""
    expected = f"expected name=value, separated by spaces, such as {VARIABLE}='layout=1-1 microbatches=4'"
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"found {VARIABLE}={text!r} ({error}); {expected}") from None
    options: dict[str, Any] = {}
    for word in words:
        name, sign, value = word.partition("=")
        if not sign or not name:
            raise ConfigError(f"found {word!r} in {VARIABLE}={text!r}; {expected}")
        if name in options:
            raise ConfigError(f"found {name} twice in {VARIABLE}={text!r}; expected it once")
        options[name] = _value(name, value)
    return options


def _value(name: str, text: str) -> Any:
    """Return a text as what its option takes; one that is nothing of the kind stays a text, which is refused."""
    kind = kind_of(name)
    if kind is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    try:
        return kind(text)
    except ValueError:
        return text


def _of_file(path: str) -> dict[str, Any]:
    expected = "expected a YAML file of options, `name: value`"
    try:
        found = OmegaConf.load(path)
        options = OmegaConf.to_container(found, resolve=True)
    except Exception as error:  # of the disk, of YAML, or of an interpolation
        raise ConfigError(f"found {FILE_VARIABLE}={path!r}, which cannot be read ({error}); {expected}") from None
    if not isinstance(found, DictConfig) or not isinstance(options, dict):
        raise ConfigError(f"found a list in {FILE_VARIABLE}={path!r}; {expected}")
    return {str(name): value for name, value in options.items()}
