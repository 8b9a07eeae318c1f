"""The proxy's records of its turns, in front of scripted engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from support.claims_engine import ClaimsEngine
from support.fake_engine import MODEL, FakeEngine, chat_json, proxy_before, tool_session
from support.waiting import until

from leyline_engine.contract import ForgetCounts, Outcome, Reason, Receipt, TokenCounts
from leyline_proxy.audit.chain import AuditKey
from leyline_proxy.audit.effects import edits_of
from leyline_proxy.audit.reading import find_logs, records, verify
from leyline_proxy.audit.records import digest_of
from leyline_proxy.observe import auditor

REDACT = r"redact:pattern='listing',replacement='[gone]'"
KEY = AuditKey.derive("k")


async def ask(
    client: httpx.AsyncClient, messages: list[dict[str, Any]], session: str = "s", **options: Any
) -> httpx.Response:
    """One turn."""
    return await client.post(
        "/v1/chat/completions",
        json={"model": MODEL, "messages": messages, "leyline": options},
        headers={"x-leyline-session": session},
    )


def kept(path: Path, kind: str = "turn") -> list[dict[str, Any]]:
    """The log's records of a kind."""
    found = list(records(find_logs(path)[0])) if path.exists() else []
    return [record for record in found if record["kind"] == kind]


def engine_that_forgets(counts: list[ForgetCounts]) -> FakeEngine:
    """An engine whose receipts report a forget, each time they are asked for."""
    engine = FakeEngine()
    asked = iter(counts)
    last = [counts[0]]

    def receipt(message_id: str) -> Receipt:
        last[0] = next(asked, last[0])
        return Receipt(
            message_id=message_id,
            outcome=Outcome.REPREFILLED,
            reason=Reason.REPREFILLED,
            tokens=TokenCounts(prompt=10, prefilled=10),
            forgot=last[0],
        )

    engine.receipt = receipt
    engine.answers = [chat_json() for _ in range(9)]
    return engine


async def test_a_pending_forget_is_followed_to_its_end(path: Path) -> None:
    """The turn's record says pending, a later one that it is closed, and so does what is shown."""
    pending, closed = ForgetCounts(overwritten=3, pending=5), ForgetCounts(overwritten=8)
    engine = engine_that_forgets([pending, pending, closed])
    async with proxy_before(engine, audit_file=path, log_level="error") as client:
        assert (await ask(client, tool_session(2), policy=REDACT)).status_code == 200
        await until(lambda: bool(kept(path)))
        assert {view.effect for view in edits_of(kept(path))} == {"pending"}
        await until(lambda: bool(kept(path, "receipt")))
    (turn,) = kept(path)
    (receipt,) = kept(path, "receipt")
    assert turn["forgot"] == {"overwritten": 3, "shared_retained": 0, "pending": 5}
    assert receipt["message_id"] == turn["message_id"]
    assert receipt["forgot"]["pending"] == 0
    assert {view.effect for view in edits_of([turn, receipt])} == {"erased"}


async def test_what_others_hold_is_not_called_erased(path: Path) -> None:
    """Other sessions that sent the same tokens keep theirs, and the log says so."""
    engine = engine_that_forgets([ForgetCounts(overwritten=1, shared_retained=4)])
    async with proxy_before(engine, audit_file=path, log_level="error") as client:
        await ask(client, tool_session(1), policy=REDACT)
    assert {view.effect for view in edits_of(kept(path))} == {"shared"}


async def test_a_forget_without_a_receipt_is_unconfirmed(path: Path) -> None:
    """Nothing vouches for it, so it is not claimed."""
    engine = FakeEngine()
    engine.gives_receipts = False
    engine.answers = [chat_json()]
    async with proxy_before(engine, audit_file=path, log_level="error") as client:
        await ask(client, tool_session(1), policy=REDACT)
    (turn,) = kept(path)
    assert turn["receipt"] is False
    assert {view.effect for view in edits_of([turn])} == {"unconfirmed"}


async def test_a_message_that_its_client_removed_is_recorded(path: Path) -> None:
    """The record has its role and its hash, although no index says where it was."""
    engine = FakeEngine(capability=None)
    engine.answers = [chat_json() for _ in range(3)]
    first = [*tool_session(2), {"role": "user", "content": "And the next."}]
    second = [*first[:1], *first[3:]]  # one exchange is gone
    settings = {"audit_file": path, "audit_key": "k", "log_level": "error"}
    async with proxy_before(engine, **settings) as client:
        await ask(client, first)
        await ask(client, second)
    (turn,) = kept(path)
    by_role = {edit["role"]: edit for edit in turn["edits"]}
    assert by_role["tool"]["removed"] == [digest_of(first[2], KEY)]
    assert by_role["assistant"]["removed"] == [digest_of(first[1], KEY)]
    assert {edit["cause"] for edit in turn["edits"]} == {"undeclared"}
    assert {view.effect for view in edits_of([turn])} == {"recomputed"}


