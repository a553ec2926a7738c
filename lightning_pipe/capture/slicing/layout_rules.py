"""Rules of operators that work element by element, reduce dimensions, or put elements elsewhere."""

from __future__ import annotations

import math
from dataclasses import replace

from torch import fx

from lightning_pipe.capture.slicing.operation import BatchOperation, Label, Offered, Pattern, SampleCut
from lightning_pipe.capture.slicing.placement import TERMS, Rows
from lightning_pipe.capture.slicing.rules import RULES, aligned, labels_of, pattern, resized, rule


@pattern(
    *"_to_copy clone alias detach native_dropout native_dropout_backward copy lift_fresh_copy where bernoulli "
    "rand_like randn_like nan_to_num threshold_backward log_sigmoid_forward log_sigmoid_backward polygamma lerp "
    "softplus_backward elu_backward leaky_relu_backward hardtanh_backward hardswish_backward hardsigmoid_backward "
    "softshrink_backward rrelu_with_noise_backward _prelu_kernel _prelu_kernel_backward".split()
)
def by_element(operation: BatchOperation) -> Pattern:
    """Line operands up by broadcasting."""
    rank = max((len(shape) for shape in operation.shapes if shape is not None), default=0)
    results = [labels_of(rank)] * len(operation.shapes)
    return Pattern(aligned(operation, operation.inputs, rank), results)


@rule(
    *"sum mean amax amin prod any all argmax argmin logsumexp var std norm linalg_vector_norm max min count_nonzero "
    "var_mean std_mean median kthvalue mode nansum".split()
)
def reduces(operation: BatchOperation, offered: Offered) -> SampleCut | None:
    """Keep what is reduced in other dimensions; add the terms of sums and means over samples."""
    source = operation.args[0]
    if len(operation.inputs) > 1:
        return RULES["clone"](operation, offered)
    rank, dims = len(operation.shape_of(source)), operation.dims()
    reduced = labels_of(rank, without=dims)
    if not operation.argument("keepdim", False):
        reduced = [label for label in reduced if label is not None]
    sums = operation.name in ("sum", "mean", "nansum")
    results = [reduced] * len(operation.shapes)
    cut = Pattern([(source, labels_of(rank))], results, sums=sums).cut(operation, offered)
    if cut is None or cut.results is not TERMS or operation.name != "mean":
        return cut
    count = math.prod(operation.shape_of(source)) // max(1, math.prod(operation.shape))
    return replace(cut, divisor=count, summed=True)


@pattern(
    *"_softmax _log_softmax _safe_softmax _softmax_backward_data _log_softmax_backward_data cumsum cumprod "
    "logcumsumexp sort topk argsort cummax cummin glu glu_backward _fft_c2c _fft_r2c _fft_c2r".split()
)
def along(operation: BatchOperation) -> Pattern:
    """Let elements meet along the dimensions that are listed."""
    rank, dims = len(operation.shape_of(operation.args[0])), operation.dims()
    results = [labels_of(rank, without=dims)] * len(operation.shapes)
    return Pattern(aligned(operation, operation.inputs, rank, without=dims), results)


@pattern("flip", "roll")
def turns(operation: BatchOperation) -> Pattern:
    """Let elements change places along the dimensions that are listed."""
    rank = len(operation.shape)
    labels = labels_of(rank, without=operation.dims("dims"))
    return Pattern([(operation.args[0], labels)], [labels])


