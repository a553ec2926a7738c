"""All that one GPU can show in ten minutes, most important first.

    python -m benchmarks.gpu_once all --budget 560 --out runs/gpu    # every section until the time is over
    python -m benchmarks.gpu_once all laws fast --budget 150         # some sections
    python -m benchmarks.gpu_once all one calls pair --device cpu    # the small forms of sections, without a GPU
    python -m benchmarks.gpu_once section waits                      # one section, in this process
    python -m benchmarks.gpu_once check                              # names that sections use; needs no GPU

Every section is a process of its own with a time limit. A finding is a line that begins with RESULT and is printed at
once. All are printed again at the end, and `results.json` has them after every section. Where there is no network,
`--wheels` names a folder of wheels (`make wheels`) to install what the interpreter lacks.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from benchmarks.gpu_once.budget import run_sections
from benchmarks.gpu_once.findings import Assignment
from benchmarks.gpu_once.sections import BUDGET_S, CPU, CUDA, SECTIONS
from benchmarks.gpu_once.wheels import install_missing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["all", "section", "check"])
    parser.add_argument("names", nargs="*", metavar="section", help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--device", choices=[CUDA, CPU], default=CUDA)
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds for all sections")
    parser.add_argument("--seconds", type=float, help="seconds for each section that runs in this process")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder for results and logs")
    parser.add_argument("--wheels", type=Path, help="folder of wheels")
    options = parser.parse_intermixed_args()
    names = options.names or [name for name, section in SECTIONS.items() if options.device in section.devices]
    for name in names:
        if name not in SECTIONS or options.device not in SECTIONS[name].devices:
            parser.error(f"found section {name!r} on {options.device}; see the list of sections")
    options.out.mkdir(parents=True, exist_ok=True)
    match options.what:
        case "all":
            raise SystemExit(0 if _run_all(names, options) else 1)
        case "section":
            for name in names:
                end_s = time.monotonic() + (options.seconds or SECTIONS[name].limit_s)
                SECTIONS[name].function(name)(Assignment(name, options.device, end_s, options.out))
        case "check":
            _check()


def _run_all(names: list[str], options: argparse.Namespace) -> bool:
    """Run sections as processes; return whether all have ended well."""
    with tempfile.TemporaryDirectory(prefix="gpu_once_packages") as packages:
        if options.wheels is not None:
            install_missing(options.wheels, into=Path(packages))
        return run_sections(
            names, device=options.device, budget_s=options.budget, folder=options.out, packages=Path(packages)
        )


def _check() -> None:
    """Print what is missing.

    Raises:
        SystemExit: if something is.
    """
    from benchmarks.gpu_once.names import missing  # imports every section

    absent = missing()
    print("missing:", *(absent or ["nothing"]), sep="\n  ")
    if absent:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
