"""Fixtures of the laboratory's tests."""

from __future__ import annotations

from support.torch_threads import one_torch_thread

__all__ = ["one_torch_thread"]
