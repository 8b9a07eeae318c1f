"""``leyline events``: the changes of engines' caches, as routers learn of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import islice
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ..kv_events import KVEvent

_COLUMNS = "{:<8} {:>5} {:>7} {:>7} {:<10} {:<16} {:<16} {:<10} {}"
_HEADS = (
    "event",
    "blocks",
    "tokens",
    "private",
    "lineage",
    "first block",
    "parent",
    "medium",
    "endpoint",
)
_LONGEST = 16 * 1024 * 1024
"""Bytes of a message."""
_QUEUED = 10_000
"""Messages that wait for a slow terminal; the publisher drops further ones."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "events",
        epilog=(
            "Example:  leyline events tcp://gpu1:5557 --json\n\n"
            "SGLang publishes them with this flag:\n\n"
            '--kv-events-config \'{"publisher":"zmq","endpoint":"tcp://*:5557"}\''
        ),
    )(events)


def events(
    endpoints: Annotated[
        list[str],
        typer.Argument(
            metavar="ENDPOINT",
            help="ZeroMQ endpoints of engines' KV events, such as tcp://gpu1:5557. A data-parallel "
            "SGLang has one for each rank: the port, the port + 1, and so on.",
        ),
    ],
    *,
    lines: Annotated[
        bool, typer.Option("--json", help="One JSON object per event, for other programs.")
    ] = False,
    private: Annotated[
        bool,
        typer.Option(
            "--private", help="Only blocks that one conversation alone finds: spliced KV."
        ),
    ] = False,
    topic: Annotated[
        str, typer.Option(help="Topic of --kv-events-config; all topics by default.")
    ] = "",
    count: Annotated[
        int | None, typer.Option(min=1, help="End after so many events; by default never.")
    ] = None,
    wait_s: Annotated[
        float | None,
        typer.Option(min=0, help="End after so many seconds without an event; by default never."),
    ] = None,
) -> None:
    """Show which blocks of KV engines store and remove, and whose they are.

    Engines publish these events for prefix-aware routers. A block with a lineage belongs to one
    conversation: it is spliced, or comes after a splice, and routers match nobody else's prompt
    with it. Token ids are never shown. An engine keeps no events for late subscribers; those from
    before the start are missing.
    """
    for endpoint in endpoints:
        if not endpoint.startswith(("tcp://", "ipc://")):
            raise typer.BadParameter(f"{endpoint!r} must be tcp://HOST:PORT or ipc://PATH")
    found = _received(endpoints, topic, wait_s)
    wanted = ((where, event) for where, event in found if event.lineage or not private)
    if not _show(islice(wanted, count), lines=lines):
        typer.echo(
            f"No events came within {wait_s:g} s. Does the engine run with --kv-events-config, and "
            "does it store anything now?",
            err=True,
        )
        raise typer.Exit(1)


def _show(found: Iterable[tuple[str, KVEvent]], *, lines: bool) -> bool:
    """Print events, and return False if there were none."""
    import msgspec

    from ..kv_events import document

    any_came = False
    for endpoint, event in found:
        if lines:
            typer.echo(msgspec.json.encode(document(event, endpoint)).decode())
        else:
            if not any_came:
                typer.echo(_COLUMNS.format(*_HEADS))
            typer.echo(_row(endpoint, event))
        any_came = True
    return any_came


def _row(endpoint: str, event: KVEvent) -> str:
    from ..kv_events import shown

    return _COLUMNS.format(
        event.kind,
        len(event.blocks),
        event.tokens or "",
        event.private or "",
        event.lineage,
        shown(event.blocks[0]) if event.blocks else "",
        shown(event.parent) if event.parent is not None else "",
        event.medium,
        endpoint if event.rank is None else f"{endpoint} rank {event.rank}",
    )


def _received(
    endpoints: list[str], topic: str, wait_s: float | None
) -> Iterator[tuple[str, KVEvent]]:
    """Yield the events of all endpoints until none has come for a while."""
    zmq = _zmq()
    from ..kv_events import BatchError, Lineages, read_batch

    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        poller = zmq.Poller()
        sources: dict[Any, tuple[str, Lineages]] = {}
        for endpoint in dict.fromkeys(endpoints):
            socket = stack.enter_context(context.socket(zmq.SUB))
            socket.setsockopt(zmq.RCVHWM, _QUEUED)
            socket.setsockopt(zmq.MAXMSGSIZE, _LONGEST)
            socket.setsockopt_string(zmq.SUBSCRIBE, topic)
            try:
                socket.connect(endpoint)
            except zmq.ZMQError as error:
                raise typer.BadParameter(f"{endpoint!r} can't be used: {error}") from error
            poller.register(socket, zmq.POLLIN)
            sources[socket] = (endpoint, Lineages())
        last = monotonic()
        while wait_s is None or monotonic() - last < wait_s:
            left = None if wait_s is None else max(0, int(1000 * (last + wait_s - monotonic())))
            for socket, _ in poller.poll(left):
                endpoint, lineages = sources[socket]
                frames: list[bytes] = socket.recv_multipart()
                *_, sequence, payload = [b"", b"", *frames]
                number = int.from_bytes(sequence, "big")
                try:
                    for event in read_batch(payload, number, lineages):
                        last = monotonic()
                        yield endpoint, event
                except BatchError as error:
                    typer.echo(f"{endpoint}: {error}", err=True)
                    raise typer.Exit(1) from error


def _zmq() -> Any:
    try:
        import zmq
    except ImportError as error:
        typer.echo("leyline events needs pyzmq: pip install pyzmq", err=True)
        raise typer.Exit(1) from error
    return zmq
