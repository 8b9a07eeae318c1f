"""Give memory that was freed back to the system."""

from __future__ import annotations

import ctypes


def give_back_freed() -> None:
    """Have the C library (only glibc) return free pages to the system.

    Freed blocks lie between live ones, and glibc by itself returns only those at the end of its
    heap, so without this the process keeps its peak memory.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return
    trim(ctypes.c_size_t(0))
