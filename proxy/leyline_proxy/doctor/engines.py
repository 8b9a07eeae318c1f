"""Checks of engines and routers: availability, splicing, the shared secret, and rendering."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
import msgspec

from leyline_engine.contract import THIS_RELEASE, Capability, ListClaims, judge

from ..errors import ProxyError
from ..model.states import RETAINED_TURNS, needs_slots, state_words
from ..settings import Settings
from ..telemetry.metrics import Metrics
from ..tls.files import TlsFilesError
from ..upstream.client import GATEWAY_FAILURES, NoCapability, UpstreamClient
from ..upstream.handshake import CLAIMS
from ..upstream.proof import Rendering, examine_rendering
from ..upstream.tls_faults import tls_problem
from ..wiring.tls import engines_context
from .findings import Finding, fail, ok, skip, warn
from .reaching import why_unreachable
from .stores import clock_verdict

_SLOW_S = 0.25
_BYTES_A_TOKEN = 4
"""Approximate bytes of a request's JSON per token."""
_AS_REQUIRED = "Start the engine as the reason requires"
_BAD_SIGNATURE = "invalid_signature"
_PAGES = {"vllm": "docs/vllm.md"}
"""Pages of engines other than SGLang."""

_ROUTER_HEALTH = "/health"


@dataclass(frozen=True, slots=True)
class EngineNeeds:
    """The settings' requirements for one engine."""

    name: str
    client: UpstreamClient
    secret: str | None
    splice: bool
    keeps_tenants_apart: bool
    """True if any tenant has ``cache_scope: tenant``."""
    max_body_bytes: int
    retained_turns: int = RETAINED_TURNS
    recurrent_edits: str = ""
    """Values of ``recurrent_edits`` in force, of the proxy and of tenants."""
    secret_setting: str = "LEYLINE_HINTS_SECRET of the engine"  # noqa: S105
    """The place of the engine's own secret."""

    @property
    def of(self) -> str:
        """Prefix of the names of its findings."""
        return f"upstream.{self.name}"


@dataclass(frozen=True, slots=True)
class Listed:
    """The answer to a request for the models."""

    status: int
    models: tuple[str, ...] | None
    taken_s: float
    skew_s: float | None
    """Seconds by which the engine's clock is ahead; None if unknown."""


@dataclass(frozen=True, slots=True)
class SecretFacts:
    """The engine's answers to a harmless command, with and without a signature."""

    bare_refused: bool
    """True if it requires a signature."""
    signed_refused: bool | None
    """True if it refuses this proxy's; None if the proxy has no secret."""


async def examine_engine(needs: EngineNeeds) -> list[Finding]:
    """Return all findings about one engine."""
    place = needs.client.address
    try:
        listed = await _list(needs.client)
    except ProxyError as error:
        return [unreachable(needs, place, error)]
    found = reached(needs, place, listed)
    if listed.status != httpx.codes.OK:
        return found
    answer = await needs.client.capability()
    found += [plugin_verdict(needs, answer), versions_verdict(needs, answer)]
    if isinstance(answer, NoCapability):
        why = "without a capability document there is nothing to compare"
        return [*found, skip(f"{needs.of}.secret", why), skip(f"{needs.of}.tokenizer", why)]
    try:
        facts = await _secret_facts(needs)
        rendering = await examine_rendering(needs.client, answer.model)
    except ProxyError as error:
        return [*found, unreachable(needs, place, error)]
    return [
        *found,
        secret_verdict(needs, facts),
        rendering_verdict(needs, rendering),
        *capability_verdicts(needs, answer),
    ]


def unreachable(needs: EngineNeeds, place: str, error: ProxyError) -> Finding:
    """Return the reason for a missing answer."""
    problem, fix = why_unreachable(error, "the engine")
    reason = tls_problem(error)
    if "certificate" in reason:
        refused = reason.removeprefix("the proxy refuses its certificate: ")
        problem = reason if refused == reason else f"its TLS certificate isn't trusted: {refused}"
        fix = (
            "Compare its certificate with upstream_tls_ca (or SSL_CERT_FILE) and "
            "upstream_tls_names, and upstream_tls_cert with what it trusts."
        )
    return fail(f"{needs.of}.reachable", f"{place}: {problem}", fix)


