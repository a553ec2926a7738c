"""Death of a rank: what becomes of a job when one of its ranks dies, is stopped, or is cut off.

    python -m benchmarks.deaths                       # 60 SIGKILLs per way of launching, SIGSTOPs, a cut network
    python -m benchmarks.deaths --ways popen --kills 12 --stops 0 --cuts 0

Every case is a whole job of two ranks with a fit, a validation and a checkpoint. Moments are spread from the start of a
rank's interpreter to its end, two of three over the last part, where it trains; in processor seconds of that rank, so
that a busy machine moves none of them into another phase. Then the rank (they take turns) gets the signal.

Counted are: how long it took until every process of the job had ended, guards and workers included, against
`deadline_s` + 10 s; and whether the terminal named the rank and what it did last. A rank that still imports when the
other is hit waits for nobody yet, so the clock starts when the last of those that are left has come to the fit, or at
the signal if that is later. A rank that is hit before it has begun a fit has done nothing that could be named: its
number is asked for. Where nobody is left to speak (the only process of a job), or nothing was lost (the training was
over), the case is listed but does not count.

Ways: `popen` (the script starts the other rank), `torchrun`, `bare` (both started by hand, with Lightning's variables),
`slurm` (with those of SLURM), `fork` (ranks are children of the script, as in a notebook).
"""

from __future__ import annotations

import argparse
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

WAYS = ("popen", "torchrun", "bare", "slurm", "fork")
RANKS = 2
EXTRA_S = 10.0  # over the deadline
IN_FIT = 0.7  # share of a rank's processor seconds after which it is in the fit; nobody could end it before, if stopped
BEFORE = 1 / 3  # share of the SIGKILLs that come before that
LOOK_S = 0.5  # between two looks at all processes of the machine
LOOKS = 25  # at a victim meanwhile
GIVEN_UP_S = 600.0  # in which a job that nobody harms should have ended
LATE_S = 60.0  # after the limit: what has not ended then is taken never to end
STARTING_S = 120.0  # after which a rank that has not come to the fit is no longer taken to be importing
MARK = "DEATHS_JOB"  # in the environment of every process of a job
ROOT = Path(__file__).parent.parent


@dataclass
class Job:
    """A running job: where its ranks are, and what it prints."""

    name: str
    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")

    def phase(self, rank: int) -> str:
        """Return how far a rank has come: nowhere, script, fit, end."""
        file = self.folder / f"phase{rank}"
        return file.read_text().split()[-2] if file.exists() else "nowhere"

    def began_s(self, rank: int) -> float:
        """Return when a rank came to the fit, on the clock of `time.monotonic`; 0 if it has not."""
        file = self.folder / f"phase{rank}"
        words = file.read_text().split() if file.exists() else []
        return next((float(at) for phase, at in zip(words[::2], words[1::2], strict=True) if phase == "fit"), 0.0)

    def pid(self, rank: int) -> int | None:
        """Return the process of a rank, once it runs the script."""
        file = self.folder / f"pid{rank}"
        text = file.read_text() if file.exists() else ""
        return int(text) if text.endswith("\n") else None  # else it is being written

    def members(self) -> list[int]:
        """List all processes of the job, whoever started them."""
        found, mark = [], f"{MARK}={self.name}".encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if mark in (entry / "environ").read_bytes().split(b"\0") and not is_zombie(entry):
                        found.append(int(entry.name))
                except OSError:  # it has ended
                    continue
        return found

    def reap(self) -> None:
        for process in self.processes:
            process.poll()

    def end(self) -> None:
        for pid in self.members():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for process in self.processes:
            process.wait()


@dataclass(frozen=True)
class Outcome:
    """What became of a job: seconds until its last process had ended, None if it has not."""

    way: str
    rank: int
    at_s: float
    phase: str
    seconds: float | None
    is_late: bool
    named: bool | None  # None: nobody is left, or nothing was lost
    line: str


