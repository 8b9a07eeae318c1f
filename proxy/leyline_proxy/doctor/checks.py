"""The table of checks."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from starlette.applications import Starlette

from ..sessions.redis.link import RedisOptions
from ..settings import ONLY_ENGINE, Settings, secret_of
from ..settings.sessions import MEMORY
from ..telemetry.metrics import Metrics
from ..tls.files import TlsFilesError
from ..upstream.embedded import EngineUnavailable, create_embedded_engine, lifespan_of
from ..upstream.replica import Replica
from ..wiring.stores import redis_options
from ..wiring.tls import engines_context
from ..wiring.upstreams import build_pool
from . import configured, machine
from .budgets import counts_long, examine_budgets
from .engines import EngineNeeds, examine_engine, examine_router, routers_of
from .examination import Check, in_thread
from .findings import Finding, fail, ok, skip
from .identity import examine_identity
from .prometheus import examine_prometheus
from .reasoning import examine_reasoning
from .recall import examine_recall
from .stores import StoreNeeds, examine_store, examine_stream
from .tls import examine_tls
from .warm_start import examine_warm_start

_LOADING_S = 120.0
_CA = "LEYLINE_REDIS_CA_FILE"
_EMBEDDED_SECRET = "hints_secret of engine_options (--engine-option hints_secret=…)"  # noqa: S105


@dataclass(frozen=True, slots=True)
class Situation:
    """The settings and the circumstances to examine."""

    settings: Settings
    config: Path | None = None
    prometheus: str | None = None
    limit_s: float = 10.0
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ, repr=False)


def checks_for(situation: Situation) -> dict[str, Check]:
    """Return each check by its name, in the order of the report."""
    settings = situation.settings
    at_once: dict[str, Callable[[], Sequence[Finding]]] = {
        "config": partial(configured.examine_config, situation.environ, situation.config),
        "packages": partial(machine.examine_packages, settings),
        "api-keys": partial(configured.examine_keys, settings, time.time()),
        "allowed-hosts": partial(configured.examine_hosts, settings),
        "policies": partial(configured.examine_policies, settings),
        "session-secret": partial(configured.examine_secrets, settings),
        "open-files": partial(machine.examine_files, settings),
        "memory": partial(machine.examine_memory, settings),
        "audit": partial(machine.examine_audit, settings),
        "warm-start": partial(examine_warm_start, settings),
        "budgets": partial(examine_budgets, settings),
        "tls": partial(examine_tls, settings),
        "trace": partial(configured.examine_trace, settings),
    }
    asked: dict[str, Callable[[], Awaitable[Sequence[Finding]]]] = {
        # Files may be on a disk that doesn't answer: in a thread, the others continue.
        **{name: partial(in_thread, check) for name, check in at_once.items()},
        "ports": partial(machine.examine_ports, settings),
        "reasoning-edits": partial(examine_reasoning, settings),
        "identity": partial(examine_identity, settings),
        "redis": partial(_redis, situation),
        "audit.redis": partial(_audit_redis, situation),
        "recall-store": partial(examine_recall, settings),
        **{f"upstream.{name}": partial(_engine, settings, name) for name in settings.engines()},
        **{
            f"upstream.{name}.router": partial(examine_router, settings, name, situation.limit_s)
            for name in routers_of(settings)
        },
        "prometheus": partial(_prometheus, situation),
    }
    checks = {name: Check(ask, situation.limit_s) for name, ask in asked.items()}
    if not settings.engines():
        limit_s = max(_LOADING_S, situation.limit_s)
        checks[f"upstream.{ONLY_ENGINE}"] = Check(partial(_embedded, settings), limit_s)
    return checks


async def _redis(situation: Situation) -> list[Finding]:
    settings = situation.settings
    if settings.session_store.get_secret_value() == MEMORY:
        return [skip("redis", "sessions are in this process's memory (session_store)")]
    needs = StoreNeeds(
        redis_options(settings),
        "redis",
        settings.redis_prefix,
        "session_store",
        _CA,
        lasting=settings.budget_store == "redis" and counts_long(settings),
    )
    return await examine_store(needs, situation.limit_s)


async def _audit_redis(situation: Situation) -> list[Finding]:
    settings = situation.settings
    if settings.audit_redis is None:
        return [skip("audit.redis", "the audit log doesn't go to Redis (audit_redis)")]
    options = RedisOptions(settings.audit_redis.get_secret_value())
    needs = StoreNeeds(options, "audit.redis", settings.audit_stream, "audit_redis")
    return await examine_stream(needs, situation.limit_s)


async def _prometheus(situation: Situation) -> list[Finding]:
    if situation.prometheus is None:
        return [skip("prometheus", "not requested (--prometheus URL)")]
    return await examine_prometheus(situation.prometheus, situation.limit_s)


async def _engine(
    settings: Settings, name: str, app: Starlette | None = None, **there: str
) -> list[Finding]:
    if app is None:
        # Build only this one: with the others' clients, many engines would exceed the time limit.
        only = {"upstream": None, "upstreams": {name: settings.engines()[name]}}
        settings = settings.model_copy(update=only)
    metrics = Metrics()
    try:
        tls = engines_context(settings, metrics)
    except TlsFilesError:
        return [skip(f"upstream.{name}", "its certificates' files can't serve (tls)")]
    pool = build_pool(settings, app, metrics, tls=tls)
    try:
        replica = next(replica for replica in pool if replica.name == name)
        return await examine_engine(_needs(settings, replica, **there))
    finally:
        for replica in pool:
            await replica.client.aclose()


def _needs(settings: Settings, replica: Replica, **there: str) -> EngineNeeds:
    scopes = {settings.cache_scope, *(own.cache_scope for own in settings.tenants.values())}
    return EngineNeeds(
        name=replica.name,
        client=replica.client,
        secret=secret_of(settings.hints_secret),
        splice=settings.splice,
        keeps_tenants_apart="tenant" in scopes,
        max_body_bytes=settings.max_body_bytes,
        retained_turns=settings.retained_turns,
        recurrent_edits=_promises(settings),
        **there,
    )


def _promises(settings: Settings) -> str:
    """Return the setting ``recurrent_edits``, and the tenants that have another."""
    own = {name: each.recurrent_edits for name, each in settings.tenants.items()}
    others = [
        f"{mode} for {name}"
        for name, mode in own.items()
        if mode not in (None, settings.recurrent_edits)
    ]
    return ", ".join([settings.recurrent_edits, *others])


async def _embedded(settings: Settings) -> list[Finding]:
    """Return findings for the engine in the proxy's process; it is loaded for this check."""
    name = f"upstream.{ONLY_ENGINE}.loads"
    options = dict(settings.engine_options)
    if settings.model is not None:
        options["model"] = settings.model
    try:
        app = await in_thread(partial(create_embedded_engine, settings.engine, options))
    except EngineUnavailable as error:
        return [fail(name, str(error), "Correct --engine, --engine-option or --model.")]
    async with lifespan_of(app):
        found = await _engine(settings, ONLY_ENGINE, app, secret_setting=_EMBEDDED_SECRET)
    return [ok(name, f"the embedded engine {settings.engine} starts"), *found]
