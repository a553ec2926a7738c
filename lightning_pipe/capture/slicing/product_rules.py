"""Rules of products, norms, convolutions, windows and attention."""

from __future__ import annotations

from torch import fx

from lightning_pipe.capture.slicing.operation import BatchOperation, Label, Labels, Offered, Pattern, SampleCut
from lightning_pipe.capture.slicing.placement import LOCAL, Kind, Rows
from lightning_pipe.capture.slicing.rules import labels_of, pattern, rule

_PRODUCTS = {
    "mm": ("mk", "kn", "mn"),
    "bmm": ("bmk", "bkn", "bmn"),
    "mv": ("mk", "k", "m"),
    "dot": ("k", "k", ""),
    "vdot": ("k", "k", ""),
    "addmm": ("mk", "kn", "mn"),
    "baddbmm": ("bmk", "bkn", "bmn"),
    "addmv": ("mk", "k", "m"),
}


@pattern(*_PRODUCTS)
def products(operation: BatchOperation) -> Pattern:
    """Contract rows to terms; what a product is added to becomes a term, too."""
    left_labels, right_labels, result = _PRODUCTS[operation.name]
    *added, left, right = operation.args[: 3 if "add" in operation.name else 2]
    operands: list[tuple[fx.Node, Labels]] = [(left, left_labels), (right, right_labels)]
    for node in added:
        shape = operation.shape_of(node)
        operands.append((node, result[len(result) - len(shape) :]))
    return Pattern(operands, [result], sums=True, added=added)


@pattern("_cdist_forward")
def distances(operation: BatchOperation) -> Pattern | None:
    """Give every row of one operand its distance from every row of the other."""
    left, right = operation.args[:2]
    rank = len(operation.shape)
    if {len(operation.shape_of(left)), len(operation.shape_of(right))} != {rank}:
        return None
    lead = labels_of(rank - 2)
    return Pattern([(left, [*lead, "m", None]), (right, [*lead, "n", None])], [[*lead, "m", "n"]])


_WINDOWS = (
    "max_pool2d_with_indices max_pool3d_with_indices avg_pool1d avg_pool2d avg_pool3d max_pool1d adaptive_max_pool2d "
    "_adaptive_avg_pool2d adaptive_avg_pool2d _adaptive_avg_pool3d upsample_nearest1d upsample_nearest2d "
    "upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d reflection_pad1d "
    "reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d im2col col2im "
    "grid_sampler_2d pixel_shuffle pixel_unshuffle channel_shuffle"
).split()
_HAVE_ROWS = "input self x grad_output grad_out indices grid".split()


def _first_dim(operation: BatchOperation, node: fx.Node) -> list[Label]:
    return ["n", *[None] * (len(operation.shape_of(node)) - 1)]


def _tensors(operation: BatchOperation, names: list[str]) -> list[fx.Node]:
    arguments = (operation.argument(name) for name in names if operation.has(name))
    return [argument for argument in arguments if isinstance(argument, fx.Node)]


def _results(operation: BatchOperation, labels: Labels) -> list[Labels]:
    """Label the first dimension of every result like that of the first."""
    return [[*labels[:1], *[None] * (len(shape or ()) - 1)] if shape else [] for shape in operation.shapes]


@pattern(*_WINDOWS, *(f"{name}_backward" for name in _WINDOWS))
def windows(operation: BatchOperation) -> Pattern:
    """Let elements of a sample meet; samples lie in the first dimension."""
    operands = [(node, _first_dim(operation, node)) for node in _tensors(operation, _HAVE_ROWS)]
    arguments = None
    name = next((name for name in ("input_size", "self_size") if operation.has(name)), "")
    if name and isinstance(operation.argument(name), list | tuple):  # backward of upsampling: the shape of the result
        sizes = operation.argument(name)

        def arguments(rows: Rows):  # type: ignore[no-untyped-def]
            return lambda samples: {name: [rows.size(samples), *sizes[1:]]}

    return Pattern(operands, _results(operation, "n"), arguments=arguments)


@pattern("convolution", "convolution_backward")
def convolutions(operation: BatchOperation) -> Pattern:
    """Let elements of a sample meet with a kernel; its gradients are sums over samples."""
    operands = [(node, _first_dim(operation, node)) for node in _tensors(operation, ["grad_output", "input"])]
    return Pattern(operands, [_first_dim_of(operation.shapes[0]), [], []][: len(operation.shapes)], sums=True)


def _first_dim_of(shape: tuple[int, ...] | None) -> Labels:
    return ["n", *[None] * (len(shape) - 1)] if shape else []


