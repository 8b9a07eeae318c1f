"""Two engines and a proxy under load from several tenants, with what can go wrong."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from support.certificates import Authority

from leyline_lab.stand_ins.serving import serving
from leyline_policies.recall import address_of
from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings
from leyline_proxy.upstream.embedded import create_embedded_engine
from leyline_proxy.upstream.rendezvous import ranked

CHAT, CLAIMS = "/v1/chat/completions", "/v1/leyline/claims"
ENGINES = ("stays", "dies")
KEYS = {name: f"{name}-key-0123456789" for name in ("red", "blue", "skips", "refuses")}
SCRAPES_S = 2.5
"""Long enough for a series to be scraped twice: rates need a value to grow from."""
KEYS_READ_S = 2.0
"""The key file is read again every second."""
POOL = 8192
TURNS = 6
BLUE_PER_MINUTE = 4
POLICIES = """
policies: [keep_all]
tenants:
  skips:
    policies: [redact: {pattern: '(?=a)(a|aa)+$', on_timeout: fail, on_fault: skip}]
  refuses:
    policies: [redact: {pattern: '(?=a)(a|aa)+$', on_timeout: fail}]
"""
"""Patterns of requests are matched in linear time: only an operator's can take too long."""
CUT = "truncate_older_than:n=2,max_chars=60"
EVICT = "truncate_older_than:n=1,max_chars=60,recallable=true"
LARGE = "Here is all of the log that the build left behind, line by line. " * 400
PLAN = "The plan is to find where the cache loses tokens, and to mend it there. " * 40


@dataclass
class Told:
    """The usage and receipts reported to callers, over all their requests."""

    answers: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of chat turns that were served whole."""
    limited: int = 0
    refused: int = 0
    failed_closed: int = 0
    """Requests that weren't sent, because a policy failed that forgets."""

    def add_stream(self, text: str) -> None:
        """Keep what a stream reported: usage and receipt of its chunks."""
        told: dict[str, Any] = {}
        for line in text.splitlines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                told |= {name: chunk[name] for name in ("usage", "leyline") if chunk.get(name)}
        self.answers.append(told)

    def usage(self, name: str) -> int:
        """Sum of a count of tokens."""
        return sum(int(answer["usage"][name]) for answer in self.answers)

    def cached(self) -> int:
        """Prompt tokens that were cached, spliced or reused."""
        details = [answer["usage"]["prompt_tokens_details"] for answer in self.answers]
        return sum(int(each["cached_tokens"]) for each in details)

    def tokens(self, name: str) -> int:
        """Sum of one of the receipts' counts."""
        return sum(int(answer["leyline"]["tokens"][name]) for answer in self.answers)

    def reuse(self, mode: str) -> int:
        """Sum of the tokens that were found elsewhere in this mode."""
        found = [answer["leyline"].get("reuse") or {} for answer in self.answers]
        counts = [each for each in found if each.get("mode") == mode]
        return sum(each["clean"] + each["session"] + each["tenant"] for each in counts)

    def gated(self) -> int:
        """Turns whose reuse was given up."""
        found = [answer["leyline"].get("reuse") or {} for answer in self.answers]
        return sum(bool(each.get("gated")) for each in found)

    def faults(self) -> int:
        """Policies that were left out."""
        return sum(len(answer["leyline"].get("policy_faults", ())) for answer in self.answers)


