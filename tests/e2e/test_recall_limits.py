"""The limits of recall over the whole stack: what is forgotten, of others, or out of reach."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from recall_kit import (
    ANSWER,
    HEADERS,
    LISTING,
    OTHER,
    TOOLS,
    account,
    asks_once,
    called,
    client_of,
    history,
    noting,
    stack,
    warmed,
)

from leyline_lab.stand_ins.scripted_model import SCRIPTED, Prompt, Reply, build_scripted
from leyline_policies.stubs import address_of

Messages = list[dict[str, Any]]
ADDRESS = address_of(LISTING)
REFERENCE = f"leyline://sha256/{ADDRESS.removeprefix('sha256:')}"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripted model's files."""
    return build_scripted(tmp_path_factory.mktemp("scripted"))


def quiet(prompt: Prompt) -> Reply:
    """Answer without a call."""
    return Reply("Done.")


def ask(client: openai.OpenAI, messages: Messages, **more: Any) -> Any:
    """Send a request of the session."""
    headers = more.pop("headers", HEADERS)
    return client.chat.completions.create(
        model=SCRIPTED, messages=messages, tools=TOOLS, extra_headers=headers, **more
    )


def shows(tokens: Any, text: str, model: Any) -> bool:
    """True if a prompt shows a text."""
    decoded = model.app.state.service._engine.model.tokenizer.decode(list(tokens))
    return text in decoded


def test_a_quarantine_takes_recalled_text_away(files: Path) -> None:
    """After a quarantine the aside is out of the prompt, its text out of the store, a recall says
    why, and the engine proves that nothing is left."""
    seen, script = noting(asks_once)
    with stack(files, script) as (origin, _), client_of(origin) as client:
        warmed(client)
        answer = ask(client, history())
        assert account(answer)["recall"]["calls"][0]["verdict"] == "hit"
        assert any(LISTING[:200] in text for _, text in seen[-1].messages)
        url = f"{origin}/v1/leyline/sessions/{HEADERS['x-leyline-session']}"
        done = httpx.post(f"{url}/quarantine", json={"messages": [3]}, timeout=30).json()
        assert done["forgot"]["result"] == "erased", done
        said = answer.choices[0].message.model_dump(include={"role", "content"})
        more = [*history(), said, {"role": "user", "content": "Again?"}]
        ask(client, more)
        assert not any(LISTING[:60] in text for _, text in seen[-1].messages)
        found = httpx.post(f"{url}/recall", json={"addresses": [ADDRESS]}).json()["pieces"]
        assert [(each["verdict"], each["cause"]) for each in found] == [("refuse", "forgotten")]
        assert "text" not in found[0]
        proof = httpx.post(f"{url}/proof", json={}, timeout=60).json()
        scans = [*proof["places"], *proof["engines"][0]["places"]]
        assert {"parts", "pool.tree", "pool.free"} <= {scan["place"] for scan in scans}
        assert not any(scan["survivors"] or scan["unscanned"] for scan in scans)


def test_a_forget_of_this_turn_reaches_its_own_asides(files: Path) -> None:
    """A message's own demand to be forgotten takes the recalled text out of the very prompt that
    carries the demand."""
    seen, script = noting(asks_once)
    with stack(files, script) as (origin, _), client_of(origin) as client:
        warmed(client)
        answer = ask(client, history())
        said = answer.choices[0].message.model_dump(include={"role", "content"})
        more = [*history(), said, {"role": "user", "content": "Again?"}]
        more[3] = {**more[3], "leyline": {"forget": True}}
        ask(client, more)
        assert not any(LISTING[:60] in text for _, text in seen[-1].messages)


def test_reference_in_a_message(files: Path) -> None:
    """A line that is a reference becomes the text, in the prompt only."""
    seen, script = noting(quiet)
    with stack(files, script) as (origin, _), client_of(origin) as client:
        warmed(client)
        ask(client, history())
        said = {"role": "assistant", "content": "Done."}
        asked = {"role": "user", "content": f"Compare with\n{REFERENCE}\nplease."}
        answer = ask(client, [*history(), said, asked])
        assert seen[-1].messages[-1][1].strip() == f"Compare with\n{LISTING}\nplease."
        found = account(answer)["recall"]["references"]
        assert [(each["address"], each["verdict"]) for each in found] == [(ADDRESS, "hit")]
        unknown = {"role": "user", "content": "leyline://sha256/" + "0" * 32}
        answer = ask(client, [*history(), said, unknown])
        assert "[not recalled: no text with this address" in seen[-1].messages[-1][1]
        found = account(answer)["recall"]["references"]
        assert [(each["verdict"], each["cause"]) for each in found] == [("abstain", "unknown")]


