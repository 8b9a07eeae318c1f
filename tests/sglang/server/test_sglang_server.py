"""The test server reports failures inside it."""

from __future__ import annotations

from pathlib import Path

import pytest
from sglang_server import ServerFailedError, SglangServer

HARMLESS = """\
[2026-01-01 00:00:00] Ignore import error when loading sglang.srt.models.mamba: no module
[2026-01-01 00:00:00] The server is fired up and ready to roll!
 - leaked function "get_argument"
"""
COMPLAINTS = [
    "Traceback (most recent call last):",
    "AssertionError: Full Pool Mem Leak Detected! available_size=3",
    "ValueError: token_to_kv_pool_allocator memory leak detected! 3",
    "ValueError: KV double free: sub-pool 0 has 2 duplicate pages.",
    "[2026-01-01 00:00:00] Failed to execute general plugin: leyline",
    "[2026-01-01 00:00:00] Failed to apply hooks to sglang.srt.managers.scheduler.Scheduler.x",
    "[2026-01-01 00:00:00] Scheduler hit an exception: …",
]


@pytest.mark.parametrize("line", COMPLAINTS)
def test_complaints_are_found(line: str, tmp_path: Path) -> None:
    """Each of SGLang's messages about a fault is found among harmless ones."""
    server = SglangServer(tmp_path, tmp_path / "log")
    server.log.write_text(f"{HARMLESS}{line}\n")
    assert server.complaints() == [line]


def test_a_harmless_log_is_clean(tmp_path: Path) -> None:
    """SGLang's output on any start and stop counts as no complaint."""
    server = SglangServer(tmp_path, tmp_path / "log")
    server.log.write_text(HARMLESS)
    assert server.complaints() == []


@pytest.mark.nightly
def test_a_failed_start_is_told_at_once(tmp_path: Path) -> None:
    """A server that dies at its start isn't waited for: its end raises, with the log's end."""
    server = SglangServer(tmp_path, tmp_path / "log", ("--no-such-flag",))
    with pytest.raises(ServerFailedError, match=r"died at its start(?s:.)*--no-such-flag"):
        server.start()