def reached(needs: EngineNeeds, place: str, listed: Listed) -> list[Finding]:
    """Return findings from the answer to the first request."""
    name = f"{needs.of}.reachable"
    if listed.status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        return [
            ok(name, f"{place} answers"),
            fail(
                f"{needs.of}.key",
                f"the engine refuses the proxy's key (status {listed.status})",
                "Set LEYLINE_UPSTREAM_API_KEY, or api_key of the upstream, to the key that the "
                "engine was started with (SGLang and vLLM: --api-key).",
            ),
        ]
    if listed.status in GATEWAY_FAILURES:
        return [
            fail(
                name,
                f"{place} answers with status {listed.status}: a gateway without a running engine",
                "Start the engine, or wait until it has loaded its model.",
            )
        ]
    if listed.status != httpx.codes.OK:
        return [
            fail(
                name,
                f"{place}/v1/models returns status {listed.status}: this isn't an "
                "OpenAI-compatible server",
                "Correct the URL. After host and port, it may only have a path prefix.",
            )
        ]
    return [
        _speed(name, place, listed.taken_s),
        ok(f"{needs.of}.key", "accepted, or not required"),
        _models(needs, listed.models),
        *_clock(needs, listed.skew_s),
    ]


def _speed(name: str, place: str, taken_s: float) -> Finding:
    detail = f"{place} answers in {taken_s * 1000:.0f} ms"
    if taken_s <= _SLOW_S:
        return ok(name, detail)
    return warn(
        name, detail, "Put the proxy near the engine; each turn sends it two more requests."
    )


def _models(needs: EngineNeeds, models: Sequence[str] | None) -> Finding:
    if models:
        return ok(f"{needs.of}.models", ", ".join(models[:8]))
    return fail(
        f"{needs.of}.models",
        "the engine lists no model",
        "Check /v1/models of the engine: requests are routed by it.",
    )


def _clock(needs: EngineNeeds, skew_s: float | None) -> list[Finding]:
    if skew_s is None:
        return []
    return [clock_verdict(f"{needs.of}.clock", skew_s, "the engine's clock")]


def plugin_verdict(needs: EngineNeeds, answer: Capability | NoCapability) -> Finding:
    """Judge whether the engine can splice edits."""
    name = f"{needs.of}.plugin"
    if isinstance(answer, NoCapability):
        detail = f"{answer.why}: edits become ordinary prefills"
        fix = (
            "Start SGLang or vLLM with the plugin: install Leyline's wheel next to it, and switch "
            "it on. SGLang: --radix-cache-backend leyline (docs/sglang.md); vLLM: docs/vllm.md. "
            "The engine's log names a version that wasn't tested (docs/compatibility.md)."
        )
        if not answer.settled:
            fix = "Try again when the engine has loaded its model."
        if not needs.splice:
            return warn(name, detail, fix)
        return fail(name, detail, fix)
    if not answer.splices:
        reason = answer.unsupported_reason or "it gives no reason"
        return fail(name, f"{answer.engine_label} can't splice: {reason}", _remedy(answer))
    claims = "takes claims" if CLAIMS in answer.actions else "takes no claims"
    if judge(answer) is not None:  # a finding of its own
        return ok(name, f"{answer.engine_label} has the plugin")
    off = "" if needs.splice else "; splicing is switched off here (splice: false)"
    return ok(name, f"{answer.engine_label} splices and {claims}{off}")


