"""``leyline events`` beside a real ZeroMQ publisher with SGLang's encoding."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq
from click.testing import Result
from typer.testing import CliRunner

from leyline_engine.contract import PRIVATE_ID
from leyline_lab.kv_events import BatchError, Lineages, read_batch
from leyline_proxy.cli.main import build_app

SECRET_IDS = [7391, 4242]


def stored(
    blocks: list[int], tokens: list[Any], lineage: str = "", **fields: Any
) -> dict[str, Any]:
    event = {"type": "BlockStored", "block_hashes": blocks, "token_ids": tokens, **fields}
    event |= {"parent_block_hash": None, "block_size": 1, "medium": "GPU"}
    return event | ({"lineage": lineage} if lineage else {})


def removed(*blocks: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(blocks), "medium": "GPU"}


EVENTS = [
    stored([11, -12], SECRET_IDS),
    stored([13], [PRIVATE_ID + 5], "00000000ab", cache_salt="scarlet"),
    removed(11),
    removed(13),
    {"type": "AllBlocksCleared"},
]


def batch(events: list[dict[str, Any]]) -> bytes:
    return msgspec.msgpack.encode([time.time(), events, 1])


@pytest.fixture
def endpoint() -> Iterator[str]:
    """A publisher that repeats the events until the test ends, as nobody knows when a subscriber
    has joined."""
    context, ended = zmq.Context(), threading.Event()
    socket = context.socket(zmq.PUB)
    port = socket.bind_to_random_port("tcp://127.0.0.1")

    def publish() -> None:
        number = 0
        while not ended.wait(0.05):
            socket.send_multipart([b"kv", number.to_bytes(8, "big"), batch(EVENTS)])
            number += 1

    thread = threading.Thread(target=publish)
    thread.start()
    yield f"tcp://127.0.0.1:{port}"
    ended.set()
    thread.join()
    socket.close(0)
    context.term()


def run(*arguments: str) -> Result:
    return CliRunner().invoke(build_app(), ["events", *arguments])


def test_each_event_is_a_line_of_json(endpoint: str) -> None:
    """Kinds, hashes, lineages and counts are there, a removed block has its lineage, and no ids."""
    result = run(endpoint, "--json", "--count", str(len(EVENTS)), "--wait-s", "10")
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["event"] for line in lines] == [
        "stored",
        "stored",
        "removed",
        "removed",
        "cleared",
    ]
    exact, spliced, gone, spliced_gone, _ = lines
    assert exact["blocks"] == ["000000000000000b", "fffffffffffffff4"]
    assert (exact["tokens"], exact["private"], exact["lineage"]) == (2, 0, None)
    assert (spliced["private"], spliced["lineage"], spliced["salted"]) == (1, "00000000ab", True)
    assert (gone["lineage"], spliced_gone["lineage"]) == (None, "00000000ab")
    assert {line["rank"] for line in lines} == {1}
    assert not any(str(token) in result.stdout for token in (*SECRET_IDS, "scarlet"))


def test_a_table_has_a_row_for_each_event(endpoint: str) -> None:
    """The columns have one heading; --private leaves blocks that anybody may find out."""
    result = run(endpoint, "--count", "2", "--private", "--topic", "kv", "--wait-s", "10")
    assert result.exit_code == 0, result.output
    heading, first, second = result.stdout.splitlines()
    assert heading.split()[:2] == ["event", "blocks"]
    assert first.startswith("stored") and second.startswith("removed")
    assert "00000000ab" in first and "00000000ab" in second


def test_silence_is_an_error_that_names_the_flag(endpoint: str) -> None:
    """A topic that nobody publishes ends after the given wait."""
    result = run(endpoint, "--topic", "other", "--wait-s", "0.3")
    assert result.exit_code == 1
    assert "--kv-events-config" in result.stderr


@pytest.mark.parametrize("address", ["gpu1:5557", "http://gpu1:5557", "tcp://nowhere"])
def test_an_endpoint_that_cannot_be_used_is_named(address: str) -> None:
    """The message quotes it."""
    result = run(address, "--wait-s", "0.1")
    assert result.exit_code == 2
    assert address in result.stderr


@pytest.mark.parametrize(
    "payload",
    [
        b"\xc1",
        msgspec.msgpack.encode({"a": 1}),
        msgspec.msgpack.encode([1.0, ["x"], None]),
        msgspec.msgpack.encode([1.0, [{"type": "Other"}], None]),
    ],
)
def test_what_is_no_batch_is_refused(payload: bytes) -> None:
    """Another publisher's messages don't look like an empty cache."""
    with pytest.raises(BatchError):
        list(read_batch(payload, 0, Lineages()))


def test_remembered_lineages_are_bounded() -> None:
    """The oldest block's mark goes first, and its removal has none."""
    lineages = Lineages(limit=2)
    for block in (1, 2, 3):
        lineages.store((block,), f"m{block}")
    assert [lineages.remove((block,)) for block in (1, 2, 3)] == ["", "m2", "m3"]
