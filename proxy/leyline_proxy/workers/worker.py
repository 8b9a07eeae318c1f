"""A worker's process: ``python -m leyline_proxy.workers.worker``, started by the supervisor."""

from __future__ import annotations

import socket

import structlog

from leyline_policies import PolicyError

from ..http.handed import ADMIN, PORT, Handover
from ..hub.link import HubLink
from ..model.fields import OptionError
from ..telemetry.logging import configure_logging
from ..wiring.workers import Worker
from .orders import WorkerOrder, read_order, refuse
from .serving import banner_of, ignore_repeated_signals, server_of


def main() -> None:
    """Serve until the supervisor ends this process."""
    order = read_order(WorkerOrder)
    settings = order.settings
    configure_logging(settings.log_level, settings.log_format)
    structlog.contextvars.bind_contextvars(worker=order.index)
    from ..http.app import create_app

    link = HubLink(order.hub, order.index, order.secret)
    try:
        app = create_app(settings, worker=Worker(link, order.engine))
    except (PolicyError, OptionError, ValueError) as error:
        refuse(error)
    services = app.state.services

    def ready() -> None:
        services.fleet.ready(banner_of(services))

    ignore_repeated_signals()
    handover = Handover(socket.socket(fileno=order.handover))
    server = server_of(
        app,
        settings,
        door=handover.door(PORT),
        admin=handover.door(ADMIN) if settings.admin_port is not None else None,
        started=ready,
        ticked=services.fleet.counted,
    )
    link.gone = server.leave
    server.run(sockets=[])


if __name__ == "__main__":
    main()
