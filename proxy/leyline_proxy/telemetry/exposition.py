"""Metrics as text: in Prometheus' format or as OpenMetrics, of one process or of several.

Several processes share their metrics through files in the folder named by the variable
``PROMETHEUS_MULTIPROC_DIR``; each of them then exposes the sums of all.
"""

from __future__ import annotations

import gzip
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder, gzip_accepted
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector

from . import processes

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"

_SMALLEST_PACKED = 1024
_OPEN_METRICS = "application/openmetrics-text"
_END = b"# EOF\n"
_FILE_OF = re.compile(r"gauge_live\w+_(\d+)\.db")


def is_shared() -> bool:
    """Return True if several processes share their metrics."""
    return bool(os.environ.get(FOLDER_VARIABLE))


@dataclass(frozen=True, slots=True)
class Exposition:
    """The form of metrics that a request asks for.

    Attributes:
        encode: writes a registry's metrics.
        accept: header value that asks another server for the same form.
        packs: True if the answer may be compressed.
    """

    encode: Callable[[Collector], bytes]
    content_type: str
    accept: str
    packs: bool

    def text(self, registry: CollectorRegistry) -> bytes:
        """Return the metrics of this process, or of all that share theirs with it."""
        return self.encode(_of_all(os.environ[FOLDER_VARIABLE]) if is_shared() else registry)

    def joined(self, texts: Iterable[bytes]) -> bytes:
        """Return texts of disjoint metrics as one."""
        open_ended = (text.removesuffix(_END) for text in texts)
        ended = _END if self.content_type.startswith(_OPEN_METRICS) else b""
        return b"".join(open_ended) + ended

    def answer(self, text: bytes) -> tuple[bytes, dict[str, str]]:
        """Return the body of a response, and its headers."""
        headers = {"content-type": self.content_type, "vary": "accept, accept-encoding"}
        if self.packs and len(text) >= _SMALLEST_PACKED:
            return gzip.compress(text, compresslevel=4), {**headers, "content-encoding": "gzip"}
        return text, headers


def exposition(headers: Mapping[str, str]) -> Exposition:
    """Return the form that a request's headers ask for.

    ``accept`` chooses OpenMetrics, which has exemplars, or else the plain text format;
    ``accept-encoding`` chooses gzip."""
    accept = headers.get("accept", "")
    try:
        encode, content_type = choose_encoder(accept)
    except (ValueError, TypeError):  # no existing version
        accept = ""
        encode, content_type = choose_encoder(accept)
    packs = gzip_accepted(headers.get("accept-encoding", ""))
    return Exposition(encode, content_type, accept, packs)


def enter(name: str) -> None:
    """Show this process under a name, where several share their metrics."""
    if is_shared():
        processes.enter(Path(os.environ[FOLDER_VARIABLE]), name)


def leave() -> None:
    """Remove this process's gauges from the sums; its counters remain."""
    if is_shared():
        mark_process_dead(os.getpid())  # type: ignore[no-untyped-call]


def _of_all(folder: str) -> CollectorRegistry:
    _bury_dead(Path(folder))
    registry = CollectorRegistry()
    MultiProcessCollector(registry, folder)  # type: ignore[no-untyped-call]
    registry.register(processes.Processes(partial(processes.entered, Path(folder))))
    return registry


def _bury_dead(folder: Path) -> None:
    """Remove the gauges of killed processes from the sums."""
    found = (_FILE_OF.fullmatch(path.name) for path in folder.glob("gauge_live*.db"))
    for process in {int(match.group(1)) for match in found if match is not None}:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            mark_process_dead(process, str(folder))  # type: ignore[no-untyped-call]
        except OSError:
            continue  # it lives, and belongs to another user