class Stack:
    """Two engines, a proxy in front of them, and callers of its tenants."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._folder = folder
        self.told = Told()
        limits = {"share": 1.0, "engine_share": 1.0}
        options = {"device": "cpu", "pool_tokens": POOL, "claim_limits": limits}
        self._engines: dict[str, ExitStack] = {}
        self.origins: dict[str, str] = {}
        for name in ENGINES:
            own = stack.enter_context(ExitStack())
            app = create_embedded_engine("replay", options)
            self.origins[name] = own.enter_context(serving(app))
            self._engines[name] = own
        self.keys, self.policies = folder / "keys", folder / "policies.yaml"
        self.keys.write_text("".join(f"{tenant}:{key}\n" for tenant, key in KEYS.items()))
        self.policies.write_text(POLICIES)
        self._shown = Authority(folder / "ca").issue("spiffe://td/proxy")
        self.url = stack.enter_context(serving(create_app(self._settings())))
        self._clients = {
            tenant: stack.enter_context(
                httpx.Client(
                    base_url=self.url, timeout=60, headers={"authorization": f"Bearer {key}"}
                )
            )
            for tenant, key in KEYS.items()
        }
        models = self._clients["red"].get("/v1/models").json()["data"]
        self.model: str = models[0]["id"]

    def _settings(self) -> Settings:
        return Settings(
            upstreams=dict(self.origins),
            api_keys_file=self.keys,
            budgets=[{"window": "day", "tokens": 10**9}],
            policies_file=self.policies,
            tenants={
                "red": {"max_concurrent": 2},
                "blue": {"requests_per_minute": BLUE_PER_MINUTE},
            },
            audit_file=self._folder / "audit.jsonl",
            claims_interval_s=0.2,
            handshake_interval_s=60,
            edit_timing="wait",
            edit_carry=10,
            recall="on",
            upstream_tls_cert=self._shown.cert,
            upstream_tls_key=self._shown.key,
            log_level="error",
        )

    def lose_engine(self) -> None:
        """Stop the engine that dies without notice, as a failing machine does."""
        self._engines["dies"].close()

    def ask(
        self, session: str, messages: list[dict[str, Any]], tenant: str = "red", **members: Any
    ) -> httpx.Response:
        """Send one turn and keep what the caller received."""
        body = {"model": self.model, "messages": messages, "max_tokens": 2, **members}
        answer = self._clients[tenant].post(CHAT, json=body, headers={"x-leyline-session": session})
        if answer.status_code == 200 and not members.get("stream"):
            self.told.answers.append(answer.json())
        elif answer.status_code == 429:
            self.told.limited += 1
        elif answer.status_code == 503:
            self.told.refused += 1
        elif answer.status_code == 502 and "policy_failed_closed" in answer.text:
            self.told.failed_closed += 1
        return answer

    def claim(self, session: str, **terms: Any) -> httpx.Response:
        """Claim a session's first message."""
        body = {"session": session, "predicate": {"messages": [0, 1]}, **terms}
        return self._clients["red"].post(CLAIMS, json=body)

    def recall(self, session: str, *addresses: str) -> None:
        """Ask for evicted texts of a session."""
        path = f"/v1/leyline/sessions/{session}/recall"
        answer = self._clients["red"].post(path, json={"addresses": addresses})
        assert answer.status_code == 200, answer.text

    def get(self, path: str) -> httpx.Response:
        """Anything else that the red tenant asks for."""
        return self._clients["red"].get(path)


def on_engine(engine: str, tag: str) -> str:
    """A session's id that is served by this engine."""
    weights = dict.fromkeys(ENGINES, 1.0)
    return next(
        key for key in (f"{tag}-{n}" for n in range(1000)) if ranked(key, weights)[0] == engine
    )


