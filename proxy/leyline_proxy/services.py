"""Everything one application instance holds, made once from its settings."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version

import httpx
from pydantic import SecretStr
from starlette.types import ASGIApp

from .core.schedule import Timing
from .pipeline.claim_watch import ClaimWatch
from .pipeline.claims import ClaimService
from .pipeline.pinning import Pinning
from .pipeline.planner import Planner
from .pipeline.sensitive import sensitive_content
from .policy_file import PolicyFile
from .sessions import MemorySessionStore, SessionStore
from .settings import Settings
from .telemetry.audit import AuditFile
from .telemetry.metrics import Metrics
from .tenants import TenantDirectory, build_directory
from .turns import TurnService
from .upstream.asgi_transport import ASGIStreamTransport
from .upstream.client import UpstreamClient
from .upstream.embedded import EMBEDDED_BASE_URL
from .upstream.handshake import Handshake


@dataclass(frozen=True, slots=True)
class Services:
    """The parts that routes use."""

    settings: Settings
    tenants: TenantDirectory
    store: SessionStore
    metrics: Metrics
    upstream: UpstreamClient
    handshake: Handshake
    turns: TurnService
    claims: ClaimService
    claim_watch: ClaimWatch
    policy_file: PolicyFile | None


def build_services(settings: Settings, engine_app: ASGIApp | None) -> Services:
    """Wire the parts together; nothing is connected or started yet.

    Raises:
        leyline_policies.PolicyError: the policy file, or what counts as sensitive, is wrong.
        ValueError: neither ``settings.upstream`` nor an engine application is given; and whatever
            :func:`~leyline_proxy.tenants.build_directory` raises.
    """
    metrics = Metrics()
    metrics.build_info.labels(version("leyline-kv")).set(1)
    tenants = build_directory(settings)
    upstream = UpstreamClient(
        _http_client(settings, engine_app),
        api_key=_secret(settings.upstream_api_key),
        hints_secret=_secret(settings.hints_secret),
    )
    handshake = Handshake(
        upstream,
        metrics,
        splice=settings.splice,
        interval_s=settings.handshake_interval_s,
        retry_s=settings.handshake_retry_s,
    )
    store = MemorySessionStore(
        max_sessions=settings.max_sessions,
        max_bytes=settings.max_session_bytes,
        ttl_s=settings.session_ttl_s,
    )
    file = settings.policies_file
    policy_file = PolicyFile(file, metrics) if file is not None else None
    planner = Planner(
        upstream,
        handshake,
        metrics,
        policy_timeout_s=settings.policy_timeout_s,
        timing=_timing(settings),
        sensitive=sensitive_content(settings.sensitive),
    )
    watch = ClaimWatch(
        upstream,
        handshake,
        metrics,
        tenants.names,
        interval_s=settings.claims_interval_s,
        audit=AuditFile(settings.audit_file, metrics) if settings.audit_file else None,
    )
    claims = ClaimService(
        store=store,
        upstream=upstream,
        handshake=handshake,
        watch=watch,
        hints_secret=_secret(settings.hints_secret),
    )
    turns = TurnService(
        store=store,
        upstream=upstream,
        handshake=handshake,
        metrics=metrics,
        planner=planner,
        retained_turns=settings.retained_turns,
        hints_secret=_secret(settings.hints_secret),
        chooser=policy_file,
        pinning=Pinning(claims),
    )
    return Services(
        settings,
        tenants,
        store,
        metrics,
        upstream,
        handshake,
        turns,
        claims,
        watch,
        policy_file,
    )


def _timing(settings: Settings) -> Timing | None:
    if settings.edit_timing == "now":
        return None
    return Timing(
        carry=settings.edit_carry,
        need=settings.edit_need,
        pressure=settings.edit_pressure,
        splicing_waits=settings.edit_timing == "wait",
    )


def _http_client(settings: Settings, engine_app: ASGIApp | None) -> httpx.AsyncClient:
    if engine_app is None and settings.upstream is None:
        raise ValueError("set upstream to the engine's URL, or pass an embedded engine")
    timeout = httpx.Timeout(
        settings.read_timeout_s,
        connect=settings.connect_timeout_s,
        pool=settings.connect_timeout_s,
    )
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
    if engine_app is not None:
        return httpx.AsyncClient(
            base_url=EMBEDDED_BASE_URL, transport=ASGIStreamTransport(engine_app), timeout=timeout
        )
    return httpx.AsyncClient(
        base_url=settings.upstream or "", timeout=timeout, limits=limits, follow_redirects=False
    )


def _secret(key: SecretStr | None) -> str | None:
    return key.get_secret_value() if key is not None else None
