"""Galvatron profiles (Miao et al., VLDB 2023; Hetu-Galvatron 2): two JSON files, with one entry for all equal layers.

    computation_profiling_NAME.json   {"layertype_0_bsz8_seq2048": 3.9, "layertype_other_bsz8_seq2048": 2.9, ...}
    memory_profiling_NAME.json        {"layertype_0_sp": {"2048": {"parameter_size": 778.2,
                                         "tp_activation_per_bsz_dict": {"1": 514.6, "2": ..., "checkpoint": 32.0}}},
                                       "other_memory_pp_on_first_sp": {"2048": {"model_states": {"1": 2021.0, ...},
                                         "activation": {"1": 198.7, ...}}}, "other_memory_pp_on_last_sp": ..., ...}

The first is given; the second lies beside it. Times are milliseconds of forward per layer and sample, sizes MiB (per
sample where they are activations), both as `process_profiled_data` of its profiler makes them. How many layers there
are stands in neither: the caller says it. So the model is a chain: what is before the layers, the layers, what is
after them.

    backward             = 2 x forward (`bct_fct_coe`)
    time of the others   = all after the layers, where the logits are
    parameters of others = model states / 4 (parameters, gradients, two moments), as the profiler has it
    output of a layer    = `checkpoint`, what a checkpointed layer keeps: its input, and what the framework adds to it

Left out: tensor-parallel variants, sequence parallelism (of one device there is nothing to divide), entries of whole
models (`layernum[2]_bsz8_seq2048`). Models of several kinds of layers or lengths are refused.
"""

from __future__ import annotations

import re
from pathlib import Path

from lightning_pipe.errors import ProfileError
from lightning_pipe.profiles.published_json import JsonValue
from lightning_pipe.profiles.published_layers import Layer, LayerOutput, Layers, with_kept

_ENTRY = re.compile(r"layertype_(?P<kind>\d+|other)_bsz(?P<samples>\d+)_seq(?P<length>.+)")
_TIMES, _SIZES = "computation_profiling", "memory_profiling"
_MILLISECOND, _MIB = 1e-3, 2**20
_BACKWARD = 2.0  # per forward
_STATES = 4  # parameters, gradients and two moments, each as large as the parameters
_ONE_DEVICE = "1"


def is_galvatron(content: object) -> bool:
    """Return whether the content of a JSON file looks like the times of such a profile."""
    return isinstance(content, dict) and any(_ENTRY.fullmatch(key) for key in content)


def layers_from_galvatron(content: object, *, path: Path, depth: int | None) -> Layers:
    """Read the layers of a profile, and their sizes from the file beside it.

    Args:
        content: the content of the file of times.
        path: that file.
        depth: number of layers of the model.

    Raises:
        ProfileError: if the number of layers is not given, there is no file of sizes, the model has several kinds of
            layers or lengths, or something is missing, of the wrong type or cannot be.
    """
    if depth is None or depth < 1:
        raise ProfileError(
            f"{path}: found {'no' if depth is None else depth} layers for a profile of Galvatron, which does not say "
            "how many the model has; expected at least 1. Set profile_layers= (in Python `layers=`)."
        )
    file = JsonValue(str(path), content)
    length, samples = _length_and_samples(file)
    sizes = _sizes(path)
    layer = _entry(sizes, "layertype_0", length)
    first, last = (_entry(sizes, f"other_memory_pp_on_{end}", length) for end in ("first", "last"))
    activations = layer.at("tp_activation_per_bsz_dict")
    between = activations.at("checkpoint").number() * _MIB
    names = ["before", *[f"layer{k}" for k in range(depth)], "after"]
    kinds = [None, *["0"] * depth, "other"]
    parameters = [_states(first), *[layer.at("parameter_size").number() * _MIB] * depth, _states(last)]
    kept = [_activation(first), *[activations.at(_ONE_DEVICE).number() * _MIB] * depth, _activation(last)]
    layers = [
        Layer(
            name=name,
            description=name,
            forward_s=(forward := _forward(file, kind, length, samples)),
            backward_s=tuple(_BACKWARD * seconds for seconds in forward),
            parameter_bytes=round(size),
            outputs=(LayerOutput(between, (k + 1,)),) if k + 1 < len(names) else (),
        )
        for k, (name, kind, size) in enumerate(zip(names, kinds, parameters, strict=True))
    ]
    return with_kept(Layers(tuple(layers), samples), dict(zip(names, kept, strict=True)))


def _length_and_samples(file: JsonValue) -> tuple[str, tuple[int, ...]]:
    """Return the only sequence length, and the numbers of samples at which layers were timed."""
    entries = [found for key in file.names() if (found := _ENTRY.fullmatch(key))]
    kinds = sorted({found["kind"] for found in entries} - {"other"})
    if kinds != ["0"]:
        raise file.error(f"{len(kinds)} kinds of layers", "one, as all layers are taken to be equal")
    lengths = sorted({found["length"] for found in entries})
    if len(lengths) != 1:
        raise file.error(f"sequence lengths {', '.join(lengths)}", "one. Remove the entries of the others")
    samples = tuple(sorted({int(found["samples"]) for found in entries if found["kind"] == "0"}))
    if samples[0] < 1:
        raise file.error("a batch of 0 samples", "at least 1")
    return lengths[0], samples


def _forward(file: JsonValue, kind: str | None, length: str, samples: tuple[int, ...]) -> tuple[float, ...]:
    """Return the seconds of forward for each number of samples; none for what has no time of its own."""
    if kind is None:
        return (0.0,) * len(samples)
    return tuple(
        file.at(f"layertype_{kind}_bsz{count}_seq{length}").number() * count * _MILLISECOND for count in samples
    )


def _sizes(path: Path) -> JsonValue:
    """Return the file of sizes beside that of times."""
    found = path.with_name(path.name.replace(_TIMES, _SIZES))
    if _TIMES not in path.name or not found.is_file():
        raise ProfileError(
            f"{path}: found no file of sizes beside it; expected {_TIMES}_NAME.json and {_SIZES}_NAME.json "
            "in one folder."
        )
    return JsonValue.read(found)


def _entry(sizes: JsonValue, key: str, length: str) -> JsonValue:
    """Return an entry of a sequence length, measured without or with sequence parallelism."""
    return sizes.at(key if key in sizes.names() else f"{key}_sp").at(length)


def _states(other: JsonValue) -> float:
    return other.at("model_states").at(_ONE_DEVICE).number() * _MIB / _STATES


def _activation(other: JsonValue) -> float:
    return other.at("activation").at(_ONE_DEVICE).number() * _MIB
