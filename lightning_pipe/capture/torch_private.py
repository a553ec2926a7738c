"""Private and undocumented names of torch that this package uses. All of them are here, and only here.

`tests/capture/test_torch_private.py` holds one contract per name (checked on torch 2.11, 2.13 and 2.15):

* `aot_export_joint_with_descriptors`: forward and backward of a module as one ATen graph, inputs and outputs described.
* descriptors (`ParamAOTInput`, ...): what each input and output of that graph is.
* `FunctionalTensor`: what tensors are while a joint graph is traced; `SymNode`, `_get_dispatch_mode` and
  `disable_proxy_modes_tracing`: the arithmetic of symbolic sizes, and whether a graph is made of it.
* `FakeTensorMode`, `ShapeEnv`, `StatelessSymbolicContext`: tensors without data, symbolic sizes; `SymNode._expr` is the
  symbol that a size was made with, `ConstantSource` what it is named after, `ShapeEnv.create_symintnode` a size of an
  expression; `enable_python_dispatcher` lets every operator take symbolic sizes.
* `FakeTensorMode.cache_clear`, caches of the methods of `ShapeEnv`, `graph_module._loader`: what tracing remembers for
  the whole process, of symbolic sizes and sources that no later trace has.
* `_reparametrize_module`: swap parameters by fake ones for the duration of a trace.
* `_LazyGraphModule`: a graph in a module, which becomes code when it is called, and not before.
* `fx.traceback`: carry the user's line and module to the nodes of the graph (`meta["custom"]`).
* `meta["partitioner_tag"]`, `meta["seq_nr"]`: which nodes are backward, and of which forward operation.
* `OpOverload` with `_opname` and `_schema`: name and arguments of an operator, and which of them its result is a view
  of; `_is_functional_tensor`.
* `ParameterDict._key_to_attr`, `ParameterList._get_abs_string_index`: where these keep a parameter.
* `OpOverload.py_kernels`: Python decompositions of recurrent layers, removed while tracing because they drop
  inter-layer dropout (torch 2.13 `_rnn_helper`).
* `_get_current_function_mode`: the function mode that was entered last.
* `is_functorch_wrapped_tensor`: tensors inside `torch.vmap` have no memory of their own.
* `OptimizedModule`, `Module._compiled_call_impl`: what `torch.compile` leaves on a module, and what a call of a module
  does instead of `Module._call_impl` if it is there.
* `OpOverload.py_kernels`, `_dispatch_cache`: what a tracer runs in the place of an operator; `decomposition_table`: of
  which operations operators are made.
* `_compiling_state_context`: `torch.compiler.is_compiling()` is true while tracing, as under torch.compile.
* `torch._inductor.compile`: kernels for a graph of ATen operators; `tracing`, `TracingContext`: with the symbols that
  its cache on disk asks for.
* `checkpoint._checkpoint_without_reentrant_generator`, `CheckpointFunction`: what `torch.utils.checkpoint.checkpoint`
  looks up when it is called.
* `profile.kineto_results`: every allocation and release on the host, of which public events tell sums per operation.
* `torch._assert_async`, `torch._assert`: assertions on values, when a device comes to them or at once.
* `TorchDispatchMode`: see every operation that runs, whoever calls it; `_schema` says which arguments it writes to.
* `_top_saved_tensors_default_hooks`: whether somebody (a checkpoint) decides what autograd keeps.
* `grad_mode._unsafe_preserve_version_counter`: write to a tensor that autograd has saved.
* `Tensor._version`: counts how often a tensor was written to.
* `autograd.function.BackwardCFunction`: a node of the graph of autograd that is Python.
* `torch._C.DisableTorchFunctionSubclass`: run torch functions on subclasses of tensors as on plain ones;
  `torch._C.DisableTorchFunction`: and without modes that answer them.
* `torch._C._swap_tensor_impl`: give the object of a tensor another tensor to be.
* `Tensor._backward_hooks`, `Tensor._post_accumulate_grad_hooks`: the hooks on the gradient of a parameter.
* `torch.nn.modules.module._has_any_global_hook`: whether hooks run with every module.
* `Module._backward_hooks`, `Module._backward_pre_hooks`, `_global_backward_hooks`, `_global_backward_pre_hooks`: the
  hooks on the backward of modules.
* `distributed_c10d._rank_not_in_group`, `_functional_collectives._resolve_group` (in torch 2.11
  `_resolve_group_name`): what every collective asks first.
* `distributed_c10d._get_default_group`: what `get_rank` and `get_world_size` ask.
* `distributed_c10d._WorldMeta.WORLD`: what `is_initialized` asks.
* `GradScaler._per_optimizer_states`: whether gradients of an optimizer were finite; `_scale`, `_growth_tracker`,
  `_init_scale`, `_init_growth_tracker`, `_lazy_init_scale_growth_tracker`: on which device the scale is kept;
  `Optimizer._step_supports_amp_scaling`: whether an optimizer looks itself.
* `Optimizer._optimizer_step_pre_hooks`, `_optimizer_step_post_hooks`, `_global_optimizer_pre_hooks`,
  `_global_optimizer_post_hooks`: who is told of steps; `_wrapped_by_lr_sched`: what learning rate schedulers put around
  `step`, to count.
* `_foreach_norm`: the norms of several tensors, as `torch.nn.utils.get_total_norm` finds them; `_foreach_copy_`: copies
  of several tensors as few launches.
* `Tensor._make_subclass`: a tensor of a subclass, made past all modes.
* `torch._C._storage_Use_Count`: how many tensors and others refer to memory.
* `torch._C._cuda_endAllocateToPool`, `_cuda_releasePool`: what a CUDA graph that could not be recorded leaves undone.
* `torch.utils._sympy.functions`: the functions of symbolic sizes that sympy does not have.
* `distributed.checkpoint.filesystem._StorageInfo`: where in a directory's files a tensor is.
* `_profiler_enabled`: whether a profiler runs in this thread, which can have one only.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import linecache
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.fx.traceback as fx_traceback
import torch.utils.checkpoint as torch_checkpoint
from torch import nn
from torch._decomp import decomposition_table
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo import OptimizedModule
from torch._dynamo.source import ConstantSource
from torch._export.utils import _compiling_state_context as compiling_state
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed import _functional_collectives, distributed_c10d
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.fx._lazy_graph_module import _LazyGraphModule as HeldGraphModule
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.fx.graph_module import _loader as graph_sources
from torch.nn.utils.stateless import _reparametrize_module as reparametrize
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._sympy import functions as size_functions

__all__ = [
    "SET_MULTITHREADING",
    "SIZE_FUNCTIONS",
    "BufferAOTInput",
    "ConstantSource",
    "DimDynamic",
    "FakeTensor",
    "FakeTensorMode",
    "FunctionalTensor",
    "GradAOTOutput",
    "HeldGraphModule",
    "InputMutationAOTOutput",
    "OpOverload",
    "ParamAOTInput",
    "PlainAOTInput",
    "PlainAOTOutput",
    "ShapeEnv",
    "StatelessSymbolicContext",
    "StorageInfo",
    "TangentAOTInput",
    "TorchDispatchMode",
    "aliased_input",
    "answered_alone",
    "answered_calls",
    "answered_collectives",
    "answered_uninitialized",
    "aot_export_joint_with_descriptors",
    "argument_names",
    "argument_place",
    "as_kind",
    "assert_async",
    "assert_now",
    "checkpoint_only",
    "checkpoints_replaced",
    "compiling_state",
    "copy_each",
    "enable_python_dispatcher",
    "end_allocation",
    "fused_recurrent_kernels",
    "fx_traceback",
    "gradient_hooks",
    "has_backward_hooks",
    "has_hooks_on_saved_tensors",
    "has_no_data",
    "has_storage",
    "inductor",
    "is_backward",
    "is_compiled",
    "is_foreign_backward",
    "is_innermost",
    "is_profiling",
    "is_real",
    "is_step_watched",
    "is_traced",
    "keep_scale_beside_loss",
    "keep_scale_on_host",
    "keeping_version",
    "looks_for_overflow",
    "named_arguments",
    "norms_of_each",
    "numbered_checkpoints",
    "operator_name",
    "own_symbol",
    "parameters_in_new_lists",
    "questions_for_rank_heard",
    "quick_symbols",
    "recorded_events",
    "reparametrize",
    "result_names",
    "set_whether_overflowed",
    "swap_contents",
    "symbolic_grids",
    "tag_nodes",
    "unguarded",
    "whether_overflowed",
    "without_modes",
    "without_overrides",
    "written_by",
]

SET_MULTITHREADING: Any = torch._C._set_multithreading_enabled  # for backwards

_OF_SIZES = (
    "FloorDiv ModularIndexing Where PythonMod Mod CleanDiv CeilToInt FloorToInt CeilDiv IntTrueDiv FloatTrueDiv LShift "
    "RShift IsNonOverlappingAndDenseIndicator TruncToFloat TruncToInt RoundToInt RoundDecimal ToFloat FloatPow "
    "PowByNatural Identity Max Min"
).split()
SIZE_FUNCTIONS: Mapping[str, Any] = {
    name: function
    for name, function in vars(size_functions).items()
    if name in _OF_SIZES or name.startswith("OpaqueUnaryFn_")
}
_RECURRENT = ("lstm.input", "lstm.data", "gru.input", "gru.data", "rnn_tanh.input", "rnn_relu.input")


@contextlib.contextmanager
def fused_recurrent_kernels() -> Iterator[None]:
    """Trace recurrent layers through torch's C++ composites instead of their Python decompositions.

    The decompositions drop the dropout between layers (torch 2.13). mkldnn's fused layer is switched off because it
    returns an undefined workspace outside autograd.
    """
    names = (name.split(".") for name in _RECURRENT)
    operators = [getattr(getattr(torch.ops.aten, packet), overload) for packet, overload in names]
    with _with_python_kernels({op: {} for op in operators}):
        enabled = torch._C._get_mkldnn_enabled()
        torch._C._set_mkldnn_enabled(False)
        try:
            yield
        finally:
            torch._C._set_mkldnn_enabled(enabled)


@contextlib.contextmanager
def symbolic_grids() -> Iterator[None]:
    """Trace `affine_grid` as what it is made of: the derivative that torch has fixes the number of samples."""
    op, key = torch.ops.aten.affine_grid_generator.default, torch._C.DispatchKey
    own = dict.fromkeys((key.AutogradCPU, key.AutogradCUDA, key.AutogradMPS), decomposition_table[op])
    with _with_python_kernels({op: {**op.py_kernels, **own}}):
        yield


@contextlib.contextmanager
def _with_python_kernels(changed: Mapping[Any, Mapping[Any, Any]]) -> Iterator[None]:
    """Give operators these kernels in Python for a while, in the place of those that they have."""
    before = {op: dict(op.py_kernels) for op in changed}

    def give(kernels: Mapping[Any, Mapping[Any, Any]]) -> None:
        for op, own in kernels.items():
            op.py_kernels.clear()
            op.py_kernels.update(own)
            op._dispatch_cache.clear()

    give(changed)
    try:
        yield
    finally:
        give(before)


def tag_nodes(module: str, line: str) -> None:
    """Give the nodes that are traced from now on the user's module and line, and the checkpoint that they are in."""
    custom: dict[str, Any] = {"module": module, "line": line}
    if _CHECKPOINT in fx_traceback.current_meta:
        custom["checkpoint"] = fx_traceback.current_meta[_CHECKPOINT]
    fx_traceback.current_meta["custom"] = custom