def versions_verdict(needs: EngineNeeds, answer: Capability | NoCapability) -> Finding:
    """Judge whether the versions of proxy, plugin and engine fit, as the handshake does."""
    name = f"{needs.of}.versions"
    if isinstance(answer, NoCapability):
        return skip(name, "without a capability document there is nothing to compare")
    mismatch = judge(answer)
    if mismatch is not None:
        detail = f"{mismatch}: edits become ordinary prefills"
        fix = f"{mismatch.fix[0].upper()}{mismatch.fix[1:]} (docs/compatibility.md)."
        return fail(name, detail, fix) if needs.splice else warn(name, detail, fix)
    plugin = answer.plugin.version or "of an early version"
    return ok(name, f"proxy {THIS_RELEASE.version}, plugin {plugin} and {answer.engine_label} fit")


def _remedy(refused: Capability) -> str:
    fix = refused.unsupported_fix
    advice = f"Restart the engine, and for that: {fix}" if fix else _AS_REQUIRED
    page = _PAGES.get(refused.engine, "docs/sglang.md")
    return f"{advice} ({page} lists what can be spliced). Or set splice: false."


def secret_verdict(needs: EngineNeeds, facts: SecretFacts | None) -> Finding:
    """Judge whether proxy and engine sign and seal with the same secret."""
    name, there = f"{needs.of}.secret", needs.secret_setting
    if facts is None:
        return skip(name, "the engine takes no commands, so this can't be checked")
    ours = facts.signed_refused is not None
    if not ours and not facts.bare_refused:
        return ok(name, "none on either side: the engine takes edits from anyone who can reach it")
    if not ours:
        return fail(
            name,
            "the engine has a hints_secret and this proxy has none: every edit is refused as "
            "invalid_edit",
            f"Set LEYLINE_HINTS_SECRET here to the {there}.",
        )
    if not facts.bare_refused:
        return fail(
            name,
            "this proxy has a hints_secret and the engine has none: every edit ends as "
            "token_mismatch",
            f"Set the {there} to this proxy's, or remove it here.",
        )
    if facts.signed_refused:
        return fail(
            name,
            "proxy and engine have different hints_secrets: every edit is refused as invalid_edit",
            f"Set LEYLINE_HINTS_SECRET here and the {there} to one value.",
        )
    return ok(name, "proxy and engine have the same hints_secret")


def rendering_verdict(needs: EngineNeeds, rendering: Rendering) -> Finding:
    """Judge whether prompts render token by token as in the engine."""
    name = f"{needs.of}.tokenizer"
    if rendering.proven:
        return ok(name, "probe conversations give the same tokens as in the engine")
    fix = (
        "Start every replica at this URL with the chat template and the tokenizer of the model "
        "that it serves (SGLang: --chat-template, --tokenizer-path; vLLM: --chat-template, "
        "--tokenizer), and with one release."
    )
    if rendering.renderer is None:
        return fail(name, f"{rendering.problem}: nothing is spliced", fix)
    return fail(
        name, f"{rendering.problem}: each turn asks the engine for its tokens, and waits", fix
    )


def capability_verdicts(needs: EngineNeeds, capability: Capability) -> list[Finding]:
    """Return findings from the engine's facts and the settings."""
    found = [
        _window(needs, capability),
        *_origins(needs, capability),
        *_states(needs, capability),
    ]
    if needs.keeps_tenants_apart and not capability.isolates:
        found.append(
            fail(
                f"{needs.of}.isolation",
                "cache_scope: tenant is set, but this engine can't keep tenants' KV apart: it "
                "refuses their requests",
                "Use an engine that knows cache_salt, or cache_scope: shared.",
            )
        )
    return found


def _origins(needs: EngineNeeds, capability: Capability) -> list[Finding]:
    kv = capability.kv
    if kv is None or not kv.origin_bytes:
        return []
    return [
        ok(
            f"{needs.of}.origins",
            f"as-computed keys of {kv.origin_tokens:,} tokens take {kv.origin_bytes:,} bytes on "
            f"each GPU, beside the KV pool ({kv.dtype})",
        )
    ]


