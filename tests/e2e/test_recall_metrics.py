"""Metrics of recalls and of needed evicted text over the whole stack, with a scripted model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from recall_kit import LISTING, OTHER, POLICY, TOOLS, Script, asks_once, history, stack
from support.waiting import wait

from leyline_lab.stand_ins.scripted_model import SCRIPTED, Call, Prompt, Reply, build_scripted
from leyline_policies.stubs import address_of
from leyline_proxy.model.asides import RECALL_TOOL

CUT = "truncate_older_than"
PATH = "/v1/leyline/sessions/metered"
QUOTED = LISTING[400:800]
"""A part of the listing that the prompt doesn't have after the cut."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripted model's files."""
    return build_scripted(tmp_path_factory.mktemp("scripted"))


class Client:
    """A client of one session, which reads the proxy's metrics, too."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def ask(
        self, messages: list[dict[str, Any]], *, session: str = "metered", **members: Any
    ) -> dict[str, Any]:
        """Send a turn; return its answer."""
        body = {"model": SCRIPTED, "messages": messages, "tools": TOOLS, **members}
        answer = self._http.post(
            "/v1/chat/completions", json=body, headers={"x-leyline-session": session}
        )
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def goes_on(self, messages: list[dict[str, Any]], **members: Any) -> list[dict[str, Any]]:
        """Send a turn; return the messages of the next one."""
        said = self.ask(messages, **members)["choices"][0]["message"]
        shown = {"role": "assistant", "content": said["content"]}
        return [*messages, shown, {"role": "user", "content": "Go on."}]

    def recall(self, *addresses: str) -> None:
        """Ask for texts apart from a turn."""
        answer = self._http.post(f"{PATH}/recall", json={"addresses": addresses})
        assert answer.status_code == 200, answer.text

    def parts(self) -> dict[str, int]:
        """Tokens of the session's evicted texts, by address."""
        answer = self._http.get(f"{PATH}/parts").json()
        return {each["address"]: each["tokens"] for each in answer["parts"]}

    def proof(self) -> dict[str, dict[str, Any]]:
        """Forget the session; return the proxy's places of the proof by name."""
        answer = self._http.post(f"{PATH}/proof", json={})
        assert answer.status_code == 200, answer.text
        return {each["place"]: each for each in answer.json()["places"]}

    def counts(self, name: str) -> dict[tuple[str, ...], float]:
        """Samples other than 0, by the values of their labels less the tenant."""
        families = text_string_to_metric_families(self._http.get("/metrics").text)
        return {
            tuple(sample.labels[each] for each in sorted(sample.labels) if each != "tenant"): (
                sample.value
            )
            for family in families
            for sample in family.samples
            if sample.name == name and sample.value
        }

    def fates(self) -> dict[str, float]:
        """Tokens of the policy by what became of them."""
        names = {
            "evicted": "leyline_evicted_tokens_total",
            "recalled": "leyline_evicted_recalled_tokens_total",
            "quoted": "leyline_evicted_quoted_tokens_total",
        }
        found = {fate: self.counts(name) for fate, name in names.items()}
        return {fate: each[(CUT,)] for fate, each in found.items() if each}


@contextmanager
def proxied(files: Path, script: Script, **settings: Any) -> Iterator[Client]:
    """A client before a proxy whose model follows ``script``."""
    with (
        stack(files, script, **settings) as (origin, _),
        httpx.Client(base_url=origin, timeout=60) as http,
    ):
        yield Client(http)


def quotes(prompt: Prompt) -> Reply:
    """Write a part of the listing if asked to, and something else otherwise."""
    asked = any("Quote" in text for role, text in prompt.messages if role == "user")
    return Reply(QUOTED if asked else "All is well. " * 30)


