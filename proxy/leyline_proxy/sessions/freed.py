"""Give memory that was freed back to the system."""

from __future__ import annotations

import ctypes


def give_back_freed() -> None:
    """Have the C library return free pages, where it can be told to (glibc); else nothing.

    Freed blocks lie between others that live, and glibc by itself returns only those at the end
    of its heap: without this, memory stays as large as it ever was.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return
    trim(ctypes.c_size_t(0))
