"""The warm start of the settings."""

from __future__ import annotations

from ..sessions import SessionStore
from ..settings import Settings, secret_of
from ..settings.sessions import MEMORY
from ..telemetry.metrics import Metrics
from ..tenants import TenantDirectory
from ..turns.erasure import Erasures
from ..upstream.pool import ReplicaPool
from ..warm_start.book import RunBook
from ..warm_start.folder import ManifestFolder
from ..warm_start.keeper import RunKeeper
from ..warm_start.manifests import RAW_FACTOR, Manifests, max_manifest
from ..warm_start.sealing import ManifestSeal
from ..warm_start.sending import Replayer
from ..warm_start.service import WarmStart


def build_warm_start(
    settings: Settings,
    *,
    tenants: TenantDirectory,
    pool: ReplicaPool,
    store: SessionStore,
    erasures: Erasures,
    metrics: Metrics,
) -> WarmStart | None:
    """Return the warm start; None if it is off. Nothing is read yet."""
    path, key = settings.warm_start_path, secret_of(settings.warm_start_key)
    if path is None or key is None:
        return None
    tokens = settings.warm_start_tokens * len(pool)
    book = RunBook(RAW_FACTOR * tokens)
    folder = ManifestFolder(path, max_manifest(tokens))
    keeper = RunKeeper(
        book,
        Manifests(folder, ManifestSeal(key), tokens),
        tenants,
        metrics,
        load_s=settings.warm_start_s,
        ttl_s=settings.session_ttl_s,
        interval_s=settings.warm_start_interval_s,
    )
    replayer = Replayer(
        book,
        pool=pool,
        store=store,
        erasures=erasures,
        tenants=tenants,
        metrics=metrics,
        hints_secret=secret_of(settings.hints_secret),
        tokens=settings.warm_start_tokens,
        seconds=settings.warm_start_s,
        ttl_s=settings.session_ttl_s,
        alone=settings.session_store.get_secret_value() == MEMORY,
    )
    return WarmStart(keeper, replayer, pool)