def test_another_tenants_address_is_unknown(files: Path) -> None:
    """Another tenant's address, and another session's, get the answer of one that doesn't exist."""
    keys = {"api_keys": ["one:sk-one-0123456789abcdef", "two:sk-two-0123456789abcdef"]}
    with stack(files, quiet, **keys) as (origin, _):
        one, two = (client_of(origin, f"sk-{name}-0123456789abcdef") for name in ("one", "two"))
        with one, two:
            warmed(one)
            ask(one, history())
            warmed(two)
            ask(two, [*history()[:3], {**history()[3], "content": OTHER}, *history()[4:]])
            url = f"{origin}/v1/leyline/sessions/recalls/recall"
            answers = {}
            for address in (ADDRESS, "sha256:" + "0" * 32):
                headers = {"authorization": f"Bearer {two.api_key}"}
                found = httpx.post(url, json={"addresses": [address]}, headers=headers).json()
                (piece,) = found["pieces"]
                answers[address] = {k: v for k, v in piece.items() if k != "selector"}
            assert len(set(map(str, answers.values()))) == 1, answers
            headers = {"authorization": f"Bearer {one.api_key}"}
            (own,) = httpx.post(url, json={"addresses": [ADDRESS]}, headers=headers).json()[
                "pieces"
            ]
            assert own["text"] == LISTING and own["verdict"] == "fault"


def test_a_session_without_a_name_recalls_what_it_shows(files: Path) -> None:
    """A session without a name gets only texts back that the request itself shows."""
    with stack(files, asks_once) as (origin, _), client_of(origin) as client:
        ask(client, history()[:4], headers={})
        answer = ask(client, history(), headers={})
        assert account(answer)["recall"]["calls"][0]["verdict"] in ("hit", "fault")
        said = answer.choices[0].message.model_dump(include={"role", "content"})
        cut = [*history()[:3], {**history()[3], "content": "(cut)"}, *history()[4:], said]
        asked = {"role": "user", "content": REFERENCE}
        answer = ask(client, [*cut, asked], headers={})
        found = account(answer)["recall"]["references"]
        assert [(each["verdict"], each["cause"]) for each in found] == [("abstain", "unknown")]


