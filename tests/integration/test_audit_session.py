"""The audit log over the whole stack: what was erased, what keeps its influence, and no text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.agent_history import agent_history
from support.stack import embedded_stack
from typer.testing import CliRunner

from leyline_proxy.audit.chain import AuditKey
from leyline_proxy.cli.main import build_app

CHAT = "/v1/chat/completions"
SECRET = "key=7391"
REDACT = r"redact:pattern='key=\d+',replacement='[gone]'"
TRUNCATE = "truncate_older_than:n=1,max_chars=60"
AUDIT_KEY = "the auditor's own"
ENGINE = {"device": "cpu", "pool_tokens": 32_768}


def history(count: int, task: str, *, secret: int = -1) -> list[dict[str, Any]]:
    """An agent's history; one tool result may hold the secret."""
    return agent_history(count, task, secret=SECRET, secret_at=secret)


@contextmanager
def stack(audit: Path, **settings: Any) -> Iterator[httpx.Client]:
    """A client of a proxy with a log and an engine of its own."""
    options = {"audit_file": audit, "audit_fsync_s": 0.05, "log_level": "error", **settings}
    with (
        embedded_stack(ENGINE, **options) as origin,
        httpx.Client(base_url=origin, timeout=60) as client,
    ):
        yield client


def ask(
    client: httpx.Client, session: str, messages: list[dict[str, Any]], **options: Any
) -> dict[str, Any]:
    """The account of a turn."""
    model = client.get("/v1/models").json()["data"][0]["id"]
    body = {"model": model, "messages": messages, "max_tokens": 1, "temperature": 0}
    answer = client.post(
        CHAT, json={**body, "leyline": options}, headers={"x-leyline-session": session}
    )
    assert answer.status_code == 200, answer.text
    account: dict[str, Any] = answer.json()["leyline"]
    return account


def command(*words: str, code: int = 0) -> str:
    """Return the output of ``leyline audit``."""
    result = CliRunner().invoke(
        build_app(), ["audit", *words], env={"LEYLINE_AUDIT_KEY": AUDIT_KEY, "COLUMNS": "160"}
    )
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture(scope="module")
def audit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of a session in which text was shortened, redacted, and edited by its client."""
    path = tmp_path_factory.mktemp("audit") / "audit.jsonl"
    with stack(path, audit_key=AUDIT_KEY) as client:
        ask(client, "s", history(2, "Look.", secret=1))
        shortened = ask(client, "s", history(3, "Look.", secret=1), policy=TRUNCATE)
        assert shortened["tokens"]["spliced"] > 0
        both = f"{REDACT} | {TRUNCATE}"
        ask(client, "s", history(4, "Look.", secret=1), policy=both)
        ask(client, "s", history(4, "Look elsewhere."), policy=both)
        ask(client, "plain", history(1, "Nothing is edited here."))
        ask(client, "first", history(0, f"Open it with {SECRET}."), policy=REDACT)
    return path


def shown(audit: Path, *words: str) -> list[dict[str, Any]]:
    """The edits that are shown."""
    found: list[dict[str, Any]] = json.loads(command("show", str(audit), "--json", *words))["edits"]
    return found


def test_the_log_is_whole(audit: Path) -> None:
    """It is whole with the key that sealed it, and not with another."""
    assert "good" in command("verify", str(audit))
    wrong = CliRunner().invoke(
        build_app(), ["audit", "verify", str(audit)], env={"LEYLINE_AUDIT_KEY": "another"}
    )
    none = CliRunner().invoke(build_app(), ["audit", "verify", str(audit)])
    assert (wrong.exit_code, none.exit_code) == (1, 2)
    assert "--key-file" in none.output


def test_no_text_is_in_the_log(audit: Path) -> None:
    """It has no prompts, tool arguments, secrets or key: not even pieces of them."""
    log = b"".join(file.read_bytes() for file in audit.parent.iterdir())
    assert b'"kind":"turn"' in log
    for text in (SECRET, "key=", "listing", "folders", "Look", "ls 0", "[gone]", AUDIT_KEY):
        assert text.encode() not in log, text


def test_amortised_edits_are_told_from_erased_ones(audit: Path) -> None:
    """Shortened text may keep its influence until a forget; redacted text is erased; an undeclared
    edit was computed again."""
    effects = {
        (view["index"], view["edit"]["cause"], view["edit"]["mode"]): view["effect"]
        for view in shown(audit, "--session", "s")
    }
    assert effects[1, "policy:truncate_older_than", "amortize"] == "amortized"
    assert effects[2, "policy:redact", "forget"] == "erased"
    assert effects[3, "undeclared", "exact"] == "recomputed"


def test_the_first_turn_of_a_name_is_erased_as_well(audit: Path) -> None:
    """The name may have been in use before, so the engine was asked to erase, and confirmed it; the
    record doesn't claim that the text was never sent."""
    (view,) = shown(audit, "--session", "first")
    assert (view["effect"], view["edit"]["cause"]) == ("erased", "policy:redact")


