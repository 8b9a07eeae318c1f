"""Empties a server's cache, so that each arm begins without one."""

from __future__ import annotations

from collections.abc import Mapping

import httpx

from .errors import StackError

_PATHS = ("/flush_cache", "/reset_prefix_cache")
"""Routes that empty a cache: SGLang's, vLLM's."""
_HELD = '"success":false'
"""What vLLM answers, with status 200, while requests hold its cache."""
_FIX = "vLLM has the route if it was started with VLLM_SERVER_DEV_MODE=1"


def empty_cache(url: str, headers: Mapping[str, str]) -> None:
    """Empty the cache of a server that is idle.

    Raises:
        StackError: it wasn't emptied.
    """
    try:
        with httpx.Client(base_url=url, headers=headers, timeout=60) as client:
            for path in _PATHS:
                answer = client.post(path, params={"timeout": 30})
                if answer.status_code != httpx.codes.NOT_FOUND:
                    break
        answer.raise_for_status()
    except httpx.HTTPStatusError as error:
        missing = error.response.status_code == httpx.codes.NOT_FOUND
        raise _unflushed(url, f"{error}{f' ({_FIX})' if missing else ''}") from error
    except httpx.HTTPError as error:
        raise _unflushed(url, str(error)) from error
    if _HELD in answer.text.replace(" ", ""):
        raise _unflushed(url, "requests hold it")


def _unflushed(url: str, why: str) -> StackError:
    return StackError(f"the cache of the server at {url} was not flushed: {why}")
