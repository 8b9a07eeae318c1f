"""A real SGLang server with an API key and a signing secret, and proxies before it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from leyline_lab.stand_ins.serving import serving
from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings
from leyline_replay.models.trained import DEFAULT_MODEL_NAME, trained_model_dir

REPOSITORY = Path(__file__).resolve().parents[2]
PYTHON = REPOSITORY / ".venv-sglang" / "bin" / "python"
sys.path.insert(0, str(REPOSITORY / "tests" / "sglang" / "support"))

from sglang_server import SglangServer  # noqa: E402 - it lies beside the plugin's own tests

API_KEY = "engine-key"
HINTS_SECRET = "shared-secret"
MODEL = DEFAULT_MODEL_NAME

StartProxy = Callable[..., str]


def sglang_server(
    log: Path, *flags: str, port: int | None = None, **variables: str
) -> SglangServer:
    """A server of the model that ships, not started yet."""
    folder = trained_model_dir(MODEL)
    assert folder is not None
    common = ("--served-model-name", MODEL, "--api-key", API_KEY)
    return SglangServer(folder, log, (*common, *flags), variables, python=str(PYTHON), port=port)


class Proxies:
    """Proxies before servers; stopped on exit."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def __enter__(self) -> Proxies:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, upstream: str, **settings: Any) -> str:
        """The origin of a new proxy before the server at ``upstream``."""
        values = {
            "upstream": upstream,
            "upstream_api_key": API_KEY,
            "hints_secret": HINTS_SECRET,
            "handshake_interval_s": 1.0,
            "handshake_retry_s": 0.2,
            "log_level": "warning",
        } | settings
        return self._stack.enter_context(serving(create_app(Settings.model_validate(values))))