@pattern("native_layer_norm", "_fused_rms_norm", "native_layer_norm_backward", "_fused_rms_norm_backward")
def layer_norms(operation: BatchOperation) -> Pattern:
    """Let elements meet in the last dimensions; gradients of scale and shift are sums over all others."""
    rank = len(operation.shape_of(operation.argument("input")))  # a result may not be wanted
    last = len(operation.argument("normalized_shape"))
    labels = labels_of(rank, without=range(rank - last, rank))
    names = ["grad_out", "input", "mean", "rstd"]
    operands = [(node, labels) for node in _tensors(operation, names)]
    is_back = operation.name.endswith("backward")
    results: list[Labels] = [labels] * len(operation.shapes)
    return Pattern(operands, [labels, [], []][: len(results)] if is_back else results, sums=is_back)


@pattern("native_group_norm", "native_group_norm_backward")
def group_norms(operation: BatchOperation) -> Pattern:
    """Let elements of a sample meet; gradients of scale and shift are sums over samples."""
    names = ["grad_out", "input", "mean", "rstd"]
    operands = [(node, _first_dim(operation, node)) for node in _tensors(operation, names)]
    is_back = operation.name.endswith("backward")
    results = [_first_dim_of(operation.shapes[0]), [], []] if is_back else _results(operation, "n")
    return Pattern(operands, results, sums=is_back, arguments=lambda rows: lambda samples: {"N": rows.size(samples)})


@rule(
    *"native_batch_norm _native_batch_norm_legit_functional _native_batch_norm_legit cudnn_batch_norm "
    "_native_batch_norm_legit_no_training".split()
)
def batch_norms(operation: BatchOperation, offered: Offered) -> SampleCut | None:
    """Take the statistics of a micro-batch: the exception. Where channels are rows (an instance norm) nothing meets."""
    source, rank = operation.args[0], len(operation.shape)
    vectors = [node for node in operation.inputs if node is not source]
    by_channel: list[Label] = [None, "c", *[None] * (rank - 2)]
    channels = Pattern(
        [(source, by_channel), *((node, "c") for node in vectors)],
        [by_channel, *["c"] * (len(operation.shapes) - 1)],
    ).cut(operation, offered)
    statistics: list[Labels | Kind] = [LOCAL] * (len(operation.shapes) - 1)
    samples = Pattern([(source, _first_dim(operation, source))], [_first_dim(operation, source), *statistics])
    return channels or samples.cut(operation, offered)


@rule("native_batch_norm_backward", "cudnn_batch_norm_backward")
def batch_norms_backward(operation: BatchOperation, offered: Offered) -> SampleCut | None:
    """Differentiate with the statistics that the forward took."""
    sources = _tensors(operation, ["grad_out", "grad_output", "input"])
    rank = len(operation.shape_of(sources[0]))
    vectors = [node for node in operation.inputs if node not in sources]
    by_channel: list[Label] = [None, "c", *[None] * (rank - 2)]
    channels = Pattern(
        [*((node, by_channel) for node in sources), *((node, "c") for node in vectors)], [by_channel, "c", "c"]
    ).cut(operation, offered)
    local = [node for node in vectors if offered[node] is LOCAL]
    if channels is None and not local and operation.argument("train", True):
        return None  # the statistics are those of all samples
    first = _first_dim(operation, sources[0])
    samples = Pattern([(node, first) for node in sources], [first, [], []], sums=True, local=local)
    return channels or samples.cut(operation, offered)


_ATTENTION = [f"_scaled_dot_product_{kind}" for kind in ("flash_attention_for_cpu", "flash_attention")]
_ATTENTION += [f"_scaled_dot_product_{kind}_attention" for kind in ("efficient", "cudnn")]


@pattern(*_ATTENTION, *(f"{name}_backward" for name in _ATTENTION))
def attention(operation: BatchOperation) -> Pattern:
    """Let queries and keys of a sample and a head meet. The state of random numbers is the micro-batch's own."""
    rows = _tensors(operation, ["grad_out", "query", "key", "value", "out", "logsumexp"])
    masks = _tensors(operation, ["attn_mask", "attn_bias"])
    operands = [(node, ["b", "h", None, None][: len(operation.shape_of(node))]) for node in rows]
    for mask in masks:
        shape = operation.shape_of(mask)
        operands.append((mask, ["b", "h", None, None][4 - len(shape) :]))
    results: list[Labels | Kind] = [
        ["b", "h", None, None][: len(shape)] if shape and len(shape) > 2 else LOCAL for shape in operation.shapes
    ]
    local = [node for node in operation.inputs if node not in (*rows, *masks)]
    return Pattern(operands, results, local=local)
