"""Start of training where no process can hold the whole module: memory, and what a crash leaves.

    python -m benchmarks.start large                      # 1.5 billion parameters on 4 ranks of 3 GiB each
    python -m benchmarks.start sibling --precision 64-true    # the same, small: losses beside those of one device
    python -m benchmarks.start large --folder DIR --parts train resume3    # some of its parts
    python -m benchmarks.start kill                       # SIGKILL at 20 random moments of a save, of each kind

`large` trains, saves a directory, is killed, resumes on fewer ranks, and makes the plain file. Every process has a
limit on its private memory (RLIMIT_DATA). Peaks are those of the resident memory that is no file (RssAnon), looked at
ten times a second; no rank may need more than 1 GiB beside its own part: parameters, gradients and optimizer state.
`benchmarks.start_phases` prints how long a start takes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_pipe import DappleStrategy
from lightning_pipe.strategy.checkpoints import saving, sharded, writing
from lightning_pipe.strategy.ranks.control_plane import ControlPlane
from lightning_pipe.units import format_bytes, parse_bytes

VOCABULARY, SAMPLES = 512, 4
MOMENTS = 20
PARTS = ("plain", "train", "resume2", "resume3", "consolidate")
ALLOWED_BYTES = 2**30  # of a rank, beside its own part
SIBLING = {"64-true": 1e-12, "bf16-true": 1e-2}  # by precision: how far losses may be apart, of themselves


class Block(nn.Module):
    """A layer of a GPT."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = max(1, width // 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = (batch, length, 3, self.heads, width // self.heads)
        query, key, value = self.qkv(self.norms[0](x)).view(split).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class GPT(pl.LightningModule):
    """A GPT that is built in configure_model, with the initialiser of GPT-2."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.width, self.layers, self.blocks = width, layers, None

    def configure_model(self) -> None:
        if self.blocks is None:
            self.embed = nn.Embedding(VOCABULARY, self.width)
            self.blocks = nn.ModuleList(Block(self.width) for _ in range(self.layers))
            self.head = nn.Linear(self.width, VOCABULARY, bias=False)
            self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        assert self.blocks is not None, "built by configure_model"
        x = self.embed(batch[:, :-1])
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class Told(pl.Callback):
    """Note losses, the time of the first step, and the bytes of this rank's own part."""

    def __init__(self) -> None:
        self.begun, self.first_s, self.losses, self.own_bytes = time.perf_counter(), 0.0, list[float](), 0

    def on_train_batch_start(self, *_: Any) -> None:
        self.first_s = self.first_s or time.perf_counter() - self.begun

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        here = [parameter for parameter in module.parameters() if type(parameter) is nn.Parameter]
        states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
        kept = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        self.own_bytes = sum(p.nbytes * (1 + p.requires_grad) for p in here) + sum(value.nbytes for value in kept)


class Peaks:
    """The most anonymous memory of the processes of a session, looked at from outside (a step must open no files)."""

    def __init__(self, session: int) -> None:
        self._session = session
        self._bytes: dict[int, int] = {}

    def look(self) -> None:
        """Look once."""
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, StopIteration, IndexError):
                fields = (process / "stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
                if int(fields[3]) == self._session:
                    lines = (process / "status").read_text(encoding="ascii", errors="replace").splitlines()
                    now = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))
                    self._bytes[int(process.name)] = max(self._bytes.get(int(process.name), 0), now)

    def of(self, process: int) -> int:
        """Return the peak of a process."""
        return self._bytes.get(process, 0)


def train(options: argparse.Namespace) -> None:
    """Train on the ranks of this process and those that it starts, and write down what every rank saw."""
    if options.limit:
        limit = parse_bytes(options.limit)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    told = Told()
    torch.set_num_threads(1)
    pl.seed_everything(0, verbose=False)
    batches = torch.randint(VOCABULARY, (16 * SAMPLES, options.context + 1))
    strategy: Any = "auto"
    if options.ranks > 1:
        strategy = DappleStrategy(
            layout="-".join(["1"] * options.ranks),
            microbatches=SAMPLES,
            costs="counted",
            planner="uniform",
            schedule="1f1b",
            restore="none",
            save_distributed_checkpoint=True,
            deadline_s=600.0,
        )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=options.ranks,
        strategy=strategy,
        precision=options.precision,
        max_steps=options.steps,
        callbacks=[told],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = GPT(options.width, options.layers)
    trainer.fit(module, DataLoader(batches, batch_size=SAMPLES), ckpt_path=options.resume or None)
    if options.save:
        trainer.save_checkpoint(options.save)
    found = {"losses": told.losses, "first_s": told.first_s, "own": told.own_bytes, "process": os.getpid()}
    Path(options.out, f"rank{trainer.global_rank}.json").write_text(json.dumps(found), encoding="utf-8")
    if options.stay:
        trainer.strategy.barrier()
        Path(options.out, "saved").touch()
        time.sleep(600)


