"""What one GPU can show stays runnable without one: `benchmarks.gpu_once`, `benchmarks.gpu`, `make test-gpu`."""

from __future__ import annotations

import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from benchmarks.gpu import CONTESTANTS, HALF, PLAIN, WHOLE, Contestant, Figure, Workload, limited, main, row
from benchmarks.gpu_once.bounded_process import BoundedProcess
from benchmarks.gpu_once.budget import run_section, run_sections
from benchmarks.gpu_once.findings import Assignment
from benchmarks.gpu_once.names import missing, missing_names
from benchmarks.gpu_once.pytest_runs import CLOSING_S, run_tests
from benchmarks.gpu_once.wheels import install_missing, missing_wheels

ROOT = Path(__file__).parents[1]
SMALL = ["one", "calls", "pair"]


def test_every_name_that_sections_use_exists() -> None:
    assert missing() == []


@pytest.mark.parametrize(
    ("source", "absent"),
    [
        ("import torch.cuda\ntorch.cuda.synchronise()", ["torch.cuda.synchronise"]),
        ("import torch.distributed as dist\ndist.ProcessGroup.abandon", ["dist.ProcessGroup.abandon"]),
        ("def f():\n    from benchmarks.gpu import Game", ["benchmarks.gpu.Game"]),
        ("import torch\nx = torch.ones(1)\nx.anything", []),
    ],
    ids=["function", "method", "import", "value"],
)
def test_a_name_that_does_not_exist_is_listed(source: str, absent: list[str]) -> None:
    assert missing_names(source) == absent


@pytest.mark.slow
def test_the_small_forms_report_steps_and_calls(tmp_path: Path) -> None:
    """The sections run in one process, which spares imports."""
    words = ["section", *SMALL, "--device", "cpu", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "benchmarks.gpu_once", *words]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    lines = [line for line in ended.stdout.splitlines() if line.startswith("RESULT ")]
    sections = [line.split()[1] for line in lines]
    assert list(dict.fromkeys(sections)) == SMALL, ended.stdout
    one, pair = (line for line in lines if re.search("RESULT one .*one rank|RESULT pair ", line))
    number = r"\d+\.\d+"
    assert re.search(rf"step +{number} ms, {number} of plain, predicted {number} \|", one), "a rank predicts its step"
    assert re.search(rf"step +{number} ms, {number} of plain, predicted +- \|", pair), "plain is the section before's"
    assert all(float(text) < 1e-5 for text in re.findall(r"losses differ ([\d.e+-]+)", one + pair))
    counts = [line for line in lines if line.split()[1] == "calls"]
    assert [line.split(":")[0].split(maxsplit=2)[2] for line in counts] == [
        "plain bf16, rank 0",
        "1-1 bf16, rank 0",
        "1-1 bf16, rank 1",
    ]
    assert all(
        re.search(rf"per step operators {number}, numbers read {number}, copies {number}", line) for line in counts
    )


PROJECT = """
import os, time

def test_that_passes(): pass
def test_that_fails(): raise ValueError("the reason")
def test_that_may_hang(): time.sleep(float(os.environ["HANG_S"]))
"""