def test_turns_without_edits_have_no_record(audit: Path) -> None:
    """The log grows with what is edited, unless all turns are asked for."""
    records = [json.loads(line) for line in audit.read_bytes().splitlines()]
    turns = [(record["session"], record["index"]) for record in records if record["kind"] == "turn"]
    assert turns == [("s", 1), ("s", 2), ("s", 3), ("first", 0)]
    assert shown(audit, "--session", "plain") == []


def test_who_has_a_text_finds_it(audit: Path) -> None:
    """With the key, the hash of a message's text is the one that its edit took away."""
    text = history(2, "", secret=1)[-1]["content"]
    wanted = AuditKey.derive(AUDIT_KEY).digest(text)
    found = [view for view in shown(audit) if wanted in view["edit"]["removed"]]
    assert {(view["index"], view["edit"]["message"]) for view in found} == {(1, 5), (2, 5)}
    printed = CliRunner().invoke(
        build_app(), ["audit", "digest"], input=text, env={"LEYLINE_AUDIT_KEY": AUDIT_KEY}
    )
    assert printed.output.strip() == wanted


def test_edits_say_who_and_how_much(audit: Path) -> None:
    """Cause, message, tokens, the engine's run, and the request's id at the engine."""
    (record,) = [
        record
        for line in audit.read_bytes().splitlines()
        if (record := json.loads(line))["kind"] == "turn"
        and (record["session"], record["index"]) == ("s", 1)
    ]
    edits = {edit["message"]: edit for edit in record["edits"]}
    assert {edit["role"] for edit in edits.values()} == {"tool"}
    assert sorted(edits) == [3, 5]
    assert edits[3]["removed_tokens"] > edits[3]["inserted_tokens"]
    assert record["message_id"].startswith("m-")
    assert "@" in record["engine"]
    assert record["tokens"]["spliced"] > 0
    assert (record["tenant"], record["outcome"], record["status"]) == (
        "default",
        "spliced",
        "settled",
    )


def test_the_table_says_what_the_effects_mean(audit: Path) -> None:
    """It does so for a reader who doesn't know the words; filters leave out the rest."""
    table = command("show", str(audit), "--session", "s")
    assert "may still influence later turns" in table
    assert "chain: good" in table
    only = shown(audit, "--session", "s", "--mode", "forget")
    assert {view["edit"]["mode"] for view in only} == {"forget"}
    assert shown(audit, "--since", "2999-01-01") == []
    assert shown(audit, "--tenant", "nobody") == []


def test_an_edited_log_is_shown_as_broken(audit: Path, tmp_path: Path) -> None:
    """A mode that was changed from amortize to forget is found, and the exit code says so."""
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(audit.read_bytes().replace(b'"mode":"amortize"', b'"mode":"forget"', 1))
    assert '"damage": "edited"' in command("verify", str(copy), "--json", code=1)
    assert "chain: broken" in command("show", str(copy), code=1)


def test_later_forgets_reach_what_was_amortised(tmp_path: Path) -> None:
    """The shortened text of a session keeps its influence until a turn forgets that message."""
    path = tmp_path / "audit.jsonl"
    with stack(path, audit_key=AUDIT_KEY) as client:
        ask(client, "s", history(2, "Look.", secret=0))
        ask(client, "s", history(3, "Look.", secret=0), policy=TRUNCATE)
        before = shown(path, "--session", "s", "--mode", "amortize")
        ask(client, "s", history(4, "Look.", secret=0), policy=f"{REDACT} | {TRUNCATE}")
    assert {view["erased_by"] for view in before} <= {None}
    first = [view for view in shown(path, "--mode", "amortize") if view["edit"]["message"] == 3]
    assert [view["erased_by"] for view in first if view["index"] == 1] == [2]


def test_all_turns_on_request_and_abandoned_ones(tmp_path: Path) -> None:
    """Each turn has a record then; one whose client left says so."""
    path = tmp_path / "audit.jsonl"
    with stack(path, audit_turns="all") as client:
        ask(client, "s", history(1, "Look."))
        model = client.get("/v1/models").json()["data"][0]["id"]
        body = {"model": model, "messages": history(1, "Look."), "max_tokens": 2000}
        headers = {"x-leyline-session": "left"}
        streamed = {**body, "stream": True, "ignore_eos": True}
        with client.stream("POST", CHAT, json=streamed, headers=headers) as answer:
            next(answer.iter_bytes())
    turns = [json.loads(line) for line in path.read_bytes().splitlines()]
    found = {turn["session"]: turn for turn in turns if turn["kind"] == "turn"}
    assert (found["s"]["status"], found["s"]["edits"]) == ("settled", [])
    assert found["s"]["outcome"] == "unedited"
    assert (found["left"]["status"], found["left"]["outcome"]) == ("abandoned", None)
    assert turns[-1]["kind"] == "stop"
