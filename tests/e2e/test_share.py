"""Sharing spliced KV within a tenant: sessions that declare the same name find it, and no
others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.stack import embedded_stack

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    """A bare HTTP client of a stack with tenants of different rights."""
    options = {"pool_tokens": 32_768, "device": "cpu"}
    tenants = {
        "free": {"api_keys": ["key-free"]},
        "other": {"api_keys": ["key-other"]},
        "team": {"api_keys": ["key-team"], "share": "team"},
        "fixed": {"api_keys": ["key-fixed"], "allow_request_policy": False},
    }
    settings = {"log_level": "error", "undeclared": {"tool": "amortize"}, "tenants": tenants}
    with (
        embedded_stack(options, **settings) as origin,
        httpx.Client(base_url=origin, timeout=60) as http,
    ):
        yield http


def post(
    client: httpx.Client, key: str, session: str, task: str, cut: bool, **options: Any
) -> httpx.Response:
    """A conversation whose first tool result may be cut."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are an agent that looks into folders. " * 4},
        {"role": "user", "content": f"Task {task}."},
    ]
    for number in range(3):
        call = {"name": "shell", "arguments": "{}"}
        calls = [{"id": f"c{number}", "type": "function", "function": call}]
        messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        result = f"line {number} of the listing\n" * 12
        content = "[cut]" if cut and number == 0 else result
        messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": content})
    body = {"model": "leyline-recall", "messages": messages, "max_tokens": 1, "leyline": options}
    headers = {"authorization": f"Bearer {key}", "x-leyline-session": session}
    return client.post(CHAT, json=body, headers=headers)


def tokens(client: httpx.Client, *args: Any, **options: Any) -> dict[str, int]:
    """The token counts of an answered turn."""
    answer = post(client, *args, **options)
    assert answer.status_code == 200, answer.text
    counts: dict[str, int] = answer.json()["leyline"]["tokens"]
    return counts


def spliced(client: httpx.Client, key: str, task: str, **options: Any) -> int:
    """Splice in a session of its own; the length of its prompt."""
    tokens(client, key, f"{task}-origin", task, False, **options)
    counts = tokens(client, key, f"{task}-origin", task, True, **options)
    assert counts["spliced"] > 0
    return counts["prompt"]


def test_who_gives_the_name_finds_what_was_spliced(client: httpx.Client) -> None:
    """Another session with the name has it as prefix; one without, or of others, prefills."""
    prompt = spliced(client, "key-free", "named", share="folder-team")
    counts = tokens(client, "key-free", "named-private", "named", True)
    assert (counts["spliced"], counts["prefix"] < prompt // 2) == (0, True)
    for key, share in (("key-other", "folder-team"), ("key-free", "another-team")):
        task = f"named-{share}-{key}"
        assert tokens(client, key, task, "named", True, share=share)["spliced"] == 0


def test_a_share_is_found_before_anyone_sent_it_exactly(client: httpx.Client) -> None:
    """The first that comes with the name prefills nothing but the last token."""
    prompt = spliced(client, "key-free", "found", share="folder-team")
    counts = tokens(client, "key-free", "found-shared", "found", True, share="folder-team")
    assert counts == {**counts, "prefix": prompt - 1, "spliced": 0, "prefilled": 1}


def test_a_tenants_share_is_its_sessions_default(client: httpx.Client) -> None:
    """An operator's choice holds for all, and a request may keep to itself."""
    prompt = spliced(client, "key-team", "default")
    alone = tokens(client, "key-team", "default-alone", "default", True, share="")
    assert alone["prefix"] < prompt // 2
    prompt = spliced(client, "key-team", "default two")
    counts = tokens(client, "key-team", "default-other", "default two", True)
    assert counts["prefix"] == prompt - 1


@pytest.mark.parametrize("share", ["a name with spaces", "x" * 129, 7])
def test_bad_names_are_refused(client: httpx.Client, share: object) -> None:
    """The error names the field."""
    answer = post(client, "key-free", "bad", "bad", False, share=share)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "leyline.share"


def test_a_tenant_without_choice_chooses_no_share(client: httpx.Client) -> None:
    """The operator decides who may see spliced KV if the policy is the operator's."""
    answer = post(client, "key-fixed", "fixed", "fixed", False, share="any")
    assert (answer.status_code, answer.json()["error"]["param"]) == (403, "leyline.share")
