"""Piper profiles (Tarnawski et al., NeurIPS 2021): JSON, with variants of every layer.

    {"nodes": [{"id": 0, "name": "Embedding", "TMPCs": {"1": [{"id": "vanilla", "timePerSample": 0.001,
      "parameterSize": 8, "memoryUsageA": 64, "memoryUsageB": 16, ...}, {"id": "activation recomp", ...}], "2": ...}}],
     "edges": [{"sourceId": 0, "destId": 1, "communicationCost": 32}], ...}

`TMPCs` has a list of variants for every number of tensor-parallel devices; `vanilla` on one device is taken. Bytes are
those of one micro-batch; `memoryUsageA` is all that a layer keeps for every micro-batch in flight. So a stage keeps the
sum of its layers' (their equation of memory) up to what crosses its borders (`published_layers.with_kept`).

    forward  = time with recomputation - time without, since recomputation runs forward once more
    backward = time without recomputation - forward

checked against PipeDream's profiles, from which `gnmt.json` and `resnet.json` were made, where it gives their times.
The file does not state a unit: layers called `node4` come from PipeDream's files, in milliseconds; others are seconds.
An edge's cost is believed even where edges of one layer differ (`bert32a100.json` gives a mask of 16 MiB and a hidden
state of 30 MiB each other's size from the second layer on): what differs in cost is a tensor of its own.

Left out: tensor-parallel variants and their messages; memory with recomputation; `memoryUsageB`, twice the parameters
in all plain variants, since costs count parameters, gradients and optimizer themselves; devices and bandwidth; that
the first layer of `resnet.json` is the loading of data.
"""

from __future__ import annotations

import re

from lightning_pipe.profiles.published_json import JsonValue, edge_outputs
from lightning_pipe.profiles.published_layers import Layer, LayerOutput, Layers, in_order, unique_names, with_kept

_PLAIN, _RECOMPUTING, _ONE_DEVICE = "vanilla", "activation recomp", "1"
_MILLISECOND, _SECOND = 1e-3, 1.0
_DECIMALS = 9  # more than files state, so that beyond is what a subtraction has rounded


def is_piper(content: object) -> bool:
    """Return whether the content of a JSON file looks like such a profile."""
    return isinstance(content, dict) and "nodes" in content and "edges" in content


def layers_from_piper(content: object, *, samples: int, source: str) -> Layers:
    """Read the layers of a profile.

    Args:
        content: the content of the JSON file.
        samples: samples of the micro-batch that the file was measured with.
        source: name of the file in errors.

    Raises:
        ProfileError: if something is missing, of the wrong type or cannot be.
    """
    file = JsonValue(source, content)
    nodes, edges = file.at("nodes").items(), file.at("edges").items()
    names = [node.at("name").text() for node in nodes]
    position = {node.at("id").count(): k for k, node in enumerate(nodes)}
    if len(position) != len(nodes):
        raise file.at("nodes").error("an id twice", "every node once")
    is_pipedream = all(re.fullmatch(r"node\d+", name) for name in names)
    unit_s = _MILLISECOND if is_pipedream else _SECOND
    outputs = edge_outputs(edges, position, size="communicationCost", samples=samples)
    unique = unique_names(names)
    layers = [
        _layer(node, name=name, description=description, outputs=outputs[k], unit_s=unit_s)
        for k, (node, name, description) in enumerate(zip(nodes, unique, names, strict=True))
    ]
    if not layers:
        raise file.at("nodes").error("no nodes", "at least one")
    kept = {
        name: _variant(node, _PLAIN).at("memoryUsageA").number() / samples
        for node, name in zip(nodes, unique, strict=True)
    }
    return with_kept(Layers(in_order(layers, source=source), (samples,)), kept)


def _layer(node: JsonValue, *, name: str, description: str, outputs: tuple[LayerOutput, ...], unit_s: float) -> Layer:
    plain, recomputing = _variant(node, _PLAIN), _variant(node, _RECOMPUTING)
    both, again = plain.at("timePerSample"), recomputing.at("timePerSample")
    forward = round(again.number() - both.number(), _DECIMALS)
    backward = round(both.number() - forward, _DECIMALS)
    if forward < 0 or backward < 0:
        raise again.error(f"{again.number():g}", f"from once to twice the {both.number():g} without recomputation")
    return Layer(
        name=name,
        description=description,
        forward_s=(forward * unit_s,),
        backward_s=(backward * unit_s,),
        parameter_bytes=round(plain.at("parameterSize").number()),
        outputs=outputs,
    )


def _variant(node: JsonValue, kind: str) -> JsonValue:
    variants = node.at("TMPCs").at(_ONE_DEVICE)
    found = {variant.at("id").text(): variant for variant in variants.items()}
    if kind not in found:
        raise variants.error(f"variants {', '.join(found) or 'none'}", f"{kind!r} among them")
    return found[kind]