@rule("view", "_unsafe_view", "reshape")
def views(operation: BatchOperation, offered: Offered) -> SampleCut | None:
    """Find the samples in another shape, by the row-major order of elements."""
    source, samples, shape = operation.args[0], operation.samples, operation.shape
    rows = offered[source]
    assert isinstance(rows, Rows)
    blocks = math.prod(operation.shape_of(source)[: rows.dim]) * rows.outer  # that all samples follow each other
    for dim in reversed(range(len(shape))):
        outside, size = math.prod(shape[:dim]), shape[dim]
        if outside and size and blocks % outside == 0 and size % (blocks // outside * samples) == 0:
            outer = blocks // outside
            placed = Rows(dim, outer, shape[dim] // (outer * samples))
            name = "shape" if operation.name == "reshape" else "size"
            return SampleCut(placed, {source: rows}, resized(operation, name)(placed))
    return None


@pattern("expand")
def expands(operation: BatchOperation) -> Pattern:
    """Add dimensions in front."""
    rank = len(operation.shape)
    sources = aligned(operation, [operation.args[0]], rank)
    return Pattern(sources, [labels_of(rank)], arguments=resized(operation, "size"))


@pattern("unsqueeze", "squeeze", "permute", "transpose", "t", "select", "diagonal", "unbind", "movedim")
def moves(operation: BatchOperation) -> Pattern | None:
    """Give dimensions other places."""
    source = operation.args[0]
    rank = len(operation.shape_of(source))
    labels = labels_of(rank)
    moved = _moved(operation, labels)
    return None if moved is None else Pattern([(source, labels)], [moved] * len(operation.shapes))


def _moved(operation: BatchOperation, labels: list[Label]) -> list[Label] | None:
    """Return the labels of the result, and take those of dimensions in which elements meet away."""
    shape, rank = operation.shape_of(operation.args[0]), len(labels)
    match operation.name:
        case "unsqueeze":
            at = operation.args[1] % (rank + 1)
            return [*labels[:at], None, *labels[at:]]
        case "squeeze":
            dims = operation.dims() if len(operation.args) > 1 else range(rank)
            return [label for dim, label in enumerate(labels) if dim not in dims or shape[dim] != 1]
        case "permute":
            return [labels[dim] for dim in operation.dims("dims")]
        case "transpose" | "t":
            first, second = (0, rank - 1) if operation.name == "t" else (d % max(rank, 1) for d in operation.args[1:3])
            order = [{first: second, second: first}.get(dim, dim) for dim in range(rank)]
            return [labels[dim] for dim in order]
        case "select" | "unbind":
            at = operation.argument("dim", 0) % rank
            labels[at] = None
            return [*labels[:at], *labels[at + 1 :]]
        case "diagonal":
            first, second = operation.argument("dim1", 0) % rank, operation.argument("dim2", 1) % rank
            labels[first] = labels[second] = None
            return [label for dim, label in enumerate(labels) if dim not in (first, second)] + [None]
    return None


def _blocks(operation: BatchOperation, rows: Rows, size: int) -> tuple[int, int] | None:
    """Return start and end of a slice of a dimension of `size` elements, if it takes whole blocks of samples."""
    block = operation.samples * rows.per_sample
    start, end = operation.argument("start") or 0, operation.argument("end")
    end = size if end is None else min(end, size)
    start, end = start + size * (start < 0), end + size * (end < 0)
    if (operation.argument("step") or 1) != 1 or start % block or end % block or end <= start:
        return None
    return start // block, end // block


@rule("slice", "slice_backward")
def slices(operation: BatchOperation, offered: Offered) -> SampleCut | None:
    """Cut other dimensions, or whole blocks of samples."""
    source, is_back = operation.args[0], operation.name == "slice_backward"
    rows, rank = offered[source], len(operation.shape)
    assert isinstance(rows, Rows)
    dim = operation.argument("dim", 0) % rank
    if dim != rows.dim or operation.shape_of(source) == operation.shape:
        arguments = resized(operation, "input_sizes") if is_back else None
        return Pattern([(source, labels_of(rank))], [labels_of(rank)], arguments=arguments).cut(operation, offered)
    size = operation.shape[dim] if is_back else operation.shape_of(source)[dim]
    between = _blocks(operation, rows, size)
    if between is None or size % (operation.samples * rows.per_sample):
        return None
    start, end = between
    outer = size // (operation.samples * rows.per_sample) if is_back else end - start
    placed = replace(rows, outer=outer)

    def arguments_of(samples: int) -> dict[str, object]:
        block = samples * rows.per_sample
        shape = resized(operation, "input_sizes")(placed)(samples) if is_back else {}
        return {"start": start * block, "end": end * block, **shape}

    return SampleCut(placed, {source: rows}, arguments_of)


@rule("split", "split_with_sizes", "unsafe_split")
def splits(operation: BatchOperation, offered: Offered) -> SampleCut | None:
    """Split other dimensions, or between blocks of samples."""
    source, sizes = operation.args[:2]
    rows, rank = offered[source], len(operation.shape_of(source))
    assert isinstance(rows, Rows)
    dim = operation.argument("dim", 0) % rank
    if dim != rows.dim:
        return Pattern([(source, labels_of(rank))], [labels_of(rank)] * len(operation.shapes)).cut(operation, offered)
    block, total = operation.samples * rows.per_sample, operation.samples
    parts = [shape[dim] for shape in operation.shapes if shape is not None]
    if any(size % block for size in parts):
        return None

    def arguments_of(samples: int) -> dict[str, object]:
        if isinstance(sizes, int):
            return {"split_size": sizes // total * samples}
        return {"split_sizes": [size // total * samples for size in sizes]}

    return SampleCut(tuple(replace(rows, outer=size // block) for size in parts), {source: rows}, arguments_of)


@rule("cat")
def cats(operation: BatchOperation, offered: Offered) -> SampleCut | None:
    """Line up in another dimension, or blocks of samples behind each other."""
    sources, rank = operation.args[0], len(operation.shape)
    dim = operation.argument("dim", 0) % rank
    rows = next(rows for source in sources if isinstance(rows := offered[source], Rows))
    if rows.dim != dim:
        operands = aligned(operation, sources, rank, without=[dim])
        return Pattern(operands, [labels_of(rank, without=[dim])]).cut(operation, offered)
    block, required = operation.samples * rows.per_sample, dict[fx.Node, Rows]()
    for source in sources:
        size, placement = operation.shape_of(source)[dim], offered[source]
        required[source] = Rows(dim, size // block, rows.per_sample)
        if size % block or (isinstance(placement, Rows) and placement != required[source]):
            return None
    outer = sum(required[source].outer for source in sources)
    return SampleCut(Rows(dim, outer, rows.per_sample), required)


@pattern("stack")
def stacks(operation: BatchOperation) -> Pattern:
    """Line up in a new dimension."""
    rank = len(operation.shape)
    dim = operation.argument("dim", 0) % rank
    labels = labels_of(rank - 1)
    return Pattern([(source, labels) for source in operation.args[0]], [[*labels[:dim], None, *labels[dim:]]])


@rule("repeat")
def repeats(operation: BatchOperation, offered: Offered) -> SampleCut | None:
    """Repeat other dimensions, or all samples."""
    source, counts = operation.args[:2]
    rows = offered[source]
    assert isinstance(rows, Rows)
    dim = rows.dim + len(operation.shape) - len(operation.shape_of(source))
    return SampleCut(Rows(dim, rows.outer * counts[dim], rows.per_sample), {source: rows}) if counts[dim] else None


@pattern("tril", "triu", "constant_pad_nd")
def in_last_dims(operation: BatchOperation) -> Pattern:
    """Let elements meet in the last dimensions."""
    rank = len(operation.shape)
    last = 2 if operation.name.startswith("tri") else len(operation.args[1]) // 2
    labels = labels_of(rank, without=range(rank - last, rank))
    return Pattern([(operation.args[0], labels)], [labels])


@pattern("select_backward")
def select_backward(operation: BatchOperation) -> Pattern:
    """Put a slice back where it was taken from."""
    rank = len(operation.shape)
    dim, labels = operation.argument("dim") % rank, labels_of(rank - 1)
    result = [*labels[:dim], None, *labels[dim:]]
    return Pattern([(operation.args[0], labels)], [result], arguments=resized(operation, "input_sizes"))


@pattern("unfold")
def unfolds(operation: BatchOperation) -> Pattern:
    """Lay windows along a dimension into a new last one."""
    rank = len(operation.shape) - 1
    dim = operation.argument("dimension") % rank
    labels = labels_of(rank, without=[dim])
    return Pattern([(operation.args[0], labels)], [[*labels, None]])


@pattern("unfold_backward")
def unfold_backward(operation: BatchOperation) -> Pattern:
    """Add windows up where they were taken from."""
    rank = len(operation.shape)
    labels = labels_of(rank, without=[operation.argument("dim") % rank])
    return Pattern([(operation.args[0], [*labels, None])], [labels], arguments=resized(operation, "input_sizes"))


@pattern("slice_scatter", "select_scatter")
def scatters_into(operation: BatchOperation) -> Pattern:
    """Write into a slice of a dimension."""
    rank, (target, source) = len(operation.shape), operation.args[:2]
    dim = operation.argument("dim", 0) % rank
    is_all = operation.shape_of(source) == operation.shape
    labels = labels_of(rank, without=[] if is_all else [dim])
    moved = [*labels[:dim], *labels[dim + 1 :]] if operation.name == "select_scatter" else labels
    return Pattern([(target, labels), (source, moved)], [labels])
