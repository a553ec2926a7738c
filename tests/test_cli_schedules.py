"""What `lightning-pipe schedules` promises: figures of the simulator, drawings, torch's files, one text per mistake."""

from __future__ import annotations

import re

import pytest

from benchmarks.closed_forms import FUSED, SPLIT, Row, peaks, run
from lightning_pipe.cli import main
from lightning_pipe.cli.options import read_options
from lightning_pipe.cli.schedules import SchedulesOptions, shown
from lightning_pipe.core.program import Compute
from lightning_pipe.errors import ConfigError
from lightning_pipe.report import draw
from lightning_pipe.schedule import SCHEDULES
from lightning_pipe.schedule.formats.torch_csv import read_csv
from lightning_pipe.schedule.weights import POLICIES


@pytest.fixture
def told(capsys):
    """Return a function that runs the command, which must succeed, and returns what it prints."""

    def running(*words: str) -> str:
        assert main(["schedules", *words]) == 0
        return capsys.readouterr().out

    return running


def cells(text: str, name: str) -> list[str]:
    """Return the row of a schedule in the table."""
    found = re.search(rf"^ +{re.escape(name)}  +(.*)$", text, re.MULTILINE)
    assert found, name
    return re.split(r"  +", found[1].strip())


def test_every_schedule_has_a_row_with_its_figures(told):
    text = told()
    assert "4 devices, 8 micro-batches: 24 s of work per device" in text
    assert cells(text, "1f1b") == ["1", "30 s", "30 s", "6 s", "10.5%", "4 3 2 1", "4", "1x"]
    assert all(len(cells(text, name)) == 8 for name in SCHEDULES)
    assert "0 |" not in text


@pytest.mark.parametrize("name", SCHEDULES)
def test_figures_are_those_of_the_order_whatever_the_number_of_stages(name):
    """Stages of v per device take a v-th of a share's seconds, so that makespans are in units of shares."""
    one, row, chunks = shown(name, SchedulesOptions()), Row(name, 4, 8), SCHEDULES[name].stages_per_device[0]
    assert (one.layout, list(one.kept)) == (row.layout, peaks(one.order, until="W"))
    if one.order == row.order:  # a schedule that looks at times may decide otherwise where stages are shorter
        assert one.timeline.makespan == pytest.approx(run(row).makespan / chunks)
    assert {len(one.stages(rank)) for rank in range(4)} == {chunks * one.copies}
    assert one.shares == tuple(kept / chunks for kept in one.kept)


@pytest.mark.parametrize(("fused", "model"), [("false", SPLIT), ("true", FUSED)])
def test_a_backward_that_is_not_split_sends_its_gradient_at_its_end_if_asked_for(fused, model):
    options = read_options(SchedulesOptions, ["devices=3", "microbatches=5", f"fused={fused}"])
    assert shown("gpipe", options).timeline.makespan == run(Row("gpipe", 3, 5), model).makespan


def test_times_are_those_that_are_given():
    words = ["devices=2", "microbatches=3", "forward=2", "input=3", "weight=0.5", "message=0.25"]
    timeline = shown("gpipe", read_options(SchedulesOptions, words)).timeline
    assert timeline.makespan == 3 * 2 + 2 + 0.25 + 3 * 3.5 + 3 + 0.25  # 3 F, another stage's F and I, 3 backwards
    assert timeline.busy(0) == timeline.busy(1) == 3 * 5.5


def test_a_single_schedule_is_drawn_with_its_options_and_a_row_per_device(told):
    text = told("schedule=1f1b", "devices=3", "microbatches=5", "options={warmup: pb}")
    assert draw(run(Row("1f1b", 3, 5, options={"warmup": "pb"}))) in text
    assert [cells(text, str(rank))[-2] for rank in range(3)] == ["5", "3", "1"]


def test_two_rounds_are_drawn_with_the_version_that_every_pass_reads(told):
    """Simulated 24 against 30; in 2BW the batch that begins ahead reads one version, that of its first forward."""
    text = told("versions=2bw", "devices=4", "microbatches=8")
    assert "2bw: 24 s a round, 27 s with clipping by norm, 30 s with a flush" in text
    assert "updates behind, by device: 1 1 1 1; versions of the weights: 2 2 2 2" in text
    first, last = (re.search(rf"^{rank} \| (.*)$", text, re.MULTILINE)[1].split() for rank in (0, 3))
    assert first[3:6] == ["F3/0", "I0/0", "W0/0"] and "F8/1" in first and "I8/1" in first
    assert last[0] == "F0/0" and "F8/1" in last and last[-1] == "W15/1"
    assert told("versions=all").count("with clipping") == len(POLICIES)
    assert told("versions=timeprest").startswith("timeprest (the same policy as stale)")


