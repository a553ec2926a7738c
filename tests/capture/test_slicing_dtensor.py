"""A second opinion: how torch's DTensor places what the rules of slicing cut, on a mesh of a rank for every sample."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from capture.test_slicing import ENTRIES, SAMPLES, traced
from lightning_pipe.capture.slicing.placement import LOCAL, TERMS, WHOLE, Rows
from lightning_pipe.capture.slicing.slicing import Slicing

OTHER_OPINIONS = {
    "clone": "it adds terms before they are copied",
    "add": "it adds terms before a number is added, which is a term of the first micro-batch here",
    "sub": "the same",
    "cat": "it puts rows together that lie behind each other",
    "index": "its strategy does not take an index without a tensor",
    "_native_batch_norm_legit_functional": "statistics are those of a micro-batch here",
    "_native_batch_norm_legit_no_training": "the same",
    "native_batch_norm_backward": "the same",
}


class NotPlacedError(Exception):
    """A placement that DTensor has not."""


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=SAMPLES, store=FakeStore())
    yield init_device_mesh("cpu", (SAMPLES,))
    dist.destroy_process_group()


def placed(held: Any) -> Placement:
    """Return the placement of DTensor.

    Raises:
        NotPlacedError: if it has none.
    """
    if isinstance(held, Rows) and held.outer == 1:
        return Shard(held.dim)
    if held is TERMS or held is WHOLE:
        return Partial() if held is TERMS else Replicate()
    raise NotPlacedError


def agrees(result: Any, other: Placement | None) -> bool:
    """Return whether a result is held as DTensor places it; a mean is a sum of terms for unequal micro-batches."""
    if other is None or result is LOCAL:
        return True
    if isinstance(result, Rows) and result.outer > 1:
        return repr(other) == f"_StridedShard(dim={result.dim}, sf={result.outer})"
    return other in (placed(result), Partial("avg") if result is TERMS else None)


def placements(schema: OpSchema) -> list[Any]:
    """List the placements of operands."""
    operands = tree_leaves((schema.args_schema, schema.kwargs_schema), is_leaf=lambda x: isinstance(x, DTensorSpec))
    return [operand.placements for operand in operands if isinstance(operand, DTensorSpec)]


def opinion(mesh: DeviceMesh, slicing: Slicing, node: fx.Node) -> str:
    """Return "" if DTensor cuts a node alike, or has no strategy for it; else what it does."""
    operation, cut = slicing.operations[node], slicing.cuts[node]

    def spec(source: fx.Node) -> DTensorSpec:
        value = source.meta["val"]
        form = TensorMeta(value.shape, value.stride(), value.dtype)
        return DTensorSpec(mesh, (placed(cut.operands[source]),), tensor_meta=form)

    try:
        schema = OpSchema(
            node.target,  # type: ignore[arg-type]
            fx.map_arg(tuple(operation.args), spec),  # type: ignore[arg-type]
            fx.map_arg(operation.kwargs, spec),  # type: ignore[arg-type]
        )
        out = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding_non_cached(schema)
    except (NotPlacedError, NotImplementedError):
        return ""
    except Exception as error:  # of a strategy
        return str(error)
    other = out.redistribute_schema if out.needs_redistribute else None
    if other is not None and placements(other) != placements(schema):
        return f"wants {placements(other)}, was offered {placements(schema)}"
    results = cut.results if isinstance(cut.results, tuple) else (cut.results,)
    specs = out.output_spec if isinstance(out.output_spec, tuple | list) else [out.output_spec]
    pairs = [(r, None if s is None else s.placements[0]) for r, s in zip(results, specs, strict=False)]
    return "" if all(agrees(*pair) for pair in pairs) else f"{pairs}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ENTRIES)
def test_dtensor_agrees_wherever_it_has_a_strategy(name: str, mesh: DeviceMesh) -> None:
    """But for a list of operators, with the reasons."""
    torch.set_default_dtype(torch.float64)
    slicing = Slicing(traced(name)[0], SAMPLES)
    made = [node for node in slicing.operations if slicing.makes(node)]
    found = {(slicing.operations[node].name, text) for node in made if (text := opinion(mesh, slicing, node))}
    torch.set_default_dtype(torch.float32)
    assert {(operator, text) for operator, text in found if operator not in OTHER_OPINIONS} == set()
