"""A real proxy with the real embedded engine on a loopback port, for tests end to end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from leyline_lab.stand_ins.serving import check_clean, serving
from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings
from leyline_proxy.upstream.embedded import create_embedded_engine


@contextmanager
def embedded_stack(engine_options: dict[str, Any], **settings: Any) -> Iterator[str]:
    """The origin of a proxy that splices."""
    engine = create_embedded_engine("replay", engine_options)
    with serving(create_app(Settings(**settings), engine_app=engine)) as origin:
        ready = httpx.get(f"{origin}/readyz", timeout=10).json()
        assert ready["upstreams"][0]["splices"], ready
        yield origin
    check_clean(engine)
