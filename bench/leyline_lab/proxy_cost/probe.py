"""A prober in a process of its own: it prints a line once the proxy is healthy, and the longest
wait for ``/healthz`` in seconds when its input ends."""

from __future__ import annotations

import sys
import threading
import time
from http import HTTPStatus
from http.client import HTTPConnection
from urllib.parse import urlsplit

EVERY_S = 0.005
"""Seconds between two probes."""


def main(origin: str) -> None:
    """Ask again and again."""
    stop = threading.Event()
    connection = HTTPConnection(urlsplit(origin).netloc, timeout=600)

    def wait() -> None:
        sys.stdin.read()
        stop.set()

    threading.Thread(target=wait, daemon=True).start()
    longest, ready = 0.0, False
    while not stop.is_set():
        begun = time.perf_counter()
        connection.request("GET", "/healthz")
        answer = connection.getresponse()
        answer.read()
        if answer.status != HTTPStatus.OK:
            raise RuntimeError("the proxy isn't healthy")
        if ready:
            longest = max(longest, time.perf_counter() - begun)
        else:
            ready = True
            print("ready", flush=True)
        time.sleep(EVERY_S)
    print(longest, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
