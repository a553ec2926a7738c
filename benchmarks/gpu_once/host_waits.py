"""Section `waits`: which calls of the host wait while a kernel spins on another stream, as a pending NCCL receive does.

A call that waits for such a kernel waits for a peer, which may be waiting for this rank. Here a kernel spins on a side
stream for a known time (`torch.cuda._sleep`) while the host makes a call. The kernel's event then shows whether the
call returned first.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu_once.findings import Assignment

SPIN_S, LONG_SPIN_S = 0.7, 3.0  # the long one for calls that load libraries
CYCLES = 200_000_000  # to calibrate the spinning kernel
LONGER = 1.25  # a call that takes longer than the kernel by this factor does so for a reason of its own
STREAMS = 31
QUEUES_S = 0.15  # what an idle stream may take to run a small kernel
VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"


class SpinningDevice:
    """A device whose side stream can be kept busy.

    Args:
        assignment: where findings go.
    """

    def __init__(self, assignment: Assignment) -> None:
        self._assignment = assignment
        self._side = torch.cuda.Stream()
        torch.cuda.synchronize()
        begin_s = time.perf_counter()
        torch.cuda._sleep(CYCLES)
        torch.cuda.synchronize()
        self._cycles_per_s = CYCLES / (time.perf_counter() - begin_s)

    def test(self, name: str, call: Callable[[], Any], spin_s: float = SPIN_S) -> None:
        """Report whether a call waits for the side stream."""
        torch.cuda.synchronize()
        with torch.cuda.stream(self._side):
            torch.cuda._sleep(int(spin_s * self._cycles_per_s))
            end = torch.cuda.Event()
            end.record()
        begin_s = time.perf_counter()
        try:
            result = call()  # stays alive until the device has come to rest: to free it may wait, too
        except Exception as error:
            result, name = None, f"{name} ({type(error).__name__}: {str(error)[:60]})"
        took_s, is_over = time.perf_counter() - begin_s, end.query()
        torch.cuda.synchronize()
        del result
        verdict = "goes on" if not is_over else "WAITS" if took_s < LONGER * spin_s else "unclear"
        self._assignment.report(f"{verdict:7} {took_s * 1e3:8.1f} ms beside a kernel of {spin_s * 1e3:.0f} ms: {name}")


def waits(assignment: Assignment) -> None:
    """Report calls that wait, and streams that share a queue."""
    device = SpinningDevice(assignment)
    x = torch.randn(1 << 20, device="cuda")
    x.add_(1)
    device.test("kernel that has run before", lambda: x.add_(1))
    device.test("torch.cuda.synchronize (must wait)", torch.cuda.synchronize)
    _first_launches(device, x)
    _memory(device, x)
    _graphs(device, x)
    _triton(device, x, assignment)
    _compiled(x, assignment)
    for connections in ("", "32"):
        command = [sys.executable, "-c", "from benchmarks.gpu_once.host_waits import queues; queues()"]
        environment = {**os.environ, **({VARIABLE: connections} if connections else {})}
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
        text = (ended.stdout or ended.stderr).strip()[-300:]
        assignment.report(f"{VARIABLE}={connections or 'default'}: {text}")


def _first_launches(device: SpinningDevice, x: torch.Tensor) -> None:
    """Test kernels and libraries that no earlier line of this process has used."""
    square, quarter = x.view(1024, 1024), x[: 1 << 18].view(512, 512)
    heads, images = x.view(4, 8, 512, 64).bfloat16(), x.view(4, 64, 64, 64)
    index = torch.zeros(1, dtype=torch.long, device="cuda")
    torch.cuda.synchronize()
    device.test("first launch of nextafter", lambda: torch.nextafter(x, x))
    device.test("first launch of cummax", lambda: torch.cummax(x, 0))
    device.test("first launch of index_put", lambda: x.index_put((index,), x[:1]))
    device.test("first matrix product (cuBLAS handle)", lambda: square @ square, LONG_SPIN_S)
    device.test("first product in bfloat16", lambda: quarter.bfloat16() @ quarter.bfloat16())
    attend = F.scaled_dot_product_attention
    device.test("first attention", lambda: attend(heads, heads, heads, is_causal=True), LONG_SPIN_S)
    device.test(
        "first convolution (cuDNN)", lambda: torch.conv2d(images, torch.ones(64, 64, 3, 3, device="cuda")), LONG_SPIN_S
    )


def _memory(device: SpinningDevice, x: torch.Tensor) -> None:
    """Test memory of the device and of the host, copies, streams."""
    big, small = 96 << 20, 24
    device.test("cudaMalloc of 3 GiB", lambda: torch.empty(3 << 30, dtype=torch.uint8, device="cuda"))
    device.test("cudaFree (empty_cache)", torch.cuda.empty_cache)
    device.test("new pinned memory, 96 MiB", lambda: torch.empty(big, dtype=torch.uint8, pin_memory=True))
    device.test("new pinned memory, 24 bytes", lambda: torch.empty(small, dtype=torch.uint8, pin_memory=True))
    device.test("pinned memory given back", lambda: torch._C._host_emptyCache())
    device.test(".item() of the current stream", lambda: x[0].item())
    device.test("copy from pageable memory, 64 MiB", lambda: torch.ones(1 << 24).to("cuda"))
    device.test("the same, non_blocking", lambda: torch.ones(1 << 24).to("cuda", non_blocking=True))
    device.test("new stream and event", lambda: (torch.cuda.Stream(), torch.cuda.Event().record()))


def _graphs(device: SpinningDevice, x: torch.Tensor) -> None:
    """Test the recording and the first launch of a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    x.mul(2)

    def record() -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            x.mul(2)
            graph.capture_end()

    device.test("CUDA graph: record and instantiate", record)
    device.test("CUDA graph: first launch", graph.replay)