_CHECKPOINT = "lightning_pipe checkpoint"  # key of what is known of the nodes that are traced


@contextlib.contextmanager
def numbered_checkpoints(around: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """Trace what `torch.utils.checkpoint.checkpoint` runs once, in nodes with the number of the outermost call.

    Args:
        around: entered around each outermost call.
    """
    numbers = itertools.count()

    @contextlib.contextmanager
    def region() -> Iterator[None]:
        meta, is_outermost = fx_traceback.current_meta, _CHECKPOINT not in fx_traceback.current_meta
        if is_outermost:
            meta[_CHECKPOINT] = next(numbers)
        try:
            with around() if is_outermost else contextlib.nullcontext():
                yield
        finally:
            if is_outermost:
                meta.pop(_CHECKPOINT, None)

    with checkpoints_replaced(region):
        yield


_CHECKPOINT_GENERATOR = next(
    name
    for name in ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")
    if hasattr(torch_checkpoint, name)  # the first in torch 2.15
)


@contextlib.contextmanager
def checkpoints_replaced(
    scene: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    *,
    where: Callable[[], bool] = lambda: False,
) -> Iterator[None]:
    """Let `torch.utils.checkpoint.checkpoint` run what it is given once, within a scene, where `where()` is false.

    What its reentrant form is given without a tensor that requires a gradient has none afterwards, as without us.
    """
    generator, function = getattr(torch_checkpoint, _CHECKPOINT_GENERATOR), torch_checkpoint.CheckpointFunction

    def generate(*args: Any, **kwargs: Any) -> Iterator[None]:
        if where():
            yield from generator(*args, **kwargs)
        else:
            with scene():
                yield

    class Chosen:
        @staticmethod
        def apply(run: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            if where():
                return function.apply(run, preserve, *args)
            is_differentiated = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
            with scene(), contextlib.nullcontext() if is_differentiated else torch.no_grad():
                return run(*args)

    with (
        mock.patch.object(torch_checkpoint, _CHECKPOINT_GENERATOR, generate),
        mock.patch.object(torch_checkpoint, "CheckpointFunction", Chosen),
    ):
        yield


def is_backward(node: torch.fx.Node) -> bool:
    """Return whether a node of a joint graph belongs to the backward."""
    return node.meta.get("partitioner_tag") == "is_backward"


def own_symbol(size: torch.SymInt) -> Any:
    """Return the symbol that a size was made with, whatever has been found to equal it since."""
    return size.node._expr


TORCH_NAMESPACES = frozenset({"aten", "prims"})  # of operators whose derivatives are torch's own


def operator_name(node: torch.fx.Node) -> str:
    """Return the name of a node's operator without namespace and overload, such as `addmm` or `getitem`."""
    target = node.target
    return target._opname if isinstance(target, OpOverload) else str(getattr(target, "__name__", ""))


def result_names(operation: OpOverload) -> list[str]:
    """Return the names of an operator's results, "" where one has none."""
    return [result.name for result in operation._schema.returns]


def argument_names(node: torch.fx.Node) -> list[str]:
    """List the names of the arguments of a node's operator; none for a Python function."""
    return [a.name for a in node.target._schema.arguments] if isinstance(node.target, OpOverload) else []


@functools.cache
def argument_place(operation: OpOverload, names: tuple[str, ...]) -> tuple[int, str, Any] | None:
    """Return place, name and default of the first of these arguments that an operator has, None if it has none."""
    arguments = enumerate(operation._schema.arguments)
    return next(((i, a.name, a.default_value) for i, a in arguments if a.name in names), None)


def argument_defaults(node: torch.fx.Node) -> dict[str, Any]:
    """Return the default values of the arguments of a node's operator, by name; none for a Python function."""
    if not isinstance(node.target, OpOverload):
        return {}
    return {a.name: a.default_value for a in node.target._schema.arguments if a.has_default_value()}


def named_arguments(node: torch.fx.Node) -> dict[str, Any]:
    """Return the arguments of a node's operator by name, those that have their default value too."""
    return {**argument_defaults(node), **dict(zip(argument_names(node), node.args, strict=False)), **node.kwargs}


def aliased_input(node: torch.fx.Node) -> torch.fx.Node | None:
    """Return the input of which a schema calls a node's result a view (or a list of views), None if there is none."""
    if not isinstance(node.target, OpOverload):
        return None
    schema = node.target._schema
    if all(result.alias_info is None for result in schema.returns):
        return None
    viewed = (value for a, value in zip(schema.arguments, node.args, strict=False) if a.alias_info is not None)
    return next((value for value in viewed if isinstance(value, torch.fx.Node)), None)


def written_by(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """List the tensors that a call of an operator writes to.

    The schema of batch norm does not tell that it changes its running statistics.
    """
    if operator in _UNDECLARED_WRITES:
        *_, mean, variance, training = args[:6]
        return [tensor for tensor in (mean, variance) if training and tensor is not None]
    values = [args[i] if i < len(args) else kwargs.get(name) for i, name in _written_arguments(operator)]
    flat = [item for value in values for item in (value if isinstance(value, (list, tuple)) else (value,))]
    return [item for item in flat if isinstance(item, torch.Tensor)]


@functools.cache
def _written_arguments(operator: OpOverload) -> tuple[tuple[int, str], ...]:
    arguments = enumerate(operator._schema.arguments)
    return tuple((i, a.name) for i, a in arguments if a.alias_info is not None and bool(a.alias_info.is_write))


def has_hooks_on_saved_tensors() -> bool:
    """Return whether autograd hands what it would keep to somebody, such as a checkpoint around this code."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def is_foreign_backward(node: Any) -> bool:
    """Return whether a node of autograd's graph is no derivative of torch's own: Python, an extension, TorchScript."""
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        return True
    return any(kind in node.name() for kind in ("CppNode", "DifferentiableGraph"))


assert_async, assert_now = torch._assert_async, torch._assert
_UNDECLARED_WRITES = frozenset({torch.ops.aten.native_batch_norm.default, torch.ops.aten.cudnn_batch_norm.default})


def has_no_data(tensor: object) -> bool:
    """Return whether a tensor stands for one while tracing, so that its values cannot be read."""
    if isinstance(tensor, FakeTensor) or type(tensor) is not torch.Tensor:
        return True
    return torch._is_functional_tensor(tensor) or _is_wrapped(tensor)


def _is_wrapped(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is one of vmap or grad of `torch.func`, which has no memory of its own."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def is_real(value: Any) -> bool:
    """Return whether a value is a tensor with content of its own while a step is traced: one from outside the step."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or torch._is_functional_tensor(value):
        return False
    return not _is_wrapped(value)


def has_storage(tensor: torch.Tensor) -> bool:
    """Return whether a tensor lies in memory that can be named: a dense one that vmap has not wrapped."""
    return tensor.layout == torch.strided and not _is_wrapped(tensor)


def keeping_version(tensor: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """Let a tensor be written to inside without autograd's noticing; who has saved it must not need its content."""
    return torch.autograd.grad_mode._unsafe_preserve_version_counter(tensor)


def outside_of_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same function for real tensors, in the midst of a trace too."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        with _disable_current_modes():
            return function(*args)

    return call


def is_traced(tensor: torch.Tensor) -> bool:
    """Return whether a tensor belongs to a trace, and is of no use behind it."""
    return isinstance(tensor, FakeTensor | FunctionalTensor) or torch._is_functional_tensor(tensor)


@contextlib.contextmanager
def parameters_in_new_lists() -> Iterator[None]:
    """Let slices and copies of parameter lists and dicts hold what is traced, not new parameters without a history."""

    def keeping(kind: type[nn.ParameterList] | type[nn.ParameterDict]) -> Callable[..., None]:
        original = kind.__setitem__

        def set_item(container: Any, key: Any, value: Any) -> None:
            if not (isinstance(value, torch.Tensor) and has_no_data(value)):
                original(container, key, value)
                return
            original(container, key, None)
            setattr(container, _attribute(container, key), value)

        return set_item

    with contextlib.ExitStack() as stack:
        for kind in (nn.ParameterList, nn.ParameterDict):
            stack.enter_context(mock.patch.object(kind, "__setitem__", keeping(kind)))
        yield


def _attribute(container: Any, key: Any) -> str:
    is_dict = isinstance(container, nn.ParameterDict)
    return str(container._key_to_attr(key) if is_dict else container._get_abs_string_index(key))


@contextlib.contextmanager
def quick_symbols() -> Iterator[None]:
    """Compute the same expression of symbolic sizes once while a step is traced.

    Otherwise that takes almost half of the time of a trace: every tensor asks for the product of its sizes, and whether
    strides equal such products, again and again. What is computed is as before: an expression depends on its operands,
    and on what is known to be equal by now. What the wrapper of a tensor asks about itself while it is made is not part
    of the graph.
    """
    known: dict[Any, SymNode] = {}
    methods = {name: vars(SymNode)[name] for name in _OF_TWO_SYMBOLS}
    make = FunctionalTensor.__new__

    def make_untraced(cls: type[FunctionalTensor], *args: Any, **kwargs: Any) -> FunctionalTensor:
        with disable_proxy_modes_tracing():
            return make(cls, *args, **kwargs)

    with contextlib.ExitStack() as stack:
        for name, compute in methods.items():
            stack.enter_context(mock.patch.object(SymNode, name, _remembering(name, compute, known)))
        stack.enter_context(mock.patch.object(SymNode, "maybe_as_int", _remembering_number(SymNode.maybe_as_int)))
        stack.enter_context(mock.patch.object(FunctionalTensor, "__new__", make_untraced))
        yield


_OF_TWO_SYMBOLS = ("add", "sub", "mul", "eq", "ne", "gt", "lt", "le", "ge", "and_", "or_", "sym_max", "sym_min")


def _remembering(
    name: str, compute: Callable[[SymNode, SymNode], SymNode], known: dict[Any, SymNode]
) -> Callable[[SymNode, SymNode], SymNode]:
    """Return the same operation on symbols, which looks first among what is known."""

    def operation(one: SymNode, other: SymNode) -> SymNode:
        env = one.shape_env
        is_traced = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
        if is_traced or env is None or one._hint is None or other._hint is None:
            return compute(one, other)
        operands = (one._expr, one.pytype, one._optimized_summation, other._expr, other.pytype)
        key = (name, env, _version(env), *operands, other._optimized_summation)
        found = known.get(key)
        if found is None:
            found = known[key] = compute(one, other)
        result = SymNode.__new__(SymNode)  # of its own, since a trace knows symbols by the identity of their nodes
        vars(result).update(vars(found))
        return result

    return operation


def _version(env: ShapeEnv) -> int:
    """Return what changes whenever symbols become known to be equal; in torch 2.11, when anything becomes known."""
    counter: int = getattr(env, "_replacements_version_counter", env._version_counter)
    return counter


def _remembering_number(compute: Callable[[SymNode], int | None]) -> Callable[[SymNode], int | None]:
    """Return the same question whether a symbol is a number, which looks first among what is known."""
    known: dict[Any, int | None] = {}

    def number(symbol: SymNode) -> int | None:
        env = symbol.shape_env
        if env is None:
            return compute(symbol)
        key = (symbol._expr, symbol.pytype, env, _version(env))
        if key not in known:
            known[key] = compute(symbol)
        return known[key]

    return number


def whether_overflowed(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a gradient that this process has is not finite, after `scaler.unscale_(optimizer)`."""
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    return any(bool(value) for value in found.values())


def set_whether_overflowed(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, overflowed: bool) -> None:
    """Let a scaler believe that gradients are not finite, or that all are, though there may be none in this process."""
    assert scaler._scale is not None, "it has scaled a loss"
    device = scaler._scale.device
    found = torch.full((), float(overflowed), dtype=torch.float32, device=device)
    scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {device: found}


def keep_scale_on_host(scaler: torch.amp.GradScaler) -> None:
    """Let a scaler keep its scale on the host, where it is read and changed without a wait for a device."""
    keep_scale_beside_loss(scaler)
    scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))


def keep_scale_beside_loss(scaler: torch.amp.GradScaler) -> None:
    """Let a scaler keep its scale on the device of the next loss, as it does by itself."""
    scaler._init_scale, scaler._init_growth_tracker = scaler.get_scale(), scaler._get_growth_tracker()
    scaler._scale = scaler._growth_tracker = None


def looks_for_overflow(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer looks itself whether gradients are finite, as fused ones do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def is_step_watched(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether somebody is told of steps of an optimizer, or has put another function in the place of `step`."""
    own = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    hooks = (*own, _global_optimizer_pre_hooks, _global_optimizer_post_hooks)
    other = vars(optimizer).get("step")
    return any(hooks) or not (other is None or hasattr(other, "_wrapped_by_lr_sched"))


def inductor(
    module: torch.fx.GraphModule,
    forms: Sequence[tuple[Sequence[int], Sequence[int], torch.dtype]],
    device: torch.device,
) -> Callable[..., Any]:
    """Compile a graph of tensors without a backward for inputs of these forms.

    Args:
        module: the graph.
        forms: shape, stride and dtype of each input.
        device: where the inputs are.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with tracing(TracingContext(mode)), mode, torch.no_grad():
        like = [torch.empty_strided(shape, stride, dtype=dtype, device=device) for shape, stride, dtype in forms]
        compiled: Callable[..., Any] = torch._inductor.compile(module, [*like])
    return compiled


def copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy tensors of the same shapes and types, with one launch per type where the device can."""
    of_type: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        ours, theirs = of_type.setdefault(target.dtype, ([], []))
        ours.append(target)
        theirs.append(source)
    for ours, theirs in of_type.values():
        torch._foreach_copy_(ours, theirs)


def as_kind(kind: type[torch.Tensor], tensor: torch.Tensor) -> Any:
    """Return a tensor of the same memory that is of a subclass; no mode sees it."""
    return torch.Tensor._make_subclass(kind, tensor)


def end_allocation(device: torch.device, pool: tuple[int, int]) -> None:
    """End what a CUDA graph has begun in a pool of memory, if it cannot do so itself."""
    index = torch.cuda.current_device() if device.index is None else device.index
    torch._C._cuda_endAllocateToPool(index, pool)
    torch._C._cuda_releasePool(index, pool)


def storage_users(storage: torch.UntypedStorage) -> int:
    """Return how many tensors, and objects like the one given, refer to memory."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether a module was given to `torch.compile`, by function or by method."""
    return isinstance(module, OptimizedModule) or module._compiled_call_impl is not None


def has_global_hooks() -> bool:
    """Return whether hooks run with every module."""
    return bool(torch.nn.modules.module._has_any_global_hook())


@contextlib.contextmanager
def answered_calls(modules: Iterable[torch.nn.Module], answer: Callable[..., Any]) -> Iterator[None]:
    """Let `answer(module, call, *args, **kwargs)` answer calls of these modules; `call` is what they would have done.

    Calls of other modules cost nothing, as they would if `Module.__call__` were replaced.
    """
    before = [(module, vars(module).get("_compiled_call_impl")) for module in modules]
    try:
        for module, compiled in before:
            vars(module)["_compiled_call_impl"] = partial(answer, module, compiled or module._call_impl)
        yield
    finally:
        for module, compiled in before:
            del vars(module)["_compiled_call_impl"]
            if compiled is not None:
                vars(module)["_compiled_call_impl"] = compiled


def checkpoint_only(where: Callable[[], bool]) -> contextlib.AbstractContextManager[None]:
    """Let `torch.utils.checkpoint.checkpoint` keep everything where `where()` is false, as if it were not there."""
    return checkpoints_replaced(where=where)


class RecordedEvent(NamedTuple):
    """What a profile has seen: a span of time, or bytes allocated (positive) or released (negative) on the host.

    Attributes:
        address: of the memory; None for a span.
    """

    name: str
    start_ns: int
    end_ns: int
    host_bytes: int = 0
    address: int | None = None


def recorded_events(finished: torch.autograd.profiler.profile) -> list[RecordedEvent]:
    """Return what a profile has seen, allocations among it, in the order of their starts."""
    results: Any = finished.kineto_results  # whose type knows of no tree
    kinds = torch._C._profiler._EventType
    waiting, found = results.experimental_event_tree()[::-1], []
    while waiting:
        event = waiting.pop()
        waiting += event.children[::-1]
        start, end = event.start_time_ns, event.end_time_ns
        if event.tag != kinds.Allocation:
            found.append(RecordedEvent(event.name, start, end))
        elif (fields := event.extra_fields).device.type == "cpu":
            found.append(RecordedEvent(event.name, start, end, fields.alloc_size, fields.ptr))
    return sorted(found, key=lambda event: event.start_ns)


def gradient_hooks(parameter: torch.Tensor) -> tuple[dict[Any, Callable[[torch.Tensor], Any]], ...]:
    """Return the tables of a leaf's hooks: on its gradient, and on the sum of its gradients; changing them counts."""
    with unguarded():
        tables = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    return tuple({} if table is None else table for table in tables)


def hooked(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return those leaves among tensors that have hooks on their gradients, or on the sums of these."""
    with unguarded():
        return [tensor for tensor in tensors if tensor._backward_hooks or tensor._post_accumulate_grad_hooks]


def has_backward_hooks(module: torch.nn.Module) -> bool:
    """Return whether a module has hooks on its own backward."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def has_backward_hooks_on_all() -> bool:
    """Return whether there are hooks on the backward of every module."""
    hooks = torch.nn.modules.module
    return bool(hooks._global_backward_hooks or hooks._global_backward_pre_hooks)


@contextlib.contextmanager
def answered_collectives(answer: Callable[[str], None]) -> Iterator[None]:
    """Call `answer(name)` when a collective of torch.distributed begins, under whatever name it was imported."""

    def ask(original: Callable[..., Any]) -> Callable[..., Any]:
        def asked(*args: Any, **kwargs: Any) -> Any:
            name = sys._getframe(1).f_code.co_name
            if name not in _NO_COLLECTIVES:
                answer(f"torch.distributed.{name}")
            return original(*args, **kwargs)

        return asked

    before = [(owner, name, getattr(owner, name)) for owner, name in _ASKED_BY_COLLECTIVES]
    try:
        for owner, name, original in before:
            setattr(owner, name, ask(original))
        yield
    finally:
        for owner, name, original in before:
            setattr(owner, name, original)


_NO_COLLECTIVES = frozenset({"get_rank", "get_world_size", "get_backend", "get_backend_config"})
_ASKED_BY_COLLECTIVES = (
    (distributed_c10d, "_rank_not_in_group"),
    (
        _functional_collectives,
        "_resolve_group" if hasattr(_functional_collectives, "_resolve_group") else "_resolve_group_name",
    ),
)  # the latter in torch 2.11


class _Alone:
    """A group of one process, as far as `get_rank` and `get_world_size` ask."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


@contextlib.contextmanager
def answered_alone(is_told: Callable[[types.FrameType], bool]) -> Iterator[None]:
    """Let `get_rank()` and `get_world_size()` answer as in a single process, if a function says so of their caller."""

    def answer(asking: types.FrameType) -> Any:
        if asking.f_code.co_name == "_get_group_size" and asking.f_back is not None:
            asking = asking.f_back
        is_question = asking.f_code in (distributed_c10d.get_rank.__code__, distributed_c10d.get_world_size.__code__)
        return _Alone() if is_question and asking.f_back is not None and is_told(asking.f_back) else None

    with _default_group_asked(answer):
        yield


@contextlib.contextmanager
def answered_uninitialized(is_told: Callable[[types.FrameType], bool]) -> Iterator[None]:
    """Let `is_initialized()` answer as in a single process, if a function says so of its caller."""
    world: Any = vars(distributed_c10d._WorldMeta)["WORLD"]

    def default_group(members: type) -> Any:
        question = sys._getframe(1)
        asking = question.f_back if question.f_code is distributed_c10d.is_initialized.__code__ else None
        return None if asking is not None and is_told(asking) else world.__get__(members)

    with mock.patch.object(distributed_c10d._WorldMeta, "WORLD", property(default_group, world.__set__)):
        yield


@contextlib.contextmanager
def questions_for_rank_heard(hear: Callable[[types.FrameType], None]) -> Iterator[None]:
    """Call a function with the frame that calls `get_rank()`, inside."""

    def listen(asking: types.FrameType) -> None:
        if asking.f_code is distributed_c10d.get_rank.__code__ and asking.f_back is not None:
            hear(asking.f_back)

    with _default_group_asked(listen):
        yield


@contextlib.contextmanager
def _default_group_asked(answer: Callable[[types.FrameType], Any]) -> Iterator[None]:
    """Give whoever looks for the default group what a function returns for its frame; the group itself for None."""
    original = distributed_c10d._get_default_group

    def group() -> Any:
        found = answer(sys._getframe(1))
        return original() if found is None else found

    vars(distributed_c10d)["_get_default_group"] = group
    try:
        yield
    finally:
        vars(distributed_c10d)["_get_default_group"] = original


def unguarded() -> contextlib.AbstractContextManager[None]:
    """Let torch treat tensors of classes that answer its calls themselves as plain ones, inside."""
    context: contextlib.AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return context


def is_innermost(mode: TorchFunctionMode) -> bool:
    """Return whether a function mode is the one that was entered last, of those that have not been left."""
    return _get_current_function_mode() is mode


def without_overrides() -> contextlib.AbstractContextManager[None]:
    """Let torch treat tensors of all classes as plain ones, whatever function modes there are, inside."""
    context: contextlib.AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return context


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Let torch do what it does without function modes and dispatch modes, inside."""
    with without_overrides(), _disable_current_modes():
        yield


def swap_contents(one: torch.Tensor, other: torch.Tensor) -> None:
    """Let two objects be each other's tensor; their classes and attributes stay."""
    torch._C._swap_tensor_impl(one, other)


def is_profiling() -> bool:
    """Return whether a profiler runs in this thread."""
    return torch._C._autograd._profiler_enabled()


def norms_of_each(tensors: list[torch.Tensor], norm_type: float) -> list[torch.Tensor]:
    """Return the norm of each tensor."""
    with torch.no_grad():
        return list(torch._foreach_norm(tensors, norm_type))


def with_node(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return a tensor whose text says that a node of this name has made it."""
    function: Any = type(
        "Named",
        (torch.autograd.Function,),
        {"forward": staticmethod(lambda _, made: made.clone()), "backward": staticmethod(lambda _, gradient: gradient)},
    )
    function._backward_cls.__name__ = name
    with torch.enable_grad():
        made: torch.Tensor = function.apply(tensor.detach().requires_grad_())
    return made


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written to."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor._version


def traces_made() -> int:
    """Return how many modules were made of graphs so far in this process, for `forget_traces`."""
    return int(graph_sources.next_id)


def forget_traces(since: int) -> None:
    """Let go of what torch remembers of past traces for the whole process: about a megabyte for a captured step.

    Args:
        since: what `traces_made` said before; of later modules the sources are forgotten, which tracebacks show.
    """
    FakeTensorMode.cache_clear()
    for method in vars(ShapeEnv).values():
        if clear := getattr(method, "cache_clear", None):
            clear()
    numbered = ((name, re.match(r"<eval_with_key>\.(\d+)", name)) for name in graph_sources.eval_cache)
    for name in [name for name, number in numbered if number is not None and int(number[1]) >= since]:
        del graph_sources.eval_cache[name]
        linecache.cache.pop(name, None)