@pytest.mark.nightly
def test_a_recall_is_counted_with_its_tokens(files: Path) -> None:
    """A recall by the model, one by a caller, and one of an unknown address have a series each, in
    tokens of the account; the policy's text counts as needed once."""
    with proxied(files, asks_once) as client:
        client.ask(history()[:4])
        said = client.ask(history())["leyline"]["recall"]["calls"][0]
        assert (said["verdict"], said["cause"]) == ("hit", None)
        assert client.counts("leyline_recalls_total") == {("none", "hit", "tool"): 1}
        assert client.counts("leyline_recall_tokens_total") == {("hit", "tool"): said["tokens"]}
        prefilled = client.counts("leyline_recall_prefilled_tokens_total")
        assert prefilled.get(("tool",), 0) == said["price_tokens"] < said["tokens"] / 5
        wait(lambda: "recalled" in client.fates())
        found, parts = client.fates(), client.parts()
        # With the recalled text, the other one is too old, too.
        assert len(parts) == 2
        assert found == {"evicted": sum(parts.values()), "recalled": parts[address_of(LISTING)]}
        client.recall(address_of(LISTING), "sha256:" + "0" * 32)
        calls = client.counts("leyline_recalls_total")
        assert calls["none", "fault", "api"] == calls["unknown", "abstain", "api"] == 1
        client.ask(history())
        assert client.fates() == found


def counted(client: Client) -> dict[str, float]:
    """The policy's tokens once all turns are counted: those of another session come last."""
    before = client.fates()["evicted"]
    other = [
        m if m["content"] != LISTING else {**m, "content": f"{OTHER}{before}"} for m in history()
    ]
    client.ask(other, session="another")
    wait(lambda: client.fates()["evicted"] > before)
    return client.fates()


@pytest.mark.nightly
def test_quotes_are_counted_on_the_next_turn(files: Path) -> None:
    """Evicted text that the model writes counts as needed as soon as the client sends the answer;
    a model that writes something else needs nothing."""
    with proxied(files, quotes) as client:
        for session, words in (("plain", "Go on."), ("metered", "Quote it.")):
            before = client.fates().get("evicted", 0)
            question = {"role": "user", "content": words}
            messages = client.goes_on([*history(), question], session=session)
            wait(lambda before=before: client.fates()["evicted"] > before)
            evicted = client.fates()["evicted"] - before
            assert "quoted" not in client.fates()
            client.ask(messages, session=session)
            found = counted(client)
            expected = evicted * len(QUOTED) / len(LISTING) if session == "metered" else 0
            assert found.get("quoted", 0) == pytest.approx(expected, rel=0.05)


def test_forgotten_text_is_not_looked_for(files: Path) -> None:
    """After a forget, what the model repeats of the session's evicted texts isn't noticed: the
    texts are gone. Without the forget it is."""
    with proxied(files, quotes) as client:
        for session, pattern in (("forgets", "warning"), ("metered", "no such text")):
            redact = {"leyline": {"policy": f"{POLICY}|redact:pattern='{pattern}'"}}
            before = client.fates().get("evicted", 0)
            messages = client.goes_on(history(), session=session)
            wait(lambda before=before: client.fates()["evicted"] > before)
            messages = client.goes_on(messages, session=session, **redact)
            messages[-1]["content"] = "Quote it."
            messages = client.goes_on(messages, session=session, **redact)
            client.ask(messages, session=session, **redact)
            assert ("quoted" in counted(client)) is (session == "metered")
        looked_at = client.proof()["quotes"]
        assert looked_at["scanned"] == looked_at["survivors"] == 0


def test_a_tenant_without_recall_has_no_series(files: Path) -> None:
    """A tenant for whom recall is off has no counts, and none of its text is kept."""
    with proxied(files, quotes, recall="off") as client:
        client.ask(client.goes_on(history()))
        assert client.fates() == {} and client.counts("leyline_recalls_total") == {}


def test_a_refusal_is_counted_by_its_cause(files: Path) -> None:
    """An address that is none counts under the reason in its account, and brings no tokens."""

    def forges(prompt: Prompt) -> Reply:
        if any("[not recalled:" in text for _, text in prompt.messages):
            return Reply("I go on.")
        return Reply(calls=(Call(RECALL_TOOL, {"address": "sha256:zz"}),))

    with proxied(files, forges) as client:
        client.ask(history())
        assert client.counts("leyline_recalls_total") == {("malformed", "abstain", "tool"): 1}
        assert client.counts("leyline_recall_tokens_total") == {}