def _triton(device: SpinningDevice, x: torch.Tensor, assignment: Assignment) -> None:
    """Test the first launch of a Triton kernel that is compiled and not loaded."""
    try:
        from benchmarks.gpu_once.triton_kernel import double

        double.warmup(x, x.numel(), 1024, grid=(1,))
        device.test("first launch of a compiled Triton kernel", lambda: double[(1024,)](x, x.numel(), 1024))
    except Exception as error:
        assignment.report(f"no Triton kernel: {type(error).__name__} {str(error)[:100]}")


def _compiled(x: torch.Tensor, assignment: Assignment) -> None:
    """Report how often a compiled function waits for the whole device."""
    with _counted_synchronizes() as calls:  # before torch.compile imports what keeps the function
        function = torch.compile(lambda a: F.layer_norm(F.gelu(a) * a, (1024,)))
        function(x.view(1024, 1024))
        first = len(calls)
        function(x.view(1024, 1024))
    assignment.report(
        f"torch.cuda.synchronize in the first call of a compiled function: {first}; in the second: {len(calls) - first}"
    )


@contextlib.contextmanager
def _counted_synchronizes() -> Iterator[list[None]]:
    """Give a list that grows by every call of `torch.cuda.synchronize` in the block."""
    calls, plain = list[None](), torch.cuda.synchronize

    def counted(*args: Any, **kwargs: Any) -> None:
        calls.append(None)
        plain(*args, **kwargs)

    torch.cuda.synchronize = counted
    try:
        yield calls
    finally:
        torch.cuda.synchronize = plain


def queues() -> None:
    """Print which streams stand still while another one is busy: they share its hardware queue."""
    x = torch.randn(16, device="cuda")
    busy, *others = (torch.cuda.Stream() for _ in range(STREAMS))
    for stream in (busy, *others):
        with torch.cuda.stream(stream):
            x.add(1)
    torch.cuda.synchronize()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(1_500_000_000)
    busy_end = busy.record_event()
    ends = list[torch.cuda.Event]()
    for stream in others:
        with torch.cuda.stream(stream):
            x.add(1)
        ends.append(stream.record_event())
    time.sleep(QUEUES_S)
    late = [number for number, end in enumerate(ends, start=1) if not end.query()]
    state = "over already" if busy_end.query() else "still busy"
    print(f"of {len(others)} other streams {len(late)} stand still behind a busy one: {late}; it was {state}")
    torch.cuda.synchronize()
