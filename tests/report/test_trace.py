"""Laws of traces and drawings: they hold every event at its time."""

from __future__ import annotations

import json

import pytest

from lightning_pipe.core.program import Compute, Free, Load, Message, Recv, Reduce, Samples, Send, Step
from lightning_pipe.core.timeline import Event, Timeline
from lightning_pipe.report import chrome_trace, draw

MESSAGE = Message("F", 0, 1, 0, Samples(0, 2))
TIMELINE = Timeline(
    (
        Event(0, Load(0, 0), 0.0, 0.0),
        Event(0, Compute(0, "F", 0), 0.0, 2.0),
        Event(0, Send(MESSAGE, 1), 2.0, 2.5),
        Event(1, Recv(MESSAGE, 0), 2.0, 2.5),
        Event(1, Compute(1, "F", 0), 3.0, 4.0),
        Event(1, Compute(1, "B", 0), 4.0, 6.0),
        Event(1, Reduce(0), 6.0, 7.0),
        Event(1, Free(1, 0), 6.0, 6.0),
        Event(1, Step(), 7.0, 8.0),
    )
)


def test_a_trace_holds_every_event_in_microseconds():
    events = [event for event in json.loads(chrome_trace(TIMELINE))["traceEvents"] if event["ph"] == "X"]
    found = [(event["pid"], event["name"], event["ts"], event["dur"]) for event in events]
    assert found == [(e.rank, str(e.instruction), e.start * 1e6, (e.end - e.start) * 1e6) for e in TIMELINE.events]


def test_a_trace_keeps_what_overlaps_on_lanes_of_their_own():
    trace = json.loads(chrome_trace(TIMELINE))["traceEvents"]
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in trace if event["name"] == "thread_name"}
    lanes = {event["name"]: names[event["pid"], event["tid"]] for event in trace if event["ph"] == "X"}
    assert lanes["0F0"] == "compute"
    assert lanes["0SEND_F0>1@1[0:2]"] == "send"
    assert lanes["1RECV_F0<0@0[0:2]"] == "receive"
    assert lanes["REDUCE0"] == "reduce"


def test_categories_are_kinds():
    events = [event for event in json.loads(chrome_trace(TIMELINE))["traceEvents"] if event["ph"] == "X"]
    assert [e["cat"] for e in events] == ["load", "F", "send", "receive", "F", "B", "reduce", "free", "step"]


def test_a_drawing_has_a_column_per_unit_of_time():
    assert draw(TIMELINE) == "0 | F0 ==\n1 |  .  .  . F0 B0 =="
    assert draw(TIMELINE, unit=2.0) == "0 | F0\n1 |  . F0 B0"


def test_a_drawing_names_stages_where_a_rank_has_several():
    events = (Event(0, Compute(0, "F", 0), 0.0, 1.0), Event(0, Compute(1, "F", 0), 1.0, 2.0))
    assert draw(Timeline(events)) == "0 | 0F0 1F0"


@pytest.mark.parametrize("timeline", [Timeline(()), Timeline((Event(0, Step(), 0.0, 1.0),))])
def test_a_timeline_without_computes_draws_nothing(timeline):
    assert draw(timeline) == ""