async def test_an_edited_message_is_recorded_with_both_hashes(path: Path) -> None:
    """The record has the hashes of the whole text before and after."""
    engine = FakeEngine(capability=None)
    engine.answers = [chat_json() for _ in range(2)]
    first = tool_session(2)
    second = [*first[:2], {**first[2], "content": "Cleared."}, *first[3:]]
    settings = {"audit_file": path, "audit_key": "k", "log_level": "error"}
    async with proxy_before(engine, **settings) as client:
        await ask(client, first)
        await ask(client, second)
    (turn,) = kept(path)
    (edit,) = turn["edits"]
    assert (edit["message"], edit["mode"]) == (2, "exact")
    assert edit["removed"] == [KEY.digest(first[2]["content"])]
    assert edit["inserted"] == [KEY.digest("Cleared.")]


async def test_without_a_key_no_text_is_hashed(path: Path) -> None:
    """A bare hash of a short secret could be guessed."""
    engine = engine_that_forgets([ForgetCounts(overwritten=1)])
    async with proxy_before(engine, audit_file=path, log_level="error") as client:
        await ask(client, tool_session(1), policy=REDACT)
    (turn,) = kept(path)
    assert {(edit["removed"], edit["inserted"]) for edit in turn["edits"]} == {(None, None)}


async def test_edits_of_a_conversation_from_elsewhere_are_unknown(path: Path) -> None:
    """Another proxy may have sent the text before; the log doesn't claim the opposite."""
    engine = FakeEngine()
    engine.answers = [chat_json()]
    policy = "truncate_older_than:n=0,max_chars=60"
    async with proxy_before(engine, audit_file=path, log_level="error") as client:
        await ask(client, tool_session(2), policy=policy)
    views = edits_of(kept(path))
    assert {view.effect for view in views} == {"unknown"}
    assert {view.edit["sent_before"] for view in views} == {None}


async def test_a_refused_turn_is_recorded(path: Path) -> None:
    """It didn't run for the sake of claims, and says so."""
    engine = ClaimsEngine(pool=400, share=1.0, engine_share=1.0)
    settings = {"audit_file": path, "audit_turns": "all", "log_level": "error"}
    async with proxy_before(engine, claims_interval_s=60, **settings) as client:
        assert (await ask(client, [{"role": "user", "content": "x" * 200}])).status_code == 200
        body = {"session": "s", "id": "plan", "kind": "hard", "predicate": {}}
        assert (await client.post("/v1/leyline/claims", json=body)).status_code == 201
        assert (await ask(client, [{"role": "user", "content": "y" * 300}])).status_code == 503
    assert [(turn["status"], turn["reason"]) for turn in kept(path)] == [
        ("settled", None),
        ("refused", "refused_by_claim"),
    ]


async def test_a_fault_of_the_log_fails_no_request(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record is lost; the loss is counted and is in the log."""

    def broken(*_: Any) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(auditor, "turn_edits", broken)
    engine = engine_that_forgets([ForgetCounts(overwritten=1)])
    async with proxy_before(engine, audit_file=path, log_level="error") as client:
        answer = await ask(client, tool_session(1), policy=REDACT)
        metrics = (await client.get("/metrics")).text
    assert answer.status_code == 200
    assert "leyline_audit_failures_total 1.0" in metrics
    assert [gap["lost"] for gap in kept(path, "gap")] == [1]


async def test_a_second_proxy_on_one_file_does_not_start(path: Path) -> None:
    """It says why, and the first one continues."""
    engine = engine_that_forgets([ForgetCounts(overwritten=1)])
    async with proxy_before(engine, audit_file=path, log_level="error") as client:
        with pytest.raises(RuntimeError, match="own file"):
            async with proxy_before(FakeEngine(), audit_file=path, log_level="error"):
                pytest.fail("it started")
        await ask(client, tool_session(1), policy=REDACT)
    assert len(kept(path)) == 1
    assert verify(find_logs(path)[0]).good


async def test_each_proxy_has_a_file_by_its_name(tmp_path: Path) -> None:
    """``{instance}`` in the name of the file is replaced by the proxy's name."""
    settings = {"audit_file": tmp_path / "a-{instance}.jsonl", "log_level": "error"}
    async with (
        proxy_before(FakeEngine(), audit_instance="one", **settings),
        proxy_before(FakeEngine(), audit_instance="two", **settings),
    ):
        pass
    assert [log.path.name for log in find_logs(tmp_path)] == ["a-one.jsonl", "a-two.jsonl"]
    assert all(verify(log).good for log in find_logs(tmp_path))


async def test_record_members_are_what_the_documentation_lists(path: Path) -> None:
    """Readers find each member of a turn's record and of its edits in docs/audit.md."""
    engine = engine_that_forgets([ForgetCounts(overwritten=1)])
    async with proxy_before(engine, audit_file=path, log_level="error") as client:
        await ask(client, tool_session(1), policy=REDACT)
    text = (Path(__file__).parents[3] / "docs" / "audit.md").read_text(encoding="utf-8")
    (turn,) = kept(path)
    for member in (*turn, *turn["edits"][0]):
        assert f"`{member}`" in text, member
    assert len(json.dumps(turn)) < 4096
    assert msgspec.json.encode(turn)
