"""Names of sessions that can't be ids: people see them, bounded and escaped; logs don't."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import pytest
from structlog.testing import capture_logs
from support.fake_engine import MODEL, FakeEngine, forgotten, proxy_before

from leyline_proxy.request.session_name import MAX_SHOWN, public_id, session_name

CHAT = "/v1/chat/completions"
SESSIONS = "/v1/leyline/sessions"
LONG = "team/" + "x" * 300 + "/last"
NAMES = ["team/agent 7", "Fix the build", LONG, "größe", "h\u202egnp"]


def talk(session: str, where: str) -> dict[str, Any]:
    """Arguments of a request that names its session in a header or in its body."""
    body: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi."}]}
    if where == "metadata":
        return {"json": body | {"metadata": {"session_id": session}}}
    return {"json": body, "headers": {where: session.encode()}}


@pytest.mark.parametrize("name", NAMES)
def test_a_shown_name_is_bounded_and_prints(name: str) -> None:
    """Its beginning and its end are kept; what doesn't print is escaped; a plain name has no other
    form than its id."""
    found = session_name(name)
    assert found.id == public_id(name) != name
    assert 0 < len(found.shown) <= MAX_SHOWN
    assert found.shown.isprintable()
    assert found.shown[:2] == name[:2] or not name.isprintable()
    assert session_name("run-7") == ("run-7", "")
    assert session_name("a\x1b[31m\nb").shown == "a\\u{1b}[31m\\u{a}b"
    assert session_name(LONG).shown.endswith("xx/last")
    assert len(session_name("\x00" * 10_000).shown) <= MAX_SHOWN


@pytest.mark.parametrize("where", ["x-leyline-session", "x-session-id", "metadata"])
async def test_a_name_is_shown_wherever_people_look(where: str) -> None:
    """The list, the session, the live page's stream and the answer have the caller's name beside
    the id, on every later turn, too; logs have the id alone."""
    name = "team/agent 7"
    async with proxy_before(FakeEngine()) as client:
        with capture_logs() as logged:
            answers = [(await client.post(CHAT, **talk(name, where))) for _ in range(2)]
        (listed,) = (await client.get(SESSIONS)).json()["sessions"]
        whole = (await client.get(f"{SESSIONS}/{public_id(name)}")).json()
        async with client.stream("GET", "/v1/leyline/live") as stream:
            async for line in stream.aiter_lines():
                if line.startswith("data: "):
                    break
    snapshot = json.loads(line[6:])
    for answer in answers:
        account = answer.json()["leyline"]
        assert (account["session"], account["session_name"]) == (public_id(name), name)
        assert answer.headers["x-leyline-session"] == public_id(name)
    for found in (listed, whole, snapshot["sessions"][0]):
        assert (found["id"], found["name"]) == (public_id(name), name)
    assert whole["turns"] == 2
    assert any(public_id(name) in str(line) for line in logged)
    assert name not in str(logged)


async def test_a_plain_name_is_its_own_id() -> None:
    """Its answer has no second name, and the list calls it by its id; so it does a session that
    nobody named."""
    async with proxy_before(FakeEngine()) as client:
        named = await client.post(CHAT, **talk("run-7", "x-leyline-session"))
        other = {"model": MODEL, "messages": [{"role": "user", "content": "Ho."}], "user": "a b"}
        nameless = await client.post(CHAT, json=other)
        listed = (await client.get(SESSIONS)).json()["sessions"]
    assert "session_name" not in named.json()["leyline"] | nameless.json()["leyline"]
    assert [each["name"] == each["id"] for each in listed] == [True, True]
    assert "a b" not in json.dumps(listed)


async def test_a_session_is_found_by_the_callers_name() -> None:
    """Paths take the name itself, unless it has a slash; a proof of it reaches the session, and
    none of another tenant is found."""
    name, engine = "Fix the build", FakeEngine()
    engine.receipt = forgotten
    keys = ("red:red-key", "blue:blue-key")
    async with proxy_before(engine, api_keys=keys) as client:
        red, blue = ({"authorization": f"Bearer {who}-key"} for who in ("red", "blue"))
        asked = talk(name, "x-leyline-session")
        await client.post(CHAT, json=asked["json"], headers={**asked["headers"], **red})
        path = f"{SESSIONS}/{quote(name, safe='')}"
        found, ledger = (
            await client.get(path, headers=red),
            await client.get(f"{path}/ledger", headers=red),
        )
        foreign = await client.get(path, headers=blue)
        listed = await client.get(SESSIONS, headers=blue)
    assert (found.status_code, found.json()["id"]) == (200, public_id(name))
    assert ledger.status_code == 200
    assert foreign.status_code == 404
    assert listed.json()["sessions"] == []
