"""Workloads of dnn-partitioning (Tarnawski et al., NeurIPS 2020): JSON, with a node for every layer and its backward.

    {"maxSizePerFPGA": 17185374208, "maxFPGAs": 6, "maxCPUs": 1,
     "nodes": [{"id": 1, "name": "node1", "supportedOnFpga": 1, "cpuLatency": 15.0, "fpgaLatency": 1.5,
                "isBackwardNode": 0, "colorClass": 1, "size": 72},
               {"id": 2, "isBackwardNode": 1, "colorClass": 1, ...}, ...],
     "edges": [{"sourceId": 1, "destId": 3, "cost": 3e-8, "size": 64}, ...]}

"FPGA" stands for any accelerator there; layer graphs were measured on a GPU. Read are layer graphs of training, in
which every color class is one forward and one backward node. In graphs of operators many backward nodes share a class
with many forward ones, so no layer could be made of them; workloads of inference have no backward. Both are refused.

    forward, backward = fpgaLatency of the two nodes, in milliseconds
    output            = size of the edges that leave the forward node, or that reach the backward one, in bytes
    parameters        = size of the forward node - output

The format states neither the unit nor the sum. In `resnet50_training.json` and `inceptionv3_training.json` each layer
has the times of PipeDream's profile, from which they come, and as its size its parameters and its output; in these two,
and in those of BERT and GNMT, edges that reach a backward node have the size of what the forward one makes.

Left out: edges between backward nodes otherwise (they repeat those of the forward ones), CPU latencies, `cost` of edges
(seconds over the authors' links), devices and their memory.
"""

from __future__ import annotations

from lightning_pipe.profiles.published_json import JsonValue, edge_outputs
from lightning_pipe.profiles.published_layers import Layer, LayerOutput, Layers, in_order, unique_names

_MILLISECOND = 1e-3
_SLACK = 1.0  # bytes by which sums of sizes are off in published files


def is_dnn_partitioning(content: object) -> bool:
    """Return whether the content of a JSON file looks like such a workload."""
    nodes = content.get("nodes") if isinstance(content, dict) else None
    return isinstance(nodes, list) and any(isinstance(node, dict) and "fpgaLatency" in node for node in nodes)


def layers_from_dnn_partitioning(content: object, *, samples: int, source: str) -> Layers:
    """Read the layers of a workload.

    Args:
        content: the content of the JSON file.
        samples: samples of the batch that the file was measured with.
        source: name of the file in errors.

    Raises:
        ProfileError: if it is no layer graph of training, or something is missing, of the wrong type or cannot be.
    """
    file = JsonValue(source, content)
    nodes = file.at("nodes").items()
    is_backward = {node.at("id").count(): _is_backward(node) for node in nodes}
    if len(is_backward) != len(nodes):
        raise file.at("nodes").error("an id twice", "every node once")
    pairs = _pairs(nodes, file)
    position = {forward.at("id").count(): k for k, (forward, _) in enumerate(pairs)}
    all_edges = file.at("edges").items()
    edges = [edge for edge in all_edges if not is_backward.get(edge.at("sourceId").count(), False)]
    reached = {edge.at("destId").count(): edge for edge in all_edges}
    outputs = edge_outputs(edges, position, size="size", samples=samples)
    names = [_name(forward) for forward, _ in pairs]
    layers = [
        _layer(
            forward,
            backward,
            name=name,
            outputs=outputs[k],
            made=samples * sum(output.bytes_per_sample for output in outputs[k])
            or _size(reached.get(backward.at("id").count())),
        )
        for k, ((forward, backward), name) in enumerate(zip(pairs, unique_names(names), strict=True))
    ]
    return Layers(in_order(layers, source=source), (samples,))


def _is_backward(node: JsonValue) -> bool:
    return "isBackwardNode" in node.names() and node.at("isBackwardNode").flag()


def _name(node: JsonValue) -> str:
    return node.at("name").text() if "name" in node.names() else f"node{node.at('id').count()}"


def _pairs(nodes: list[JsonValue], file: JsonValue) -> list[tuple[JsonValue, JsonValue]]:
    """Return the forward and the backward node of every color class, in the order of the forward ones."""
    if not any(map(_is_backward, nodes)):
        raise file.at("nodes").error(
            "no backward node, so a workload of inference", "one of training, such as resnet50_training.json"
        )
    backwards: dict[int, list[JsonValue]] = {}
    forwards: dict[int, list[JsonValue]] = {}
    for node in nodes:
        (backwards if _is_backward(node) else forwards).setdefault(node.at("colorClass").count(), []).append(node)
    for color in {**forwards, **backwards}:
        counts = len(forwards.get(color, ())), len(backwards.get(color, ()))
        if counts != (1, 1):
            raise file.at("nodes").error(
                f"{counts[0]} forward and {counts[1]} backward nodes of color class {color}, so a graph of operators",
                "a graph of layers, where each class has one forward and one backward node",
            )
    return [(forward, backwards[color][0]) for color, (forward,) in forwards.items()]


def _size(edge: JsonValue | None) -> float:
    return 0.0 if edge is None else edge.at("size").number()


def _layer(
    forward: JsonValue, backward: JsonValue, *, name: str, outputs: tuple[LayerOutput, ...], made: float
) -> Layer:
    """Return the layer of a pair of nodes that makes so many bytes."""
    for node in (forward, backward):
        if not node.at("supportedOnFpga").flag():
            raise node.error("a node that no accelerator runs", "nodes that accelerators run")
    forward_s, backward_s = (node.at("fpgaLatency").number() * _MILLISECOND for node in (forward, backward))
    size = forward.at("size")
    parameters = size.number() - made
    if parameters < -_SLACK:
        raise size.error(f"{size.number():g}", f"at least the {made:g} bytes of the node's output")
    return Layer(
        name=name,
        description=_name(forward),
        forward_s=(forward_s,),
        backward_s=(backward_s,),
        parameter_bytes=max(0, round(parameters)),
        outputs=outputs,
    )
