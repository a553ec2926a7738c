"""Sailor profiles (Strati et al., SOSP 2025): JSON, with seconds of every layer for several sizes of micro-batches.

    profiles/MODEL/GPU/profile.json   {"4": {"1": {"0": [0.0012, 0.0001, 0.0028], "1": ...}, "2": ...}, "8": ...}
    llm_info.json                     {"MODEL": {"1": {"0": {"params_bytes": 8, "act_output_bytes": 64,
                                       "act_mem_bytes": 256, ...}, ...}, "2": ...}, ...}

The keys of a profile are samples of a micro-batch, tensor-parallel devices, and layers; the three numbers are seconds
of forward, backward and update. Sizes are those of one sample (`gather_profs.py` takes them from micro-batches of one),
in one file for all models: `llm_info.json` in the folder of the profile or in one above it; the model is the
folder above the one of the device. Layers are a chain.

    update   = the same for every layer in the file; here the sum, per byte of all parameters
    a layer keeps `act_mem_bytes` of each sample

Left out: tensor-parallel variants; `act_input_bytes`, which repeats what the layer before makes.
"""

from __future__ import annotations

from pathlib import Path

from lightning_pipe.errors import ProfileError
from lightning_pipe.profiles.published_json import JsonValue
from lightning_pipe.profiles.published_layers import Layer, LayerOutput, Layers, with_kept

SIZES = "llm_info.json"
_ONE_DEVICE = "1"
_FOLDERS_ABOVE = 5  # Planner/sailor_planner/profiles/MODEL/GPU has the file of sizes in Planner


def is_sailor(content: object) -> bool:
    """Return whether the content of a JSON file looks like such a profile: numbers of samples, then of devices."""
    return (
        isinstance(content, dict)
        and bool(content)
        and all(
            samples.isdecimal() and isinstance(devices, dict) and all(map(str.isdecimal, devices))
            for samples, devices in content.items()
        )
    )


def layers_from_sailor(content: object, *, path: Path) -> Layers:
    """Read the layers of a profile, and their sizes from the file beside or above it.

    Args:
        content: the content of the JSON file.
        path: the file, whose folders name model and device.

    Raises:
        ProfileError: if there is no file of sizes, the model was not measured on one device, or something is missing,
            of the wrong type or cannot be.
    """
    file = JsonValue(str(path), content)
    samples = sorted(int(key) for key in file.names() if _ONE_DEVICE in file.at(key).names())
    if not samples or samples[0] < 1:
        raise file.error(
            "no times of one device", f"tensor-parallel degree {_ONE_DEVICE} for some size of micro-batches"
        )
    rows = [file.at(str(count)).at(_ONE_DEVICE) for count in samples]
    names = sorted(rows[-1].names(), key=lambda name: (len(name), name))
    if not names or not all(map(str.isdecimal, names)):
        raise rows[-1].error(f"layers {', '.join(names) or 'none'}", "at least one, each with a number for a name")
    for row in rows:
        if set(row.names()) != set(names):
            raise row.error(f"{len(row.names())} layers", f"the {len(names)} of {samples[-1]} samples")
    sizes = _sizes(path)
    if len(sizes.names()) != len(names):
        raise file.error(f"{len(names)} layers", f"the {len(sizes.names())} of {sizes.path}")
    times = {name: [_times(row.at(name)) for row in rows] for name in names}
    layers = [
        Layer(
            name=f"layer{name}",
            description=f"layer{name}",
            forward_s=tuple(forward for forward, _, _ in times[name]),
            backward_s=tuple(backward for _, backward, _ in times[name]),
            parameter_bytes=round(sizes.at(name).at("params_bytes").number()),
            outputs=_outputs(sizes.at(name), reader=k + 1, last=k + 1 == len(names)),
        )
        for k, name in enumerate(names)
    ]
    update_s = sum(times[name][-1][2] for name in names)
    parameters = sum(layer.parameter_bytes for layer in layers)
    kept = {f"layer{name}": sizes.at(name).at("act_mem_bytes").number() for name in names}
    return with_kept(Layers(tuple(layers), tuple(samples), update_s / parameters if parameters else 0.0), kept)


def _times(place: JsonValue) -> tuple[float, float, float]:
    found = tuple(item.number() for item in place.items())
    if len(found) != 3:
        raise place.error(f"{len(found)} numbers", "three: seconds of forward, backward and update")
    forward, backward, update = found
    return forward, backward, update


def _outputs(sizes: JsonValue, *, reader: int, last: bool) -> tuple[LayerOutput, ...]:
    return (LayerOutput(sizes.at("act_output_bytes").number(), () if last else (reader,)),)


def _sizes(path: Path) -> JsonValue:
    """Return the sizes of the layers of the model on one device."""
    folders = [path.resolve().parent, *path.resolve().parents[1 : 1 + _FOLDERS_ABOVE]]
    found = next((folder / SIZES for folder in folders if (folder / SIZES).is_file()), None)
    model = path.resolve().parent.parent.name
    if found is None:
        raise ProfileError(
            f"{path}: found no {SIZES} in {folders[0]} or above; expected Sailor's file of the sizes of layers there. "
            "Copy it beside the profile."
        )
    file = JsonValue.read(found)
    if model not in file.names():
        raise file.error(
            f"no model {model!r}", f"the name of the folder above {path.parent.name}: {', '.join(file.names())}"
        )
    return file.at(model).at(_ONE_DEVICE)
