"""Laws of traces and drawings: they hold every event at its time."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest

from lightning_pipe.core.program import Compute, Free, Load, Message, Recv, Reduce, Samples, Send, Step
from lightning_pipe.core.timeline import Event, Timeline
from lightning_pipe.report import chrome_trace, draw
from lightning_pipe.simulator import UnitPrices, simulate
from report.runs import as_recorded, program_of, run_of

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


def slices(trace: str) -> list[dict]:
    return [event for event in json.loads(trace)["traceEvents"] if event["ph"] == "X"]


def names(trace: str, kind: str) -> dict[tuple[int, int], str]:
    """Return the names of processes or threads by their numbers."""
    events = [event for event in json.loads(trace)["traceEvents"] if event["name"] == kind]
    return {(event["pid"], event.get("tid", 0)): event["args"]["name"] for event in events}


def test_a_trace_holds_every_event_in_microseconds():
    found = [(event["pid"], event["name"], event["ts"], event["dur"]) for event in slices(chrome_trace(TIMELINE))]
    expected = [(e.rank, str(e.instruction), e.start * 1e6, (e.end - e.start) * 1e6) for e in TIMELINE.events]
    assert sorted(found) == sorted(expected)


def test_a_trace_keeps_what_overlaps_on_lanes_of_their_own():
    trace = chrome_trace(TIMELINE)
    threads = names(trace, "thread_name")
    lanes = {event["name"]: threads[event["pid"], event["tid"]] for event in slices(trace)}
    assert lanes["0F0"] == "compute"
    assert lanes["0SEND_F0>1@1[0:2]"] == "send"
    assert lanes["1RECV_F0<0@0[0:2]"] == "receive"
    assert lanes["REDUCE0"] == "reduce"


def test_no_thread_of_a_trace_holds_two_things_at_once():
    trace = chrome_trace(as_recorded(run_of(((0,), (1, 2), (3,)), UnitPrices(latency=0.5, reduction=2.0))))
    threads = defaultdict(list)
    for event in slices(trace):
        threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for times in threads.values():
        assert all(a[1] <= b[0] for a, b in pairwise(sorted(times)))
    assert "receive 2" in names(trace, "thread_name").values(), "receives are posted ahead"


def test_copies_to_the_host_and_back_have_a_lane_each():
    trace = chrome_trace(run_of(((0,), (1,)), UnitPrices(swap=0.5), offloads=(0,)))
    threads = names(trace, "thread_name")
    lanes = {event["name"]: (event["cat"], threads[event["pid"], event["tid"]]) for event in slices(trace)}
    assert lanes["0EVICT1"] == ("evict", "out") and lanes["0FETCH1"] == ("fetch", "back")
    assert "out" not in {name for (rank, _), name in threads.items() if rank == 1}, "lanes are there if needed"


def test_categories_are_kinds():
    kinds = {e["name"]: e["cat"] for e in slices(chrome_trace(TIMELINE))}
    expected = ["load", "F", "send", "receive", "F", "B", "reduce", "free", "step"]
    assert [kinds[str(event.instruction)] for event in TIMELINE.events] == expected


def test_memory_is_a_counter_of_its_rank():
    curves = {0: [(0.0, 10), (1.5, 30)], 1: [(2.0, 5)]}
    events = json.loads(chrome_trace(TIMELINE, memory=curves))["traceEvents"]
    found = [(e["pid"], e["name"], e["ts"], e["args"]) for e in events if e["ph"] == "C"]
    assert found == [
        (0, "memory", 0.0, {"bytes": 10}),
        (0, "memory", 1.5e6, {"bytes": 30}),
        (1, "memory", 2e6, {"bytes": 5}),
    ]


def test_predicted_and_measured_lie_side_by_side_and_begin_together():
    measured = Timeline(tuple(replace(e, start=100 + 2 * e.start, end=100 + 2 * e.end) for e in TIMELINE.events))
    trace = chrome_trace(
        measured, predicted=TIMELINE, memory={0: [(101.0, 1)]}, predicted_memory={0: [(0.5, 2)], 1: [(0.5, 3)]}
    )
    processes = {pid: name for (pid, _), name in names(trace, "process_name").items()}
    assert sorted(processes.values()) == [f"rank {r} {run}" for r in range(2) for run in ("measured", "predicted")]
    order = {e["pid"]: e["args"]["sort_index"] for e in json.loads(trace)["traceEvents"] if "sort_index" in e["name"]}
    told = [processes[pid] for pid in sorted(order, key=order.__getitem__)]
    assert told == [f"rank {r} {run}" for r in range(2) for run in ("predicted", "measured")]
    starts = {processes[e["pid"]]: e["ts"] for e in slices(trace) if e["name"] == "0F0"}
    assert starts == {"rank 0 predicted": 100e6, "rank 0 measured": 100e6}
    counters = [e for e in json.loads(trace)["traceEvents"] if e["ph"] == "C"]
    assert {(processes[e["pid"]], e["ts"], e["args"]["bytes"]) for e in counters} == {
        ("rank 0 predicted", 100.5e6, 2),
        ("rank 1 predicted", 100.5e6, 3),
        ("rank 0 measured", 101e6, 1),
    }


def test_a_drawing_has_a_column_per_unit_of_time():
    assert draw(TIMELINE) == "0 | F0 ==\n1 |  .  .  . F0 B0 =="
    assert draw(TIMELINE, unit=2.0) == "0 | F0\n1 |  . F0 B0"


def test_a_drawing_names_stages_where_a_rank_has_several():
    events = (Event(0, Compute(0, "F", 0), 0.0, 1.0), Event(0, Compute(1, "F", 0), 1.0, 2.0))
    assert draw(Timeline(events)) == "0 | 0F0 1F0"


@pytest.mark.parametrize("timeline", [Timeline(()), Timeline((Event(0, Step(), 0.0, 1.0),))])
def test_a_timeline_without_computes_draws_nothing(timeline):
    assert draw(timeline) == ""


def test_arrows_lead_from_the_compute_that_made_a_message_to_its_receipt():
    run = run_of(((0,), (1,)), UnitPrices(latency=0.5))
    events = json.loads(chrome_trace(run, predicted=run))["traceEvents"]
    begins = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert begins.keys() == ends.keys() and len(begins) == 2 * 2 * 4, "predicted and measured, F and B, 4 micro-batches"
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    for number, begin in begins.items():
        assert threads[begin["pid"], begin["tid"]] == "compute"
        assert threads[ends[number]["pid"], ends[number]["tid"]] == "receive"
        assert ends[number]["ts"] - begin["ts"] == pytest.approx(0.5e6)
        around = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (begin["pid"], 0)]
        assert any(e["ts"] <= begin["ts"] < e["ts"] + e["dur"] for e in around), "a compute encloses its begin"


def test_arguments_are_peer_bytes_and_predicted_seconds():
    program = program_of(((0,), (1,)))
    run = simulate(program, UnitPrices(latency=0.5))
    trace = chrome_trace(as_recorded(run), predicted=run, traffic=program.traffic)
    found = {(e["pid"], e["name"]): e["args"] for e in slices(trace)}
    assert found[0, "0F0"] == {"predicted seconds": 1.0}
    assert found[1, "1RECV_F0<0@0[0:6]"] == {"peer": 0, "bytes": 6, "predicted seconds": 0.5}
    marks = [e for e in json.loads(trace)["traceEvents"] if e["ph"] == "i"]
    assert {(e["pid"], e["name"]) for e in marks} >= {(0, "optimizer step"), (1, "optimizer step")}
