"""The embedded engine's process: ``python -m leyline_proxy.workers.engine``."""

from __future__ import annotations

from asyncio import CancelledError
from contextlib import suppress

import uvicorn

from ..telemetry.exposition import enter
from ..telemetry.logging import configure_logging
from ..upstream.embedded import EngineUnavailable, create_embedded_engine
from .orders import EngineOrder, read_order, refuse
from .serving import ignore_repeated_signals


def main() -> None:
    """Serve the engine on its Unix socket until the supervisor ends this process."""
    order = read_order(EngineOrder)
    configure_logging(order.log_level, order.log_format)
    enter("engine")
    try:
        app = create_embedded_engine(order.name, order.options)
    except EngineUnavailable as error:
        refuse(error)
    ignore_repeated_signals()
    config = uvicorn.Config(
        app,
        uds=str(order.socket),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=5,
    )
    with suppress(CancelledError, KeyboardInterrupt):
        uvicorn.Server(config).run()


if __name__ == "__main__":
    main()