def large(options: argparse.Namespace) -> None:
    """Start, train, save, be killed, resume on fewer ranks, and make the plain file; or some of these parts."""
    size = 12 * options.width**2 * options.layers + 2 * VOCABULARY * options.width
    print(f"GPT of {size / 1e9:.2f} billion parameters, {options.precision}")
    with contextlib.ExitStack() as stack:
        folder = options.folder or stack.enter_context(tempfile.TemporaryDirectory())
        saved = str(Path(folder, "saved.ckpt"))
        for part in options.parts:
            _part(options, part, folder=folder, saved=saved)


def _part(options: argparse.Namespace, part: str, *, folder: str, saved: str) -> None:
    match part:
        case "plain":
            _, ended = _trained(options, folder, ranks=1, steps=1, limit=options.limit, may_fail=True)
            print(f"1 rank, plain Trainer, limit {options.limit}: {ended}", flush=True)
        case "train":
            _report(_trained(options, folder, ranks=options.ranks, steps=3, limit=options.limit, save=saved, stay=True))
        case "resume2" | "resume3":
            ranks = int(part[-1])
            _report(_trained(options, folder, ranks=ranks, steps=5, limit=options.wider, resume=saved))
        case _:
            _consolidate(options, saved, str(Path(folder, "out.ckpt")))


def _consolidate(options: argparse.Namespace, saved: str, out: str) -> None:
    """Make the plain file in a limited process, and read it."""
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_DATA, ({parse_bytes(options.limit)},) * 2)"
    begin = time.perf_counter()
    code = f"{limited}; from lightning_pipe.cli import main; main({['consolidate', saved, out]!r})"
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True) as process:
        peaks = Peaks(process.pid)
        while process.poll() is None:
            peaks.look()
            time.sleep(0.1)
    if process.returncode:
        raise RuntimeError(f"consolidate has ended with {process.returncode}")
    found = torch.load(out, mmap=True, weights_only=True)["state_dict"]
    count = sum(value.numel() for value in found.values())
    peak, seconds = format_bytes(peaks.of(process.pid)), time.perf_counter() - begin
    print(f"plain file of {count / 1e9:.2f} billion parameters in {seconds:.0f} s, at most {peak}", flush=True)


def _trained(
    options: argparse.Namespace,
    folder: str,
    *,
    ranks: int,
    steps: int,
    limit: str,
    save: str = "",
    resume: str = "",
    stay: bool = False,
    may_fail: bool = False,
) -> tuple[list[dict[str, Any]], str]:
    """Train in other processes; with `stay`, kill them when they have saved."""
    os.makedirs(folder, exist_ok=True)
    out = Path(tempfile.mkdtemp(dir=folder))
    command = [sys.executable, "-m", "benchmarks.start", "train", f"--ranks={ranks}", f"--steps={steps}"]
    command += [f"--limit={limit}", f"--save={save}", f"--resume={resume}", f"--out={out}", *["--stay"] * stay]
    command += [f"--width={options.width}", f"--layers={options.layers}", f"--precision={options.precision}"]
    command += [f"--context={options.context}"]
    with (out / "errors").open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(command, start_new_session=True, stderr=errors)
        peaks = Peaks(process.pid)
        try:
            while process.poll() is None and not (stay and (out / "saved").exists()):
                peaks.look()
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
    said = (out / "errors").read_text(encoding="utf-8").strip().splitlines()[-1:]
    if code not in (0, -signal.SIGKILL) and not may_fail:
        raise RuntimeError((out / "errors").read_text(encoding="utf-8"))
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(out.glob("rank*.json"))]
    found = [{**one, "peak": peaks.of(one["process"])} for one in found]
    return found, f"exit code {code} {' '.join(said)[:160]}"


def _report(run: tuple[list[dict[str, Any]], str]) -> None:
    found, ended = run
    first_s = found[0]["first_s"]
    print(f"{len(found)} ranks, {ended}, first step after {first_s:.0f} s, losses {found[0]['losses']}", flush=True)
    for rank, one in enumerate(found):
        own, peak, more = (format_bytes(size) for size in (one["own"], one["peak"], one["peak"] - one["own"]))
        verdict = "within" if one["peak"] <= one["own"] + ALLOWED_BYTES else "MORE THAN"
        print(f"  rank {rank}: own part {own}, peak {peak}, {more} beside it: {verdict} {format_bytes(ALLOWED_BYTES)}")