def test_all_are_drawn_if_asked_for(told):
    text = told("draw=true", "devices=2", "microbatches=3")
    for name in SCHEDULES:
        assert f"{name}\n{shown(name, SchedulesOptions(devices=2, microbatches=3)).drawing}" in text


def test_a_schedule_that_cannot_be_made_says_why_in_its_row(told):
    text = told("devices=3")
    reasons = " ".join(text.split()).count("even number of devices")  # which may be broken into lines
    assert len([name for name in SCHEDULES if cells(text, name)[0] == "-"]) == reasons > 0
    assert cells(text, "chimera")[-1].startswith("found the devices")


@pytest.mark.parametrize("communication", ["false", "true"])
def test_the_file_for_torch_is_the_schedule(communication, told, tmp_path):
    path = tmp_path / "zb_v.csv"
    words = ("schedule=zb_v", f"csv={path}", f"communication={communication}")
    assert f"Wrote zb_v to {path}" in told(*words).replace("\n", " ")
    text = path.read_text(encoding="utf-8")
    assert ("SEND" in text) == (communication == "true")
    assert read_csv(text) == shown("zb_v", SchedulesOptions()).order


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("devices=0",), "found devices=0; expected at least 1"),
        (("stages_per_device=0",), "found stages_per_device=0"),
        (("forward=0",), "found forward=0; expected seconds, and more than 0"),
        (("weight=nan",), "found weight=nan"),
        (("input=inf",), "found input=inf"),
        (("message=-1",), "found message=-1"),
        (("schedule=zb_w",), "found 'zb_w' in schedule.*did you mean"),
        (("csv=x.csv",), "found csv without schedule="),
        (("options={warmup: pb}",), "found options without schedule="),
        (("schedule=1f1b", "options={warm: pb}"), "no option 'warm'.*did you mean 'warmup'"),
        (("schedule=chimera", "devices=3"), "even number of devices"),
        (("schedule=gpipe", "csv=/nowhere/x.csv"), "cannot write the schedule"),
        (("model=x",), "unknown option 'model'"),
        (("schedule=none.csv",), "cannot read the schedule none.csv"),
        (("schedule=none.csv", "devices=2", "options={a: 1}"), "devices, options; the file decides these"),
    ],
)
def test_mistakes_are_refused_with_one_text(words, message, capsys):
    assert main(["schedules", *words]) == 2
    assert re.search(message, capsys.readouterr().err.replace("\n", " "))


def test_the_old_name_of_stages_per_device_is_noted_once_and_not_beside_the_new_one(told, caplog, capsys):
    new = told("schedule=interleaved", "stages_per_device=4")
    assert not caplog.messages
    assert told("schedule=interleaved", "chunks=4") == new
    assert [message.partition(";")[0] for message in caplog.messages] == [
        "The option chunks is called stages_per_device now"
    ]
    assert main(["schedules", "chunks=2", "stages_per_device=2"]) == 2
    assert "chunks is the old name of stages_per_device" in capsys.readouterr().err.replace("\n", " ")


def test_a_file_is_shown_as_the_schedule_that_it_lists(told, tmp_path):
    path = tmp_path / "zb_v.csv"
    times = ("forward=2", "message=0.25")
    text = told("schedule=zb_v", "devices=2", "microbatches=3", f"csv={path}", *times)
    found = shown(str(path), read_options(SchedulesOptions, [*times]))
    given = shown("zb_v", read_options(SchedulesOptions, ["devices=2", "microbatches=3", *times]))
    assert (found.order, found.program, found.timeline, found.kept) == (
        given.order,
        given.program,
        given.timeline,
        given.kept,
    )
    assert found.drawing in text and found.drawing in told(f"schedule={path}", *times)


def test_devices_of_a_file_may_hold_different_numbers_of_stages(told, tmp_path):
    path = tmp_path / "uneven.csv"
    path.write_text("0F0,2F0,2B0,0B0\n1F0,1B0\n")
    text = told(f"schedule={path}", "forward=3", "input=3", "weight=3")
    assert "2 devices, 1 micro-batch: 9 s of work per device" in text
    assert [cells(text, device)[:2] for device in "01"] == [["0,2", "12 s"], ["1", "6 s"]]


def test_what_is_drawn_has_a_column_for_the_shortest_compute():
    one = shown("gpipe", SchedulesOptions(devices=1, microbatches=1, forward=1, input=0.5, weight=0))
    assert one.drawing == "0 | F0 == I0"
    assert len(shown("gpipe", SchedulesOptions(devices=1, microbatches=1, weight=1e-9)).drawing) < 40_000
    assert {event.instruction for event in one.timeline.computes(0)} == {Compute(0, kind, 0) for kind in "FIW"}


def test_options_are_checked_where_they_are_made():
    with pytest.raises(ConfigError, match="at least 1"):
        SchedulesOptions(microbatches=0)
