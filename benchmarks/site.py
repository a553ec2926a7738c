"""Draw what the pages of docs/ show, and write a page for each schedule, before the site is built.

    python -m benchmarks.site          # make docs runs it, then mkdocs

Everything goes to docs/pictures/ and docs/schedule/, which git ignores. All pictures come from the simulator and the
plots that runs use; the report is that of a plan on a cluster preset.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.schedule_docs import CASE, own_schedules, section
from lightning_pipe.cli.schedules import shown
from lightning_pipe.core.program import AnyCompute, Bucket, Edge, Layout, Traffic, VerifiedProgram
from lightning_pipe.core.timeline import Timeline
from lightning_pipe.report import plot_memory, plot_timeline
from lightning_pipe.schedule import order_of
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.verification.verify import verify
from lightning_pipe.simulator import UnitPrices, memory_curves, simulate

DOCS = Path(__file__).parent.parent / "docs"
RARELY_SOUGHT = "---\nsearch:\n  boost: 0.5\n---"  # other pages come first among the hits of a search
PICTURES, PAGES = DOCS / "pictures", DOCS / "schedule"
FOUR = ((0,), (1,), (2,), (3,))
UNIT = UnitPrices(reduction=0.5, step=0.5, saved=2**20)


def program(stages: tuple[tuple[int, ...], ...], schedule: str, microbatches: int) -> VerifiedProgram:
    """Return a verified program of equal stages."""
    edges = [e for s in range(len(stages) - 1) for e in (Edge("F", s, s + 1, 1.0), Edge("B", s + 1, s, 1.0))]
    traffic = Traffic(tuple(edges), tuple(Bucket((s,), 1) for s in range(len(stages))))
    layout = Layout(stages)
    order = order_of(schedule, layout=layout, microbatches=microbatches)
    return verify(lower(order, layout=layout, sizes=(6,) * microbatches, traffic=traffic))


def run(stages: tuple[tuple[int, ...], ...], schedule: str, microbatches: int, prices: UnitPrices = UNIT) -> Timeline:
    """Return a simulated step."""
    return simulate(program(stages, schedule, microbatches), prices)


@dataclass(frozen=True)
class Shared(UnitPrices):
    """Prices where two replicas share the work of the first stage."""

    def compute_s(self, compute: AnyCompute, rank: int, samples: int) -> float:
        """Return half the seconds for the first stage."""
        return super().compute_s(compute, rank, samples) * (0.5 if compute.stage == 0 else 1.0)


def draw_memory(path: Path) -> None:
    """Draw what GPipe and 1F1B keep on the first of four ranks."""
    curves = {}
    schedules = ("gpipe", "1f1b")
    for name, schedule in enumerate(schedules):
        written = program(FOUR, schedule, 8)
        curve = memory_curves(simulate(written, UNIT), program=written, prices=UNIT)[0]
        curves[name] = tuple(zip(curve.times, curve.held_bytes, strict=True))
    plot_memory(curves, path, names=dict(enumerate(schedules)), title="saved tensors of the first of four ranks")


DRAWN: dict[str, Callable[[Path], None]] = {
    "naive.png": lambda path: plot_timeline(run(FOUR, "gpipe", 1), path, title="one micro-batch"),
    "gpipe.png": lambda path: plot_timeline(run(FOUR, "gpipe", 8), path, title="gpipe, 8 micro-batches"),
    "1f1b.png": lambda path: plot_timeline(run(FOUR, "1f1b", 8), path, title="1f1b, 8 micro-batches"),
    "zero_bubble.png": lambda path: plot_timeline(run(FOUR, "zb_h2", 8), path, title="zb_h2, 8 micro-batches"),
    "slow_links.png": lambda path: plot_timeline(
        run(FOUR, "1f1b", 8, UnitPrices(latency=1.0, reduction=0.5, step=0.5)), path, title="1f1b, slow links"
    ),
    "replicas.png": lambda path: plot_timeline(
        run(((0, 1), (2,)), "1f1b", 6, Shared(reduction=1.0, step=0.5)), path, title="layout 2-1"
    ),
    "memory.png": draw_memory,
}


def write_schedule_page(name: str) -> None:
    """Write the page of a schedule, and the picture of its example."""
    example = shown(name, CASE)
    picture = f"schedule_{name}.png"
    title = f"{name}, {CASE.devices} devices, {CASE.microbatches} micro-batches"
    plot_timeline(example.timeline, PICTURES / picture, title=title)
    paragraphs = [RARELY_SOUGHT, f"# {name}", f"![{title}](../pictures/{picture})", *section(name, example)]
    text = "\n\n".join([*paragraphs, "[All schedules](../schedules.md)\n"])
    (PAGES / f"{name}.md").write_text(text, encoding="utf-8")


def main() -> None:
    """Draw all pictures and write all pages."""
    PICTURES.mkdir(exist_ok=True)
    PAGES.mkdir(exist_ok=True)
    for name, draw in DRAWN.items():
        draw(PICTURES / name)
    for name in own_schedules():
        write_schedule_page(name)
    print(f"{len(DRAWN)} pictures, and a page and a picture for each of {len(own_schedules())} schedules")


if __name__ == "__main__":
    main()
