"""Policies from a file: by tenant and model, and changed while sessions run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs
from support.fake_engine import MODEL, FakeEngine, proxy_before, tool_session

from leyline_policies import SpecError
from leyline_proxy.edits.policy_file import PolicyFile
from leyline_proxy.settings import Settings
from leyline_proxy.telemetry.metrics import Metrics

CHAT = "/v1/chat/completions"
CUT = "policies:\n  - truncate_older_than: {n: 0, max_chars: 40}\n"


def write(path: Path, text: str) -> None:
    """Replace the file as editors do."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)


async def sizes(client: httpx.AsyncClient, engine: FakeEngine, turn: int) -> int:
    """Characters of the first tool result as it is sent."""
    body = {"model": MODEL, "messages": tool_session(turn), "max_tokens": 1}
    answer = await client.post(CHAT, json=body, headers={"x-leyline-session": "reloaded"})
    assert answer.status_code == 200
    account: dict[str, Any] = answer.json()["leyline"]
    assert account["turn_index"] == turn - 1
    return len(engine.sent["messages"][2]["content"])


async def test_a_changed_file_holds_from_the_next_turn_and_drops_no_session(tmp_path: Path) -> None:
    """The session continues; a file that is wrong changes nothing and is counted."""
    path, engine = tmp_path / "policies.yaml", FakeEngine(capability=None)
    write(path, "policies: [keep_all]\n")
    async with proxy_before(engine, policies_file=path, edit_timing="now") as client:
        whole = await sizes(client, engine, 1)
        write(path, CUT)
        await _until(client, 'leyline_policy_reloads_total{result="loaded"} 1.0')
        assert await sizes(client, engine, 2) < whole
        write(path, "policies: [truncate_oldest]\n")
        await _until(client, 'leyline_policy_reloads_total{result="refused"} 1.0')
        assert await sizes(client, engine, 3) < whole


async def _until(client: httpx.AsyncClient, line: str) -> None:
    for _ in range(500):
        if line in (await client.get("/metrics")).text:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(line)


async def test_tenants_and_models_have_their_own(tmp_path: Path) -> None:
    """The tenant's before the model's before everyone's, the same objects every time."""
    path = tmp_path / "policies.yaml"
    write(
        path,
        "policies: [keep_all]\n"
        "tenants: {team-a: {policies: []}}\n"
        "models: {'qwen*': {policies: [drop_failed_calls]}}\n",
    )
    file = PolicyFile(path, Metrics())
    assert file.choose("team-a", "qwen3") == ()
    assert [policy.name for policy in file.choose("team-b", "qwen3")] == ["drop_failed_calls"]
    assert [policy.name for policy in file.choose("team-b", "llama")] == ["keep_all"]
    assert file.choose("x", "y") is file.choose("x", "y")
    assert not await file.refresh()


def test_a_file_that_is_wrong_at_the_start_is_refused(tmp_path: Path) -> None:
    """The message has the line, and the closest name."""
    path = tmp_path / "policies.yaml"
    write(path, "policies:\n  - keep_al\n")
    with pytest.raises(SpecError, match=r"(?s)policies.yaml:2.*keep_all"):
        PolicyFile(path, Metrics())


def test_policies_come_from_one_place(tmp_path: Path) -> None:
    """A file and a flag together would leave open which holds."""
    with pytest.raises(ValueError, match="not both"):
        Settings(policies_file=tmp_path / "p.yaml", policy="keep_all")


async def test_a_pipeline_of_an_unknown_tenant_is_logged(tmp_path: Path) -> None:
    """It is named with the tenant that may be meant, at the start and whenever the file is read."""
    path = tmp_path / "policies.yaml"
    path.write_text("tenants: {teama: {policies: [keep_all]}}")
    with capture_logs() as logged:
        file = PolicyFile(path, Metrics(), tenants=lambda: {"team-a"})
        path.write_text("tenants: {team-a: {policies: [keep_all]}, other: {policies: [keep_all]}}")
        assert await file.refresh()
    named = [line for line in logged if line["event"] == "policies_unknown_tenant"]
    assert [line["named"] for line in named] == ["teama", "other"]
    assert "'team-a'" in named[0]["fix"]
