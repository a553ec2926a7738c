"""Train a project by its own entry point in three ways, and print how the results compare with one device's.

python -m third_party.compare NAME     (in tests, with the project's own Python; `make projects` calls it)
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from third_party.entry import OPTIONS, RELOAD, WAYS
from third_party.table import PROJECTS

LIMIT_S = float(os.environ.get("THIRD_PARTY_LIMIT_S", 400))
PARTS = ("losses", "metrics", "weights", "results", "reload")
_SMALL = 1e-3  # below it, differences are absolute


@dataclass(frozen=True)
class Outcome:
    """How a run ended: `equal`, `differs`, `refused`, `fails` or `hangs`, with numbers or words."""

    verdict: str
    detail: str
    first_step_s: float | None = None

    def __str__(self) -> str:
        seconds = "" if self.first_step_s is None else f" (first step after {self.first_step_s:.1f} s)"
        return f"{self.verdict} {self.detail}{seconds}"


def trained(name: str, way: str, folder: Path) -> Outcome | None:
    """Run a project, and then its reload; return how that failed, or nothing."""
    folder.mkdir()
    return run(name, way, folder, "0.pt") or run(name, RELOAD, folder, "reload.pt")


def run(name: str, way: str, folder: Path, written: str) -> Outcome | None:
    """Run a project in a process of its own; return how it failed to write a file, or nothing."""
    environment = {**os.environ, "THIRD_PARTY": f"{name} {way} {folder}", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    for name_of_other in (OPTIONS, "PYTHONDONTWRITEBYTECODE"):
        environment.pop(name_of_other, None)
    with (folder / "log").open("a") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "third_party.entry"], env=environment, cwd=folder,
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code = child.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            return Outcome("hangs", f"no end within {LIMIT_S:.0f} s")
        finally:
            _end_group(child)
    if code == 0 and (folder / written).exists():
        return None
    return _failure(folder, code)


def _end_group(child: subprocess.Popen[Any]) -> None:
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    child.wait()


def _failure(folder: Path, code: int) -> Outcome:
    reports = sorted(folder.glob("*.json"))
    if not reports:
        return Outcome("fails", f"with exit status {code}: {(folder / 'log').read_text()[-500:]}")
    error = json.loads(reports[0].read_text())
    verdict = "refused" if error["refused"] else "fails"
    return Outcome(
        verdict, f"{error['type']}: {error['text']} [after {error['steps']} steps; {'; '.join(error['places'])}]"
    )


def numbers(value: Any, name: str = "") -> dict[str, torch.Tensor]:
    """Flatten nested containers of tensors, arrays and numbers."""
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, (list, tuple)) and not all(isinstance(item, (int, float)) for item in value):
        parts = enumerate(value)
    else:
        return {name: torch.as_tensor(value, dtype=torch.float64)}
    return {key: tensor for part, inner in parts for key, tensor in numbers(inner, f"{name}/{part}").items()}


def difference(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Return the largest difference relative to the largest value of its tensor, and that tensor's name."""
    shapes, wanted_shapes = ({name: tuple(x.shape) for name, x in side.items()} for side in (found, wanted))
    if shapes != wanted_shapes:
        odd = sorted({*shapes.items()} ^ {*wanted_shapes.items()})[0]
        return float("inf"), f"only one of them has {odd[0]} of shape {odd[1]}"
    relative = [
        (float(_distance(found[name], value).max() / value.abs().nan_to_num(0).max().clamp(min=_SMALL)), name)
        for name, value in wanted.items()
        if value.numel()
    ]
    return max(relative, default=(0.0, ""))


def _distance(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    same = (found == wanted) | (found.isnan() & wanted.isnan())
    return (found - wanted).abs().nan_to_num(nan=float("inf")).masked_fill(same, 0)


def outcome(name: str, way: str, folder: Path, alone: dict[str, Any]) -> Outcome:
    """Return how a run on two ranks compares with one device: all ranks' weights, and what the first has besides."""
    failed = trained(name, way, folder)
    if failed is not None:
        return failed
    ranks = _recorded(folder)
    if way == "split" and ranks[0]["layout"] != "1-1":
        return Outcome("fails", f"{OPTIONS} is not read: the layout is {ranks[0]['layout']}")
    parts = [(part, ranks[0]) for part in PARTS] + [("weights", rank) for rank in ranks[1:]]
    differences = [(*difference(numbers(rank[part]), numbers(alone[part])), part) for part, rank in parts]
    largest = max(differences)[0]
    detail = ", ".join(f"{part}{where} {value:.1e}" for value, where, part in differences)
    verdict = "equal" if largest <= PROJECTS[name].tolerance else "differs"
    return Outcome(verdict, f"{largest:.1e} ({detail})", ranks[0]["first_step_s"])


def _recorded(folder: Path) -> list[dict[str, Any]]:
    """Return what each rank has written; the first one has the results of the reload, too."""
    ranks = [torch.load(path, weights_only=False) for path in sorted(folder.glob("?.pt"))]
    ranks[0]["reload"] = torch.load(folder / "reload.pt", weights_only=False)
    return ranks


def compare(name: str, folder: Path) -> Iterator[tuple[str, Outcome]]:
    """Yield the outcome of each way.

    Raises:
        RuntimeError: if the project does not train on one device.
    """
    failed = trained(name, WAYS[0], folder / WAYS[0])
    if failed is not None:
        raise RuntimeError(f"{name} on one device {failed}")
    alone = _recorded(folder / WAYS[0])[0]
    yield WAYS[0], Outcome("trains", f"{len(alone['losses'])} steps", alone["first_step_s"])
    for way in WAYS[1:]:
        yield way, outcome(name, way, folder / way, alone)


def is_as_in_table(name: str, way: str, result: Outcome, log: str) -> bool:
    """Return whether a run has the verdict that the table has, and its words in the error or in the log."""
    if way == WAYS[0]:
        return True
    seen = PROJECTS[name].seen[way]
    return result.verdict == seen.verdict and seen.words in f"{result.detail}\n{log}"


def main(name: str) -> int:
    """Print a line for each way; return 0 if all are as in the table."""
    version = importlib.metadata.version(PROJECTS[name].package)
    differ = False
    with tempfile.TemporaryDirectory(prefix=name) as scratch:
        folder = Path(os.environ.get("THIRD_PARTY_FOLDER", scratch)) / name
        folder.mkdir(parents=True)
        for way, result in compare(name, folder):
            as_before = is_as_in_table(name, way, result, (folder / way / "log").read_text())
            differ |= not as_before
            remark = "" if as_before else f" | the table has: {PROJECTS[name].seen[way]}"
            sys.stdout.write(f"{PROJECTS[name].package} {version} | {way} | {result}{remark}\n")
            sys.stdout.flush()
    return int(differ)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