def _states(needs: EngineNeeds, capability: Capability) -> list[Finding]:
    words, fix = (each(capability, needs.retained_turns) for each in (state_words, needs_slots))
    if not words:
        return []
    name, state = f"{needs.of}.states", capability.state
    if state is not None and state.recurrent_layers:
        words += f"; recurrent_edits: {needs.recurrent_edits}"
    return [warn(name, words, fix) if fix else ok(name, words)]


def _window(needs: EngineNeeds, capability: Capability) -> Finding:
    name, window, kv = f"{needs.of}.window", capability.max_context, capability.kv
    detail = f"{window:,} tokens"
    if kv is not None and kv.capacity_tokens < window:
        return warn(
            name,
            f"the model takes {detail}, but the KV pool holds only {kv.capacity_tokens:,}",
            "Give the engine more memory for KV (SGLang: --mem-fraction-static; vLLM: "
            "--gpu-memory-utilization), or a shorter context (--context-length; "
            "--max-model-len), so that clients get an early error.",
        )
    if needs.max_body_bytes < window * _BYTES_A_TOKEN:
        return warn(
            name,
            f"the model takes {detail}, about {window * _BYTES_A_TOKEN:,} bytes, and "
            f"max_body_bytes is {needs.max_body_bytes:,}",
            f"Set max_body_bytes to {window * _BYTES_A_TOKEN:,} or more.",
        )
    return ok(name, detail)


async def _list(client: UpstreamClient) -> Listed:
    begun = time.perf_counter()
    response = await client.get("/v1/models")
    taken = time.perf_counter() - begun
    return Listed(
        response.status_code,
        _ids(response),
        taken,
        _skew(response.headers.get("date"), time.time()),
    )


def _ids(response: httpx.Response) -> tuple[str, ...] | None:
    try:
        return tuple(str(item["id"]) for item in response.json()["data"])
    except (ValueError, KeyError, TypeError):
        return None


def _skew(date: str | None, now: float) -> float | None:
    try:
        return parsedate_to_datetime(date).timestamp() - now if date else None
    except ValueError:
        return None


async def _secret_facts(needs: EngineNeeds) -> SecretFacts | None:
    """Send two commands that change nothing; return None if the engine takes none."""
    body = msgspec.json.encode(ListClaims(limit=1))
    bare = await _refused(needs.client, body, None)
    if bare is None:
        return None
    secret = needs.secret
    signed = None if secret is None else await _refused(needs.client, body, secret)
    return SecretFacts(bare, signed)


async def _refused(client: UpstreamClient, body: bytes, secret: str | None) -> bool | None:
    response = await client.answer_to_claims(body, secret)
    if response.status_code in (httpx.codes.NOT_FOUND, httpx.codes.METHOD_NOT_ALLOWED):
        return None
    return response.status_code == httpx.codes.FORBIDDEN and _code(response) == _BAD_SIGNATURE


def _code(response: httpx.Response) -> Any:
    try:
        return response.json()["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return None


def routers_of(settings: Settings) -> dict[str, str]:
    """Return the router of each engine that has one, by the engine's name."""
    found = {name: own.router or settings.router for name, own in settings.engines().items()}
    return {name: url for name, url in found.items() if url is not None}


async def examine_router(settings: Settings, name: str, limit_s: float) -> list[Finding]:
    """Check that requests to an engine have a router that takes them."""
    found, url = f"upstream.{name}.router", routers_of(settings)[name]
    try:
        tls = engines_context(settings, Metrics())
    except TlsFilesError:
        return [skip(found, "its certificates' files can't serve (tls)")]
    asked = httpx.URL(url)
    place = f"{asked.scheme}://{asked.netloc.decode().rpartition('@')[2]}"
    verify = tls() if tls is not None else True
    async with httpx.AsyncClient(timeout=limit_s, trust_env=False, verify=verify) as http:
        try:
            async with http.stream("GET", url.rstrip("/") + _ROUTER_HEALTH) as answer:
                pass  # the status is enough
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            problem, fix = why_unreachable(error, "the router")
            return [fail(found, f"{place}: {problem}", fix)]
    return [ok(found, f"{place} answers (status {answer.status_code})")]
