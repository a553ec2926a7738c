"""What a user may set: unknown names, wrong types and values out of range are errors that say what to do."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import lightning.pytorch as pl
import pytest
from omegaconf import OmegaConf

from lightning_pipe import DappleStrategy, compare, plan
from lightning_pipe.cli.options import PRECISIONS, CompareOptions, PlanOptions
from lightning_pipe.config import _RULES, DappleConfig, hydra_schema, read_config
from lightning_pipe.errors import ConfigError
from lightning_pipe.foreign_names import _INSTEAD, schedule_name
from lightning_pipe.planner.problem import EXECUTED, Constraints
from lightning_pipe.planner.registry import PLANNER_NAMES, PLANNERS
from lightning_pipe.schedule.registry import SCHEDULES

OPTIONS = (
    "plan planner layout schedule stages_per_device warmup microbatches costs cluster cache capture whole_batch "
    "check recheck witness post_validation compile cuda_graphs batch_dim seed exact_ties "
    "deadline_s report memory_limit "
    "keep_freed_memory shard_optimizer measure_memory trace timeline_steps watch_every replan start_method weights "
    "versions versions_options save_distributed_checkpoint async_checkpoint restore verbose"
).split()


def test_the_options_are_these():
    assert [field.name for field in fields(DappleConfig)] == OPTIONS


def test_nothing_set_gives_the_defaults():
    assert read_config({}) == DappleConfig()


def typed_words(hint: Any) -> tuple[str, ...]:
    """Return the words that editors complete: those of the `Literal` in a type."""
    parts = get_args(hint)
    return parts if get_origin(hint) is Literal else tuple(word for part in parts for word in typed_words(part))


def test_the_typed_words_are_those_accepted():
    own_schedules = {name for name in SCHEDULES if str(SCHEDULES[name].order.__module__).startswith("lightning_pipe.")}
    accepted = {name: set(rule.one_of) for name, rule in _RULES.items()} | {"schedule": own_schedules}
    typed = {name: typed_words(hint) for name, hint in get_type_hints(DappleConfig).items()}
    assert all(_RULES["warmup"].holds(word) for word in typed["warmup"])
    assert {name: set(words) for name, words in typed.items()} == accepted | {"warmup": {"pa", "pb", "1f1b*"}}
    assert ("auto", *PLANNERS, "exhaustive") == PLANNER_NAMES


@pytest.mark.parametrize(("function", "options"), [(plan, PlanOptions), (compare, CompareOptions)])
def test_planning_from_python_has_the_types_of_the_strategy_and_the_defaults_of_the_command(function, options):
    of_config, shown = get_type_hints(DappleConfig), inspect.signature(function).parameters
    typed = {name: typed_words(hint) for name, hint in get_type_hints(function, localns={"pl": pl}).items()}
    assert typed["precision"] == PRECISIONS
    assert typed.get("planners", PLANNER_NAMES) == PLANNER_NAMES
    shared = {name for name in typed if name in of_config}
    assert shared >= {"costs", "schedule", "shard_optimizer"}
    assert {name: typed[name] for name in shared} == {name: typed_words(of_config[name]) for name in shared}
    for field in fields(options):
        assert field.name not in shown or field.name == "planners" or shown[field.name].default == field.default


def test_every_schedule_can_be_chosen():
    assert [read_config({"schedule": name}).schedule for name in SCHEDULES] == list(SCHEDULES)


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("plan", Path("plan.yaml"), "plan.yaml"),
        ("trace", Path("runs/timeline.json"), "runs/timeline.json"),
        ("deadline_s", 60, 60.0),
        ("layout", 2, "2"),
        ("layout", "2-1-1", "2-1-1"),
        ("layout", [2, 1], "2-1"),
        ("layout", (1, 1, 2), "1-1-2"),
        ("schedule", "1F1B", "1f1b"),
        ("schedule", "Gpipe", "gpipe"),
        ("schedule", "ScheduleGPipe", "gpipe"),
        ("schedule", "Interleaved1F1B", "interleaved"),
        ("schedule", "LoopedBFS", "breadth_first"),
        ("schedule", "ZBVZeroBubble", "zb_v"),
        ("schedule", "DualPipeV", "dualpipe_v"),
        ("warmup", 3, "3"),
        ("seed", None, None),
        ("microbatches", 8, 8),
        ("exact_ties", True, True),
        ("keep_freed_memory", False, False),
    ],
)
def test_natural_spellings_are_read(name, value, read):
    assert getattr(read_config({name: value}), name) == read


@pytest.mark.parametrize("value", ["4,3,2,1", [4, 3, 2, 1], OmegaConf.create([4, 3, 2, 1])], ids=str)
def test_depths_are_those_of_all_stages(value):
    assert read_config({"warmup": value, "layout": [1, 1, 2, 1]}).warmup == "4,3,2,1"
    assert read_config({"warmup": value, "layout": "1-1", "stages_per_device": 2}).warmup == "4,3,2,1"
    for others, has in (({"layout": "1-1-1"}, "a layout of 3 stages"), ({}, "no layout")):
        with pytest.raises(ConfigError, match=f"a depth for each of 4 stages, with {has}; .* layout='1-1-1-1', or one"):
            read_config({"warmup": value, **others})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"microbatchs": 4}, "unknown option 'microbatchs'; 'microbatchs': did you mean 'microbatches'"),
        ({"num_stages": 4, "timeout": 3}, "options 'num_stages', 'timeout'; 'num_stages': set layout.*deadline_s"),
        ({"micro": 4, "a": 3, "find_unused_parameters": 1}, "'find_unused_parameters': remove it.*expected some of"),
        ({"find_unused_parameters": True}, "remove it: gradients are reduced"),
        ({"pipeline_model_parallel_size": 2}, "set layout"),
        ({"schedule": "InterleavedZeroBubble"}, "is schedule='zb_h1' with stages_per_device=2"),
        ({"layout": [2, 0]}, "expected ranks per stage joined by '-'"),
        ({"microbatches": 0}, r"found microbatches=0 \(int\); expected an integer of at least 1"),
        ({"microbatches": True}, r"found microbatches=True \(bool\); expected an integer"),
        ({"microbatches": "8"}, r"found microbatches='8' \(str\); expected an integer"),
        ({"exact_ties": 1}, r"found exact_ties=1 \(int\); expected true or false"),
        ({"keep_freed_memory": "no"}, r"found keep_freed_memory='no' \(str\); expected true or false"),
        ({"schedule": "1f1"}, "found schedule='1f1'.*did you mean '1f1b'"),
        ({"planner": None}, "found planner=None.*expected one of"),
        ({"planner": "uniforms"}, "did you mean 'uniform'"),
        ({"layout": "2,1"}, "expected ranks per stage joined by '-'"),
        ({"layout": "2-0"}, "expected ranks per stage joined by '-'"),
        ({"warmup": "pc"}, "expected \"pa\", \"pb\""),
        ({"deadline_s": 0}, r"found deadline_s=0.0 \(float\); expected a number of seconds"),
        ({"deadline_s": float("nan")}, "expected a number of seconds"),
        ({"plan": ""}, "expected the path of a plan file"),
        ({"seed": -1}, "expected an integer of at least 0"),
        ({"batch_dim": 1.0}, r"found batch_dim=1.0 \(float\)"),
        ({"start_method": "ssh"}, "expected one of popen"),
        ({"plan": "plan.yaml", "layout": "2-1"}, "found plan='plan.yaml' and layout.*Remove"),
        ({"plan": "plan.yaml", "microbatches": 4, "schedule": "gpipe"}, "schedule, microbatches"),
        ({"schedule": "gpipe", "warmup": "pb"}, "found warmup='pb' with schedule='gpipe'"),
    ],
)  # fmt: skip
def test_mistakes_are_told(options, text):
    with pytest.raises(ConfigError, match=text):
        read_config(options)


def test_a_hydra_node_is_read_like_keywords():
    node = OmegaConf.create({"n": 4, "strategy": {"microbatches": "${n}", "layout": "2-1"}})
    assert read_config(node.strategy) == DappleConfig(microbatches=4, layout="2-1")


def test_the_schema_of_the_presets_has_the_same_defaults():
    schema = dict(OmegaConf.structured(hydra_schema()))
    assert schema.pop("_target_") == "lightning_pipe.DappleStrategy"
    assert read_config(schema) == DappleConfig()


def test_layout_and_warmup_are_given_to_planner_and_schedule():
    assert DappleConfig(layout="2-1").replicas == (2, 1)
    assert DappleConfig().replicas is None
    may = {"memory_policies": EXECUTED, "shard_optimizer": "auto"}
    assert DappleConfig(warmup="pb", layout="2-1").constraints == Constraints(None, (2, 1), "1f1b", "pb", **may)
    assert DappleConfig(schedule="gpipe", microbatches=4).constraints == Constraints(4, schedule="gpipe", **may)
    assert DappleConfig(post_validation=True).constraints.shard_optimizer == "off"


def test_plans_may_by_default_do_what_runs_can_do():
    assert DappleConfig().constraints.memory_policies == {"recompute", "offload"}


@pytest.mark.parametrize(
    ("limit", "read"),
    [
        ("16GiB", {"": 16 * 2**30}),
        (3000, {"": 3000}),
        ("V100: 15 GiB, T4:14GB", {"V100": 15 * 2**30, "T4": 14 * 10**9}),
        ({"V100": "15GiB", "T4": 5000}, {"V100": 15 * 2**30, "T4": 5000}),
    ],
)
def test_a_memory_limit_holds_for_all_devices_or_by_kind(limit, read):
    assert read_config({"memory_limit": limit}).memory_limits == read


@pytest.mark.parametrize(
    "limit", ["", "much", "0 B", "-1 GiB", "V100: 1GiB, V100: 2GiB", ": 1GiB", "1GiB, 2GiB", 16, True]
)
def test_a_limit_that_says_nothing_is_refused(limit):
    with pytest.raises(ConfigError, match="memory_limit"):
        read_config({"memory_limit": limit})


def test_the_old_name_of_measure_memory_is_read_and_said():
    with pytest.warns(FutureWarning, match="measure_memory"):
        assert read_config({"memory": True}).measure_memory
    with pytest.raises(ConfigError, match="memory_limit"):
        read_config({"memory": "16GiB"})


def test_the_old_name_of_stages_per_device_is_read_and_noted_once():
    notes: list[str] = []
    old = {"schedule": "interleaved", "chunks": 2}
    new = {"schedule": "interleaved", "stages_per_device": 2}
    assert read_config(old, warn=notes.append) == read_config(new, warn=notes.append)
    assert [note for note in notes if "chunks is called stages_per_device now" in note] == notes != []
    assert read_config(new).constraints.stages_per_device == 2
    node = OmegaConf.merge(OmegaConf.structured(hydra_schema()), {"chunks": 4})
    del node._target_
    with pytest.warns(FutureWarning, match=r"called stages_per_device now.*microbatches"):
        assert read_config(node).stages_per_device == 4
    with pytest.raises(ConfigError, match="found chunks and stages_per_device; chunks is the old name"):
        read_config({"chunks": 2, "stages_per_device": 2})
    with pytest.raises(ConfigError, match="found stages_per_device=0"), pytest.warns(FutureWarning):
        read_config({"chunks": 0})


def test_the_strategy_takes_the_old_name_of_stages_per_device():
    with pytest.warns(FutureWarning, match="called stages_per_device now"):
        assert DappleStrategy(chunks=2).config == DappleConfig(stages_per_device=2)


def test_on_and_off_as_yaml_reads_them():
    assert read_config({"shard_optimizer": True}).shard_optimizer == "on"
    assert read_config({"shard_optimizer": False}).shard_optimizer == "off"


def test_no_option_is_hinted_at_that_is_far_from_what_was_written():
    with pytest.raises(ConfigError) as caught:
        read_config({"split": 1})
    assert "did you mean" not in str(caught.value)


def test_advice_is_given_for_no_option_that_exists_and_names_those_that_do():
    assert not set(_INSTEAD) & set(OPTIONS)
    for text in _INSTEAD.values():
        named = re.findall(r"set ([a-z_]+)", text)
        assert set(named) <= {*OPTIONS, "process_group_backend"}, text


def test_names_of_schedules_are_read_in_any_case():
    for name in SCHEDULES:
        assert schedule_name(name.upper(), SCHEDULES) == name
    assert schedule_name("unheard of", SCHEDULES) == "unheard of"
