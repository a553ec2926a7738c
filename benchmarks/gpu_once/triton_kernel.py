"""A small Triton kernel; Triton reads the source of kernels from their file, and is not installed everywhere."""

from __future__ import annotations

from typing import Any

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]


@triton.jit  # type: ignore[untyped-decorator]
def double(pointer: Any, count: Any, block: tl.constexpr) -> None:
    """Double the elements of a vector in place."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(pointer + at, tl.load(pointer + at, mask=at < count) * 2, mask=at < count)