def sibling(options: argparse.Namespace) -> None:
    """Take the way of `large` with a small model and without limits; compare losses with one device's on that way."""
    options.width, steps = 256, 5
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        ran, saved = partial(_trained, options, folder, limit=""), str(Path(folder, "saved.ckpt"))
        plain = str(Path(folder, "plain.ckpt"))
        (before, *_), _ = ran(ranks=1, steps=3, save=plain)
        (after, *_), _ = ran(ranks=1, steps=steps, resume=plain)  # Lightning begins the loader anew
        first, _ = ran(ranks=options.ranks, steps=3, save=saved, stay=True)
        resumed = [ran(ranks=ranks, steps=steps, resume=saved)[0] for ranks in (2, 3)]
    alone = before["losses"] + after["losses"]
    expected = torch.tensor(alone, dtype=torch.float64)
    found = [first[0]["losses"] + rest["losses"] for ranks in resumed for rest in ranks]
    apart = float(((torch.tensor(found, dtype=torch.float64) - expected) / expected).abs().max())
    verdict = "equal" if apart <= (allowed := SIBLING[options.precision]) else f"MORE THAN {allowed:.0e}"
    print(f"{options.precision}, losses of one device: {alone}")
    print(f"those of {options.ranks} ranks, and then of 2 or 3, are apart by at most {apart:.1e} of them: {verdict}")


def kill(options: argparse.Namespace) -> None:
    """Kill a process at random moments of its saves; what is there must be one whole checkpoint."""
    for name, write, read in (
        ("sharded", _write_sharded, _read_sharded),
        ("behind training", _write_behind, _read_sharded),
        ("plain", _write_plain, _read_plain),
    ):
        found = []
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            path = Path(folder, "last.ckpt")
            write(path, 0)
            for moment in range(MOMENTS):
                child = os.fork()
                if child == 0:
                    for number in range(1, 10**6):
                        write(path, moment * 1000 + number)
                time.sleep(random.Random(moment).uniform(0.05, 1.0))
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                found.append(read(path))
        print(f"{name}: killed {MOMENTS} times, loaded {len(found)} times; saves seen: {found}")


def _stamped(number: int) -> dict[str, torch.Tensor]:
    return {f"layer{n}": torch.full((256, 1024), float(number)) for n in range(16)}


ALONE = ControlPlane(None, rank=0, ranks=1, wait=lambda _: None)


def _write_sharded(path: Path, number: int) -> None:
    writing.save(path, *_parts(number), ALONE)


def _write_behind(path: Path, number: int) -> None:
    writing.BehindTraining(path, *_parts(number), ALONE).settle(ALONE)


def _parts(number: int) -> tuple[writing.Tensors, dict[str, Any]]:
    return {sharded.MODEL: _stamped(number)}, sharded.described([], {}, {"number": number}, None)


def _read_sharded(path: Path) -> int:
    tensors = sharded.Directory(path)
    return _one_of({name: tensors[name].read() for name in tensors})


def _write_plain(path: Path, number: int) -> None:
    saving.save_plain(path, _stamped(number))


def _read_plain(path: Path) -> int:
    return _one_of(torch.load(saving.existing(path), weights_only=True))


def _one_of(tensors: dict[str, torch.Tensor]) -> int:
    """Return the number that all tensors hold."""
    (number,) = {float(value) for tensor in tensors.values() for value in tensor.unique()}
    assert len(tensors) == 16, len(tensors)
    return int(number)


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    every: dict[str, Callable[[argparse.Namespace], None]] = {
        "large": large, "sibling": sibling, "train": train, "kill": kill,
    }  # fmt: skip
    for name in every:
        one = commands.add_parser(name)
        add = partial(one.add_argument)
        add("--width", type=int, default=3968)
        add("--layers", type=int, default=8)
        add("--precision", default="bf16-true")
        add("--context", type=int, default=16)
        add("--limit", default="3GiB")
        add("--wider", default="5GiB", help="limit where fewer ranks hold more each")
        add("--folder", default=None, help="where checkpoints are written")
        add("--parts", nargs="+", default=PARTS, choices=PARTS, help="of `large`; later ones need --folder")
        for option, default in (("ranks", 4), ("steps", 3)):
            add(f"--{option}", type=int, default=default)
        for option in ("save", "resume", "out"):
            add(f"--{option}", default="")
        add("--stay", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends what was started, too
    every[options.command](options)
    shutil.rmtree("lightning_logs", ignore_errors=True)


if __name__ == "__main__":
    main()
