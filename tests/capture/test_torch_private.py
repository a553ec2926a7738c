"""Contracts of the private torch names that capture leans on (see `capture.torch_private`)."""

from __future__ import annotations

import contextlib

import pytest
import sympy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_pipe.capture import torch_private as private


def _joint(module: nn.Module, *inputs: torch.Tensor) -> torch.fx.GraphModule:
    with contextlib.ExitStack() as stack:
        return private.aot_export_joint_with_descriptors(stack, module, inputs).graph_module


class _Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).square().mean()


def test_grids_are_traced_as_what_they_are_made_of() -> None:
    """Torch's derivative of `affine_grid` fixes the number of samples."""
    operator, theta = torch.ops.aten.affine_grid_generator.default, torch.randn(3, 2, 3, dtype=torch.float64)
    kernels = dict(operator.py_kernels)

    def made(theta: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.affine_grid(theta, [theta.shape[0], 1, 4, 5], align_corners=False)

    def gradient(theta: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(made(theta).square().sum(), theta)[0]

    theta.requires_grad_()
    expected = gradient(theta)
    with private.symbolic_grids():
        graph = make_fx(gradient, tracing_mode="symbolic")(theta)
    assert operator.py_kernels == kernels
    assert "affine_grid" not in graph.code
    torch.testing.assert_close(graph(theta), expected)


def test_the_joint_graph_describes_its_inputs_and_outputs():
    graph = _joint(_Loss(), torch.randn(5, 3)).graph
    inputs = [type(n.meta["desc"]) for n in graph.nodes if n.op == "placeholder"]
    outputs = [type(d) for d in graph.output_node().meta["desc"] if d is not None]
    assert inputs.count(private.ParamAOTInput) == 6
    assert inputs.count(private.BufferAOTInput) == 3
    assert inputs.count(private.PlainAOTInput) == inputs.count(private.TangentAOTInput) == 1
    assert outputs.count(private.GradAOTOutput) == 6
    assert outputs.count(private.InputMutationAOTOutput) == 3
    assert outputs.count(private.PlainAOTOutput) == 1


def test_a_held_graph_becomes_code_when_it_is_called():
    graph = make_fx(lambda x: x.sin() + 1)(torch.ones(3)).graph
    held = private.HeldGraphModule(nn.Module(), graph)
    assert held._needs_recompile()
    assert torch.equal(held(torch.zeros(3)), torch.ones(3)) and not held._needs_recompile()


def test_a_backward_node_has_the_sequence_number_of_its_forward_operation():
    nodes = [n for n in _joint(_Loss(), torch.randn(5, 3)).graph.nodes if n.op == "call_function"]
    forward = {n.meta["seq_nr"] for n in nodes if not private.is_backward(n)}
    products = [n for n in nodes if private.is_backward(n) and n.target is torch.ops.aten.mm.default]
    assert products and all(n.meta["seq_nr"] in forward for n in products)


def test_tags_reach_the_nodes_of_the_graph():
    class Tagged(_Loss):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            private.tag_nodes("here", "line 1")
            return super().forward(x)

    with private.fx_traceback.preserve_node_meta():
        graph = _joint(Tagged(), torch.randn(5, 3)).graph
    tags = [n.meta.get("custom") for n in graph.nodes if n.op == "call_function" and not private.is_backward(n)]
    assert all(tag == {"module": "here", "line": "line 1"} for tag in tags)


def test_dropout_between_recurrent_layers_survives_tracing():
    """Torch 2.13 drops it in its Python decomposition of LSTM, GRU and RNN."""
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        layer = kind(4, 8, 2, dropout=0.5).train()
        fake = private.FakeTensorMode(allow_non_fake_inputs=True)
        with fake, private.fused_recurrent_kernels():
            graph = _joint(layer, torch.randn(3, 2, 4)).graph
        random = [
            n
            for n in graph.nodes
            if getattr(n.target, "tags", ()) and torch.Tag.nondeterministic_seeded in n.target.tags
        ]
        assert len(random) == 1, kind.__name__


def test_recurrent_kernels_are_put_back():
    op = torch.ops.aten.lstm.input
    before = dict(op.py_kernels)
    with private.fused_recurrent_kernels():
        assert not op.py_kernels
    assert op.py_kernels == before


def test_a_compiled_module_is_recognised():
    compiled = nn.Linear(2, 2)
    compiled.compile()
    assert private.is_compiled(compiled)
    assert private.is_compiled(torch.compile(nn.Linear(2, 2)))
    assert not private.is_compiled(nn.Linear(2, 2))


@pytest.mark.parametrize("is_compiled", [False, True])
def test_calls_of_chosen_modules_are_answered(is_compiled):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    x, heard = torch.ones(1, 2), []
    expected = model(x)
    if is_compiled:
        model[0].compile(backend="eager")
    before = dict(vars(model[0]))

    def answer(module, call, *args):
        heard.append(module)
        return call(*args)

    with private.answered_calls([model[0]], answer):
        torch.testing.assert_close(model(x), expected)
    assert heard == [model[0]] and vars(model[0]) == before
    model(x)
    assert len(heard) == 1


@pytest.mark.parametrize(
    ("call", "shares"),
    [
        (lambda x: x.view(6), True),
        (lambda x: x.t(), True),
        (lambda x: x.split(1)[0], True),
        (lambda x: x + 1, False),
        (lambda x: x.clone(), False),
    ],
)
def test_schemas_say_which_results_are_views(call, shares: bool):
    graph = make_fx(call)(torch.zeros(2, 3)).graph
    first = next(node for node in graph.nodes if node.op == "call_function")
    assert (private.aliased_input(first) is not None) == shares


def test_a_profile_tells_every_allocation_in_order_and_that_it_runs():
    assert not private.is_profiling()
    with torch.autograd.profiler.profile(use_cpu=True, profile_memory=True) as finished:
        assert private.is_profiling()
        with torch.profiler.record_function("mine"):
            first = torch.empty(1000, dtype=torch.uint8)
            del first
            second = torch.empty(3000, dtype=torch.uint8)
    assert not private.is_profiling() and second.nbytes == 3000
    events = private.recorded_events(finished)
    changes = [e for e in events if e.host_bytes]
    assert [e.host_bytes for e in changes] == [1000, -1000, 3000]
    (mine,) = (e for e in events if e.name == "mine")
    assert all(mine.start_ns <= e.start_ns <= mine.end_ns for e in changes)


def test_schemas_say_which_arguments_are_written_to():
    x, y, mean, variance = torch.randn(4, 3), torch.randn(4, 3), torch.zeros(3), torch.ones(3)
    seen: list[list[torch.Tensor]] = []

    class Writes(private.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(private.written_by(func, args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    with Writes():
        x.add_(1)
        torch.mul(x, 2, out=y)
        torch._foreach_mul_([x, y], 2.0)
        x.add(1)
        nn.functional.batch_norm(x, mean, variance, training=True)
        nn.functional.batch_norm(x, mean, variance, training=False)
    written = [[id(tensor) for tensor in tensors] for tensors in seen if tensors]
    assert written == [[id(x)], [id(y)], [id(x), id(y)], [id(mean), id(variance)]]


def test_hooks_on_saved_tensors_are_noticed_inside_them_only():
    assert not private.has_hooks_on_saved_tensors()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        assert private.has_hooks_on_saved_tensors()
    assert not private.has_hooks_on_saved_tensors()


def test_a_version_grows_with_every_write_and_with_nothing_else():
    tensor = torch.zeros(2)
    before = private.version_of(tensor)
    torch.nn.functional.relu(tensor + 1)
    assert private.version_of(tensor) == before
    tensor[:1].mul_(2)
    assert private.version_of(tensor) > before


def test_hooks_on_gradients_can_be_taken_off_and_put_back():
    parameter, seen = nn.Parameter(torch.ones(2)), []
    parameter.register_hook(lambda gradient: gradient * 3)
    parameter.register_post_accumulate_grad_hook(seen.append)
    tables = private.gradient_hooks(parameter)
    before = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    parameter.sum().backward()
    assert parameter.grad.tolist() == [1.0, 1.0] and not seen
    for table, hooks in zip(tables, before, strict=True):
        table.update(hooks)
    parameter.sum().backward()
    assert parameter.grad.tolist() == [4.0, 4.0] and seen == [parameter]
    assert private.gradient_hooks(nn.Parameter(torch.ones(1))) == ({}, {})


def test_parameters_with_hooks_are_those_that_have_some_now():
    plain, changed, summed, bare = (nn.Parameter(torch.ones(1)) for _ in range(4))
    changed.register_hook(lambda gradient: gradient)
    summed.register_post_accumulate_grad_hook(lambda parameter: None)
    bare.register_hook(lambda gradient: gradient).remove()
    assert [id(one) for one in private.hooked([plain, changed, summed, bare])] == [id(changed), id(summed)]


@pytest.mark.parametrize(
    "register", ["register_full_backward_hook", "register_full_backward_pre_hook", "register_backward_hook"]
)
def test_hooks_on_the_backward_of_a_module_are_noticed(register: str):
    module = nn.Linear(1, 1)
    assert not private.has_backward_hooks(module) and not private.has_backward_hooks_on_all()
    getattr(module, register)(lambda *_: None)
    assert private.has_backward_hooks(module)
    handle = nn.modules.module.register_module_full_backward_hook(lambda *_: None)
    assert private.has_backward_hooks_on_all()
    handle.remove()


def test_every_collective_asks_first_and_a_question_about_ranks_does_not():
    class Asked(Exception):
        pass

    def refuse(name: str) -> None:
        raise Asked(name)

    one, two = torch.ones(2), torch.ones(2)
    calls = {
        "all_reduce": lambda: dist.all_reduce(one),
        "broadcast": lambda: dist.broadcast(one, 0),
        "all_gather": lambda: dist.all_gather([two], one),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(two, one),
        "all_gather_object": lambda: dist.all_gather_object([None], 1),
        "reduce": lambda: dist.reduce(one, 0),
        "reduce_scatter": lambda: dist.reduce_scatter(one, [two]),
        "gather": lambda: dist.gather(one, [two]),
        "scatter": lambda: dist.scatter(one, [two]),
        "all_to_all": lambda: dist.all_to_all([one], [two]),
        "barrier": lambda: dist.barrier(),
        "functional": lambda: _functional_collectives.all_reduce(one, "sum", [0]),
    }
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with private.answered_collectives(refuse):
            for call in calls.values():
                with pytest.raises(Asked):
                    call()
            assert dist.get_rank() == 0 and dist.get_world_size() == 1
        dist.all_reduce(one)
    finally:
        dist.destroy_process_group()


def test_a_class_that_answers_calls_of_torch_is_passed_by_inside_only():
    class Silent(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return None

    tensor = torch.ones(2).as_subclass(Silent)
    assert tensor.sum() is None
    with private.unguarded():
        assert tensor.sum() == 2
    assert tensor.sum() is None


def test_parameter_lists_and_dicts_keep_parameters_as_attributes():
    listed, named = (
        nn.ParameterList([nn.Parameter(torch.ones(1))]),
        nn.ParameterDict({"a": nn.Parameter(torch.ones(1))}),
    )
    assert getattr(listed, listed._get_abs_string_index(0)) is listed[0]
    assert getattr(named, named._key_to_attr("a")) is named["a"]
    with private.parameters_in_new_lists():
        assert listed[0:1][0] is listed[0]
        assert named.copy()["a"] is named["a"]


def test_tensors_of_a_trace_are_recognised():
    seen = []

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(self.inner(x))
            return seen[-1].square().mean()

    _joint(Step(), torch.randn(5, 3))
    assert seen and all(map(private.is_traced, seen))
    assert not private.is_traced(torch.ones(1)) and not private.is_traced(nn.Parameter(torch.ones(1)))


def test_contents_of_tensors_are_swapped_across_devices_and_their_objects_stay():
    parameter = nn.Parameter(torch.empty(2, 3, device="meta"))
    parameter.mark = "kept"
    other = nn.Parameter(torch.ones(4))
    private.swap_contents(parameter, other)
    assert (parameter.shape, parameter.device.type, parameter.mark) == ((4,), "cpu", "kept")
    assert other.is_meta and not hasattr(other, "mark")


class _Answers(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return "answered"


class _Doubles(private.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {})) * 2


def test_who_asks_for_the_rank_is_heard_and_who_asks_for_the_number_of_ranks_is_not():
    heard = []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with private.questions_for_rank_heard(lambda frame: heard.append(frame.f_code.co_name)):
            assert dist.get_rank() == 0 and dist.get_world_size() == 1
        assert dist.get_rank() == 0 and len(heard) == 1
    finally:
        dist.destroy_process_group()
    assert heard == ["test_who_asks_for_the_rank_is_heard_and_who_asks_for_the_number_of_ranks_is_not"]


def test_a_function_mode_is_told_from_those_that_were_entered_since():
    with _Answers() as outer:
        assert private.is_innermost(outer)
        with _Answers() as inner:
            assert private.is_innermost(inner) and not private.is_innermost(outer)
    assert not private.is_innermost(outer)


def test_modes_are_left_out_where_torch_is_asked_itself():
    with _Answers():
        assert torch.ones(1) == "answered"
        with private.without_overrides():
            assert float(torch.ones(1)) == 1.0
    with _Doubles():
        assert torch.ones(1).item() == 4.0  # ones, and the number that is read
        with private.without_modes():
            assert torch.ones(1).item() == 1.0


@pytest.mark.parametrize("gradient", [3.0, float("inf")])
def test_a_scaler_is_told_whether_gradients_are_finite(gradient: float):
    scaler, parameter = torch.amp.GradScaler("cpu", init_scale=8.0), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    assert not private.looks_for_overflow(optimizer)
    assert private.looks_for_overflow(torch.optim.SGD([parameter], lr=1.0, fused=True))
    scaler.scale(torch.ones(()))
    parameter.grad = torch.tensor([8.0, gradient])
    scaler.unscale_(optimizer)
    assert private.whether_overflowed(scaler, optimizer) == (gradient == float("inf"))
    private.set_whether_overflowed(scaler, optimizer, gradient == 3.0)  # the opposite is believed
    scaler.step(optimizer)
    assert torch.equal(parameter, torch.ones(2)) == (gradient == 3.0)
    scaler.update()
    assert scaler.get_scale() == (4.0 if gradient == 3.0 else 8.0)


def test_it_is_seen_who_is_told_of_steps_of_an_optimizer():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # counts steps
    assert not private.is_step_watched(optimizer)
    for register in (
        optimizer.register_step_pre_hook,
        optimizer.register_step_post_hook,
        register_optimizer_step_pre_hook,
        register_optimizer_step_post_hook,
    ):
        hook = register(lambda *_: None)
        assert private.is_step_watched(optimizer)
        hook.remove()
    assert not private.is_step_watched(optimizer)
    optimizer.step = lambda closure=None: None
    assert private.is_step_watched(optimizer)


def test_a_scaler_is_told_where_it_has_seen_no_gradient():
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    private.set_whether_overflowed(scaler, optimizer, False)
    scaler.step(optimizer)
    scaler.update()


class _Sizes(nn.Module):
    """Sizes that are read, multiplied and compared, of values that the step and autograd make."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x).view(x.shape[0] * 2, 3)
        y = torch.cat([y, y[: y.shape[0] // 2]]).sum() / y.numel() + y.mean() + y.t().contiguous().std(dim=0).sum()
        return y / (x.numel() + x.shape[0])


def _symbolic_joint(module: nn.Module, *, quick: bool) -> torch.fx.GraphModule:
    mode = private.FakeTensorMode(shape_env=private.ShapeEnv(), allow_non_fake_inputs=True)
    context = private.StatelessSymbolicContext(dynamic_sizes=[private.DimDynamic.DUCK, private.DimDynamic.STATIC])
    x = mode.from_tensor(torch.empty(5, 3), symbolic_context=context)
    with mode:
        state = {name: nn.Parameter(torch.empty(p.shape)) for name, p in module.named_parameters()}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mode)
        stack.enter_context(private.reparametrize(module, state))
        if quick:
            stack.enter_context(private.quick_symbols())
        return private.aot_export_joint_with_descriptors(stack, module, (x,)).graph_module


def test_symbols_that_are_remembered_give_the_same_graph_but_for_unread_sizes():
    module = _Sizes()
    plain, quick = (_symbolic_joint(module, quick=quick) for quick in (False, True))
    operations = [
        [n.target for n in one.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)] for one in (plain, quick)
    ]
    assert operations[0] == operations[1]
    for samples in (2, 5, 11):
        inputs = [p.detach() for p in module.parameters()]
        inputs += [torch.randn(samples, 3), torch.ones(())]
        one, two = (torch.utils._pytree.tree_leaves(graph([*inputs[:-1]], [inputs[-1]])) for graph in (plain, quick))
        torch.testing.assert_close(one, two, rtol=0, atol=0)


def test_symbols_are_computed_as_ever_afterwards():
    before = {name: vars(private.SymNode)[name] for name in ("mul", "eq", "maybe_as_int")}
    make = vars(private.FunctionalTensor)["__new__"]
    with private.quick_symbols():
        assert vars(private.SymNode)["mul"] is not before["mul"]
    assert {name: vars(private.SymNode)[name] for name in before} == before
    assert vars(private.FunctionalTensor)["__new__"] is make


def test_an_assertion_on_a_value_raises_where_it_does_not_hold():
    for function, error in ((private.assert_async, RuntimeError), (private.assert_now, AssertionError)):
        function(torch.tensor(True), "it is false")
        with pytest.raises(error):
            function(torch.tensor(False), "it is false")


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_norms_of_several_tensors_are_those_of_each(norm_type):
    tensors = [torch.randn(3, 4), torch.randn(7), torch.randn(2, dtype=torch.float64)]
    norms = private.norms_of_each(tensors, norm_type)
    assert [float(norm) for norm in norms] == [float(torch.linalg.vector_norm(t, norm_type)) for t in tensors]
    assert [norm.dtype for norm in norms] == [t.dtype for t in tensors]


def test_a_symbol_is_named_after_its_source_and_a_size_can_be_made_of_its_expression():
    def sizes(name: str) -> tuple[object, object]:
        mode = private.FakeTensorMode(shape_env=private.ShapeEnv())
        context = private.StatelessSymbolicContext(dynamic_sizes=[private.DimDynamic.DUCK])
        fake = mode.from_tensor(torch.empty(5), source=private.ConstantSource(name), symbolic_context=context)
        size = fake.shape[0]
        made = mode.shape_env.create_symintnode(2 * size.node.expr, hint=10)
        with mode:
            assert torch.empty(made).shape[0].node.expr == (2 * size).node.expr
        return size.node.expr, made.node.hint

    assert sizes("leaf_0") == sizes("leaf_0")
    assert sizes("leaf_0")[0] != sizes("leaf_1")[0]


def test_a_derivative_in_python_is_told_from_those_of_torch():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    x = torch.ones(2, requires_grad=True)
    assert private.is_foreign_backward(Doubled.apply(x).grad_fn)
    assert not private.is_foreign_backward((x * 2).grad_fn)


@pytest.mark.slow
def test_a_graph_is_compiled_for_inputs_of_one_form():
    class Two(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return torch.ops.aten.gelu.default(torch.ops.aten.mul.Tensor(x, y)), torch.ops.aten.sum.default(y)

    x, y = torch.randn(4, 3), torch.randn(3, 4).t()
    forms = [(t.shape, t.stride(), t.dtype) for t in (x, y)]
    compiled = private.inductor(torch.fx.symbolic_trace(Two()), forms, x.device)
    torch.testing.assert_close(tuple(compiled(x, y)), Two()(x, y))


def test_memory_knows_how_many_tensors_refer_to_it():
    memory = torch.zeros(8)
    storage = memory.untyped_storage()
    before = private.storage_users(storage)
    view = memory[2:].view(torch.int32).as_strided((2,), (1,))
    assert private.storage_users(storage) > before
    del view
    assert private.storage_users(storage) == before


def test_tensors_of_several_types_are_copied():
    sources = [torch.arange(3.0), torch.arange(4), torch.ones(2, 2, dtype=torch.bool), torch.rand(0)]
    targets = [torch.zeros_like(source) for source in sources]
    private.copy_each(targets, sources)
    torch.testing.assert_close(targets, sources)
    private.copy_each([], [])


@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
def test_attention_names_what_it_says_of_its_random_numbers(kind):
    names = private.result_names(getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention").default)
    assert names[0] == "output"
    assert {"rng_state", "unused"} <= {*names} or {"philox_seed", "philox_offset"} <= {*names}


def test_an_argument_is_found_by_any_of_its_names():
    attention = torch.ops.aten._scaled_dot_product_flash_attention.default
    assert private.argument_place(attention, ("rate", "dropout_p")) == (3, "dropout_p", 0.0)
    assert private.argument_place(attention, ("rate",)) is None


def test_a_tensor_becomes_one_of_a_subclass_past_all_modes():
    class Kind(torch.Tensor):
        pass

    form = torch.empty((), device="meta")
    with private.FakeTensorMode():
        made = private.as_kind(Kind, form)
    assert type(made) is Kind and made.is_meta


def test_the_place_of_a_tensor_in_a_directory_is_what_torch_writes_there() -> None:
    place = private.StorageInfo("__0_0.distcp", 64, 128)
    assert (place.relative_path, place.offset, place.length, place.transform_descriptors) == (
        *("__0_0.distcp", 64, 128),
        None,
    )


def test_functions_of_sizes_are_expressions_of_sympy() -> None:
    assert {"FloorDiv", "Mod", "Max", "Min", "OpaqueUnaryFn_sqrt"} <= private.SIZE_FUNCTIONS.keys()
    assert all(issubclass(function, sympy.Basic) for function in private.SIZE_FUNCTIONS.values())
