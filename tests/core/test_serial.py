"""Laws of files: what is written is read back equal, and every mistake is named by its path."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import pytest

from lightning_pipe.core.plan import Plan, StagePlan
from lightning_pipe.core.program import Bucket, Edge, Layout, Traffic
from lightning_pipe.core.serial import (
    from_dict,
    from_yaml,
    load_json,
    load_yaml,
    save_json,
    save_yaml,
    to_dict,
    to_yaml,
)
from lightning_pipe.errors import PlanError


@dataclass(frozen=True)
class Part:
    name: str
    share: Literal["all", 3] = "all"


@dataclass(frozen=True)
class Whole:
    number: int
    ratio: float
    flag: bool
    parts: tuple[Part, ...]
    pair: tuple[int, str]
    numbers: frozenset[int] = frozenset()
    table: dict[str, float] = field(default_factory=dict)
    part: Part | None = None
    limit: int | str | None = None


WHOLE = Whole(
    number=3,
    ratio=1e-7,
    flag=True,
    parts=(Part("a"), Part("ü: [x]", 3)),
    pair=(1, "yes"),
    numbers=frozenset({5, 2}),
    table={"x": float("inf"), "y": 2.0},
    part=Part("1e5"),
    limit="4,3,2,1",
)
PLAN = Plan(
    stages=(StagePlan("", (0, 1)), StagePlan("model.blocks.3", (2,), "microbatches")),
    microbatches=8,
    options={"warmup": "pb", "depth": 3},
    graph="8f3a",
)
VALUES = [
    WHOLE,
    PLAN,
    Plan((StagePlan("", (0,)),), 1),
    Layout(((0, 1), (2,)), frozenset({1})),
    Traffic((Edge("F", 0, 1, 2.5, 8),), (Bucket((0, 1), 12),), (0, 1)),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize(("save", "load"), [(save_yaml, load_yaml), (save_json, load_json)])
def test_what_is_saved_is_loaded_equal(value, save, load, tmp_path):
    save(value, tmp_path / "file")
    assert load(type(value), tmp_path / "file") == value
    assert from_dict(type(value), to_dict(value)) == value


def test_a_plan_file_reads_well():
    assert to_yaml(PLAN) == (
        "stages:\n"
        "- at: ''\n"
        "  ranks: [0, 1]\n"
        "  share: samples\n"
        "- at: model.blocks.3\n"
        "  ranks: [2]\n"
        "  share: microbatches\n"
        "microbatches: 8\n"
        "schedule: 1f1b\n"
        "options: {warmup: pb, depth: 3}\n"
        "graph: 8f3a\n"
    )


def test_what_a_stage_does_not_keep_and_how_replicas_share_are_written_where_said():
    stage = StagePlan("", (0, 1), weights=(3, 1), recompute=("gelu",), offload=("model.blocks.3", "mm"))
    assert to_yaml(stage) == (
        "at: ''\nranks: [0, 1]\nshare: samples\nweights: [3, 1]\nrecompute: [gelu]\noffload: [model.blocks.3, mm]\n"
    )
    assert from_yaml(StagePlan, to_yaml(stage)) == stage
    decided = replace(stage, beside_copy=0)
    assert to_yaml(decided).endswith("offload: [model.blocks.3, mm]\nbeside_copy: 0\n")
    assert from_yaml(StagePlan, to_yaml(decided)) == decided


def test_keys_with_defaults_may_be_left_out():
    plan = from_yaml(Plan, "stages: [{at: '', ranks: [0]}]\nmicrobatches: 4")
    assert plan == Plan((StagePlan("", (0,)),), 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stages: []", "microbatches: missing; Plan needs it"),
        (
            "stages: [{at: '', ranks: [0]}, {at: x, ranks: a}]",
            "stages[1].ranks: expected a list of integers, found 'a'",
        ),
        ("stages: [{at: '', ranks: [0, a]}]", "stages[0].ranks[1]: expected an integer, found 'a'"),
        ("stages: [{at: '', ranks: [0, true]}]", "stages[0].ranks[1]: expected an integer, found True"),
        (
            "stages: [{at: '', rank: [0]}]",
            "stages[0].rank: unknown key; did you mean 'ranks'? Expected one of at, ranks, share, weights, recompute",
        ),
        ("stages: [{at: '', ranks: [0], share: half}]", "share: expected 'samples' or 'microbatches', found 'half'"),
        ("stages: [3]", "stages[0]: expected a mapping with the keys of StagePlan, found 3"),
        ("stages: {}", "stages: expected a list of StagePlan, found {}"),
        ("options: {warmup: [1]}", "options.warmup: expected an integer or a text, found [1]"),
        ("options: 3", "options: expected a mapping of texts to an integer or a text, found 3"),
        ("options: {3: 1}", "options: key: expected a text, found 3"),
        ("3", "the top: expected a mapping with the keys of Plan, found 3"),
        ("[", "is not YAML"),
        ("microbatches: 4\nmicrobatches: 8", "found the key 'microbatches' a second time"),
        ("stages: [{at: a, ranks: [0], at: b}]", "found the key 'at' a second time"),
    ],
)
def test_a_mistake_in_a_plan_is_named_by_its_path(text, message):
    complete = text if text in ("3", "[", "stages: []") else text + "\nmicrobatches: 2"
    complete += "\nstages: []" if text.startswith("options") else ""
    with pytest.raises(PlanError) as caught:
        from_yaml(Plan, complete, source="plan.yaml")
    assert str(caught.value).startswith("plan.yaml")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ratio": "1e-5"}, "ratio: expected a number, found '1e-5' (write 1.0e-05)"),
        ({"ratio": True}, "ratio: expected a number, found True"),
        ({"flag": 1}, "flag: expected true or false, found 1"),
        ({"number": 1.5}, "number: expected an integer, found 1.5"),
        ({"pair": [1]}, "pair: expected a list of an integer and a text, found [1]"),
        ({"pair": [1, 2]}, "pair[1]: expected a text, found 2"),
        ({"part": {}}, "part.name: missing; Part needs it"),
        ({"part": 3}, "part: expected a mapping with the keys of Part or nothing (null), found 3"),
        ({"table": {"x": "y"}}, "table.x: expected a number, found 'y'"),
    ],
)
def test_a_value_of_the_wrong_type_is_named(change, message):
    with pytest.raises(PlanError) as caught:
        from_dict(Whole, {**to_dict(WHOLE), **change})
    assert str(caught.value) == message


def test_integers_are_fine_where_numbers_are_expected():
    assert from_dict(Whole, {**to_dict(WHOLE), "ratio": 2}).ratio == 2.0


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(PlanError, match=r"cannot read .*nowhere\.yaml"):
        load_yaml(Plan, tmp_path / "nowhere.yaml")
    (tmp_path / "half.json").write_text("{")
    with pytest.raises(PlanError, match=r"half\.json is not JSON"):
        load_json(Plan, tmp_path / "half.json")