@pytest.mark.parametrize(("hang_s", "limit_s", "last"), [(0, 100, "ended: 1 failed, 2 passed;"), (100, 0, "CUT OFF: ")])
def test_runs_of_tests_report_what_failed_and_whether_they_ended(
    hang_s: int,
    limit_s: int,
    last: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HANG_S", str(hang_s))
    (tmp_path / "test_project.py").write_text(PROJECT)
    assignment = Assignment("laws", "cpu", time.monotonic() + CLOSING_S + limit_s, tmp_path)
    with pytest.raises(SystemExit):
        run_tests(assignment, [str(tmp_path / "test_project.py"), "-o", "addopts="])
    *failed, closing = (line for line in capsys.readouterr().out.splitlines() if line.startswith("RESULT "))
    assert closing.startswith(f"RESULT laws     {last}")
    assert hang_s or re.fullmatch(r"RESULT laws +FAILED .*test_that_fails - ValueError: the reason", failed[0])


def test_a_wheel_is_installed_where_the_interpreter_lacks_its_package(tmp_path: Path) -> None:
    wheels, packages = tmp_path / "wheels", tmp_path / "packages"
    wheels.mkdir()
    (wheels / "pytest-0.1-py3-none-any.whl").touch()
    wheel = wheels / "absent_law-1.0-py3-none-any.whl"
    about, files = "absent_law-1.0.dist-info", {"absent_law.py": "HERE = True\n"}
    files[f"{about}/METADATA"] = "Metadata-Version: 2.1\nName: absent-law\nVersion: 1.0\n"
    files[f"{about}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{about}/RECORD"] = "".join(f"{name},,\n" for name in (*files, f"{about}/RECORD"))
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    assert missing_wheels(wheels) == [wheel]
    install_missing(wheels, into=packages)
    assert (packages / "absent_law.py").read_text() == "HERE = True\n"


def test_a_section_that_fails_or_takes_too_long_leaves_its_findings_and_its_last_words(tmp_path: Path) -> None:
    failing = "import os; print('RESULT waits a finding'); print('the reason', end='', flush=True); os._exit(1)"
    endless = "import time\nprint('RESULT waits a finding', flush=True)\nwhile True: time.sleep(60)"
    for script, reason in ((failing, r"ended with 1 after .*: the reason"), (endless, r"was cut off after")):
        command = [sys.executable, "-c", script]
        outcome = run_section("waits", command, limit_s=2.0, folder=tmp_path, environment={})
        assert not outcome.ended_well
        assert outcome.findings[0] == "RESULT waits a finding"
        assert re.match(rf"RESULT waits +{reason}", outcome.findings[1]), outcome
        assert re.match(r"RESULT waits +took \d+ s", outcome.findings[2]), outcome


def test_sections_without_time_are_reported_as_not_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not run_sections(["one", "pair"], device="cpu", budget_s=10, folder=tmp_path, packages=None)
    assert capsys.readouterr().out.splitlines()[-2:] == [
        f"RESULT {name:8} not begun: no time left" for name in ("pair", "one")
    ]


def test_nothing_of_a_process_outlives_its_limit(tmp_path: Path) -> None:
    """Its child ignores the interrupt, and would hold a pipe open."""
    child = "import os, signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print(os.getpid()); time.sleep(600)"
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-uc', {child!r}]).wait()"
    process = BoundedProcess([sys.executable, "-c", parent], limit_s=3600, log=tmp_path / "log")
    lines = process.lines()
    first = next(lines)  # the child has come so far
    process.end_s = time.monotonic()
    *_, last = lines
    assert last == "KeyboardInterrupt"
    assert process.is_cut_off and process.code() != 0
    while is_running(int(first)):
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Return whether a process is there and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_target_of_make_uses_an_interpreter_as_it_is() -> None:
    """Where there is no network no virtual environment can be made."""
    command = ["make", "--dry-run", "test-gpu", "GPU_PYTHON=a-python", "VENV=absent"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "a-python -m benchmarks.gpu_once all laws graphs rest" in printed
    assert "venv" not in printed and "absent" not in printed and " pip " not in printed


def test_the_table_has_a_row_before_the_next_contestant_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = Figure(0.01, 1 << 30, 1 << 30, 0.009, 0.5 * (1 << 30), [1.0, 0.5], 3.0, "")
    printed = list[str]()

    def run(contestant: Contestant, workload: Workload) -> Figure:
        printed.append(capsys.readouterr().out)
        if contestant.options and "compile" in contestant.options:
            raise RuntimeError("rank 0 died")
        return figure

    monkeypatch.setattr(Contestant, "run", run)
    monkeypatch.setattr(sys, "argv", ["gpu", "--only", PLAIN, "one rank, compiled", "one rank"])
    main()
    printed.append(capsys.readouterr().out)
    title, first, second, third = printed
    assert title == f"{Workload()}\n"
    assert first == f"{row(PLAIN, {PLAIN: figure})}\n"
    assert second == "one rank, compiled: rank 0 died\n"
    assert third == f"{row('one rank', {PLAIN: figure, 'one rank': figure})}\n"
    assert "step   10.0 ms, 1.00 of plain, predicted 0.90 | peak   1024 MiB, 1.00 of plain, predicted 0.50" in third


def test_half_of_the_memory_is_half_of_the_peak_without_a_limit() -> None:
    figure = Figure(0.01, 1000, 1000, 0.009, 1000.0, [1.0], 3.0, "")
    assert (limited(HALF, CONTESTANTS[HALF], {WHOLE: figure}).options or {})["memory_limit"] == "500B"
    with pytest.raises(RuntimeError, match="which has not run"):
        limited(HALF, CONTESTANTS[HALF], {})