def is_zombie(entry: Path) -> bool:
    return (entry / "stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z"


def start(way: str, deadline_s: float, *, hosts: tuple[str, ...] = ()) -> Job:
    """Start a job; on two hosts, a rank on each, if there are any."""
    job = Job(uuid.uuid4().hex, Path(tempfile.mkdtemp(prefix="deaths")))
    script = [sys.executable, str(Path(__file__).resolve()), "--train", str(deadline_s)]
    common = {**os.environ, MARK: job.name, "FOLDER": str(job.folder), "OMP_NUM_THREADS": "1", "HOW": way}
    common |= {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "card" if hosts else "lo"}
    port = str(free_port())
    output = (job.folder / "output").open("ab")
    address = "10.0.0.1" if hosts else "127.0.0.1"
    by_hand = {"MASTER_ADDR": address, "MASTER_PORT": port}
    if way == "torchrun":
        run = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", f"--master-port={port}"]
        commands = [([*run, *script[1:]], common)]
    elif way == "bare":
        ranks = [{"LOCAL_RANK": "0", "NODE_RANK": str(r)} if hosts else {"LOCAL_RANK": str(r)} for r in range(RANKS)]
        enter = [["ip", "netns", "exec", host] for host in hosts] or [[]] * RANKS
        commands = [([*enter[r], *script], {**common, **by_hand, **ranks[r]}) for r in range(RANKS)]
    elif way == "slurm":
        commands = [(script, {**common, **by_hand, **slurm(rank)}) for rank in range(RANKS)]
    else:
        commands = [(script, common)]
    for command, environment in commands:
        job.processes.append(
            subprocess.Popen(command, env=environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL, cwd=ROOT)
        )
    output.close()
    return job


def slurm(rank: int) -> dict[str, str]:
    names = {"NTASKS": RANKS, "NTASKS_PER_NODE": RANKS, "PROCID": rank, "LOCALID": rank, "NODEID": 0}
    names |= {"JOB_ID": 1, "JOB_NAME": "deaths", "NODELIST": "localhost", "NNODES": 1}
    return {f"SLURM_{name}": str(value) for name, value in names.items()}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def seconds_of(way: str, deadline_s: float) -> float:
    """Return how many processor seconds a rank takes that nobody harms, from the start of its interpreter."""
    job = start(way, deadline_s)
    begin = time.monotonic()
    while job.members() and time.monotonic() - begin < GIVEN_UP_S:
        time.sleep(LOOK_S)
        job.reap()
    text = job.output
    job.end()
    assert text.count("all went well") == RANKS, text
    return max(float((job.folder / f"seconds{rank}").read_text()) for rank in range(RANKS))


def hurt(way: str, number: signal.Signals, *, rank: int, at_s: float, deadline_s: float) -> Outcome:
    """Send a signal to one rank of a job after so many of its processor seconds, and look what becomes of it."""
    job = start(way, deadline_s)
    try:
        victim = reached(job, way, rank, at_s)
        phase = job.phase(rank)
        try:
            if victim is None:
                raise ProcessLookupError
            os.kill(victim, number)
        except ProcessLookupError:
            phase = "end"
        return watched(job, way, rank, at_s, phase, deadline_s)
    finally:
        job.end()


def reached(job: Job, way: str, rank: int, at_s: float) -> int | None:
    """Wait until a rank has used so many processor seconds; return its process, None if it has ended before."""
    begin, victim = time.monotonic(), None
    if way in ("bare", "slurm"):
        victim = job.processes[rank].pid
    elif way == "popen" and rank == 0:
        victim = job.processes[0].pid
    while job.members() and time.monotonic() - begin < GIVEN_UP_S:
        for _ in range(LOOKS):
            victim = victim or job.pid(rank)  # others are started later
            if victim is not None and processor_s(victim) >= at_s:
                return victim
            time.sleep(LOOK_S / LOOKS)
        job.reap()
    return None


def processor_s(pid: int) -> float:
    """Return the processor seconds of a process; endless if it has ended."""
    try:
        words = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return math.inf
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def watched(job: Job, way: str, rank: int, at_s: float, phase: str, deadline_s: float) -> Outcome:
    """Wait until a job has ended, and read what it printed."""
    hit = now = time.monotonic()
    limit = deadline_s + EXTRA_S
    seconds: float | None = 0.0
    while job.members():
        time.sleep(LOOK_S)
        job.reap()
        now = time.monotonic()
        came = max(job.began_s(other) or min(now, hit + STARTING_S) for other in range(RANKS) if other != rank)
        seconds = now - max(hit, came)
        if seconds > limit + LATE_S:
            seconds = None
            break
    if seconds == 0.0:  # those that are left ended before they had come to the fit
        seconds = now - hit
    text = job.output
    (job.folder / "story").write_text(f"{way} rank {rank} at {at_s:.1f} s, {phase}, {seconds}")
    line = first_word(text, rank, had_begun=phase == "fit")
    named: bool | None = bool(line)
    if not line and (phase == "end" or (way == "popen" and job.pid(RANKS - 1) is None)):
        named = None
    is_late = seconds is None or seconds > limit
    return Outcome(way, rank, at_s, phase, seconds, is_late, named, line or str(job.folder))


def first_word(text: str, rank: int, *, had_begun: bool) -> str:
    """Return the line that names the rank, and what it did last if it had begun; "" if there is none."""
    doing = rf"Rank {rank} (died|failed) (at|outside) .*"
    missing = rf".*[Rr]anks? {rank}\b.*(not come|not started|had joined).*"
    agent = rf"\s+rank\s+: {rank} .*"  # torchrun's own account
    patterns = [doing] if had_begun else [doing, missing, agent]
    return next((found[0] for pattern in patterns if (found := re.search(pattern, text))), "")


def cut(at_s: float, deadline_s: float) -> list[Outcome]:
    """Cut the network between two hosts; both ranks must end, and each names the other."""
    from benchmarks.two_hosts import CARD, two_hosts

    with two_hosts(1e9) as hosts:
        job = start("bare", deadline_s, hosts=hosts.names)
        try:
            reached(job, "bare", 0, at_s)
            phase = job.phase(0)
            subprocess.run(["ip", "-n", hosts.names[0], "link", "set", CARD, "down"], check=True)
            first = watched(job, "cut", 0, at_s, phase, deadline_s)
            line = first_word(job.output, 1, had_begun=phase == "fit")
            return [first, replace(first, rank=1, named=bool(line) or first.named, line=line)]
        finally:
            job.end()


def tell(cases: Iterable[Outcome]) -> None:
    """Print one line per case as it ends, and then the figures."""
    outcomes = []
    for o in cases:
        outcomes.append(o)
        ended = "NOT ENDED" if o.seconds is None else f"ended after {o.seconds:5.1f} s" + " (LATE)" * o.is_late
        word = {True: "named", False: "NOT NAMED", None: "-"}[o.named]
        print(f"{o.way:9} rank {o.rank} at {o.at_s:5.1f} s ({o.phase:7}) {ended}, {word}: {o.line[:150]}", flush=True)
    counted = [o for o in outcomes if o.named is not None]
    ended = sum(not o.is_late for o in outcomes)
    named = sum(bool(o.named) for o in counted)
    slowest = max((o.seconds for o in outcomes if o.seconds is not None), default=0.0)
    phases = dict(Counter(o.phase for o in outcomes))
    print(
        f"=> {ended} of {len(outcomes)} ended in time (slowest {slowest:.1f} s); {named} of {len(counted)} named "
        f"({len(outcomes) - len(counted)} do not count); phases {phases}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--early", type=int, help="how many of them come before the fit (default: a third)")
    parser.add_argument("--stops", type=int, default=4, help="per way, in turns of ranks")
    parser.add_argument("--cuts", type=int, default=4)
    parser.add_argument("--deadline", type=float, default=20.0)
    parser.add_argument("--whole", type=float, help="processor seconds of a rank, if they are known")
    parser.add_argument(
        "--part", default="0/1", help="which moments of each sweep: 1/4 is every fourth, from the second"
    )
    parser.add_argument("--train", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is not None:
        train(options.train)
        return
    part, parts = map(int, options.part.split("/"))
    for way in options.ways:
        whole = options.whole or seconds_of(way, options.deadline)
        print(f"{way}: a rank takes {whole:.1f} processor seconds; deadline_s={options.deadline:g}", flush=True)
        for number, count in ((signal.SIGKILL, options.kills), (signal.SIGSTOP, options.stops)):
            first = 0.0 if number == signal.SIGKILL else IN_FIT
            moments = [1.03 * whole * (first + (1 - first) * (k + 0.5) / count) for k in range(count)]
            if count:
                print(number.name)
                cases = list(enumerate(moments))[part::parts]
                tell(hurt(way, number, rank=k % RANKS, at_s=at, deadline_s=options.deadline) for k, at in cases)
    if options.cuts:
        print("cut networks")
        whole = options.whole or seconds_of("bare", options.deadline)
        tell(
            o
            for k in range(options.cuts)
            for o in cut(whole * (IN_FIT + (1 - IN_FIT) * k / options.cuts), options.deadline)
        )


def moments(whole_s: float, before: int, within: int) -> list[float]:
    """Spread moments over a rank's processor seconds: some before the fit, the others within."""
    early = [IN_FIT * (k + 0.5) / before for k in range(before)]
    late = [IN_FIT + (1 - IN_FIT) * (k + 0.5) / within for k in range(within)]
    return [whole_s * share for share in early + late]


def note(kind: str, text: str, rank: int) -> None:
    with Path(os.environ["FOLDER"], f"{kind}{rank}").open("a") as file:
        file.write(f"{text}\n" if kind != "phase" else f"{text} {time.monotonic()}\n")


def train(deadline_s: float) -> None:
    """Be one rank of a job."""
    how = os.environ["HOW"]
    known = os.environ.get("RANK", os.environ.get("SLURM_PROCID", os.environ.get("LOCAL_RANK")))
    rank = int(known or 0) or int(os.environ.get("NODE_RANK", "0"))
    if how != "fork":
        note("pid", str(os.getpid()), rank)
        note("phase", "script", rank)
    import lightning.pytorch as pl
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_pipe import DappleStrategy

    class Chain(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)], nn.Linear(16, 2))

        def setup(self, stage: str) -> None:
            if how == "fork":
                note("pid", str(os.getpid()), self.trainer.global_rank)
                note("phase", "fit", self.trainer.global_rank)

        def teardown(self, stage: str) -> None:
            if how == "fork":
                note("seconds", str(time.process_time()), self.trainer.global_rank)

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
            self.log("validation", self.training_step(batch, batch_idx))

        def on_train_batch_end(self, *_: object) -> None:
            time.sleep(0.05)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters())

    torch.manual_seed(0)
    data = TensorDataset(torch.randn(160, 16), torch.randint(2, (160,)))
    hosts = 2 if "NODE_RANK" in os.environ and os.environ["GLOO_SOCKET_IFNAME"] == "card" else 1
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=RANKS // hosts,
        num_nodes=hosts,
        strategy=DappleStrategy(
            layout="1-1", microbatches=2, costs="counted", deadline_s=deadline_s,
            start_method="fork" if how == "fork" else "popen",
        ),
        max_epochs=3,
        default_root_dir=os.environ["FOLDER"],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    if how != "fork":
        note("phase", "fit", rank)
    trainer.fit(Chain(), DataLoader(data, 8), DataLoader(data, 8))
    if how != "fork":
        note("phase", "end", rank)
        note("seconds", str(time.process_time()), rank)
    print("all went well\n" * (RANKS if how == "fork" else 1), flush=True, end="")


if __name__ == "__main__":
    main()