def history(turns: int, session: str, version: int = 0) -> list[dict[str, Any]]:
    """An agent's messages after ``turns`` calls; another version has another first result."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You repair small programs. " * 8},
        {"role": "user", "content": f"Find out why the tests of project {session} fail."},
    ]
    for turn in range(turns):
        function = {"name": "cat", "arguments": f'{{"path": "module_{turn}.py"}}'}
        call = {"id": f"call_{turn}", "type": "function", "function": function}
        shift = version if turn == 0 else 0
        listing = "\n".join(f"line {n}: value_{turn}_{n} = {n * turn + shift}" for n in range(20))
        messages += [
            {"role": "assistant", "content": f"I read module {turn}.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"call_{turn}", "content": listing},
        ]
    return messages


def _tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"path": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def run_round(stack: Stack, name: str) -> None:
    """Every kind of session once, a few at a time, then claims, limits and files."""

    def edited(kind: str, policies: Sequence[str]) -> None:
        session = on_engine("stays", f"{name}-{kind}")
        for turn, policy in enumerate(policies):
            stack.ask(session, history(turn, session), leyline={"policy": policy})

    def rewritten() -> None:
        session = on_engine("stays", f"{name}-rewritten")
        for turn in range(3):
            stack.ask(session, history(3, session, version=turn))

    def declared() -> None:
        session = on_engine("stays", f"{name}-declared")
        stack.ask(session, history(2, session))
        edit = {"message": 3, "replacement": "[cut]", "mode": "amortize"}
        stack.ask(session, history(3, session), leyline={"edits": [edit]})

    def tools() -> None:
        session = on_engine("stays", f"{name}-tools")
        for offered in (["cat"], ["cat", "grep"], ["grep"]):
            stack.ask(session, history(2, session), tools=[_tool(each) for each in offered])

    def reused(mode: str, margin: float = 0) -> None:
        for number in range(3):
            session = on_engine("stays", f"{name}-{mode}-{margin}-{number}")
            asked = {"reuse": mode, "reuse_margin": margin}
            stack.ask(session, history(3, session), leyline=asked)

    def recalled() -> None:
        session = on_engine("stays", f"{name}-recalled")
        messages = history(5, session)
        results = [each["content"] for each in messages if each["role"] == "tool"]
        # The model's answer, as the client has it, quotes the first result; the third comes back.
        quote = {"role": "assistant", "content": results[0][100:300]}
        go_on = {"role": "user", "content": "Go on."}
        needs: list[list[str]] = [[], [], [address_of(results[2])]]
        for turn, need in enumerate(needs):
            more = [quote, go_on] if turn else []
            asked = {"policy": EVICT, "context": {"need": need}} if need else {"policy": EVICT}
            stack.ask(session, [*messages, *more], leyline=asked)
        stack.recall(session, address_of(results[2]), "sha256:" + "0" * 32)

    near_limit = "warn_near_limits:max_tokens=200,threshold=0.1"
    summary = "summarize:trigger_tokens=200,keep_messages=2,summary_tokens=8"
    jobs: list[Callable[[], None]] = [
        lambda: edited("cut", [CUT] * TURNS),
        lambda: edited("redact", ["keep_all"] * (TURNS - 1) + ["redact:pattern=value_0_7"]),
        lambda: edited("warned", [near_limit] * 2),
        lambda: edited("summed", [summary] * TURNS),
        rewritten,
        declared,
        tools,
        recalled,
        lambda: reused("live"),
        lambda: reused("live", 100),
        lambda: reused("observe"),
    ]
    with ThreadPoolExecutor(4) as pool:
        for job in [pool.submit(job) for job in jobs]:
            job.result()
    for _ in range(BLUE_PER_MINUTE + 4):
        session = on_engine("stays", f"{name}-blue")
        stack.ask(session, history(1, session), tenant="blue")
    _stream(stack, on_engine("stays", f"{name}-stream"))
    stack.get("/v1/leyline/sessions")
    _claims(stack, name)


def _stream(stack: Stack, session: str) -> None:
    """Turns whose tokens are sent as they come."""
    for turn in range(TURNS):
        told = {"stream": True, "stream_options": {"include_usage": True}}
        answer = stack.ask(session, history(turn, session), leyline={"policy": CUT}, **told)
        assert answer.text.endswith("data: [DONE]\n\n"), answer.text
        stack.told.add_stream(answer.text)


def _claims(stack: Stack, name: str) -> None:
    """A hard and a soft claim, and a request that doesn't fit beside the hard one."""
    plans, notes = (on_engine("stays", f"{name}-{kind}") for kind in ("plans", "notes"))
    logs = on_engine("stays", f"{name}-logs")
    for session, kind in ((plans, "hard"), (notes, "soft")):
        stack.ask(session, [{"role": "user", "content": f"{kind}: {PLAN}"}])
        made = stack.claim(session, kind=kind, id=f"{name}-{kind}")
        assert made.status_code == 201, made.text
    refused = stack.ask(logs, [{"role": "user", "content": LARGE}])
    assert refused.json()["error"]["code"] == "refused_by_claim", refused.text


def _all(ask: Callable[[str], object], sessions: Sequence[str]) -> None:
    """One turn of each session, a few at a time."""
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(ask, session) for session in sessions]:
            done.result()


def cause_trouble(stack: Stack) -> None:
    """Files that are wrong, and an engine that dies with sessions that were edited there."""
    sessions = [on_engine("dies", f"lost-{number}") for number in range(6)]
    stack.keys.write_text(stack.keys.read_text() + f"red:{KEYS['red']}-too\n")
    for turns in (1, 2):
        _all(lambda session, turns=turns: stack.ask(session, history(turns, session)), sessions)
    time.sleep(KEYS_READ_S)
    stack.lose_engine()

    def go_on(session: str) -> None:
        answer = stack.ask(session, history(3, session), leyline={"policy": CUT})
        assert answer.status_code == 200, answer.text

    _all(go_on, sessions[:2])
    time.sleep(SCRAPES_S)
    _all(go_on, sessions[2:])
    messages = [{"role": "user", "content": "a" * 60 + "b"}]
    for tenant in ("skips", "refuses"):
        stack.ask(on_engine("stays", "endless"), messages, tenant=tenant)
    redact = {"policy": "redact:pattern=value_0_7"}
    for some in (sessions[:2], sessions[2:4]):
        _all(lambda session: stack.ask(session, history(4, session), leyline=redact), some)
        time.sleep(SCRAPES_S)
    stack.keys.write_text(stack.keys.read_text() + "no key at all\n")
    stack.policies.write_text("policies: [no_such_policy]\n")
