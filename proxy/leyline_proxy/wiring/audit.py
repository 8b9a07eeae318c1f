"""The audit log of the settings."""

from __future__ import annotations

import socket
from importlib.metadata import version

from ..audit.chain import AuditKey
from ..audit.chain_file import ChainFile
from ..audit.keys import read_keys
from ..audit.writer import AuditWriter
from ..hub.audit import SharedLog, SharedTurns
from ..hub.link import HubLink
from ..observe.auditor import Auditor
from ..settings.audit import PLACE, AuditSettings
from ..telemetry.metrics import Metrics


def build_auditor(
    settings: AuditSettings, metrics: Metrics, link: HubLink | None = None
) -> Auditor:
    """Return the log of the settings; nothing is opened or started yet.

    Args:
        link: to the hub, which then writes the file.

    Raises:
        ValueError: the key file can't be read, or the URL isn't Redis's.
    """
    if settings.audit_file is None:
        return Auditor()
    watch = None
    if link is None:
        writer = build_audit_writer(settings, metrics)
    else:
        shared = SharedLog(link, settings.audit_file)
        watch = shared.watch
        writer = AuditWriter(
            shared, metrics, max_waiting=settings.audit_queue, fsync_s=settings.audit_fsync_s
        )
    return Auditor(
        writer,
        audit_key(settings),
        settings.audit_turns,
        refuses=settings.audit_on_fault == "refuse",
        watch=watch,
        under_way=SharedTurns(link) if link is not None else None,
    )


def build_audit_writer(settings: AuditSettings, metrics: Metrics) -> AuditWriter:
    """Return the writer of the settings' file; nothing is opened or started yet.

    Raises:
        ValueError: no file is set, or as :func:`build_auditor`.
    """
    if settings.audit_file is None:
        raise ValueError("audit_file isn't set")
    instance = settings.audit_instance or socket.gethostname()[:64]
    key = audit_key(settings)
    path = settings.audit_file
    file = ChainFile(
        path.with_name(path.name.replace(PLACE, instance)),
        key=key,
        instance=instance,
        version=version("leyline-kv"),
        max_bytes=settings.audit_max_bytes,
        keep=settings.audit_keep,
    )
    stream = None
    if settings.audit_redis is not None:
        from ..audit.stream import StreamSink  # only this needs Redis

        url = settings.audit_redis.get_secret_value()
        if not url.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("audit_redis must start with redis:// or rediss://")
        stream = StreamSink(
            url, settings.audit_stream, metrics, maxlen=settings.audit_stream_maxlen
        )
    return AuditWriter(
        file,
        metrics,
        max_waiting=settings.audit_queue,
        fsync_s=settings.audit_fsync_s,
        stream=stream,
    )


def audit_key(settings: AuditSettings) -> AuditKey | None:
    """Return the key that seals the log; None without one.

    Raises:
        NamedFileError: its file can't be read, or has no key.
    """
    if settings.audit_key_file is not None:
        return AuditKey.derive(read_keys(settings.audit_key_file, "audit_key_file")[0])
    if settings.audit_key is not None:
        return AuditKey.derive(settings.audit_key.get_secret_value())
    return None