def test_a_store_that_is_down_costs_recalls_only(files: Path, tmp_path: Path) -> None:
    """With the store gone, turns go on, and a recall says that texts can't be read."""
    folder = tmp_path / "parts"
    folder.mkdir()
    key = "a-secret-of-many-characters"
    settings = {"recall_store": f"file://{folder}", "recall_key": key}

    def script(prompt: Prompt) -> Reply:
        if any("[not recalled:" in text for _, text in prompt.messages):
            return Reply("I go on without it.")
        return asks_once(prompt)

    with stack(files, script, **settings) as (origin, _), client_of(origin) as client:
        warmed(client)
        answer = ask(client, history())
        assert answer.choices[0].message.content.endswith(ANSWER)
        for path in sorted(folder.rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        folder.rmdir()
        folder.write_text("no folder")
        answer = ask(client, history(), headers={"x-leyline-session": "later"})
        assert answer.choices[0].message.content.endswith("I go on without it.")
        call = account(answer)["recall"]["calls"][0]
        assert (call["verdict"], call["cause"]) == ("abstain", "store_down")


def test_recall_is_refused_where_it_is_off(files: Path) -> None:
    """A tenant without recall can't ask for it, and its requests leave without the tool."""
    seen, script = noting(quiet)
    with stack(files, script, recall="off") as (origin, _), client_of(origin) as client:
        answer = ask(client, history())
        assert "recall" not in account(answer)
        assert seen[-1].tools == {"shell", "note"}
        with pytest.raises(openai.PermissionDeniedError) as refused:
            ask(client, history(), extra_body={"leyline": {"recall": "shown"}})
        assert "leyline.recall" in str(refused.value)
        answer = httpx.get(f"{origin}/v1/leyline/sessions/recalls/parts")
        assert answer.status_code == 403


def needed(**context: Any) -> dict[str, Any]:
    """The option of a request."""
    return {"extra_body": {"leyline": {"context": context}}}


def test_working_set_restores_in_place(files: Path) -> None:
    """A needed text that a policy evicted is sent whole, in its place, from the KV that it had."""
    seen, script = noting(quiet)
    with stack(files, script) as (origin, _), client_of(origin) as client:
        warmed(client)
        answer = ask(client, history(), **needed(need=[ADDRESS, "tool:shell"]))
        results = [text for role, text in seen[-1].messages if role == "tool"]
        assert [text.strip() for text in results] == [LISTING.strip(), OTHER.strip()]
        pieces = account(answer)["context"]["pieces"]
        assert (pieces[0]["address"], pieces[0]["verdict"]) == (ADDRESS, "hit")
        assert pieces[1]["messages"] == [5]
        answer = ask(client, history(), **needed(need=[ADDRESS], budget_tokens=10))
        (piece,) = account(answer)["context"]["pieces"]
        assert (piece["verdict"], piece["cause"]) == ("abstain", "over_budget")
        assert piece["price_tokens"] > 10
        results = [text for role, text in seen[-1].messages if role == "tool"]
        assert ADDRESS in results[0]


def test_working_set_brings_back_what_the_client_dropped(files: Path) -> None:
    """A needed text that only the store has comes back once, and stays in later prompts."""
    seen, script = noting(quiet)
    with stack(files, script) as (origin, _), client_of(origin) as client:
        warmed(client)
        ask(client, history())
        said = {"role": "assistant", "content": "Done."}
        task = {"role": "user", "content": "Go on."}
        cut = [*history()[:2], called(1), history()[5], said, task]
        answer = ask(client, cut, **needed(need=[ADDRESS]))
        (piece,) = account(answer)["context"]["pieces"]
        assert piece["verdict"] in ("hit", "fault") and piece["messages"] == []
        assert [text for _, text in seen[-1].messages].count(LISTING.strip()) <= 1
        assert LISTING[:300] in seen[-1].messages[-1][1]
        answer = ask(client, [*cut, said, task], **needed(need=[ADDRESS]))
        (piece,) = account(answer)["context"]["pieces"]
        assert piece["verdict"] == "hit"
        assert sum(LISTING[:300] in text for _, text in seen[-1].messages) == 1


def test_working_set_excludes(files: Path) -> None:
    """An excluded text leaves the prompt with a stub that has its address."""
    seen, script = noting(quiet)
    with stack(files, script, policy="keep_all") as (origin, _), client_of(origin) as client:
        warmed(client)
        answer = ask(client, history(), **needed(exclude=[ADDRESS]))
        assert account(answer)["context"]["refused"] == []
        results = [text for role, text in seen[-1].messages if role == "tool"]
        assert ADDRESS in results[0] and LISTING[:60] not in results[0]
        url = f"{origin}/v1/leyline/sessions/recalls/recall"
        (piece,) = httpx.post(url, json={"addresses": [ADDRESS]}).json()["pieces"]
        assert piece["text"] == LISTING


def test_texts_whose_kv_never_was_are_prefilled(files: Path) -> None:
    """A text that was evicted before any engine read it comes back as a fault from the store, and
    as a recompute from the client's own list."""
    with stack(files, asks_once) as (origin, _), client_of(origin) as client:
        answer = ask(client, history(), headers={"x-leyline-session": "first"})
        assert answer.choices[0].message.content.endswith(ANSWER)
        assert account(answer)["recall"]["calls"][0]["verdict"] == "fault"
        other = {"x-leyline-session": "second"}
        answer = ask(client, history(), headers=other, **needed(need=[ADDRESS]))
        (piece,) = account(answer)["context"]["pieces"]
        assert (piece["verdict"], piece["messages"]) == ("recompute", [3])
        assert piece["price_tokens"] > 0.5 * piece["tokens"] > 100
