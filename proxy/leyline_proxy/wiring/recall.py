"""The store of evicted texts of the settings."""

from __future__ import annotations

from collections.abc import Callable

from ..hub.link import HubLink
from ..hub.spaces import SharedSpace
from ..parts.files import FileSpace
from ..parts.limits import PartLimits
from ..parts.memory import MemorySpace
from ..parts.recallable_parts import RecallableParts
from ..parts.redis import RedisSpace
from ..parts.sealing import PartSeal
from ..parts.space import Space
from ..parts.store import PartStore
from ..sessions.redis import RedisOptions
from ..settings import Settings
from ..settings.recall import REDIS
from ..settings.sessions import MEMORY, REDIS_SCHEMES
from ..telemetry.metrics import Metrics


def build_recall(
    settings: Settings, metrics: Metrics, link: HubLink | None = None
) -> RecallableParts | None:
    """Return the texts that can be recalled; None if recall is off for everyone.

    Args:
        link: to the hub, which then has the texts that would be in this process's memory.

    Raises:
        ValueError: see :func:`build_part_store`.
    """
    if not recalls(settings):
        return None

    def failed(operation: str) -> None:
        metrics.recall_store_errors.labels(operation).inc()

    return RecallableParts(build_part_store(settings, failed=failed, link=link))


def recalls(settings: Settings) -> bool:
    """Return True if recall is on for any tenant."""
    return "on" in (settings.recall, *(own.recall for own in settings.tenants.values()))


def build_part_store(
    settings: Settings,
    *,
    failed: Callable[[str], object] = lambda _: None,
    link: HubLink | None = None,
) -> PartStore:
    """Return the store of ``recall_store``; nothing is connected yet.

    Args:
        failed: called with each operation that fails.
        link: see :func:`build_recall`.

    Raises:
        ValueError: a file system that isn't known, or whose package isn't installed.
    """
    limits = PartLimits(
        ttl_s=settings.recall_ttl_s,
        tenant_bytes=settings.recall_tenant_bytes,
        part_bytes=settings.recall_max_part_bytes,
    )
    keys = [key.get_secret_value() for key in settings.recall_key]
    if link is not None and not keys and is_in_memory(settings):
        keys = [link.secret]
    return PartStore(_space(settings, link), PartSeal(keys), limits, failed=failed)


def is_in_memory(settings: Settings) -> bool:
    """Return True if evicted texts are in memory."""
    return settings.recall_store.get_secret_value() == MEMORY


def _space(settings: Settings, link: HubLink | None) -> Space:
    where = settings.recall_store.get_secret_value()
    if where == MEMORY:
        if link is not None:
            return SharedSpace(link)
        return MemorySpace(settings.recall_memory_bytes)
    if where == REDIS or where.startswith(REDIS_SCHEMES):
        return RedisSpace(recall_redis_options(settings), settings.redis_prefix)
    return file_space(where, timeout_s=settings.recall_store_timeout_s)


def recall_redis_options(settings: Settings) -> RedisOptions:
    """Return the options of the connection to the Redis of ``recall_store``."""
    where = settings.recall_store
    url = (
        settings.session_store if where.get_secret_value() == REDIS else where
    ).get_secret_value()
    ca_file = settings.redis_ca_file if url.startswith("rediss") else None
    return RedisOptions(
        url=url,
        ca_file=str(ca_file) if ca_file is not None else None,
        connect_timeout_s=settings.redis_connect_timeout_s,
        timeout_s=settings.recall_store_timeout_s,
        max_connections=settings.redis_max_connections,
    )


def file_space(url: str, *, timeout_s: float) -> FileSpace:
    """Return the folder of a URL.

    Raises:
        ValueError: a file system that isn't known, or whose package isn't installed.
    """
    import fsspec  # only stores of files need it

    scheme = url.partition("://")[0]
    try:
        # Other proxies write, too: a cached listing would hide their forgets.
        system, root = fsspec.core.url_to_fs(
            url, use_listings_cache=False, skip_instance_cache=True
        )
    except (ImportError, ValueError) as error:
        package = "s3fs" if scheme == "s3" else "the package that fsspec has for it"
        raise ValueError(
            f"recall_store: files of {scheme}:// can't be used here; install {package}"
        ) from error
    return FileSpace(system, root, timeout_s=timeout_s)
