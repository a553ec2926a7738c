"""A fake of torch.cuda that runs on a CPU: a device with memory, streams, events and graphs.

    with FakeCuda(early={0}) as fake:
        x = torch.ones(3, device="cuda") * 2        queued on the current stream
        fake.calls                                  waits of the host, and its allocations of pinned memory

A tensor is on the device if its memory is. Torch computes with it as on a CPU, and `device` and `is_cuda` say "cuda".
Its operations are queued, as closures, on the current stream: results have memory at once, and contents later.

A stream of `early` runs what it is given at once. Any other runs nothing until the host, or a stream that has to run,
waits for it. So for every set of early streams the others are as late as waits allow, and a wait that is missing lets
somebody read memory before it is written, or write to it after it has another owner.

Memory of tensors that are dropped goes to the next allocation on the same stream, as that of torch's allocator does,
and holds 0xFF (NaN) in the meantime; so does new memory. Pinned memory lives as long as copies use it.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from types import TracebackType
from typing import Any, ClassVar
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

DEVICE = torch.device("cuda", 0)
POISON = 0xFF
_aten = torch.ops.aten
_READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_GRAPHS = -1  # the pool of memory of graphs, which is no stream's


class Stream:
    """Work that runs in order."""

    fake: ClassVar[FakeCuda]

    def __init__(self, device: Any = None, **options: Any) -> None:
        self.number = len(self.fake.streams)
        self.tasks: deque[Callable[[], object]] = deque()
        self.queued = self.done = 0
        self.fake.streams.append(self)

    def push(self, task: Callable[[], object]) -> None:
        """Queue work."""
        self.tasks.append(task)
        self.queued += 1

    def run(self, position: int) -> None:
        """Run what was queued before a position."""
        with self.fake.lock:
            while self.done < position:
                self.done += 1
                self.fake.tick += 1
                with _as_it_is():
                    self.tasks.popleft()()

    def wait_event(self, event: Event) -> None:
        if (at := event.at) is not None:
            self.fake.launch(lambda: at[0].run(at[1]), self)

    def wait_stream(self, stream: Stream) -> None:
        position = stream.queued
        self.fake.launch(lambda: stream.run(position), self)

    def synchronize(self) -> None:
        self.fake.host_waits("Stream.synchronize", self, self.queued)


class Event:
    """A place in a stream."""

    fake: ClassVar[FakeCuda]

    def __init__(self, enable_timing: bool = False, **options: Any) -> None:
        self.at: tuple[Stream, int] | None = None
        self._tick: int | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.fake.current
        self.at = stream, stream.queued + 1
        self.fake.launch(self._reach, stream)

    def _reach(self) -> None:
        self._tick = self.fake.tick

    def query(self) -> bool:
        """Return whether the device is there; if it is not, it is when the host looks again."""
        if self.at is None:
            return True
        stream, position = self.at
        is_there = stream.done >= position
        stream.run(position)
        return is_there

    def synchronize(self) -> None:
        if self.at is not None:
            self.fake.host_waits("Event.synchronize", *self.at)

    def elapsed_time(self, end: Event) -> float:
        if self._tick is None or end._tick is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return float(end._tick - self._tick)


class CUDAGraph:
    """What was queued on a stream between the begin and the end of a capture."""

    fake: ClassVar[FakeCuda]

    def capture_begin(self, **options: Any) -> None:
        assert self.fake.current.number, "a capture needs a stream of its own"
        self.tasks: list[Callable[[], object]] = []
        self.fake.graph = self

    def capture_end(self) -> None:
        self.fake.graph = None

    def replay(self) -> None:
        for task in self.tasks:
            self.fake.launch(task)


class FakeCuda:
    """The device; it is there inside of the context.

    Args:
        early: numbers of the streams that run early; 0 is the default stream, others count from 1 as they are made.

    Attributes:
        calls: of the host, by which it waits for the device, or allocates pinned memory.
    """

    def __init__(self, early: Collection[int] = (0,)) -> None:
        self.early, self.lock, self.tick = early, threading.RLock(), 0
        self.calls: list[str] = []
        self.streams: list[Stream] = []
        self.graph: CUDAGraph | None = None
        self._blocks: dict[int, torch.Tensor] = {}  # by address; they stay to the end
        self._pinned: dict[int, torch.Tensor] = {}
        self._free: dict[tuple[int, int], list[torch.Tensor]] = defaultdict(list)
        self._sync_mode = 0
        self._of_thread = threading.local()

    @property
    def current(self) -> Stream:
        """Return the current stream of this thread."""
        stream: Stream = getattr(self._of_thread, "stream", self.streams[0])
        return stream

    def launch(self, task: Callable[[], object], stream: Stream | None = None) -> None:
        """Queue work on a stream, by default the current one; early streams run."""
        with self.lock:
            if self.graph is not None and (stream or self.current) is self.current:
                self.graph.tasks.append(task)
                return
            (stream or self.current).push(task)
            for early in [stream for stream in self.streams if stream.number in self.early]:
                early.run(early.queued)

    def host_waits(self, what: str, stream: Stream, position: int) -> None:
        """Let the host wait for a place in a stream."""
        assert self.graph is None, "operation not permitted when stream is capturing"
        self.calls.append(what)
        if self._sync_mode:
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
        stream.run(position)

    def synchronize(self, device: Any = None) -> None:
        """Let the host wait for the device."""
        self.calls.append("torch.cuda.synchronize")
        for stream in self.streams:
            stream.run(stream.queued)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Make a stream the current one."""
        outer, self._of_thread.stream = self.current, stream
        try:
            yield
        finally:
            self._of_thread.stream = outer

    def allocate(self, count: int, *, pinned: bool = False) -> torch.Tensor:
        """Return bytes of new memory, of the device or pinned."""
        with _as_it_is():
            if pinned:
                self.calls.append("cudaHostAlloc")
                raw = torch.full((max(count, 1),), POISON, dtype=torch.uint8)
                self._pinned[raw.data_ptr()] = raw
                return raw[:count]
            pool = _GRAPHS if self.graph is not None else self.current.number
            free = self._free[pool, count]
            raw = free.pop() if free else torch.empty(max(count, 1), dtype=torch.uint8)
            self._blocks[raw.data_ptr()] = raw
            owner = raw.numpy()[:count]
            weakref.finalize(owner, self._release, raw, pool, count).atexit = False
            self.launch(lambda: raw.fill_(POISON))
            return torch.from_numpy(owner)

    def _release(self, raw: torch.Tensor, pool: int, count: int) -> None:
        """Take memory back, which its next owner on the same stream overwrites."""
        if self.graph is not None:
            self.graph.tasks.append(lambda: raw.fill_(POISON))
        elif pool != _GRAPHS:
            self.streams[pool].push(lambda: raw.fill_(POISON))
        self._free[pool, count].append(raw)

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on the device."""
        return tensor.layout == torch.strided and tensor.untyped_storage().data_ptr() in self._blocks

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what work reads and writes in place of a tensor: memory, whoever owns it when the work runs."""
        raw = self._blocks.get(tensor.untyped_storage().data_ptr())
        if raw is None:
            return tensor
        bytes_of = raw.untyped_storage()
        form = tensor.storage_offset(), tensor.size(), tensor.stride()
        return torch.empty(0, dtype=tensor.dtype).set_(bytes_of, *form)  # type: ignore[call-overload]

    def empty_like(self, form: torch.Tensor, *, pinned: bool = False) -> torch.Tensor:
        """Return new memory in the form of a tensor, which may be of "meta"."""
        spans = [(size - 1) * stride for size, stride in zip(form.shape, form.stride(), strict=True)]
        count = (1 + sum(spans)) * form.element_size() if form.numel() else 0
        with _as_it_is():
            return self.allocate(count, pinned=pinned).view(form.dtype).as_strided(form.shape, form.stride())

    def place(self, content: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the device that gets the content of one of the host."""
        made = self.empty_like(content)
        target = self.alias(made)
        self.launch(lambda: target.copy_(content))
        return made

    def copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        """Copy, as `Tensor.copy_` does."""
        comes, goes = self.is_on_device(target), self.is_on_device(source)
        pinned = (source if comes else target).untyped_storage().data_ptr() in self._pinned
        written = self.alias(target)
        read = self.alias(source) if goes or pinned else source.clone()
        self.launch(lambda: written.copy_(read))
        if comes != goes and not (non_blocking and (pinned or comes)):
            self.host_waits("a copy", self.current, self.current.queued)
        return target

    def moved(self, tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False) -> torch.Tensor:
        """Return a tensor on a device, or as it is if it is there."""
        to_device = device.type == "cuda"
        if to_device == self.is_on_device(tensor):
            return tensor
        with _as_it_is():
            form = torch.empty_like(tensor, device="meta")
            target = self.empty_like(form) if to_device else torch.empty_like(form, device="cpu")
            return self.copy(target, tensor, non_blocking)

    def at(self, address: int, count: int) -> torch.Tensor:
        """Return bytes of the device by their address, which somebody else owns."""
        begin = max(block for block in self._blocks if block <= address)
        with _as_it_is():
            raw = self._blocks[begin].untyped_storage()
            return torch.empty(0, dtype=torch.uint8).set_(raw, address - begin, (count,))  # type: ignore[call-overload]

    def __enter__(self) -> FakeCuda:
        stream, event, graph = (type(kind.__name__, (kind,), {"fake": self}) for kind in (Stream, Event, CUDAGraph))
        stream()
        self._exit = contextlib.ExitStack()
        for name, put in {
            "Stream": stream,
            "Event": event,
            "CUDAGraph": graph,
            "current_stream": lambda device=None: self.current,
            "stream": self.stream,
            "synchronize": self.synchronize,
            "graph_pool_handle": lambda: (0, 0),
            "get_sync_debug_mode": lambda: self._sync_mode,
            "set_sync_debug_mode": lambda mode: setattr(self, "_sync_mode", 1 if mode in ("warn", 1) else 0),
        }.items():
            self._exit.enter_context(mock.patch.object(torch.cuda, name, put))
        device = torch.Tensor.device
        where = property(lambda tensor: DEVICE if self.is_on_device(tensor) else device.__get__(tensor))
        on_device = property(lambda storage: DEVICE if storage.data_ptr() in self._blocks else torch.device("cpu"))
        self._exit.enter_context(mock.patch.object(torch.Tensor, "device", where))
        self._exit.enter_context(mock.patch.object(torch.Tensor, "is_cuda", property(self.is_on_device)))
        self._exit.enter_context(mock.patch.object(torch.UntypedStorage, "device", on_device))
        self._exit.enter_context(_Launches(self))
        self._exit.enter_context(_Arguments(self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._exit.close()


class _Arguments(TorchFunctionMode):
    """Sees where calls want their results."""

    def __init__(self, fake: FakeCuda) -> None:
        super().__init__()
        self._fake = fake

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        fake, kwargs = self._fake, dict(kwargs or {})
        if func is torch.Tensor.to:
            device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args[1:], **kwargs)
            tensor = args[0] if dtype is None else func(args[0], dtype)
            return tensor if device is None else fake.moved(tensor, device, non_blocking=non_blocking)
        if func in (torch.Tensor.cpu, torch.Tensor.tolist, torch.Tensor.numpy):
            return func(fake.moved(args[0], torch.device("cpu")), *args[1:], **kwargs)
        if func is torch.as_tensor and hasattr(args[0], "__cuda_array_interface__"):
            memory = args[0].__cuda_array_interface__
            return fake.at(memory["data"][0], *memory["shape"])
        if kwargs.pop("pin_memory", False):
            return fake.empty_like(func(*args, **kwargs), pinned=True)
        if torch.device(kwargs.get("device") or "cpu").type != "cuda":
            return func(*args, **kwargs)
        made = func(*args, **kwargs | {"device": "cpu"})
        if fake.is_on_device(made):
            return made
        if func.__name__.startswith("empty"):
            return fake.empty_like(made)
        placed = fake.place(made)
        if func is torch.tensor:
            fake.host_waits("torch.tensor", fake.current, fake.current.queued)
        return placed


class _Launches(TorchDispatchMode):
    """Queues operations on tensors of the device."""

    def __init__(self, fake: FakeCuda) -> None:
        super().__init__()
        self._fake = fake

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        fake, kwargs = self._fake, kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        returns = func._schema.returns
        with _as_it_is():
            places = [fake.is_on_device(tensor) for tensor in tensors]
            is_view = any(out.alias_info for out in returns) and not func._schema.is_mutable
            if not any(places) or is_view or func.overloadpacket is _aten.set_:
                return func(*args, **kwargs)
            if func is _aten.copy_.default:
                return fake.copy(*args, **kwargs)
            if any(not is_on_device and tensor.dim() for is_on_device, tensor in zip(places, tensors, strict=True)):
                raise RuntimeError(f"{func}: expected all tensors to be on the same device")
            given, options = tree_map_only(torch.Tensor, self._given, (args, kwargs))
            if _READS.intersection(func.tags):
                fake.host_waits(str(func), fake.current, fake.current.queued)
                return tree_map_only(torch.Tensor, fake.place, func(*given, **options))
            if returns and all(out.alias_info for out in returns):
                fake.launch(lambda: func(*given, **options))
                return kwargs.get("out", args[0])
            forms = func(*tree_map_only(torch.Tensor, _meta, args), **_on_meta(kwargs))
            made = tree_map_only(torch.Tensor, fake.empty_like, forms)
            targets = [fake.alias(leaf) for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
            fake.launch(lambda: _fill(targets, func(*given, **options)))
            return made

    def _given(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._fake.alias(tensor) if self._fake.is_on_device(tensor) else tensor.clone()


def _fill(targets: Sequence[torch.Tensor], made: Any) -> None:
    contents = [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
    for target, content in zip(targets, contents, strict=True):
        target.copy_(content)


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _on_meta(kwargs: dict[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = tree_map_only(torch.Tensor, _meta, kwargs)
    return options | {"device": "meta"} if "device" in kwargs else options


@contextlib.contextmanager
def _as_it_is() -> Iterator[None]:
    """Let torch do what it is told."""
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
        yield
