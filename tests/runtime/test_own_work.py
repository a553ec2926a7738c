"""A new instruction is a class with effects, a price and a handler; what is left out is named by whoever misses it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest

from lightning_pipe.core.effects import OWN_WORK, Effects, OwnWork, own_work
from lightning_pipe.core.program import Bucket, Edge, Joined, Layout, Program, Traffic, VerifiedProgram
from lightning_pipe.cost import own_work as prices_of_own_work
from lightning_pipe.cost.own_work import OWN_WORK_PRICES, price_own_work
from lightning_pipe.errors import PlanError, ProgramError
from lightning_pipe.report import accounts, chrome_trace
from lightning_pipe.report.plot import plot_timeline
from lightning_pipe.runtime import handlers
from lightning_pipe.runtime.executor import run_together
from lightning_pipe.runtime.job import ProgramResult
from lightning_pipe.runtime.transport.local import Hub
from lightning_pipe.schedule import order_of
from lightning_pipe.schedule.formats.text import format_program, parse, parse_program
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.verification.verify import verify
from lightning_pipe.simulator import UnitPrices, memory_curves, simulate
from ranks.pipelines import Case, capture_of, executor_of, job_of, module_of, program_of, split_of

SECONDS, BYTES = 3.0, 5
EFFECTS = Effects(
    law="shelf",
    after=("F",),
    before=("I",),
    resource="compute",
    bytes=1,
    verb="shelved",
    label="shelf",
    colour="#123456",
)


@pytest.fixture
def shelve() -> Iterator[type[OwnWork]]:
    """Define an instruction: after F of a micro-batch, before its I, it keeps the rank busy and holds bytes."""

    @own_work
    @dataclass(frozen=True, order=True)
    class Shelve(OwnWork):
        code: ClassVar[str] = "SHELVE"
        effects: ClassVar[Effects] = EFFECTS

    yield Shelve
    for registry in (OWN_WORK, OWN_WORK_PRICES, handlers.HANDLERS):
        for key in [key for key in registry if key in ("SHELVE", Shelve)]:
            del registry[key]


class OwnPrices(UnitPrices):
    """Unit prices that ask the registry for own work, as the prices of plans do."""

    def own_work_s(self, work: OwnWork, rank: int, samples: int) -> float:
        return prices_of_own_work.own_work_s(None, work, rank, samples)  # type: ignore[arg-type]

    def own_work_bytes(self, work: OwnWork, rank: int, samples: int) -> int:
        return prices_of_own_work.own_work_bytes(None, work, rank, samples)  # type: ignore[arg-type]


def priced(kind: type[OwnWork]) -> None:
    price_own_work(kind, seconds=lambda *_: SECONDS, bytes=lambda *_: BYTES)


def program(*, shelved: str = "", before: str = "0F1") -> Program:
    """Return two stages under GPipe; `shelved` stands on rank 0 before an instruction."""
    traffic = Traffic((Edge("F", 0, 1, 8.0), Edge("B", 1, 0, 8.0)), (Bucket((0,), 1), Bucket((1,), 1)))
    layout = Layout(((0,), (1,)))
    order = order_of("gpipe", layout=layout, microbatches=2, options={})
    text = format_program(lower(order, layout=layout, sizes=(1, 1), traffic=traffic))
    return parse_program(text.replace(f" {before}", f" {shelved} {before}", 1) if shelved else text)


def test_it_is_parsed_and_written(shelve):
    assert parse("0SHELVE1") == shelve(0, 1) and str(shelve(0, 1)) == "0SHELVE1"
    found = program(shelved="0SHELVE0")
    assert shelve(0, 0) in found.ranks[0] and parse_program(format_program(found)) == found


def test_it_is_proved_by_its_effects(shelve):
    assert isinstance(verify(program(shelved="0SHELVE0")), VerifiedProgram)
    for shelved, before, message in (
        ("0SHELVE0", "0F0", r'0SHELVE0: law "shelf": it needs 0F0 before it'),
        ("0SHELVE0", "0W0", r'0SHELVE0: law "shelf": it comes after 0I0, which waits for it'),
        ("0SHELVE0 0SHELVE0", "0F1", r'law "shelf": it is shelved twice'),
        ("1SHELVE0", "0F1", r'1SHELVE0: law "shelf": .*has no such work'),
    ):
        with pytest.raises(ProgramError, match=message):
            verify(program(shelved=shelved, before=before))


def test_it_may_be_demanded_of_stages(shelve):
    shelve.effects = replace(EFFECTS, stages=lambda program: (0,))
    with pytest.raises(ProgramError, match='0I0: law "shelf": it needs 0SHELVE0 before it'):
        verify(program())


def test_it_takes_its_price_in_time_and_memory(shelve):
    priced(shelve)
    plain, found = verify(program()), verify(program(shelved="0SHELVE0"))
    before, after = simulate(plain, OwnPrices()), simulate(found, OwnPrices())
    event = next(event for event in after.events if isinstance(event.instruction, shelve))
    assert (event.start, event.end) == (1.0, 1.0 + SECONDS) and after.makespan == before.makespan + SECONDS
    curve = memory_curves(after, program=found, prices=OwnPrices())[0]
    none = memory_curves(before, program=plain, prices=OwnPrices())[0]
    assert curve.peak_bytes == none.peak_bytes + BYTES
    assert curve.held_bytes[-1] == 0


@pytest.mark.parametrize("resource", ["out", "back"])
def test_a_copy_runs_beside_computes_which_wait_for_its_end(shelve, resource):
    shelve.effects = replace(EFFECTS, resource=resource)
    price_own_work(shelve, seconds=lambda *_: 50.0, bytes=lambda *_: BYTES)
    found = simulate(verify(program(shelved="0SHELVE0")), OwnPrices())
    starts = {str(event.instruction): event.start for event in found.events}
    assert starts["0F1"] == 1.0 and starts["0I0"] == 51.0


def test_it_is_drawn_traced_and_accounted(shelve, tmp_path: Path):
    pytest.importorskip("matplotlib")
    priced(shelve)
    timeline = simulate(verify(program(shelved="0SHELVE0")), OwnPrices())
    names = {event["name"]: event for event in json.loads(chrome_trace(timeline))["traceEvents"]}
    assert names["0SHELVE0"]["cat"] == "shelve" and names["0SHELVE0"]["dur"] == SECONDS * 1e6
    plot_timeline(timeline, tmp_path / "shelf.png")
    assert _has_colour(tmp_path / "shelf.png", (0x12, 0x34, 0x56))
    assert sum(gap.swap + gap.overhead for gap in accounts(timeline)[0].gaps) >= 0


def _has_colour(path: Path, colour: tuple[int, int, int]) -> bool:
    from matplotlib.image import imread

    pixels = (imread(path)[..., :3] * 255).round().astype(int).reshape(-1, 3)
    return bool((pixels == colour).all(axis=1).any())


def test_its_handler_runs_where_it_stands_and_is_recorded(shelve):
    calls = []
    handlers.handles(shelve)(lambda parts, work: calls.append((work, sorted(parts.stages))))
    outcomes = run_with(shelve)
    assert calls == [(shelve(1, 0), [1])]
    order = [str(event.instruction) for event in outcomes[1].timeline.events]
    assert order.index("1F0") < order.index("1SHELVE0") < order.index("1F1")


def test_without_effects_or_a_code_it_is_refused():
    with pytest.raises(ProgramError, match="Nothing declares no effects"):

        @own_work
        class Nothing(OwnWork):
            code = "NOTHING"

    with pytest.raises(ProgramError, match="Codeless has the code None"):

        @own_work
        class Codeless(OwnWork):
            effects = EFFECTS

    with pytest.raises(ProgramError, match="Double is written EVICT, as Evict is"):

        @own_work
        class Double(OwnWork):
            code, effects = "EVICT", EFFECTS


def test_one_that_is_not_made_known_is_named_by_everyone():
    @dataclass(frozen=True, order=True)
    class Stranger(OwnWork):
        code: ClassVar[str] = "STRANGER"
        effects: ClassVar[Effects] = EFFECTS

    known = program()
    rank = known.ranks[0]
    strange = replace(known, ranks=((*rank[:2], Stranger(0, 0), *rank[2:]), known.ranks[1]))
    proved = VerifiedProgram(*(getattr(strange, name) for name in strange.__dataclass_fields__))
    with pytest.raises(ProgramError, match="'STRANGER'"):
        parse("0STRANGER0")
    for consumer in (verify, lambda program: simulate(proved, UnitPrices())):
        with pytest.raises(ProgramError, match="Stranger is not known"):
            consumer(strange)


def test_without_a_price_or_a_handler_it_is_named(shelve):
    proved = verify(program(shelved="0SHELVE0"))
    with pytest.raises(PlanError, match=r"Shelve \(0SHELVE0, shelf\) has no price in seconds"):
        simulate(proved, OwnPrices())
    with pytest.raises(PlanError, match=r"Shelve .* has no unit price"):
        simulate(proved, UnitPrices())
    price_own_work(shelve, seconds=lambda *_: SECONDS)
    with pytest.raises(PlanError, match=r"Shelve .* has no price in bytes"):
        memory_curves(simulate(proved, OwnPrices()), program=proved, prices=OwnPrices())
    with pytest.raises(ProgramError, match=r"Shelve .* has no handler"):
        handlers.handler_of(shelve(0, 0))
    with pytest.raises(ProgramError, match=r"Shelve .* has no handler"):
        run_with(shelve)


def run_with(kind: type[OwnWork]) -> list[ProgramResult]:
    """Run a pipeline of three ranks, the second of which has the instruction between two forwards."""
    case = Case("Chain", ((0,), (1,), (2,)))
    capture = capture_of(case, module_of(case))
    split = split_of(case, capture)
    hub = Hub()
    executors = [executor_of(case, module_of(case), capture, split, hub.endpoint(r)) for r in range(3)]
    text = format_program(program_of(case, split)).replace(" 1F1", f" {kind(1, 0)} 1F1", 1)
    return run_together(executors, verify(parse_program(text)), [job_of(case)] * 3, record=True)


def test_modules_that_name_an_instruction_are_few():
    package = Path(handlers.__file__).parents[1]
    texts = [path.read_text(encoding="utf-8") for path in package.rglob("*.py")]
    for kind in (*OWN_WORK.values(), Joined):
        naming = sum(re.search(rf"\b{kind.__name__}\b", text) is not None for text in texts)
        assert naming <= 8, f"{kind.__name__} stands in {naming} modules"
